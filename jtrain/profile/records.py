"""What a profile is made of: what the trace, the program and the sampler say, as plain values.

Times are integers of nanoseconds since the epoch until they are reported, and seconds (`_s`) from there on: a float
holds the time since the epoch to 256 ns only.
"""

import dataclasses
from typing import Any, Literal

type Phase = Literal["forward", "backward", "optimizer", "data", "checkpoint", "other"]

type Kind = Literal["compute", "communication", "copy", "control"]
"""`control` holds others (a loop, a conditional, a call) and has no time of its own."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one execution of an op puts on the network, as one device sees it: bytes that it sends, on a ring."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction of a compiled program.

    layer: "embed", "layers/attention", "layers/mlp", "final_norm", "loss", "optimizer" ...; "" where nothing says it.
    scope: the path of named scopes and functions that it comes from, as the compiler keeps it.
    flops, bytes: of one execution on one device; 0 where unknown.
    """

    name: str
    opcode: str
    kind: Kind
    phase: Phase
    layer: str
    scope: str
    flops: int
    bytes: int
    collective: Collective | None


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
    """One step as the host saw it: from the end of the one before (the first: from its beginning) to its own end."""

    step: int
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class HostSpan:
    """What the host did: "data_wait", "checkpoint", "evaluate" ... (an annotation named `jtrain:<name>`)."""

    name: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """All of a trace that a breakdown reads.

    anchors: of the first and the last step, its beginning on the trace's clock and on the machine's monotonic one, ns;
      empty where the trace does not say.
    """

    platform: str
    device_kind: str
    num_devices: int
    steps: tuple[StepSpan, ...]
    events: tuple[OpEvent, ...]
    host: tuple[HostSpan, ...]
    anchors: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Of one device, in the dtype that a run computes in, at the clock `ref_mhz`; None where unknown."""

    flops: float | None
    hbm_bytes_per_s: float | None
    ref_mhz: float | None
    max_mhz: float | None


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """Where one step went.

    parts: seconds that sum to duration_s, mean over devices: theoretical, instruction, utilisation, overlap, clocks,
      exposed_communication, data_wait, host, idle; theoretical and instruction are None where the peak is unknown, and
      inside utilisation then.
    chain: theoretical_s * instruction * utilisation * overlap * frequency = compute_s, in which a device computes: see
      `jtrain.profile.chain`.
    clocks_lost_s: seconds by cause: power, thermal, other.
    mfu: model FLOPs utilisation against the peak of the specification (spec), at the measured clock (clock), at the
      reference clock (reference).
    devices: of each: device, busy_s, communication_s, exposed_communication_s.
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
    """All executions of one op in the window, on all devices. A moment that it shares with others is divided.

    theoretical_s: at the peak, 0 of what is computed again; None where the peak is unknown, and of communication.
    lost: seconds beyond those, by link of the chain (instruction, utilisation, overlap, clocks), and of communication
      those that no compute hides (exposed).
    mean_mhz, multiplier: its clock, and the share of its time that it would have taken at the reference clock.
    """

    name: str
    opcode: str
    kind: Kind
    phase: Phase
    layer: str
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

    exposed_s: of total_s, what no compute hides.
    bytes_per_s: achieved, wire_bytes over the time in which they were in flight.
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
    """What one device's sampler saw, at most 2000 points; time_s counts from the window's start; None is unknown."""

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
    """Bytes of one device: of a class of arrays as planned, or in use as its allocator says."""

    name: str
    bytes: int
    source: Literal["plan", "allocator"]


@dataclasses.dataclass(frozen=True)
class LiveTrack:
    """Temporaries of one device alive while each op of a step runs, by what made them: see `jtrain.profile.live`.

    time_s: of each point, from the step's start; bytes: class -> as many values.
    """

    step: int
    time_s: list[float]
    bytes: dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Everything that a report shows; breakdown.json is its `dataclasses.asdict`.

    num_devices, all_devices: of the process that this is of, and of all processes.
    coverage: share of device time whose op has a layer and a phase.
    settings: fields of the config that advice is about, `layout.remat` and others, with their values.
    goodput: seconds of the whole run by category until the window opened, all attempts together, as goodput.json.
    notes: what could not be known, and why.
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
    coverage: float
    settings: dict[str, str | int]
    goodput: dict[str, float]
    advice: list[str]
    notes: list[str]
    version: int = 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self)
