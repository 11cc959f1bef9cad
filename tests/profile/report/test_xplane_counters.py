"""Counters in a trace, as shown by the real XProf; nothing else in the trace changes."""

import json
import pickle
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks.samples import Samples, make
from jtrain.profile.report import xplane_counters
from tests.processes import program

BEGAN = 1_700_000_000_000_000_000
PEAKS = Peaks(flops=1e12, hbm_bytes_per_s=1e9, ref_mhz=1000.0, max_mhz=1000.0)
STATS = (
    "hlo_category",
    "program_id",
    "symbol_id",
    "flops",
    "bytes_accessed",
    "device_offset_ps",
    "device_duration_ps",
)


def tpu_plane(of_second: str = "", began: str = f"stats {{ metadata_id: 1 uint64_value: {BEGAN} }}") -> bytes:
    """Trace in libtpu's format: a step of two ops of 2 ms each, 1 ms after the start of the trace."""

    def event(number: int, offset_ps: int, more: str = "") -> str:
        device_time = (
            f"stats {{ metadata_id: 6 uint64_value: {offset_ps} }} stats {{ metadata_id: 7 "
            f"uint64_value: {2 * 10**9} }}"
        )
        return (
            f"events {{ metadata_id: {number} offset_ps: {offset_ps} duration_ps: {2 * 10**9} "
            f"{device_time} {more} }}"
        )

    def metadata(number: int) -> str:
        stats = " ".join(
            f"stats {{ metadata_id: {of} uint64_value: {value} }}"
            for of, value in ((2, 11), (3, 20 + number), (4, 10**9), (5, 10**6))
        )
        return f"""event_metadata {{ key: {number} value {{ id: {number} name: "%fusion.{number} = bf16[8,8] fusion(x)"
            display_name: "fusion.{number}" stats {{ metadata_id: 1 str_value: "convolution fusion" }} {stats} }} }}"""

    names = "\n".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for i, name in enumerate(STATS, 1)
    )
    return ProfileData.text_proto_to_serialized_xspace(f"""
        planes {{ id: 1 name: "/device:TPU:0"
          lines {{ id: 1 name: "Steps" timestamp_ns: 1000000 events {{ metadata_id: 3 duration_ps: {4 * 10**9} }} }}
          lines {{ id: 2 name: "XLA Ops" timestamp_ns: 1000000 {event(1, 0)} {event(2, 2 * 10**9, of_second)} }}
          {metadata(1)} {metadata(2)} event_metadata {{ key: 3 value {{ id: 3 name: "7" }} }} {names}
          stat_metadata {{ key: 8 value {{ id: 8 name: "Time Scale Multiplier" }} }} }}
        planes {{ id: 2 name: "Task Environment"
          stat_metadata {{ key: 1 value {{ id: 1 name: "profile_start_time" }} }} {began} }}""")


def slow_then_fast() -> dict[int, Samples]:
    """Samples of 750 MHz while the first op runs, then 1000 MHz, at 300 W."""
    times = BEGAN + np.arange(0, 6_000_001, 500_000)
    mhz = np.where(times < BEGAN + 3_000_000, 750.0, 1000.0)
    return {0: make(0, "scripted", epoch_ns=times, sm_mhz=mhz, power_w=np.full(len(times), 300.0))}


def tool(file: Path, name: str) -> Any:
    """Output of an XProf tool, run in a separate process, since it crashed beside jax's copy of its
    libraries.
    """
    for cache in file.parent.glob("*.pb"):
        if cache != file:
            cache.unlink()
    done = subprocess.run(program(__file__, "run_xprof", file, name), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


def test_xprof_weighs_ops_by_the_multipliers_that_we_write(tmp_path: Path) -> None:
    """(0.75 * 2 ms + 1.0 * 2 ms) / 4 ms = 0.875; without our multipliers it is 1."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(tpu_plane())
    assert tool(file, "op_profile")["aggDvfsTimeScaleMultiplier"] == 1
    xplane_counters.annotate(file, slow_then_fast(), PEAKS, {})
    assert tool(file, "op_profile")["aggDvfsTimeScaleMultiplier"] == 0.875


def test_an_op_that_the_clock_does_not_pace_keeps_its_time(tmp_path: Path) -> None:
    """With b = 0.5 for the slow op: (0.875 * 2 ms + 2 ms) / 4 ms."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(tpu_plane())
    xplane_counters.annotate(file, slow_then_fast(), PEAKS, {"fusion.1": 0.5})
    assert tool(file, "op_profile")["aggDvfsTimeScaleMultiplier"] == 0.9375


def test_what_the_chip_measured_itself_is_kept(tmp_path: Path) -> None:
    """The second op has a multiplier of 0.5 from libtpu: (0.75 + 0.5) / 2."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(tpu_plane(of_second="stats { metadata_id: 8 double_value: 0.5 }"))
    xplane_counters.annotate(file, slow_then_fast(), PEAKS, {})
    assert tool(file, "op_profile")["aggDvfsTimeScaleMultiplier"] == 0.625


def test_xprofs_viewer_draws_clock_and_power_as_counters(tmp_path: Path) -> None:
    """Every sample is drawn at its time in microseconds; ops have their joules."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(tpu_plane())
    xplane_counters.annotate(file, slow_then_fast(), PEAKS, {})
    drawn = {
        event["name"]: event["entries"]
        for event in tool(file, "trace_viewer@")["traceEvents"]
        if event.get("ph") == "C"
    }
    assert set(drawn) == {"core clock (MHz)", "power (W)"}
    assert drawn["core clock (MHz)"] == [[500 * i, 750 if i < 6 else 1000] for i in range(13)]
    joules = [stats["vdd_energy_j"] for _, _, _, stats in events(file, "/device:TPU:0", "XLA Ops")]
    assert joules == pytest.approx([0.6, 0.6])


def everything(file: Path) -> list[Any]:
    """All events of a trace with their planes and lines, read in a separate process."""
    command = program(__file__, "pickle_events", file)
    return pickle.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def events(file: Path, plane: str, line: str) -> list[tuple[str, float, float, dict[Any, Any]]]:
    """Events of one line."""
    return [tuple(rest) for of, on, *rest in everything(file) if (of, on) == (plane, line)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_a_real_trace_keeps_every_event(tmp_path: Path) -> None:
    """The CPU backend has no plane per device: the counters get a new one, the rest does not change."""
    work = jax.jit(lambda x: x @ x)
    with jax.profiler.trace(str(tmp_path)):
        work(jnp.ones((64, 64))).block_until_ready()
    (file,) = tmp_path.rglob("*.xplane.pb")

    before = everything(file)
    assert len(before) > 10
    profile = ProfileData.from_file(str(file))
    began = dict(profile.find_plane_with_name("Task Environment").stats)["profile_start_time"]
    times = int(began) + np.arange(5) * 1000
    clocks = {0: make(0, "cpu", epoch_ns=times, sm_mhz=np.full(5, 2000.0))}
    xplane_counters.annotate(file, clocks, PEAKS, {})
    assert [event for event in everything(file) if not event[0].startswith("/device:CUSTOM:clocks")] == before
    counters = events(file, "/device:CUSTOM:clocks:0", "_counters_")
    assert [(start, stats["counter_value"]) for _, start, _, stats in counters] == [
        (i * 1000, 2000.0) for i in range(5)
    ]
    once = file.read_bytes()
    xplane_counters.annotate(file, clocks, PEAKS, {})
    assert file.read_bytes() == once, "a second time changes nothing"


def test_a_truncated_trace_is_refused(tmp_path: Path) -> None:
    """Refuses a trace cut in two, and one without its last plane, which has the start time."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(tpu_plane()[:300])
    with pytest.raises(ValueError, match="truncated"):
        xplane_counters.annotate(file, slow_then_fast(), PEAKS, {})
    file.write_bytes(tpu_plane(began=""))
    with pytest.raises(ValueError, match="profile_start_time"):
        xplane_counters.annotate(file, slow_then_fast(), PEAKS, {})
