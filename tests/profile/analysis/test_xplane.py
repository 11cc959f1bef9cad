"""Traces of a CPU, a GPU and a TPU give the same steps and ops, at times since the epoch."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from jtrain.profile.analysis import xplane
from jtrain.profile.analysis.records import HostSpan, OpEvent, StepSpan, Trace
from tests.profile.traced import MODULE, STEPS, WAIT_S, traced

BEGAN_NS = 1_795_284_144_288_810_791
US = 1_000_000
"""Picoseconds per microsecond: durations and offsets in a file are in picoseconds."""

ENVIRONMENT = f"""planes {{ name: "Task Environment"
  stats {{ metadata_id: 1 uint64_value: {BEGAN_NS} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "profile_start_time" }} }}
}}"""

HOST = f"""planes {{ name: "/host:CPU"
  event_metadata {{ key: 1 value {{ id: 1 name: "jtrain:step" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "jtrain:data_wait" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "step_num" }} }}
  stat_metadata {{ key: 2 value {{ id: 2 name: "monotonic_ns" }} }}
  lines {{ id: 1 name: "python"
    events {{ metadata_id: 1 offset_ps: {10 * US} duration_ps: {100 * US}
      stats {{ metadata_id: 1 int64_value: 7 }} stats {{ metadata_id: 2 int64_value: 5000 }} }}
    events {{ metadata_id: 2 offset_ps: {110 * US} duration_ps: {20 * US} }}
    events {{ metadata_id: 1 offset_ps: {130 * US} duration_ps: {100 * US}
      stats {{ metadata_id: 1 int64_value: 8 }} stats {{ metadata_id: 2 int64_value: 125000 }} }}
  }}
}}"""

STEPS_OF_HOST = (
    StepSpan(7, BEGAN_NS + 10_000, BEGAN_NS + 110_000),
    StepSpan(8, BEGAN_NS + 110_000, BEGAN_NS + 230_000),
)


def line(name: str, *events: tuple[int, int, int, str]) -> str:
    """(metadata id, start in us, duration in us, stats)."""
    inside = " ".join(
        f"events {{ metadata_id: {i} offset_ps: {start * US} duration_ps: {length * US} {stats} }}"
        for i, start, length, stats in events
    )
    return f'lines {{ name: "{name}" {inside} }}'


def plane(name: str, events: dict[int, str], stats: dict[int, str], *lines: str) -> str:
    metadata = [f'event_metadata {{ key: {i} value {{ id: {i} name: "{of}" }} }}' for i, of in events.items()]
    metadata += [f'stat_metadata {{ key: {i} value {{ id: {i} name: "{of}" }} }}' for i, of in stats.items()]
    return f'planes {{ name: "{name}" {" ".join([*metadata, *lines])} }}'


def write(folder: Path, *planes: str, name: str = "host.xplane.pb") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return folder


def read(folder: Path, platform: str = "gpu") -> Trace:
    return xplane.read(folder, module=MODULE, platform=platform, device_kind="NVIDIA H200")


def op(device: int, step: int, name: str, start_us: int, length_us: int) -> OpEvent:
    return OpEvent(device, step, name, BEGAN_NS + start_us * 1000, length_us * 1000)


def of_op(name: str, module: str = MODULE) -> str:
    return f'stats {{ metadata_id: 1 str_value: "{name}" }} stats {{ metadata_id: 2 str_value: "{module}" }}'


def test_a_gpu_says_its_ops_on_streams_and_derived_lines_are_not_counted_again(tmp_path: Path) -> None:
    """Two devices, with a kernel of another program, one of no program, and ops outside of all steps."""
    kernels = {1: "loop_fusion_3", 2: "ncclDevKernel_AllGather", 3: "MemcpyH2D", 4: "convert"}
    stats = {1: "hlo_op", 2: "hlo_module"}
    first = line(
        "Stream #13(Compute)",
        (1, 20, 30, of_op("fusion.3")),
        (3, 60, 5, ""),
        (4, 140, 1, of_op("convert.1", "jit_convert")),
        (1, 300, 9, of_op("fusion.3")),
    )
    second = line("Stream #14(Compute)", (2, 30, 40, of_op("all-gather-start.1")))
    derived = line("XLA Ops", (1, 20, 30, of_op("fusion.3")))
    folder = write(
        tmp_path,
        HOST,
        plane("/device:GPU:0", kernels, stats, first, second, derived),
        plane("/device:GPU:1", kernels, stats, line("Stream #13(Compute)", (1, 25, 30, of_op("fusion.3")))),
        ENVIRONMENT,
    )
    trace = read(folder)
    assert trace.steps == STEPS_OF_HOST, "a step begins where the one before it ends"
    assert trace.num_devices == 2
    assert sorted(trace.events, key=lambda event: (event.device, event.start_ns)) == [
        op(0, 7, "fusion.3", 20, 30),
        op(0, 7, "all-gather-start.1", 30, 40),
        op(0, 7, "MemcpyH2D", 60, 5),
        op(0, 8, "jit_convert/convert.1", 140, 1),
        op(1, 7, "fusion.3", 25, 30),
    ]
    assert trace.host == (HostSpan("data_wait", BEGAN_NS + 110_000, BEGAN_NS + 130_000),)
    assert trace.anchors == ((BEGAN_NS + 10_000, 5000), (BEGAN_NS + 130_000, 125_000))


def test_a_tpu_says_its_ops_by_name_and_what_is_in_flight_on_a_line_of_its_own(tmp_path: Path) -> None:
    """An asynchronous op lasts from start to done; its module is read from the line of modules."""
    names = {
        1: "%fusion.3 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop",
        2: "all-gather-start.1",
        3: "all-gather-done.1",
        4: f"{MODULE}(8123)",
        5: "jit_other(77)",
        6: "7",
    }
    core = line("XLA Ops", (2, 20, 1, ""), (1, 21, 30, ""), (3, 51, 9, ""), (1, 140, 5, ""))
    flights = line("Async XLA Ops", (2, 20, 40, ""))
    modules = line("XLA Modules", (4, 15, 80, ""), (5, 139, 50, ""))
    steps = line("Steps", (6, 15, 80, ""))
    folder = write(
        tmp_path, HOST, plane("/device:TPU:0", names, {}, steps, modules, core, flights), ENVIRONMENT
    )
    assert sorted(read(folder, "tpu").events, key=lambda event: (event.start_ns, event.name)) == [
        op(0, 7, "all-gather-start.1", 20, 40),
        op(0, 7, "fusion.3", 21, 30),
        op(0, 7, "all-gather-done.1", 51, 9),
        op(0, 8, "jit_other/fusion.3", 140, 5),
    ]


def test_several_processes_leave_a_file_each_and_their_devices_follow_each_other(tmp_path: Path) -> None:
    """Both processes number their only device 0."""
    gpu = plane(
        "/device:GPU:0",
        {1: "k"},
        {1: "hlo_op", 2: "hlo_module"},
        line("Stream #1", (1, 20, 3, of_op("dot.1"))),
    )
    write(tmp_path, HOST, gpu, ENVIRONMENT, name="a.xplane.pb")
    write(tmp_path / "later", HOST, gpu, ENVIRONMENT, name="b.xplane.pb")
    trace = read(tmp_path)
    assert trace.num_devices == 2
    assert [event.device for event in trace.events] == [0, 1]


def test_a_cpu_says_the_ops_of_every_emulated_device_within_its_steps() -> None:
    """A real traced run: eight devices, three steps, the waits between them, and times on the wall clock."""
    folder = traced(data=8)
    trace = xplane.read(folder, module=MODULE, platform="cpu", device_kind="cpu")
    assert [step.step for step in trace.steps] == list(STEPS)
    assert trace.num_devices == 8
    assert {(event.device, event.step) for event in trace.events} == {(d, s) for d in range(8) for s in STEPS}
    spans = {step.step: step for step in trace.steps}
    for event in trace.events:
        assert spans[event.step].start_ns <= event.start_ns
        assert event.start_ns + event.duration_ns <= spans[event.step].end_ns, "a step is waited for"
    counts = {
        (d, s): sum((e.device, e.step) == (d, s) for e in trace.events) for d in range(8) for s in STEPS
    }
    assert len(set(counts.values())) == 1, "every device runs the same program in every step"
    assert [span.name for span in trace.host] == ["data_wait"] * 2
    assert all(span.end_ns - span.start_ns >= WAIT_S * 1e9 for span in trace.host)
    (first, first_monotonic), (last, last_monotonic) = trace.anchors
    assert abs((last - first) - (last_monotonic - first_monotonic)) < 100_000_000, "one clock, in one unit"
    written = next(folder.rglob("*.xplane.pb")).stat().st_mtime_ns
    assert 0 < written - trace.steps[-1].end_ns < 120_000_000_000, "since the epoch"


@dataclasses.dataclass(frozen=True)
class Bad:
    what: str
    match: str
    data: Any


def test_each_file_that_is_no_trace_of_steps_is_refused_in_one_line(tmp_path: Path) -> None:
    """Missing folder, empty folder, truncated file, empty file, file without its last plane, file without
    steps.
    """
    good = next(traced(data=8).rglob("*.xplane.pb")).read_bytes()
    cases = [
        Bad("half", "truncated", good[: len(good) // 2]),
        Bad("nearly", "truncated", good[:-5]),
        Bad("empty", "truncated", b""),
        Bad("no_end", "truncated", ProfileData.text_proto_to_serialized_xspace(HOST)),
        Bad("no_steps", "has no steps", ProfileData.text_proto_to_serialized_xspace(ENVIRONMENT)),
    ]
    with pytest.raises(ValueError, match="is not a folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no trace"):
        read(tmp_path)
    for bad in cases:
        (tmp_path / bad.what).mkdir()
        (tmp_path / bad.what / "h.xplane.pb").write_bytes(bad.data)
        with pytest.raises(ValueError, match=bad.match) as refused:
            read(tmp_path / bad.what)
        assert "\n" not in str(refused.value)
