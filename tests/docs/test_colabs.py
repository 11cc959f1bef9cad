"""Notebooks run from top to bottom, on a copy, with fewer steps."""

import ast
import base64
import inspect
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.wheels import own_environment, pip

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))

type Runner = Callable[..., dict[str, Any]]


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_defines_nothing_and_carries_no_output(path: Path) -> None:
    """What it needs is in jtrain, where tests and types reach it; committed outputs would be stale ones."""
    for source in sources(path):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)], source
    cells = nbformat.read(path, as_version=4).cells
    assert not [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


def test_every_notebook_begins_with_the_same_cell_that_installs_jtrain() -> None:
    """Where jtrain is there, as here, it does nothing; where neither it nor a wheel is there, it says what to do."""
    cells = [sources(path)[0] for path in NOTEBOOKS]
    assert len(cells) == 5
    assert set(cells) == {cells[0]}
    exec(compile(cells[0], "install", "exec"), {})
    # `-I` and `-S`: neither the checkout nor the packages of this environment.
    code = f"import sys; sys.path[:] = [path for path in sys.path if path]; exec({cells[0]!r})"
    lone = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env=own_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert lone.returncode == 1
    assert "upload a wheel of jtrain beside this notebook, or set os.environ['JTRAIN']" in lone.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_a_notebook_imports_exists_and_takes_what_it_is_given(path: Path) -> None:
    """By name; also where nobody runs the slow tests below."""
    nodes = [node for source in sources(path) for node in ast.walk(ast.parse(source))]
    ours = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jtrain")
    ]
    assert ours
    names: dict[str, Any] = {}
    for node in ours:
        for alias in node.names:
            exec(f"from {node.module} import {alias.name}", names)
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        function = names.get(ast.unparse(call.func))
        if callable(function):
            parameters = inspect.signature(function).parameters
            given = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
            assert [name for name in given if name not in parameters] == [], ast.unparse(call)


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with what Colab brings along, of the tested versions, and without jtrain."""
    environment = tmp_path_factory.mktemp("colab") / "environment"
    venv.create(environment, with_pip=True)
    pip(environment, "install", "-c", str(ROOT / "constraints.txt"), "ipykernel")
    assert not has_jtrain(environment / "bin" / "python")
    return environment / "bin" / "python"


def has_jtrain(python: Path) -> bool:
    """True if an environment finds jtrain; the folder of the checkout is not the working directory."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('jtrain') is None)"
    return subprocess.run([python, "-c", code], cwd=python.parent, env=own_environment()).returncode == 0


@pytest.fixture
def run(fresh_python: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs a notebook in that environment; the first one that runs installs jtrain from the wheel, by its own cell.

    The function returns outputs by cell, with the second number of `steps`, if it trains any, in the place of the
    first.
    """
    # The home stays: pip keeps what it has downloaded, and its settings, there.
    for name in set(os.environ) - own_environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("JTRAIN", str(wheel))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))

    kernel = tmp_path / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(fresh_python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))

    def run_notebook(name: str, steps: tuple[int, int] | None = None) -> dict[str, Any]:
        notebook = nbformat.read(ROOT / "colabs" / name, as_version=4)
        if steps is not None:
            settings = next(cell for cell in notebook.cells if cell.get("id") == "settings")
            shipped, fewer = (f"steps = {number}\n" for number in steps)
            assert shipped in settings.source
            settings.source = settings.source.replace(shipped, fewer)
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, kernel_name="colab", timeout=None, resources=resources).execute()
        assert has_jtrain(fresh_python)
        return {cell["id"]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    return run_notebook


def text_of(outputs: list[Any]) -> str:
    """What a cell printed, errors aside."""
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_tiny_trains_plots_and_samples(run: Runner) -> None:
    """Every cell runs; the loss fell, a picture came out, and the sample goes on from its prompt."""
    outputs = run("tiny.ipynb", steps=(100, 6))
    assert "0" in outputs["train"][-1]["data"]["text/plain"], "the exit code of a complete run"
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    printed = text_of(outputs["sample"])
    assert printed.startswith("def ")
    assert len(printed) > len("def ") + 10


@pytest.mark.slow
def test_data_is_mixed_packed_prepared_and_changed(run: Runner) -> None:
    """Every cell runs; all rows of the table are there, the index is whole, and the change is told."""
    outputs = run("data.ipynb", steps=(120, 12))
    assert "docstrings (60.0%)" in text_of(outputs["declare"])
    assert "row 0  " in text_of(outputs["inspect"])
    assert "12 batches of (32, 1024)" in text_of(outputs["read"])
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    rows = [line.split() for line in text_of(outputs["choices"]).splitlines()[1:]]
    assert len(rows) == 6
    spread = {(packing, balance): float(cost) for packing, balance, _, cost in rows}
    for packing in ("concat", "first_fit", "best_fit"):
        assert 1 <= spread[packing, "True"] < spread[packing, "False"]
    prepared = text_of(outputs["prepare"])
    assert prepared.count(": intact (") == 4
    assert "(what is prepared anew, or with more files, has another order" in prepared
    assert "the same: True" in prepared
    changed = text_of(outputs["change"])
    assert "step 12: the mixture was 'linear" in changed
    assert "step 12: topics 0.0167 -> 0.0000" in changed


@pytest.mark.slow
def test_a_plan_is_printed_drawn_and_searched(run: Runner) -> None:
    """Every cell runs; the sheet fits, both pictures came out, what was found is sorted, and the run
    picks.
    """
    outputs = run("plan.ipynb")
    # Rich's displays.
    *sheet, code = [output["data"]["text/plain"] for output in outputs["sheet"] if "data" in output]
    assert any("of the memory at the peak, in the moment" in text for text in sheet)
    assert code == "0"
    for cell in ("strategies", "search"):
        assert any("image/png" in output.get("data", {}) for output in outputs[cell])
    seconds = [float(line.split()[0]) for line in text_of(outputs["search"]).splitlines()[1:]]
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    assert "layout.auto on " in text_of(outputs["auto"])


@pytest.mark.slow
def test_a_schedule_is_drawn_changed_checked_and_run(run: Runner) -> None:
    """Every cell runs; the bubbles are those of the closed forms, a wrong order is refused, and the losses
    agree.
    """
    outputs = run("pipeline.ipynb", steps=(20, 3))
    for cell in ("draw", "change"):
        assert any("image/svg+xml" in output.get("data", {}) for output in outputs[cell])
    assert "bubble: 20.0%, split: 14.3%" in text_of(outputs["split"])
    assert "refused: schedule wrong, worker 1, 1W0: it needs 1I0, which comes later" in text_of(
        outputs["check"]
    )
    rows = {line.split()[0]: line.split()[1:] for line in text_of(outputs["clock"]).splitlines()[1:]}
    assert rows["1f1b"][0] == "20.0%"  # (P-1)(F+B) / ((M+P-1)(F+B))
    assert rows["mine"][0] == "7.7%"  # ZB-H1: (P-1)(F+I-W) / (M(F+B) + (P-1)(F+I-W))
    found = re.search(r"largest difference of 3 losses: (\S+)", text_of(outputs["run"]))
    assert found is not None
    assert float(found[1]) < 1e-4
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])


@pytest.mark.slow
def test_a_profile_is_shown_and_compared(run: Runner) -> None:
    """Every cell runs; the page is whole, parts sum to the steps, and what remat costs is found."""
    outputs = run("profile.ipynb", steps=(24, 9))
    (page,) = outputs["page"]
    encoded = re.search(r"base64,([\w+/=]+)", page["data"]["text/html"])
    assert encoded is not None
    assert "Where a step" in base64.b64decode(encoded[1]).decode()
    values = text_of(outputs["values"])
    durations = re.findall(r"step \d+: ([\d.]+) s, parts ([\d.]+) s:", values)
    assert len(durations) == 4
    assert all(float(of_step) == pytest.approx(float(parts), abs=2e-3) for of_step, parts in durations)
    assert any("image/png" in output.get("data", {}) for output in outputs["memory"])
    shown = [output["data"]["text/plain"] for output in outputs["compare"] if "data" in output]
    assert shown[-1] == "0"
