"""Samples as functions of time: exact to the nanosecond, and aligned with a real trace to a millisecond."""

import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.profile.clocks import samples
from jtrain.profile.clocks.samples import MIN_HOLD_NS, Anchor, Samples, make

EPOCH = 1_700_000_000_000_000_001  # odd: a float would round it
MS = 1_000_000


def at(*ms: float) -> np.ndarray:
    """Times in nanoseconds, given relative to EPOCH."""
    return np.array([EPOCH + round(one * MS) for one in ms], np.int64)


def clock(ms: list[float], mhz: list[float]) -> Samples:
    return make(0, "scripted", epoch_ns=at(*ms), monotonic_ns=at(*ms) - EPOCH, sm_mhz=mhz)


def test_a_mean_weighs_each_clock_by_the_time_it_held() -> None:
    """20 ms at 1000 MHz and 20 ms at 500 MHz, with spans inside, across and of length 0."""
    held = clock([0, 20, 40], [1000.0, 500.0, 800.0])
    start, end = at(0, 0, 10, 15, 20, 39), at(20, 40, 30, 25, 20, 41)
    assert held.mean_mhz(start, end).tolist() == [1000.0, 750.0, 750.0, 750.0, 500.0, 650.0]


def test_what_no_sample_covers_is_unknown() -> None:
    """Unknown before the first sample, long after the last, and in a gap that a stuck driver left."""
    held = clock([0, 20, 5000, 5020], [1000.0, 1000.0, 1000.0, 1000.0])
    assert np.isnan(held.mean_mhz(at(-1, 5020, 10), at(5, 5021 + MIN_HOLD_NS / MS, 2000))).all()
    assert held.mean_mhz(at(5020, 20), at(5020 + MIN_HOLD_NS / MS, 100)).tolist() == [1000.0, 1000.0]
    assert np.isnan(make(0, "none", epoch_ns=[]).mean_mhz(at(0), at(1))).all()


def test_a_sample_that_was_refused_leaves_the_one_before_it_holding() -> None:
    """Power is read only every fifth time."""
    held = clock([0, 20, 40], [1000.0, np.nan, 500.0])
    assert held.mean_mhz(at(0), at(40)).tolist() == [1000.0]
    assert held.num_in(at(0, 30), at(41, 40)).tolist() == [2, 0], "only samples that know the clock count"


def test_clocks_of_zero_are_unknown_with_one_note() -> None:
    """Otherwise a sleeping device, or a driver that reports 0, would look infinitely slow."""
    held = clock([0, 20, 40], [0.0, 500.0, 0.0])
    assert np.isnan(held.sm_mhz).tolist() == [True, False, True]
    assert held.notes == (
        "clocks: device 0: 2 of 3 samples give 0 MHz for the compute clock: treated as unknown.",
    )


def test_a_lone_hardware_slowdown_is_a_flash() -> None:
    """Hardware slowdown needs two samples in a row; other reasons stay."""
    held = make(0, "nvml", epoch_ns=at(0, 20, 40, 60, 80), reasons=[8, 0, 8 | 4, 8, -1])
    assert held.reasons.tolist() == [0, 0, 12, 8, -1]


def test_counters_grow_linearly_between_samples() -> None:
    """Counters are unknown where nothing was counted."""
    held = make(
        0, "nvml", epoch_ns=at(0, 100, 200), power_violation_ns=[5, 5, 50_000_005], energy_j=[1.0, 31.0, 61.0]
    )
    start, middle, end = at(100, 150, 200).tolist()
    assert held.increase("power_violation_ns", start, middle) == 25_000_000
    assert held.increase("energy_j", start, end) == pytest.approx(30.0)
    assert np.isnan(held.increase("thermal_violation_ns", start, end))
    assert np.isnan(held.increase("energy_j", start - 10 * MIN_HOLD_NS, end))


@hypothesis.given(
    offset=st.integers(-(2**40), 2**40),
    drift=st.integers(-1000, 1000),
    moments=st.lists(st.integers(0, 10**11)),
)
def test_two_anchors_undo_any_offset_and_drift(offset: int, drift: int, moments: list[int]) -> None:
    """With a trace clock that is shifted and `drift` ppm fast, every sample is within 1 ns, in integers."""

    def trace(monotonic_ns: int) -> int:
        return EPOCH + offset + monotonic_ns + monotonic_ns * drift // 10**6

    held = make(0, "scripted", epoch_ns=np.zeros(len(moments)), monotonic_ns=np.array(moments, np.int64))
    aligned = held.aligned(Anchor(trace(0), 0), Anchor(trace(10**11), 10**11))
    assert all(
        abs(found - trace(moment)) <= 1
        for found, moment in zip(aligned.epoch_ns.tolist(), moments, strict=True)
    )


def test_one_anchor_is_refused() -> None:
    """One anchor gives no rate of the clock."""
    with pytest.raises(ValueError, match="at least two steps"):
        clock([0], [1.0]).aligned(Anchor(1, 5), Anchor(9, 5))


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_samples_lie_beside_a_real_trace_to_a_millisecond(tmp_path: Path) -> None:
    """Samples taken inside known annotations, with a wall clock 3 s off, are aligned with these
    annotations.
    """
    work = jax.jit(lambda x: x @ x)
    x = jnp.ones((256, 256))
    work(x).block_until_ready()
    taken = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        for step in range(20):
            with jax.profiler.StepTraceAnnotation("step", step_num=step, monotonic_ns=time.monotonic_ns()):
                work(x).block_until_ready()
                before = time.monotonic_ns()
                with jax.profiler.TraceAnnotation("mark"):
                    taken.append((before + time.monotonic_ns()) // 2)
                time.sleep(0.005)
    (file,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    began = int(dict(profile.find_plane_with_name("Task Environment").stats)["profile_start_time"])
    marks, anchors = [], []
    for line in profile.find_plane_with_name("/host:CPU").lines:
        for event in line.events:
            if event.name == "mark":
                marks.append(began + round(event.start_ns))
            elif event.name == "step":
                anchors.append(Anchor(began + round(event.start_ns), int(dict(event.stats)["monotonic_ns"])))
    assert len(marks) == len(anchors) == 20

    off = 3_000_000_000
    held = make(0, "scripted", epoch_ns=np.array(marks) - off, monotonic_ns=np.array(taken, np.int64))
    errors = [np.abs(one.epoch_ns - np.array(marks)) for one in (held, held.aligned(anchors[0], anchors[-1]))]
    assert errors[0].min() >= off, "unaligned they are far off, or the next line shows nothing"
    # Of twenty marks a busy machine may stop the process inside of some: the median is the alignment's own.
    assert np.median(errors[1]) < 1 * MS


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """All series and notes come back, and integers to the nanosecond."""
    held = make(3, "nvml", ("clocks: a note.",), epoch_ns=at(0, 20), sm_mhz=[1.5, np.nan], reasons=[4, -1])
    samples.write(tmp_path / "samples-3.npz", held)
    (found,) = samples.load(tmp_path).values()
    assert (found.device, found.source, found.notes) == (3, "nvml", ("clocks: a note.",))
    for name in samples.SERIES:
        np.testing.assert_array_equal(getattr(found, name), getattr(held, name))


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    samples.write(tmp_path / "samples-0.npz", clock([0, 20], [1.0, 2.0]))
    whole = (tmp_path / "samples-0.npz").read_bytes()
    (tmp_path / "samples-0.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"samples-0\.npz does not hold clock samples"):
        samples.load(tmp_path)
    assert samples.load(tmp_path / "nowhere") == {}
