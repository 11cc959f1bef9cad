"""Walls of a run: that both exist, that they move out with the batch and in with the latency, and the
command.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from jtrain.cli.plan import main
from jtrain.plan.economics.walls import (
    LINEAR,
    SERIAL,
    Cluster,
    RunSize,
    best_layout,
    collective_latency_s,
    data_wall,
    largest_run,
    latency_wall,
)
from jtrain_kernels.device import from_name

MONTHS_S = 90 * 86_400.0


def cluster(*, batch: float = 16e6, latency_us: float = 10.0, name: str = "h100") -> Cluster:
    """H100s for 90 days."""
    return Cluster(from_name(name), MONTHS_S, batch, latency_us / 1e6)


def wall_flop(of: Cluster) -> float:
    """FLOP of the data-movement wall."""
    found = data_wall(of)
    assert found is not None
    return found.shape.flop


def test_a_run_has_the_flop_of_its_parameters_and_tokens() -> None:
    """6 N D with 20 tokens per parameter; 12 width^2 parameters a layer, 128 times as wide as there are
    layers.
    """
    shape = RunSize(2e28)
    assert 6 * shape.parameters * shape.tokens == pytest.approx(2e28)
    assert shape.parameters == pytest.approx(1.29e13, rel=0.01)
    assert 12 * shape.width**2 * shape.layers == pytest.approx(shape.parameters)


def test_runs_scale_linearly_up_to_a_wall() -> None:
    """Small runs use all of their devices, larger ones less and less, and beyond the latency wall none ends
    in time.
    """
    h100 = cluster()
    found = [best_layout(10.0**exponent, h100) for exponent in (23, 25, 27, 28, 29)]
    shares = [0.0 if one is None else one.share for one in found]
    assert shares[0] > 0.99
    assert all(after <= before + 1e-3 for before, after in pairwise(shares)), "the layouts are a grid"
    assert shares[-1] < LINEAR < shares[1]
    at_wall = data_wall(h100)
    assert at_wall is not None
    assert at_wall.share >= LINEAR
    assert 0 < at_wall.days <= 90
    beyond = best_layout(1.05 * at_wall.shape.flop, h100)
    assert beyond is None or beyond.share < LINEAR
    last = latency_wall(h100)
    assert last.flop > 10 * at_wall.shape.flop
    assert best_layout(1.05 * last.flop, h100) is None


def test_both_walls_move_out_with_the_batch_and_in_with_the_latency() -> None:
    """Strictly for the latency wall; by at least nothing for the other one, and over a wide range by a
    lot.
    """
    by_batch = [cluster(batch=batch) for batch in (1e6, 4e6, 16e6, 64e6, 256e6)]
    by_latency = [cluster(latency_us=latency) for latency in (100.0, 30.0, 10.0, 3.0, 1.0)]
    for each in (by_batch, by_latency):
        data, latency = [wall_flop(one) for one in each], [latency_wall(one).flop for one in each]
        assert data == sorted(data)
        assert data[-1] > 1.2 * data[0]
        assert all(after > 2 * before for before, after in pairwise(latency))


def test_the_latency_wall_is_the_time_of_its_layers() -> None:
    """Tokens by batch, times layers, times the collectives that wait for each other: exactly 90 days."""
    of = cluster()
    shape = latency_wall(of)
    steps = shape.tokens / of.batch_tokens
    assert steps * shape.layers * SERIAL * of.latency_s == pytest.approx(MONTHS_S)


def test_a_cluster_of_ones_own_is_no_larger_than_all_devices() -> None:
    """A thousand H100 do what a thousand can: their FLOP/s by 90 days, nearly all of it; more devices do
    more.
    """
    h100 = cluster()
    some, more = largest_run(h100, 1000), largest_run(h100, 4608)
    assert some is not None
    assert more is not None
    assert some.devices <= 1000
    assert 0.98 * 1000 * h100.flops * MONTHS_S < some.shape.flop <= 1000 * h100.flops * MONTHS_S
    assert some.shape.flop < more.shape.flop < wall_flop(h100)


def test_tpus_wait_less_for_each_other() -> None:
    """A hop between TPUs takes a microsecond, so their latency wall is further out than that of NVLink."""
    assert collective_latency_s(from_name("v5p")) == pytest.approx(2e-6)
    assert collective_latency_s(from_name("h100")) == pytest.approx(15.2e-6)


def test_the_command_prints_both_beside_the_published_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what binds, how they move, and how far a cluster of one's own gets; the JSON has the same."""
    file = tmp_path / "walls.json"
    assert main(["walls", "--device", "h100", "--count", "4096", "--json", str(file)]) == 0
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    for part in ("2e+28", "2e+31", "what binds there:", "how the walls move", "4,096 x h100 train at most"):
        assert part in printed
    assert f"{found['data_wall_flop']:.1e}" in printed
    assert found["published_flop"] == {"data movement": 2e28, "latency": 2e31}
    assert found["own"]["flop"] < found["data_wall_flop"] < found["latency_wall_flop"]
    base, quarter, *_ = found["moved"]
    assert (base["data_flop"], base["latency_flop"]) == (found["data_wall_flop"], found["latency_wall_flop"])
    assert quarter["batch_tokens"] == found["batch_tokens"] / 4 == 4e6
    assert quarter["latency_flop"] < base["latency_flop"]
    assert math.isclose(found["latency_s"], 15.2e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no machine is named. Give --device, one of a100, h100"),
        (
            ["--device", "rtx4090"],
            "the speed of the network beyond them is not published. Give --network GBIT",
        ),
        (["--device", "h100", "--days", "0"], "--days 0 must be a number above 0"),
        (["--device", "h100", "--batch-tokens", "x"], "--batch-tokens x must be a number above 0"),
        (["--device", "h100", "--latency-us", "-1"], "--latency-us -1 must be a number above 0"),
        (["--device", "h100", "--count", "12"], "--count 12: a host has 8 x h100. Use 8, 16"),
        (["--device", "h100", "--days", "1e-9"], "scales on h100: raise --days or --batch-tokens"),
        (["--device", "cpu"], "--device cpu: its peaks are not published"),
    ],
)
def test_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Without a traceback; the way out that it names works."""
    assert main(["walls", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_network_that_is_given_is_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """RTX 4090 have no links between them; over 100 Gbit/s each a run scales, though a smaller one than on
    H100.
    """
    assert main(["walls", "--device", "rtx4090", "--network", "100"]) == 0
    assert "data movement scales linearly" in capsys.readouterr().out
