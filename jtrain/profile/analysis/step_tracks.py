"""Data classes of a replayed step: what each device ran when, its critical path, its length without a cause."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Lane:
    """Executions of ops of one kind on one device, in order of their start; none overlaps another.

    kind: "computing" or "communication".
    ops: indices into `LaneTrack.names`.
    start_us, duration_us: microseconds from the step's start.
    """

    device: int
    kind: str
    ops: list[int]
    start_us: list[float]
    duration_us: list[float]


@dataclasses.dataclass(frozen=True)
class LaneTrack:
    """Lanes of every device over one step.

    duration_s: of the step.
    names, groups: of each op; the group is its phase, or "communication".
    num_left_out: executions that are in no lane: the shortest ones of a step that has too many.
    """

    step: int
    duration_s: float
    names: list[str]
    groups: list[str]
    lanes: list[Lane]
    num_left_out: int


@dataclasses.dataclass(frozen=True)
class PathRow:
    """Seconds of the critical path in one layer and phase, one kind of collective, or one kind of wait."""

    name: str
    kind: Literal["computing", "communication", "wait"]
    seconds: float


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Length of the step without one cause of lost time, replayed (`replay.py`)."""

    cause: str
    without_s: float


@dataclasses.dataclass(frozen=True)
class CriticalPath:
    """The chain of ops and waits that a step was as long as, in the mean of the steps of a window.

    rows: add up to duration_s, the mean step; largest first.
    causes: largest gain first; those without a gain are left out.
    """

    num_steps: int
    duration_s: float
    rows: list[PathRow]
    causes: list[WhatIf]
