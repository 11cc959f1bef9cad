"""A soak's figures from samples made by hand; without a GPU it refuses."""

import numpy as np
import pytest

from jtrain.bench import Options, machine
from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks import samples

SECOND = 1_000_000_000


def test_a_soak_adds_up() -> None:
    """Ten seconds, half of them at half the clock: a quarter of the time lost; 400 W are 4000 J."""
    start = 5 * SECOND
    times = start + np.arange(-1, 12) * SECOND
    held = samples.make(
        0,
        "scripted",
        epoch_ns=times,
        monotonic_ns=times,
        sm_mhz=np.where(times < start + 5 * SECOND, 1800.0, 900.0),
        power_w=np.full(len(times), 400.0),
        reasons=np.where(times < start + 5 * SECOND, 0, 0x4),
    )
    found = machine.summarise(held, 2e15, start, start + 10 * SECOND, Peaks(1e15, 1e12, 1800.0, None))
    assert found.flops_per_s == pytest.approx(2e14)
    assert found.mean_mhz == pytest.approx(1350.0)
    assert found.joules_per_tflop == pytest.approx(2.0)
    assert found.lost_s == pytest.approx({"power": 2.5, "thermal": 0.0, "other": 0.0})


def test_without_a_gpu_it_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"machine --soak needs a GPU's clocks, but the device here is 'cpu'\."
    ):
        list(machine.run(Options(calls=1, soak=1.0, rehearse=False)))
