"""DESIGN's order of modules, held by reading every import: one row never looks up at the next."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import program

ROOT = Path(__file__).parents[1]

ROWS = (
    ("errors", "report"),  # tables and pages, which everybody describes
    ("runtime", "hlo", "pipeline"),  # schedules are data, which the layout reads
    ("layout", "telemetry"),
    ("data", "model", "optim", "profile", "checkpoint", "supervise"),
    ("step",),
    ("config",),
    ("step_comparison",),  # runs the steps of a `Run`, for proofs and checks
    ("plan", "hf", "dashboard"),
    ("train",),
    ("check",),
    ("cli",),
    ("bench",),
    ("__main__", "launch", "generate", "explain", "survey", "node_check"),
)
"""A module imports only rows above its own, and itself. `python -m` finds the command line of a package by
name."""

RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
KERNEL_IMPORTS = {"jax", "jaxlib", "jax_triton", "jaxtyping", "numpy", "tokamax", "triton", "jtrain_kernels"}
OTHER_ENVIRONMENTS = {"peers", "checkpoint_programs"}
"""Folders of programs that run in the environments of what is compared with."""
FIDDLE_IMPORTERS = {"config", "cli"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache  # most tests here read all files
def imports(source: str) -> tuple[str, ...]:
    """Dotted names of everything imported, also inside functions; `from a import b` gives `a` and `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the row"
            assert node.module is not None
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(found)


def component(path: Path) -> str:
    """jtrain/model/rope.py -> model; jtrain/launch.py -> launch."""
    return path.relative_to(ROOT / "jtrain").parts[0].removesuffix(".py")


def upward(name: str, path: Path, source: str) -> list[str]:
    """Imports in `source` that break the order."""
    broken = []
    for module in imports(source):
        parts = module.split(".")
        if parts[0] != "jtrain" or len(parts) < 2:
            continue
        if parts[1] != name and RANK[parts[1]] >= RANK[name]:
            broken.append(module)
    return broken


@pytest.mark.parametrize("path", sources("jtrain"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_rows_above_its_own(path: Path) -> None:
    """DESIGN section 3."""
    name = component(path)
    if name != "__init__":
        assert name in RANK, f"{name} has no row: add it to DESIGN section 3 and to ROWS"
        assert upward(name, path, path.read_text()) == []


def test_an_upward_import_would_be_found() -> None:
    """The guard of the test above: it sees imports in functions, and of siblings."""
    path = ROOT / "jtrain" / "optim.py"
    assert upward("optim", path, "def f() -> None:\n    from jtrain.train import loop\n") == [
        "jtrain.train",
        "jtrain.train.loop",
    ]
    assert upward("optim", path, "import jtrain.data.dataset\n") == ["jtrain.data.dataset"]
    assert upward("optim", path, "from jtrain.layout.dims import Batch\n") == []


def circles(sources_by_name: dict[str, str]) -> list[str]:
    """Returns the modules of a loop of imports, those inside functions and for types included."""
    names = set(sources_by_name)
    graph: dict[str, set[str]] = {}
    for name, source in sources_by_name.items():
        imported = set(imports(source)) & names - {name}
        # `from jtrain.a import b` needs jtrain.a.b, and its package only to find it.
        graph[name] = {one for one in imported if not any(other.startswith(f"{one}.") for other in imported)}
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_import_circles() -> None:
    """No two modules import each other, not even later, inside functions: each can be read without the
    other.
    """
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("jtrain")}
    assert circles({name.removesuffix(".__init__"): path.read_text() for path, name in files.items()}) == []
    lazy = "def f() -> None:\n    from jtrain import a"
    assert circles({"jtrain.a": "import jtrain.b", "jtrain.b": lazy}) != [], "a circle would be found"


def test_kernels_stand_alone() -> None:
    """`jtrain_kernels` can be used without jtrain: jax, numpy and, behind a guard, triton."""
    for path in sources("kernels"):
        outside = {name.split(".")[0] for name in imports(path.read_text())} - set(sys.stdlib_module_names)
        assert outside <= KERNEL_IMPORTS, path


def test_one_door_to_the_kernels() -> None:
    """model/ops.py alone calls ops (a folder each), so that a kernel can be swapped there; benchmarks time
    them.

    What a chip is, `jtrain_kernels.device`, serves everybody.
    """
    ops = {path.parent.name for path in sources("kernels") if path.name == "api.py"}
    assert "attention" in ops
    importers = {
        str(path.relative_to(ROOT))
        for path in sources("jtrain")
        for name in imports(path.read_text())
        if name.startswith("jtrain_kernels.") and name.split(".")[1] in ops
    }
    assert importers <= {"jtrain/model/ops.py"} | {str(p.relative_to(ROOT)) for p in sources("jtrain/bench")}


def test_fiddle_stays_with_the_config() -> None:
    """Every other function takes the parts it needs, so nothing below can depend on how configs are made."""
    importers = {
        component(path)
        for path in sources("jtrain")
        for name in imports(path.read_text())
        if name.split(".")[0] == "fiddle"
    }
    assert importers <= FIDDLE_IMPORTERS


def test_nobody_imports_launch_scripts_configs_bench_or_tests() -> None:
    """launch/ holds scripts, configs/ is loaded by path, and bench/, which may import everything, is in no
    wheel.
    """
    for path in [*sources("jtrain"), *sources("kernels")]:
        roots = {name.split(".")[0] for name in imports(path.read_text())}
        assert not roots & {"launch", "configs", "tests", "colabs", "bench"}, path
    # Ray has no command that starts a process per node, so its script is in Python.
    assert sources("launch") == [ROOT / "launch" / "ray" / "train.py"], "other Python belongs to jtrain/"


def test_no_file_is_a_kitchen_sink() -> None:
    """A file is named after what it knows, and `kernels/` must not shadow another package."""
    names = {
        path.stem for folder in ("jtrain", "kernels", "bench", "tests", "configs") for path in sources(folder)
    }
    assert not names & {"utils", "util", "common", "helpers", "helper", "misc", "base"}
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_everything_starts_no_backend_and_changes_no_environment() -> None:
    """Nothing happens at import: no device query, no environment write, for any module of the two
    packages.
    """
    modules = [
        ".".join(path.relative_to(ROOT / top).with_suffix("").parts).removesuffix(".__init__")
        for top, folder in ((".", "jtrain"), ("kernels", "kernels"), (".", "bench"))
        for path in sources(folder)
        if path.name != "__main__.py" and path.parent.name not in OTHER_ENVIRONMENTS
    ]
    done = subprocess.run(
        program(__file__, "import_all"),
        input="\n".join(modules),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(modules)), "imported"]
