"""Search among layouts with pipeline stages, beside those of `search.py`.

Stages send activations where ZeRO sends weights, so they can win where the gathers of weights cross the slow
network between hosts; inside one host or slice they only add a bubble. Stages are therefore tried on machines
of several hosts, and where the fastest layout without them waits for the network.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jtrain.layout.mesh import MeshSpec
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.mesh_options import divisors, mesh_options
from jtrain.plan.search import search
from jtrain.plan.search_task import Point, SearchTask

SCHEDULES = (PipelineSpec("1f1b"), PipelineSpec("interleaved", chunks=2), PipelineSpec("zb-h1"))
"""Schedules that are tried: the least memory, a smaller bubble, and gradients of weights in place of the
bubble."""


WAITING = 0.05
"""Share of a step that the fastest layout without stages must wait for the network before stages are tried:
it is about what they can save, and a bubble costs as much."""

_MESHES = 8
"""Meshes on which all schedules are tried."""


def staged_meshes(task: SearchTask, *, chunks: int) -> Iterator[MeshSpec]:
    """Yields the (stage, replica, data, tensor) meshes of the machine with several stages.

    Each stage has whole hosts, or a whole number of stages is in each; `tensor` stays within the links.
    """
    machine = task.machine
    # Within the links gathers are cheap, and stages only add a bubble.
    if machine.count <= machine.device.linked:
        return
    for stage in divisors(machine.count)[1:]:
        # Each virtual stage needs a layer; larger divisors need more.
        if stage * chunks > task.job.model.num_layers:
            break
        yield from (
            mesh for mesh in mesh_options(task.job, stage=stage) if mesh.tensor <= machine.device.linked
        )


def search_with_stages(task: SearchTask, alone: Sequence[Point]) -> list[Point]:
    """Returns the layouts with stages that fit, the fastest first.

    The first schedule is tried on all meshes, the others on the best of them: it needs the least memory, and
    a schedule hardly changes which mesh is the best. Left out is what would be slower than the fastest layout
    without stages even if no stage waited for another.

    Args:
      alone: layouts without stages that fit, the fastest first.
    """
    if alone and _waiting_share(alone[0]) < WAITING:
        return []
    # Stages that are slower than the layout without them are not wanted.
    limit_s = alone[0].step_s if alone else math.inf
    points = _with_schedule(task, SCHEDULES[0], None, limit_s)
    # Points are sorted by time, so the first meshes are the best.
    promising = list(dict.fromkeys(point.mesh for point in points))[:_MESHES]
    for pipeline in SCHEDULES[1:]:
        points += _with_schedule(task, pipeline, promising, limit_s)
    return sorted(points, key=lambda point: (point.step_s, point.plan.total_bytes))


def _with_schedule(
    task: SearchTask, pipeline: PipelineSpec, allowed_meshes: Sequence[MeshSpec] | None, limit_s: float
) -> list[Point]:
    layout = dataclasses.replace(task.job.layout, pipeline_spec=pipeline)
    meshes = staged_meshes(task, chunks=pipeline.chunks)
    candidate_meshes = (mesh for mesh in meshes if allowed_meshes is None or mesh in allowed_meshes)
    return search(task.changed(layout=layout), candidate_meshes, limit_s=limit_s)


def _waiting_share(point: Point) -> float:
    """Share of the step in which the layout waits for the network."""
    assert point.timed is not None
    return sum(row.exposed_s for row in point.timed.network) / point.timed.step_s
