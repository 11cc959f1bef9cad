"""Data classes of a profile: trace, ops of the compiled program, sampled clocks, breakdown.

Times are integer nanoseconds since the epoch until they are reported, and seconds (`_s`) from there on: a
float64 resolves the time since the epoch to 256 ns only.
"""

import dataclasses
from typing import Any, Literal

from jtrain.hlo.scopes import Phase
from jtrain.profile.analysis.step_tracks import CriticalPath, LaneTrack

type OpKind = Literal["compute", "communication", "copy", "control"]
"""Kind of an op; a `control` op (loop, conditional, call) contains other ops and has no time of its own."""


@dataclasses.dataclass(frozen=True)
class OpTraffic:
    """Network traffic of one execution of an op, as one device sees it.

    wire_bytes: bytes that the device sends, assuming a ring algorithm.
    groups: devices that communicate with each other, as indices into the mesh.
    """

    kind: str
    axes: tuple[str, ...]
    wire_bytes: int
    groups: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class HloOp:
    """One instruction of a compiled program.

    layer: "embed", "layers/attention", "layers/mlp", "final_norm", "loss", "optimizer" ...; "" if unknown.
    scope: path of named scopes and functions that the instruction was traced from, as the compiler keeps it.
    flops, bytes: per execution on one device; 0 if unknown.
    shape: element types and dimensions of its result; source: file and line that it was traced from; "" if
      unknown.
    is_async: True for the start of a collective or copy that later ops may run beside.
    """

    name: str
    opcode: str
    kind: OpKind
    phase: Phase
    layer: str
    scope: str
    flops: int
    bytes: int
    collective: OpTraffic | None
    shape: str = ""
    source: str = ""
    is_async: bool = False


@dataclasses.dataclass(frozen=True)
class OpEvent:
    """One execution of an op on one device."""

    device: int
    step: int
    name: str
    start_ns: int
    duration_ns: int


@dataclasses.dataclass(frozen=True)
class StepSpan:
    """One step as the host saw it: from the end of the step before (the first: its own start) to its end."""

    step: int
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class HostSpan:
    """Host activity such as "data_wait", "checkpoint" or "evaluate": an annotation `jtrain:<name>`."""

    name: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """Part of a profiler trace that a breakdown reads.

    anchors: start of the first and of the last step, each as (trace clock, monotonic clock) in ns; empty if
      the trace does not record them.
    """

    platform: str
    device_kind: str
    num_devices: int
    steps: tuple[StepSpan, ...]
    events: tuple[OpEvent, ...]
    host: tuple[HostSpan, ...]
    # Two moments on both clocks are enough for an offset and a drift: see `Samples.aligned`.
    anchors: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peak speeds of one device at the clock `ref_mhz`, in the run's compute dtype; None where unknown.

    measured: when this machine measured `flops`, as text; None where its maker publishes it.
    """

    flops: float | None
    hbm_bytes_per_s: float | None
    ref_mhz: float | None
    max_mhz: float | None
    measured: str | None = None


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """Time of one step, divided into parts.

    parts: seconds that sum to duration_s, averaged over devices: theoretical, instruction, utilisation,
      overlap, clocks, exposed_communication, data_wait, host, idle. If the device's peak is unknown,
      theoretical and instruction are None and their time is part of utilisation.
    chain: factors of theoretical_s * instruction * utilisation * overlap * frequency = compute_s, the seconds
      in which a device computes: see `jtrain.profile.analysis.chopper`.
    clocks_lost_s: seconds lost to low clocks by cause: power, thermal, other.
    mfu: model FLOPs utilisation against the specified peak (spec), the peak at the measured clock (clock) and
      the peak at the highest clock (reference).
    devices: one dict per device: device, busy_s, communication_s, exposed_communication_s.
    """

    step: int
    duration_s: float
    parts: dict[str, float | None]
    chain: dict[str, float | None]
    clocks_lost_s: dict[str, float]
    energy_j: float | None
    mfu: dict[str, float | None]
    devices: list[dict[str, int | float]]


@dataclasses.dataclass(frozen=True)
class OpRow:
    """All executions of one op in the window, on all devices; time of several ops at once is divided.

    theoretical_s: time at the device's peak; 0 for recomputed ops, None for communication or if the peak is
      unknown.
    lost: seconds beyond theoretical_s by factor (instruction, utilisation, overlap, clocks); for
      communication the seconds that no compute hides (exposed).
    mean_mhz: mean clock while the op ran.
    multiplier: time that the op would have taken at the reference clock, as a share of its measured time.
    flops, bytes, shape, source: as of `HloOp`.
    kernel: op of the kernels' registry that it is of, and the implementation; "" if of none.
    """

    name: str
    opcode: str
    kind: OpKind
    phase: Phase
    layer: str
    flops: int
    bytes: int
    shape: str
    source: str
    kernel: str
    count: int
    total_s: float
    theoretical_s: float | None
    lost_s: float
    lost: dict[str, float]
    mean_mhz: float | None
    multiplier: float | None


@dataclasses.dataclass(frozen=True)
class CommRow:
    """All collectives of one kind over the same axes, per step and device.

    exposed_s: part of total_s that no compute hides.
    bytes_per_s: achieved bandwidth: wire_bytes over the time in which they were in flight.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    wire_bytes: int
    planned_bytes: int | None
    total_s: float
    exposed_s: float
    bytes_per_s: float | None


@dataclasses.dataclass(frozen=True)
class ClockTrack:
    """Sampled clocks, power and temperature of one device, at most 2000 points; None where unknown.

    time_s: seconds from the window's start.
    """

    device: int
    source: str
    time_s: list[float]
    sm_mhz: list[float | None]
    mem_mhz: list[float | None]
    power_w: list[float | None]
    temperature_c: list[float | None]
    reasons: list[str]


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes on one device: planned size of a class of arrays, or bytes in use by the allocator."""

    name: str
    bytes: int
    source: Literal["plan", "allocator"]


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A temporary array: the op that made it, and where that is in the model and in the source code."""

    op: str
    layer: str
    phase: Phase
    shape: str
    source: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class LiveTrack:
    """Bytes of temporaries alive on one device while each op of a step runs (`memory_timeline.py`).

    time_s: seconds of each point from the step's start.
    bytes: one value per point for each class of maker (forward pass, backward pass ...).
    largest: the largest temporaries that are alive at the peak.
    """

    step: int
    time_s: list[float]
    bytes: dict[str, list[int]]
    largest: list[LiveBuffer]


@dataclasses.dataclass(frozen=True)
class PipelineShares:
    """Shares of the workers' time in the ticks of one step.

    duration_s: from the begin of the first tick to the end of the last.
    instructions: share in F, I, W and B.
    ends: share in which they compute embedding and loss.
    bubble: the rest: a worker waits for others, sends, or keeps its slots.
    """

    step: int
    duration_s: float
    instructions: float
    ends: float
    bubble: float


@dataclasses.dataclass(frozen=True)
class PipelineTrack:
    """Instructions of the workers of this process, as they ran and by the schedule.

    schedule: its name; its other fields are those of `PipelineSchedule`.
    packing: packing of the ticks.
    workers: numbers of the workers, one for each row of `measured` and `planned`.
    step: the step of `measured`, the median of the window by the time of its ticks.
    measured: (operation such as `0F1`, begin, end) in seconds from the first tick.
    planned: the same under the lockstep clock, in units of a forward pass.
    planned_bubble: bubble of that clock, over all workers.
    steps: shares of every step of the window, over the workers of this process.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    placement: Literal["round_robin", "v"]
    packing: str
    workers: list[int]
    step: int
    measured: list[list[tuple[str, float, float]]]
    planned: list[list[tuple[str, float, float]]]
    planned_bubble: float
    steps: list[PipelineShares]


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Everything that a report shows; breakdown.json is its `dataclasses.asdict`.

    num_devices, all_devices: devices of this process, and of all processes.
    coverage: share of device time whose op has a known layer and phase.
    peaks: those of a device that times are compared with.
    settings: config fields that advice refers to (`layout.remat` and others), with their values.
    goodput: seconds of the whole run until the window opened, over all attempts, by category as in
      goodput.json.
    pipeline: instructions of a pipelined step's workers; None without stages, or if the trace does not show
      them.
    host: seconds per step of each host activity that the trace names, such as `callback Goodput` or `checkpoint`,
      whether devices wait for it or not.
    lanes, path: what each device ran in the median step, and the critical path of the mean one; None if no op
      ran.
    notes: facts that are unknown, with the reason.
    """

    platform: str
    device_kind: str
    num_devices: int
    all_devices: int
    process: int
    num_processes: int
    tokens_per_step: int
    steps: list[StepBreakdown]
    ops: list[OpRow]
    communication: list[CommRow]
    clocks: list[ClockTrack]
    memory: list[MemoryRow]
    live: LiveTrack | None
    pipeline: PipelineTrack | None
    host: dict[str, float]
    lanes: LaneTrack | None
    path: CriticalPath | None
    coverage: float
    peaks: Peaks
    settings: dict[str, str | int]
    goodput: dict[str, float]
    advice: list[str]
    notes: list[str]
    # Raised when a field changes its meaning; `read_breakdown` refuses all others.
    version: int = 2

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of breakdown.json."""
        return dataclasses.asdict(self)
