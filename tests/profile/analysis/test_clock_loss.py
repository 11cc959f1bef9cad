"""Clock loss: seconds are exact; shares, causes, MFUs and joules add up."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks.samples import Samples, energy_j, make

EPOCH = 1_700_000_000_000_000_001
S = 1_000_000_000
H100 = Peaks(flops=989.4e12, hbm_bytes_per_s=3.35e12, ref_mhz=1830.0, max_mhz=1980.0)
NO_PEAKS = Peaks(None, None, None, None)


def ns(*seconds: float) -> np.ndarray:
    return np.array([EPOCH + round(one * S) for one in seconds], np.int64)


def halving(**more: object) -> Samples:
    """Samples every 20 ms: full speed for two seconds, then half speed for two."""
    times = np.arange(0, 4, 0.02)
    return make(0, "scripted", epoch_ns=ns(*times), sm_mhz=np.where(times < 2, 1000.0, 500.0), **more)  # type: ignore[arg-type]


def test_a_clock_that_halves_costs_exactly_half_the_time_after_it() -> None:
    """Ops of one second before, across and after the change, with several sensitivities b."""
    start, end = ns(0.5, 1.5, 2.5), ns(1.5, 2.5, 3.5)
    mhz = halving().mean_mhz(start, end)
    assert mhz.tolist() == [1000.0, 750.0, 500.0]
    for b, lost_s in ((1.0, [0.0, 0.25, 0.5]), (0.5, [0.0, 0.125, 0.25]), (0.0, [0.0, 0.0, 0.0])):
        multiplier = clock_loss.multipliers(mhz, b, 1000.0)
        assert ((end - start) * 1e-9 * (1 - multiplier)).tolist() == lost_s


@hypothesis.given(st.floats(1e-6, 10), st.floats(100, 2000), st.floats(0.01, 1), st.floats(1, 3))
def test_b_of_one_is_choppers_chain(
    duration_s: float, mhz: float, utilisation: float, instruction: float
) -> None:
    """D_thr * O_inst * O_util * O_freq == D_act, with cycles as from a counter and O_freq = 1 / m."""
    peak_mhz, flops_per_cycle = 2100.0, 622_592.0
    cycles = duration_s * mhz * 1e6
    executed = utilisation * flops_per_cycle * cycles
    theoretical_s = executed / instruction / (flops_per_cycle * peak_mhz * 1e6)
    (m,) = clock_loss.multipliers([mhz], 1.0, peak_mhz)
    assert theoretical_s * instruction / utilisation / m == pytest.approx(duration_s, rel=1e-12)
    assert cycles / (peak_mhz * 1e6) == pytest.approx(duration_s * m, rel=1e-12), "D_cyc of Chopper"


def test_an_unknown_clock_costs_nothing() -> None:
    """An unknown reference clock costs nothing either; a reference of zero is refused."""
    assert clock_loss.multipliers([np.nan, 500.0], 1.0, 1000.0).tolist() == [1.0, 0.5]
    assert clock_loss.multipliers([np.nan, 500.0], 1.0, None).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="ref_mhz=0"):
        clock_loss.multipliers([500.0], 1.0, 0.0)


def test_the_reference_is_the_peaks_or_the_best_that_was_seen() -> None:
    """Relative clocks have no reference but the best sample."""
    assert clock_loss.reference_mhz(H100, {0: halving()}) == 1830.0
    assert clock_loss.reference_mhz(NO_PEAKS, {0: halving()}) == 1000.0
    assert clock_loss.reference_mhz(NO_PEAKS, {}) is None


def test_sensitivity_is_the_compute_share_of_the_roofline() -> None:
    """b is 1 if compute-bound, 0 if memory-bound, 0.5 if even, and 2/3 at half the clock, where compute takes
    twice.
    """
    peaks = Peaks(flops=1e12, hbm_bytes_per_s=1e9, ref_mhz=1000.0, max_mhz=1000.0)
    found = clock_loss.sensitivity(
        [1e12, 0, 1e12, 1e12, 0], [0, 1e9, 1e9, 1e9, 0], peaks, [1000.0, 1000.0, np.nan, 500.0, 1000.0]
    )
    np.testing.assert_allclose(found, [1.0, 0.0, 0.5, 2 / 3, 1.0])
    assert clock_loss.sensitivity([1e12], [1e9], NO_PEAKS, [1000.0]).tolist() == [1.0], (
        "Chopper's without peaks"
    )


def test_lost_seconds_are_split_by_the_violation_counters() -> None:
    """In two seconds below the reference, power held the clock down for 1 s and heat for 0.5 s."""
    grows = np.arange(0, 4, 0.02)
    slow = np.clip(grows - 2, 0, None)
    counted = halving(power_violation_ns=slow * S / 2, thermal_violation_ns=slow * S / 4)
    start, end = ns(0, 3.98).tolist()
    found = clock_loss.split_by_cause(0.99, counted, start, end, 1000.0)
    assert found == pytest.approx({"power": 0.495, "thermal": 0.2475, "other": 0.2475}, rel=1e-6)
    assert sum(found.values()) == 0.99


def test_reasons_stand_in_for_counters_that_are_refused() -> None:
    """Without counters the throttle reasons are used; without reasons everything is "other"."""
    times = np.arange(0, 4, 0.02)
    reasons = np.where(times < 2, 0, np.where(times < 3, 0x4, 0x20))
    start, end = ns(0, 4).tolist()
    found = clock_loss.split_by_cause(1.0, halving(reasons=reasons), start, end, 1000.0)
    assert found == pytest.approx({"power": 0.5, "thermal": 0.5, "other": 0.0})
    for unknown in (halving(), None):
        assert clock_loss.split_by_cause(1.0, unknown, start, end, 1000.0) == {
            "power": 0.0,
            "thermal": 0.0,
            "other": 1.0,
        }


@hypothesis.given(st.floats(100, 2500), st.floats(1e9, 1e16), st.floats(1e-3, 1e3))
def test_three_mfus_differ_by_their_clocks_alone(mhz: float, step_flops: float, duration_s: float) -> None:
    """mfu_spec = mfu_clock * f / f_ref, and mfu_reference = mfu_spec * f_ref / f_max."""
    found = clock_loss.mfu(step_flops, duration_s, 8, H100, mhz)
    spec, clock, reference = found["spec"], found["clock"], found["reference"]
    assert spec is not None
    assert clock is not None
    assert reference is not None
    assert spec == pytest.approx(step_flops / duration_s / 8 / 989.4e12)
    assert spec == pytest.approx(clock * mhz / 1830.0, rel=1e-12)
    assert reference == pytest.approx(spec * 1830.0 / 1980.0, rel=1e-12)


def test_an_unknown_peak_or_clock_gives_no_mfu() -> None:
    """An unknown MFU is None, not a wrong number."""
    nothing = {"spec": None, "clock": None, "reference": None}
    assert clock_loss.mfu(1e12, 1.0, 1, NO_PEAKS, 1000.0) == nothing
    assert clock_loss.mfu(None, 1.0, 1, H100, 1000.0) == nothing
    assert clock_loss.mfu(1e12, 1.0, 1, H100, None)["clock"] is None


def test_energy_is_counted_over_twenty_periods_or_else_integrated() -> None:
    """Counter and power disagree on purpose, which shows which one was used."""
    times = np.arange(0, 4, 0.1)
    held = make(0, "nvml", epoch_ns=ns(*times), energy_j=300 * times, power_w=np.full(40, 250.0))
    start, soon, end = ns(0, 1, 3).tolist()
    assert energy_j(held, start, end) == pytest.approx(900.0)
    assert energy_j(held, start, soon) == pytest.approx(250.0)
    counter_only = make(0, "nvml", epoch_ns=ns(*times), energy_j=300 * times)
    assert energy_j(counter_only, start, soon) == pytest.approx(300.0)
    assert energy_j(halving(), start, end) is None


def test_an_op_has_a_clock_of_its_own_from_three_samples_on() -> None:
    """Shorter ops get a clock from all their executions together: 1 ms every 20 ms, over many steps."""
    starts = ns(*(index * 0.02 - 0.0005 for index in range(1, 100)))
    each = halving().num_in(starts, starts + 1_000_000)
    assert clock_loss.has_enough_samples(each).sum() == 0
    assert clock_loss.has_enough_samples(int(each.sum())).item()
    assert each.sum() == 99


def test_tracks_hold_what_is_looked_at_less_often() -> None:
    """Tracks have at most 2000 points, None where unknown, and reasons by name."""
    times = np.arange(0, 100, 0.02)
    power = np.full(len(times), np.nan)
    power[::5] = 300.0
    held = make(
        1, "nvml", epoch_ns=ns(*times), sm_mhz=np.full(len(times), 900.0), power_w=power, reasons=times > 50
    )
    (track,) = clock_loss.sample_tracks({1: held}, *ns(0, 100).tolist())
    assert (track.device, track.source) == (1, "nvml")
    assert 1000 < len(track.time_s) <= 2000
    assert set(track.power_w) == {300.0}
    assert set(track.temperature_c) == {None}
    assert (track.reasons[0], track.reasons[-1]) == ("", "idle")
    assert track.time_s[1] == pytest.approx(0.06)
