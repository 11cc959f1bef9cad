"""Lanes with the ops that each device ran in the median step, thinned to what a page can hold."""

import heapq
from collections.abc import Mapping

import numpy as np

from jtrain.profile.analysis.records import Trace
from jtrain.profile.analysis.step_tracks import Lane, LaneTrack
from jtrain.profile.analysis.timeline import Events, median_step

MAX_DRAWN = 20_000
"""Executions that lanes hold; each takes about 25 bytes of a page."""


def lane_track(trace: Trace, events: Events) -> LaneTrack | None:
    """Lanes of the median step, communication below the computing of its device; None if no op ran."""
    step = median_step(trace)
    all_executions = np.flatnonzero(events.step == step.step)
    if not len(all_executions):
        return None
    # The longest ones, again in order of their begin.
    durations = events.end_ns[all_executions] - events.start_ns[all_executions]
    drawn = np.sort(all_executions[np.argsort(-durations, kind="stable")[:MAX_DRAWN]])
    ops = sorted(set(events.op[drawn].tolist()))
    number_of = {op: number for number, op in enumerate(ops)}
    lanes: list[Lane] = []
    for device in range(trace.num_devices):
        for is_computing in (True, False):
            executions = drawn[(events.device[drawn] == device) & (events.computes[drawn] == is_computing)]
            kind = "computing" if is_computing else "communication"
            lanes += _lanes(device, kind, executions, events, number_of, step.start_ns)
    return LaneTrack(
        step=step.step,
        duration_s=(step.end_ns - step.start_ns) * 1e-9,
        names=[events.ops[op].name for op in ops],
        groups=[_group(events, op) for op in ops],
        lanes=lanes,
        num_left_out=len(all_executions) - len(drawn),
    )


def _group(events: Events, op: int) -> str:
    return "communication" if events.ops[op].kind == "communication" else events.ops[op].phase


def _lanes(
    device: int,
    kind: str,
    executions: np.ndarray,
    events: Events,
    number_of: Mapping[int, int],
    step_start_ns: int,
) -> list[Lane]:
    """Puts executions into as few lanes as hold them without overlap: a GPU has streams, a CPU threads."""
    lanes: list[Lane] = []
    free: list[tuple[int, int]] = []  # (end of its last execution, lane), the first to be free first
    for execution in executions.tolist():
        start_ns, end_ns = int(events.start_ns[execution]), int(events.end_ns[execution])
        if free and free[0][0] <= start_ns:
            _, number = heapq.heappop(free)
        else:
            number = len(lanes)
            lanes.append(Lane(device, kind, [], [], []))
        heapq.heappush(free, (end_ns, number))
        lane = lanes[number]
        lane.ops.append(number_of[int(events.op[execution])])
        # A tenth of a microsecond is what a trace resolves; more digits would only make the page larger.
        lane.start_us.append(round((start_ns - step_start_ns) / 1e3, 1))
        lane.duration_us.append(round((end_ns - start_ns) / 1e3, 1))
    return lanes
