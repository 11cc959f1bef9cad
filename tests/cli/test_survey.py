"""`jtrain survey`: its figures are those of the commands, and a killed measurement goes on."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jtrain.cli import survey
from jtrain.errors import UserError
from jtrain.plan.survey.claims import CLAIMS
from jtrain.plan.survey.evidence import Lookup, Noted

QUICK, LONG = "plan ecmp --flows 8 --links 8", "plan ecmp --flows 64 --links 16 --trials 60000"
SPEED = Lookup(QUICK, ("rows", "16", "speed"))


QUICK_CLAIMS = tuple(
    claim
    for claim in CLAIMS
    if claim.predicted is None or claim.predicted.command.split()[1] in ("ecmp", "walls", "pipeline")
)
"""Claims whose prediction takes less than a second."""


def pages(folder: Path) -> Path:
    """The files of one call, in a folder without measurements."""
    assert len(jax.devices()) == 8
    with contextlib.chdir(folder):
        assert survey.main(["--json", "survey.json", "--html", "survey.html"]) == 0
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "survey.json").read_text())
    assert sum(content["verdicts"].values()) == len(content["claims"])
    return {row["name"]: row for row in content["claims"]}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "CLAIMS", QUICK_CLAIMS)
        patch.setattr(survey, "CLAIMS_BY_SUBJECT", {"Data": QUICK_CLAIMS[:3], "The rest": QUICK_CLAIMS[3:]})
        return pages(tmp_path_factory.mktemp("survey"))


@pytest.fixture(scope="module")
def rows(page: Path) -> dict[str, dict[str, Any]]:
    return rows_of(page)


def predicted(rows: dict[str, dict[str, Any]], name: str) -> float:
    return rows[name]["figures"]["predicted"]["value"]


def written(command: str, tmp_path: Path) -> Any:
    """The JSON of a command in a process of its own."""
    file = tmp_path / "out.json"
    words = [sys.executable, "-m", f"jtrain.{command.split()[0]}", *command.split()[1:], "--json", str(file)]
    subprocess.run(words, check=True, capture_output=True)
    return json.loads(file.read_text())


def test_predictions_are_those_of_the_commands(rows: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Each command by itself, in a process of its own, and read by hand."""
    walls = written("plan walls --device h100", tmp_path)
    assert predicted(rows, "wall-data-movement") == walls["data_wall_flop"]
    assert predicted(rows, "wall-latency") == walls["latency_wall_flop"]
    links = written("plan ecmp --flows 64 --links 16", tmp_path)
    assert predicted(rows, "e-ecmp") == next(
        row["speed"] for row in links["rows"] if row["queue_pairs"] == 16
    )
    schedule = written("plan pipeline --schedule 1f1b --stages 8 --microbatches 32", tmp_path)
    assert predicted(rows, "pipeline-bubble") == schedule["bubble"] == pytest.approx(7 / 39)


@pytest.mark.slow
def test_predictions_are_those_of_the_longer_commands(tmp_path: Path) -> None:
    """Every row of the whole page."""
    rows = rows_of(pages(tmp_path))
    assert list(rows) == [claim.name for claim in CLAIMS]
    tables = written("plan table", tmp_path)
    strategies = {row["strategy"]: row for row in tables["table_2"]}
    plain, params = strategies["data parallel"], tables["table_1"][1]["parameters"]
    for row in tables["table_1"]:
        assert predicted(rows, f"table-1-{row['model']}") == row["devices_of_80_gb"]
    for stage in (2, 3):
        largest = strategies[f"ZeRO-{stage}"]["largest"]["80 GB"] / plain["largest"]["80 GB"]
        assert predicted(rows, f"zero-{stage}") == largest
    activations = strategies["offload: activations"]["device_bytes"] / plain["device_bytes"]
    assert predicted(rows, "offload-activations") == activations
    assert predicted(rows, "bytes-per-parameter") == plain["device_bytes"] / params
    step_s = tables["table_3"][0]["step_s"]
    assert tables["table_3"][0]["stated"]
    assert predicted(rows, "table-3-ethernet") == step_s["10 GbE"]
    assert predicted(rows, "table-3-infiniband") == step_s["400G InfiniBand"]
    assert predicted(rows, "table-3-ratio") == step_s["10 GbE"] / step_s["400G InfiniBand"]
    (cost,) = written(
        rows["cost-money"]["figures"]["predicted"]["command"].removeprefix("jtrain "), tmp_path
    )["rows"]
    assert (predicted(rows, "cost-money"), predicted(rows, "cost-energy")) == (
        cost["usd"],
        cost["joules_per_token"],
    )
    offloaded = written(
        rows["offload-10b"]["figures"]["predicted"]["command"].removeprefix("jtrain "), tmp_path
    )
    assert predicted(rows, "offload-10b") == pytest.approx(offloaded["formula"]["parameters"] / 1e9)
    unified = written(
        rows["unified-memory"]["figures"]["predicted"]["command"].removeprefix("jtrain "), tmp_path
    )
    assert predicted(rows, "unified-memory") == unified["formula"]["host_argument_bytes"] == 0


def test_every_row_has_its_command_and_its_source(rows: dict[str, dict[str, Any]]) -> None:
    """Of those that are committed, with date and machine; an open row says why."""
    for row in rows.values():
        for kind, figure in row["figures"].items():
            assert figure["command"].startswith(("jtrain ", "bench/NOTES.md"))
            assert bool(figure["source"]) == (figure["value"] is not None) == (not figure["missing"])
            assert (figure["source"] == "this call") == (kind == "predicted")
    assert rows["data-memory-Grain"]["verdict"] == "not reproduced"
    assert rows["data-memory-torch"]["figures"]["measured"]["source"].startswith(
        "bench/results/data_memory-xeon.json, 2026-11-22, 2 x Intel(R) Xeon(R) Processor, commit c6075156"
    )
    assert rows["e-ecmp"]["verdict"] == "not decidable here"
    assert rows["dvfs-allocation"]["figures"]["measured"]["missing"] == "needs a GPU at its power limit"


def test_the_page_has_the_figures_of_the_json(page: Path, rows: dict[str, dict[str, Any]]) -> None:
    text = (page / "survey.html").read_text()
    values = re.findall(r'<data data-path="claims\.\d+\.figures\.\w+\.value" value="([^"]+)"', text)
    figures = [figure["value"] for row in rows.values() for figure in row["figures"].values()]
    found = [figure for figure in figures if figure is not None]
    assert len(found) >= 15
    assert sorted(map(float, values)) == sorted(found)


def test_a_killed_measurement_goes_on(tmp_path: Path) -> None:
    """What was measured is kept; what a killed call left running is waited for, and then done again."""
    calls = (
        "import pathlib\nfrom jtrain.cli.survey import measure\n"
        f"measure([{QUICK!r}, {LONG!r}], pathlib.Path('.'))"
    )
    process = subprocess.Popen([sys.executable, "-c", calls], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2 of 2"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.01)  # the kernel tells nobody when a process has started another
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    quick, long = (survey.record_file(command, tmp_path) for command in (QUICK, LONG))
    assert quick.is_file()
    assert not long.is_file()
    first = quick.stat().st_mtime_ns
    with pytest.raises(UserError, match="what a killed one started still runs") as refusal:
        survey.measure([LONG], tmp_path)
    assert "another --out" in str(refusal.value)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert survey.measure([QUICK, LONG], tmp_path) == {}
    assert long.is_file()
    assert quick.stat().st_mtime_ns == first
    process.stderr.close()


def test_what_this_machine_measured_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails: the reason. It works: the figure of its JSON, with its date."""
    wrong = "plan ecmp --flows 8 --links 0"
    reasons = survey.measure([wrong, QUICK], tmp_path)
    assert list(reasons) == [wrong]
    assert reasons[wrong].startswith("exit code 2: error: --links 0 must be from 1 to 65,536.")
    committed = Lookup(QUICK, ("rows", "16", "speed"), noted=Noted("README.md", "", 9.0))
    assert survey.find_figure(committed, tmp_path / "empty", "").value == 9.0
    figure = survey.find_figure(committed, tmp_path, "")
    content, _ = survey.predict(QUICK)
    assert figure.value == SPEED.read(content) > 1
    assert re.search(r"/plan-ecmp-flows-8-links-8\.json, 20\d\d-\d\d-\d\d, commit ", figure.source)
    # A row that this machine could not fill leaves the committed figure.
    other = Lookup(QUICK, ("rows", "7", "speed"), noted=Noted("README.md", "", 9.0))
    assert survey.find_figure(other, tmp_path, "").value == 9.0
    assert "measured before" not in capsys.readouterr().err


def test_an_installed_jtrain_has_no_committed_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has neither bench/ nor docs/."""
    monkeypatch.setattr(survey, "CHECKOUT", tmp_path)
    for claim in CLAIMS:
        for kind, lookup in claim.lookups.items():
            if kind != "predicted":
                figure = survey.find_figure(lookup, tmp_path, "needs a GPU")
                assert figure.value is None
                assert figure.missing == (
                    "needs a checkout" if lookup.published or lookup.noted else "needs a GPU"
                )


def test_a_plan_that_is_refused_is_a_reason() -> None:
    content, message = survey.predict("plan ecmp --flows 8 --links 0")
    assert content is None
    assert message.startswith("error: --links 0 must be from 1")


def test_wrong_rows_and_folders_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert survey.main(["--measure", "prefetsh"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --measure prefetsh is no row. Did you mean prefetch? Rows to measure: data-throughput, "
    )
    assert survey.commands_of(["prefetch"]) == ["bench loop_overhead"], "the way out"
    assert survey.main(["--measure", "wall-latency"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --measure wall-latency is only predicted. Rows to measure: data-throughput, "
    )
    assert survey.main(["--out", "nowhere"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --out nowhere is no folder, and --measure alone makes one. Leave --out out.\n"
    )
    assert not (tmp_path / "nowhere").exists()
    monkeypatch.setattr(survey, "CLAIMS", QUICK_CLAIMS[:1])
    monkeypatch.setattr(survey, "CLAIMS_BY_SUBJECT", {"Data": QUICK_CLAIMS[:1]})
    assert survey.main([]) == 0, "the way out"
    assert capsys.readouterr().err == "next: jtrain survey --measure\n"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    """Cut off, or of another form; removed, the row is measured again."""
    file = survey.record_file(QUICK, tmp_path)
    for text in ('{"command": "plan', "[]", "{}"):
        file.write_text(text)
        with pytest.raises(
            UserError, match=r"is not what --measure writes\. Remove it, and run `jtrain survey"
        ):
            survey.find_figure(SPEED, tmp_path, "")
    file.unlink()
    assert survey.measure([QUICK], tmp_path) == {}
    # Long commands that begin alike share a file, and no figure.
    padded = f"plan ecmp {'--seed 0 ' * 9}--flows 8 --links"
    assert survey.measure([f"{padded} 8"], tmp_path) == {}
    assert survey.record_file(f"{padded} 8", tmp_path) == survey.record_file(f"{padded} 4", tmp_path)
    assert survey.read_record(f"{padded} 8", tmp_path) is not None
    assert survey.read_record(f"{padded} 4", tmp_path) is None
    assert survey.find_figure(SPEED, tmp_path, "").value is not None
