"""Searches of `python -m jtrain.plan`: what they offer, what the compiler says of it, and what is refused."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from jtrain.cli.plan import main
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from tests.cli.test_plan import TINY, compiled_sheet


def test_a_search_offers_a_command_that_launches(capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints is a config that builds, on all the devices, and not what the config says anyway."""
    assert main([*TINY, "--search"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("jtrain launch"))
    words = shlex.split(line)
    assert words[:3] == ["jtrain", "launch", "--config=tiny"]
    sets = [word for before, word in itertools.pairwise(words) if before == "--set"]
    assert sets
    assert "layout.offload.params=none" not in sets
    assert build_run(load_config("tiny", (), sets)).mesh.size == 8


def test_a_search_that_finds_nothing_says_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, one message, with what would fit."""
    assert main(["--config=llama8b", "--device", "h100", "--count", "1", "--search"]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"nothing fits into 1 x h100: the nearest miss takes .* It would fit with any of: .*--co", error
    )


@pytest.mark.aot
@pytest.mark.slow
def test_the_compiler_confirms_what_a_search_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first point is compiled for that machine, and its bytes stand beside the formula's."""
    file = tmp_path / "plan.json"
    argv = [
        "--config=tiny",
        "--device",
        "h200",
        "--count",
        "1",
        "--search",
        "--compile",
        "--top",
        "1",
        "--json",
        str(file),
    ]
    assert main(argv) == 0
    assert "the fastest that the compiler confirms:" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["compiler"]["argument_bytes"] == written["formula"]["argument_bytes"]
    assert written["compiler"]["peak_bytes"] == pytest.approx(written["formula"]["peak_bytes"], rel=0.1)


def test_a_search_of_which_the_compiler_confirms_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it said of each; here of two, ten times what the formula says."""
    said = compiled_sheet(peak_over_formula=10.0).compiled
    monkeypatch.setattr("jtrain.cli.plan.compile_point", lambda *_: said)
    assert (
        main(["--config=tiny", "--device", "h200", "--count", "1", "--search", "--compile", "--top", "2"])
        == 2
    )
    assert re.search(
        r"the compiler confirms none of the first 2: it says 2\.\d, 2\.\d GiB", capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_surveys_tables_are_regenerated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every strategy saves, what combines them trains the largest model, and more memory a larger one."""
    file = tmp_path / "table.json"
    assert main(["table", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "I. Devices that train a model" in printed
    assert re.search(r"ZeRO-3 +bfloat16 +hierarchical +4 x 6,144 .* -5% ", printed)
    found = json.loads(file.read_text())
    sizes = {row["model"]: row for row in found["table_1"]}
    assert sizes["7B"]["survey_devices_of_80_gb"] == 4
    assert sizes["70B"]["survey_devices_of_80_gb"] == 35
    needed = [row["devices_of_80_gb"] for row in found["table_1"]]
    assert needed == sorted(needed)
    assert all(row["devices_of_80_gb"] <= 2 * row["survey_devices_of_80_gb"] for row in found["table_1"])
    assert found["table_3"][0]["stated"]
    assert max(abs(error) for error in found["table_3"][0]["error"].values()) <= 0.10
    rows = {row["strategy"]: row for row in found["table_2"]}
    assert rows["data parallel"]["saved"] == 0
    assert 0 < rows["ZeRO-1"]["saved"] < rows["ZeRO-2"]["saved"] < rows["ZeRO-3"]["saved"] < 1
    assert rows["offload: optimizer"]["host_bytes"] > 40 * 2**30
    assert rows["offload: optimizer"]["time"] > 1
    assert rows["remat: full"]["time"] > 1
    largest = [row["largest"]["80 GB"] for row in found["table_2"]]
    assert (
        max(largest)
        == rows["the same, all three, bf16, 8 bits"]["largest"]["80 GB"]
        > 10 * largest[0]
        > 10**9
    )
    assert all(row["largest"]["141 GB"] > row["largest"]["80 GB"] for row in found["table_2"])


def test_a_search_finds_the_mesh_whatever_the_config_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Four devices, a config for eight along `tensor`; the command builds, and leaves nothing to be decided
    again.
    """
    offload = ("layout.offload.update=host", "layout.offload.optimizer=1.0")
    sets = ("mesh.tensor=8", "mesh.data=1", "layout.auto=True", *offload)
    options = [word for one in sets for word in ("--set", one)]
    assert main(["--config=llama1b", "--device", "h200", "--count", "4", "--search", *options]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("jtrain launch"))
    chosen = [word for word in shlex.split(command) if "=" in word]
    run = build_run(load_config("llama1b", (), [word for word in chosen if not word.startswith("--config")]))
    assert run.mesh.size == 4
    assert not run.layout.auto
