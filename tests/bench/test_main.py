"""The benchmark verb: what it lists, writes and refuses."""

import importlib
import json
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import plan_compiled
from jtrain.bench import REHEARSE, Options, Row, kernels, meets_bar, option, row
from jtrain.bench.__main__ import CHECKOUT as ROOT
from jtrain.bench.__main__ import FOLDERS, bench, benchmarks, first_line, parse
from jtrain.plan import AOT_ENVIRONMENT


def test_every_benchmark_says_what_it_measures_and_can_run() -> None:
    """One line each, and a `run`, read without importing any: some need packages of their own."""
    files = benchmarks()
    assert files["startup"].parent == FOLDERS["jtrain.bench"]
    assert files["data"].parent == FOLDERS["bench"]
    assert len(files) == sum(len(list(folder.glob("[!_]*.py"))) for folder in FOLDERS.values()), (
        "a name is used twice"
    )
    for name, file in files.items():
        assert first_line(file), name
        text = file.read_text()
        assert any(f"def run(args: Options) -> {kind}[Row]:" in text for kind in ("list", "Iterator")), name


def test_without_a_name_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(benchmarks())


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = sorted(
    {match for page in PAGES for match in re.findall(r"jtrain bench ([a-z][^`\n|]*)", page.read_text())}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_benchmark_that_a_page_names_takes_its_options(command: str) -> None:
    """A page is where a reader finds the command of a figure."""
    name, *options = shlex.split(command)
    (package,) = (package for package, folder in FOLDERS.items() if folder == benchmarks()[name].parent)
    module = importlib.import_module(f"{package}.{name}")
    assert parse(getattr(module, "OPTIONS", ()), [name, *options]).name == name


def test_an_unknown_benchmark_is_refused() -> None:
    """With the nearest name."""
    with pytest.raises(
        ValueError, match=r"no benchmark cpu_stp\. Did you mean cpu_step\? There are: .*startup"
    ):
        bench(["cpu_stp"])


def test_the_json_is_what_design_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DESIGN section 8, with an option of the benchmark's own."""

    def run(args: Options) -> list[Row]:
        return [
            row("speed", float(args.speed), "tokens/s", baseline=50.0, bar=">= 1.5"),
            row("size", None, "bytes"),
        ]

    module = types.ModuleType("jtrain.bench.startup", "A stand-in.")
    module.__dict__.update(run=run, OPTIONS=(option("--speed"),))
    monkeypatch.setitem(sys.modules, "jtrain.bench.startup", module)
    monkeypatch.setattr("jtrain.bench.__main__.start_jax", lambda environ: None)
    assert bench(["startup", "--speed", "100", "--json", str(tmp_path / "rows.json")]) == 0
    assert "met" in capsys.readouterr().out
    report = json.loads((tmp_path / "rows.json").read_text())
    assert list(report) == ["name", "date", "device", "versions", "commit", "rows"]
    assert report["name"] == "startup"
    assert " x " in report["device"]
    assert "jax" in report["versions"]
    speed = dict(what="speed", value=100.0, unit="tokens/s", baseline=50.0, ratio=2.0, bar=">= 1.5")
    size = dict(what="size", value=None, unit="bytes", baseline=None, ratio=None, bar=None)
    assert report["rows"] == [speed, size]


@pytest.mark.parametrize(("value", "code"), [(0.0, 0), (1.0, 1), (None, 0)])
def test_a_benchmark_may_end_with_one_where_it_misses_a_bar(
    monkeypatch: pytest.MonkeyPatch, value: float | None, code: int
) -> None:
    """`faults` is one; the others are measurements, and end with 0."""

    def run(args: Options) -> list[Row]:
        return [row("lost", value, "trials", bar="<= 0")]

    module = types.ModuleType("jtrain.bench.startup", "A stand-in.")
    module.__dict__.update(run=run)
    monkeypatch.setitem(sys.modules, "jtrain.bench.startup", module)
    monkeypatch.setattr("jtrain.bench.__main__.start_jax", lambda environ: None)
    assert bench(["startup"]) == 0
    module.__dict__.update(MUST_MEET=True)
    assert bench(["startup"]) == code


def test_a_benchmark_for_absent_chips_needs_no_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is what JAX must find before the module imports it; an option may be what asks for
    it.
    """
    package = tmp_path / "absent_chips"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jtrain.bench.__main__.FOLDERS", FOLDERS | {"absent_chips": package})
    monkeypatch.setattr("jtrain.bench.__main__.start_jax", lambda environ: None)
    text = (
        "import os\nOPTIONS = ()\n{}\nseen = os.environ['CUDA_VISIBLE_DEVICES']\ndef run(args): return []\n"
    )
    seen: list[str] = []
    for name, line, more in (
        ("never", "", ()),
        ("unasked", "ABSENT_CHIPS = ('--json',)", ()),
        ("asked", "ABSENT_CHIPS = ('--json',)", ("--json", str(tmp_path / "rows.json"))),
        ("always", "ABSENT_CHIPS = True", ()),
    ):
        (package / f"{name}.py").write_text(text.format(line))
        for variable in AOT_ENVIRONMENT:
            monkeypatch.setenv(variable, "")
        assert bench([name, *more]) == 0
        seen.append(importlib.import_module(f"absent_chips.{name}").seen)
    assert seen == ["", "", "-1", "-1"]
    assert kernels.ABSENT_CHIPS == ("--device", "--compile")
    assert plan_compiled.ABSENT_CHIPS is True


def test_rows_are_on_the_disk_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark that is ended, or fails, keeps what it has measured; a rehearsal's rows say so and meet no
    bar.
    """
    file, seen = tmp_path / "rows.jsonl", list[str]()

    def run(args: Options) -> Iterator[Row]:
        yield row("first", 1.0, "s", bar="<= 2")
        seen.append(file.read_text())
        raise RuntimeError("the GPU fell off the bus")

    module = types.ModuleType("jtrain.bench.startup", "A stand-in.")
    module.__dict__.update(run=run, OPTIONS=(REHEARSE,))
    monkeypatch.setitem(sys.modules, "jtrain.bench.startup", module)
    monkeypatch.setattr("jtrain.bench.__main__.start_jax", lambda environ: None)
    for more, what, bar in (
        ([], "first", "<= 2"),
        (["--rehearse"], "rehearsal, no measurement: first", None),
    ):
        file.unlink(missing_ok=True)
        with pytest.raises(RuntimeError, match="fell off the bus"):
            bench(["startup", "--lines", str(file), *more])
        (line,) = (json.loads(text) for text in file.read_text().splitlines())
        assert (line["what"], line["bar"]) == (what, bar)
    assert all(text.endswith("}\n") for text in seen)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (row("a", 2.0, "s", bar="< 2"), False),
        (row("a", 2.0, "s", bar="<= 2"), True),
        (row("a", 3.0, "x", baseline=2.0, bar=">= 1.5"), True),  # of the ratio
        (row("a", 3.0, "x", baseline=2.0, bar="> 1.5"), False),
        (row("a", 3.0, "x"), None),
        (row("a", None, "x", bar="> 1.5"), None),
    ],
)
def test_a_bar_is_of_the_ratio_where_there_is_a_baseline(made: Row, met: bool | None) -> None:
    assert meets_bar(made) is met


def test_a_bar_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of <=, <, >=, > and a number"):
        meets_bar(row("a", 1.0, "s", bar="fast"))


def test_a_gpu_sheet_without_a_gpu_is_refused() -> None:
    """A CPU's number would be taken for one."""
    from jtrain.bench import h200

    with pytest.raises(ValueError, match="needs a GPU, but the device here is 'cpu'"):
        list(h200.run(Options(steps=1, only=None, sets=[], rehearse=False)))
