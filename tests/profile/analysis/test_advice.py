"""Advice of made-up traces of every platform: no tool or cause of another one, always with its gain."""

import dataclasses
import itertools
import re

import pytest

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.advice import advise, hardware
from jtrain.profile.analysis.breakdown import break_down
from jtrain.profile.analysis.records import Breakdown
from tests.profile import example
from tests.profile.analysis.test_breakdown import FACTS, OPS, TRACE, clocks

MACHINES = {
    "cpu": ("cpu", "cpu"),
    "nvidia": ("gpu", "NVIDIA H200"),
    "amd": ("gpu", "AMD Instinct MI300X"),
    "tpu": ("tpu", "TPU v5"),
    "other": ("gpu", "trn2"),
}
OWN_WORDS = {
    "cpu": ("emulated", "other guests", "these cores"),
    "nvidia": ("nvidia-smi",),
    "amd": ("amd-smi",),
    "tpu": ("provider", "throttle score"),
    "other": (),
}
CAUSES = ("power", "thermal", "other")


def lossy(machine: str, cause: str) -> Breakdown:
    """The example with every part above its threshold, and one cause of low clocks."""
    platform, kind = MACHINES[machine]
    shares = dict.fromkeys(example.SHARES, 0.1) | {"theoretical": 0.05, "utilisation": 0.25}
    step = example.step(20, duration_s=1.0, shares=shares)
    lost = {name: 0.1 * (name == cause) for name in CAUSES}
    slow = [one | {"exposed_communication_s": 0.0} if one["device"] == 3 else one for one in step.devices]
    steps = [dataclasses.replace(step, step=20 + i, clocks_lost_s=lost, devices=slow) for i in range(5)]
    return dataclasses.replace(example.breakdown(), platform=platform, device_kind=kind, steps=steps)


@pytest.mark.parametrize(("machine", "cause"), list(itertools.product(MACHINES, CAUSES)))
def test_no_advice_is_of_another_platform(machine: str, cause: str) -> None:
    """Nine rules speak; each ends with what it can win, the largest first, and a step is never won whole."""
    breakdown = lossy(machine, cause)
    assert hardware(breakdown) == machine
    lines = advise(breakdown)
    assert len(lines) == 9
    foreign = [word for name, words in OWN_WORDS.items() if name != machine for word in words]
    assert [word for word in foreign if word in " ".join(lines)] == []
    # No tool of a TPU or of an unknown device names its power limit.
    own = any(word in " ".join(lines) for word in OWN_WORDS[machine])
    assert own == (machine != "other" and (machine, cause) != ("tpu", "power"))
    gains = [
        re.search(r"Expected gain: at most (\S+) ms of a step, (\S+)% more tokens", line) for line in lines
    ]
    assert None not in gains
    won_ms = [float(gain[1]) for gain in gains if gain]
    assert won_ms == sorted(won_ms, reverse=True)
    for won, gain in zip(won_ms, gains, strict=True):
        assert gain is not None
        assert 0 < won < 1000
        assert float(gain[2]) == pytest.approx(100 * (1000 / (1000 - won) - 1), abs=0.06)


def test_a_gain_is_a_number_of_the_page() -> None:
    """Half of a reduction whose bytes are halved, a whole wait, seconds of one cause, the ops of a layer."""
    breakdown = lossy("nvidia", "power")
    gain = {
        line.partition(":")[0]: line.rpartition("at most ")[2].partition(" of a step")[0]
        for line in advise(breakdown)
    }
    assert gain["Exposed communication"] == "50.00 ms", "half of the 100 ms of the reduce-scatter"
    assert gain["Data wait"] == gain["Host"] == gain["Idle"] == gain["Clock loss"] == "100.0 ms"
    layers: dict[str, float] = {}
    for op in breakdown.ops:
        seconds = figures.per_step(breakdown, op.lost["utilisation"])
        layers[figures.op_location(op)] = layers.get(figures.op_location(op), 0.0) + seconds
    assert gain["Low utilisation"] == f"{max(layers.values()) * 1e3:#.4g} ms"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_trace_s_own_advice_is_of_its_platform(machine: str) -> None:
    """From events and clocks to lines: the clock falls for most of the step, and the driver says nothing."""
    platform, kind = MACHINES[machine]
    trace = dataclasses.replace(TRACE, platform=platform, device_kind=kind)
    facts = FACTS | {"platform": platform, "device_kind": kind}
    breakdown = break_down(trace, OPS, facts, clocks(*[1000.0] * 5, *[400.0] * 16), {})
    lines = " ".join(advise(breakdown))
    assert "Clock loss" in lines
    assert ("nvidia-smi" in lines) == (machine == "nvidia")
    assert ("amd-smi" in lines) == (machine == "amd")
    assert ("emulated devices" in lines) == (machine == "cpu")
    assert machine != "cpu" or "jtrain plan" not in lines
