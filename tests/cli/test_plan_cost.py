"""`python -m jtrain.plan cost`: the curve over cluster sizes, another chip beside it, and every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jtrain.cli.plan import main
from jtrain.plan.economics.failures import best_interval_s, goodput

COST = ("cost", "--config=tiny", "--device", "h100")
WIDE = [f"--set={text}" for text in ("model.d_model=8192", "model.num_layers=40", "model.d_ff=28672")]


def written(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> tuple[dict[str, Any], str]:
    """What a command writes as JSON, and what it prints in one line."""
    assert main([*COST, *words, "--json", str(file)]) == 0
    return json.loads(file.read_text()), " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The curve that several tests read."""
    file = tmp_path_factory.mktemp("cost") / "cost.json"
    assert main([*COST, "--count", "1,4,8", "--tokens", "1T", "--price", "2.5", "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_every_size_has_time_money_energy_and_carbon(curve: dict[str, Any]) -> None:
    """They follow from the step, the goodput, the price, the chip's 700 W and 473 g per kWh."""
    assert [row["count"] for row in curve["rows"]] == [1, 4, 8]
    for row in curve["rows"]:
        wall_s = 1e12 / row["tokens_per_s"] / row["goodput"]
        assert row["days"] == pytest.approx(wall_s / 86_400)
        assert row["device_hours"] == pytest.approx(row["count"] * wall_s / 3600)
        assert row["usd"] == pytest.approx(2.5 * row["device_hours"])
        assert row["mwh"] == pytest.approx(0.7 * row["device_hours"] / 1000)
        assert row["joules_per_token"] == pytest.approx(row["mwh"] * 3.6e9 / 1e12)
        assert row["co2_tonnes"] == pytest.approx(0.473 * row["mwh"])


@pytest.mark.slow
def test_goodput_is_that_of_the_failures(
    curve: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Saves come at Daly's interval in whole steps; a tenth of the time between failures loses much more."""
    worse, printed = written(capsys, tmp_path / "c.json", "--count", "1,4,8", "--tokens", "1T", "--mtbf", "5")
    for row, other in zip(curve["rows"], worse["rows"], strict=True):
        assert row["mtbf_s"] == pytest.approx(50_700 * 3600 / row["count"])
        assert other["goodput"] < row["goodput"] < 1
        assert other["checkpoint_every_steps"] < row["checkpoint_every_steps"]
    assert worse["rows"][-1]["goodput"] < 0.85
    assert f"set checkpoint.every_steps={worse['rows'][0]['checkpoint_every_steps']}" in printed, (
        "one is the cheapest"
    )
    none, printed = written(capsys, tmp_path / "c.json", "--count", "1,8", "--mtbf", "1", "--restart", "3600")
    assert [(row["fits"], "goodput" in row) for row in none["rows"]] == [(True, True), (True, False)]
    assert "8 fails too often" in printed
    given, _ = written(
        capsys, tmp_path / "c.json", "--count", "4", "--tokens", "1T", "--restart", "60", "--save", "5"
    )
    [row] = given["rows"]
    best_s, step_s = best_interval_s(5.0, row["mtbf_s"]), row["step_s"]
    assert row["checkpoint_every_steps"] == round(best_s / step_s)
    interval_s = row["checkpoint_every_steps"] * step_s
    expected = goodput(interval_s=interval_s, save_s=5.0, restart_s=60.0, mtbf_s=row["mtbf_s"])
    assert row["goodput"] == pytest.approx(expected)


def test_gb200_against_h100_at_a_higher_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A token costs 1.6 times the price by the speed: less where it is over 1.6 times as fast."""
    found, printed = written(
        capsys, tmp_path / "c.json", "--count", "1,4", "--tokens", "1T", "--against", "gb200=1.6"
    )
    assert found["against"]["device"] == "gb200"
    for row, other, ratio in zip(
        found["rows"], found["against"]["rows"], found["against"]["ratios"], strict=True
    ):
        assert ratio["speed"] == pytest.approx(row["days"] / other["days"])
        assert ratio["cost"] == pytest.approx(1.6 / ratio["speed"])
        assert ratio["energy"] == pytest.approx(other["joules_per_token"] / row["joules_per_token"])
    pays, waits = found["against"]["ratios"]
    assert pays["speed"] > 1.6 > waits["speed"], "a toy on four of them waits for its collectives"
    assert "gb200 pays where it is over 1.6 times as fast: cheaper per token on 1 x gb200" in printed
    _, printed = written(capsys, tmp_path / "c.json", "--count", "1", "--against", "gb200=9")
    assert "never cheaper per token" in printed


def test_energy_of_tpus_only_where_it_is_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """v4 has 192 W; of a v5p time and money are known, and --carbon is refused."""
    file = tmp_path / "c.json"
    assert (
        main(
            ["cost", "--config=tiny", "--device", "v4", "--count", "4", "--tokens", "1T", "--json", str(file)]
        )
        == 0
    )
    [row] = json.loads(file.read_text())["rows"]
    assert row["mwh"] == pytest.approx(0.192 * row["device_hours"] / 1000)
    assert (
        main(
            [
                "cost",
                "--config=tiny",
                "--device",
                "v5p",
                "--count",
                "4",
                "--tokens",
                "1T",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    [row] = json.loads(file.read_text())["rows"]
    assert row["days"] > 0
    assert row["mwh"] is row["co2_tonnes"] is None
    assert "energy and CO2 unknown: the power of a v5p is not published" in capsys.readouterr().out
    assert main(["cost", "--config=tiny", "--device", "v5p", "--count", "4", "--carbon", "100"]) == 2
    assert "--carbon 100: the power of a v5p is not published" in capsys.readouterr().err
    assert main(["cost", "--config=tiny", "--device", "tpu7x", "--count", "4"]) == 0
    assert "at an assumed 15 GB/s: that link of a tpu7x is not published" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_machine_file_has_the_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also the power that a maker does not publish: with it --carbon is known."""
    machine, file = tmp_path / "my.toml", tmp_path / "c.json"
    machine.write_text('usd_per_hour = 4.0\n[chip]\nname = "v5p"\npower_w = 500\n')
    words = [
        "cost",
        "--config=tiny",
        "--machine",
        str(machine),
        "--count",
        "4",
        "--carbon",
        "100",
        "--json",
        str(file),
    ]
    assert main(words) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["usd"] == pytest.approx(4 * row["device_hours"])
    assert row["co2_tonnes"] == pytest.approx(0.1 * row["mwh"])
    assert row["mwh"] > 0
    assert "cheapest: 4 x v5p" in capsys.readouterr().out


def test_sizes_that_are_too_small_are_shown_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model of 20 billion parameters fits 8 H100 and not 2. Where nothing fits at all the command
    refuses.
    """
    words, file = [*COST, *WIDE, "--tokens", "1T"], tmp_path / "c.json"
    assert main([*words, "--count", "2,8", "--json", str(file)]) == 0
    assert [row["fits"] for row in json.loads(file.read_text())["rows"]] == [False, True]
    assert "nothing fits" in capsys.readouterr().out
    assert main([*words, "--count", "1"]) == 2
    refusal = capsys.readouterr().err
    assert "nothing fits into 1 x h100: the nearest miss takes" in refusal
    [enough] = re.findall(r"--count \d+", refusal)
    assert main([*words, *enough.split()]) == 0


@pytest.mark.slow
def test_gb200_is_worth_its_price_for_llama_8b(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Over twice as fast on up to 512 devices, so cheaper at 1.6 times the price; more devices cost more in
    all.
    """
    file = tmp_path / "c.json"
    words = [
        "cost",
        "--config=llama8b",
        "--device",
        "h100",
        "--count",
        "64,512,1024",
        "--tokens",
        "15T",
        "--json",
        str(file),
    ]
    assert main([*words, "--against", "gb200=1.6"]) == 0
    found = json.loads(file.read_text())
    assert all(2 < ratio["speed"] < 3 and ratio["cost"] < 1 for ratio in found["against"]["ratios"])
    days, hours = ([row[key] for row in found["rows"]] for key in ("days", "device_hours"))
    assert days == sorted(days, reverse=True)
    assert hours == sorted(hours)
    assert "cheaper per token on 64, 512, 1,024 x gb200" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cost", "--config=tiny"], "no machine is named. Give --device, one of a100, h100"),
        (
            [*COST, "--count", "64,8"],
            "--count 64,8: expected ascending whole numbers above 0, such as 64,128,256",
        ),
        ([*COST, "--count", "many"], "--count many: expected ascending"),
        ([*COST, "--count", "12"], "--count 12: a host has 8 x h100. Use 8, 16"),
        ([*COST, "--tokens", "15X"], "--tokens 15X must be a number above 0, such as 2.5, 1e9, 300B or 15T"),
        ([*COST, "--price", "0"], "--price 0 must be a number above 0"),
        ([*COST, "--mtbf", "-1"], "--mtbf -1 must be a number above 0"),
        ([*COST, "--save", "."], "--save . must be a number above 0"),
        (
            [*COST, "--against", "gb200"],
            "--against gb200: expected a device and how many times as much it costs",
        ),
        ([*COST, "--against", "gb2000=2"], "No device is called 'gb2000'. Did you mean gb200"),
        (
            [*COST, "--json", "/nowhere/c.json"],
            "--json /nowhere/c.json: there is no folder /nowhere. Make it first",
        ),
        (
            [*COST, "--machine", "my.toml"],
            "--machine my.toml with --device h100: both name a machine. Leave one out",
        ),
        ([*COST, "--count", "1", "--mtbf", "1e-9"], "hardly any interval between saves ends. Raise --mtbf"),
    ],
)
def test_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Without a traceback; the message names the option and the way out."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
