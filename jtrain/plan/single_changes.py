"""Layouts that differ from another one in a single setting, and the search that ends where none of them is
faster.

A change is one that a user would make with one or two `--set`: another remat, ZeRO stage or number of
microbatches, overlap over `tensor`, attention over `context`, a schedule, or a factor of the devices moved
from one axis to another. The layout's numbers stay what they are: precision, optimizer, batch and kernels are
the config's.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import AXES, MeshSpec
from jtrain.optim import check_layout
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.mesh_options import divisors
from jtrain.plan.search_task import Point, SearchTask, estimate_job, fits, with_step_time
from jtrain.step.layout_choices import changes_of_one, check_layers

FASTER = 0.01
"""Share of a step by which a change must be faster to be worth a line, or a step of the search."""

_MAX_CHUNKS = 4
_MAX_STEPS = 20
"""Changes after which the search ends for certain."""


def faster_changes(task: SearchTask, point: Point) -> list[Point]:
    """Layouts that fit, differ from `point` in one setting and are faster by more than `FASTER`, the fastest
    first.
    """
    limit_s = point.step_s * (1 - FASTER)
    changed = (_estimated(task, point, *change) for change in _changes(task, point))
    timed = [with_step_time(task, one) for one in changed if one is not None and fits(task, one.plan)]
    # Memory decides between equals.
    return sorted(
        (one for one in timed if one.step_s < limit_s), key=lambda one: (one.step_s, one.plan.total_bytes)
    )


def refine(task: SearchTask, point: Point) -> Point:
    """The layout that single changes lead to from `point`, at most `_MAX_STEPS` of them: none of its own is
    faster by more than `FASTER`.
    """
    for _ in range(_MAX_STEPS):
        if not (faster := faster_changes(task, point)):
            break
        point = faster[0]
    return point


def _estimated(
    task: SearchTask, point: Point, spec: LayoutSpec, mesh: MeshSpec, pipeline: PipelineSpec
) -> Point | None:
    """The point with another layout, untimed; None where the model, batch or schedule cannot have it."""
    try:
        layout = point.job.layout.relaid(spec, mesh, pipeline)
        job = dataclasses.replace(point.job, layout=layout)
        check_layers(job.model, spec, mesh)
        check_layout(job.optimizer, layout)
        return estimate_job(task, job, timed=False)
    except ValueError:
        return None


def _changes(task: SearchTask, point: Point) -> Iterator[tuple[LayoutSpec, MeshSpec, PipelineSpec]]:
    spec, mesh, pipeline = point.spec, point.mesh, point.job.layout.pipeline_spec
    # Of a device, over all microbatches.
    rows = point.job.global_batch // mesh.batch_shards
    for changed_spec in changes_of_one(spec, mesh, rows=rows, asked=task.config_spec):
        yield changed_spec, mesh, pipeline
    if mesh.stage > 1:
        for changed_pipeline in _pipeline_changes(pipeline):
            yield spec, mesh, changed_pipeline
    for changed_mesh in _mesh_changes(mesh):
        yield spec, changed_mesh, pipeline


def _pipeline_changes(pipeline: PipelineSpec) -> Iterator[PipelineSpec]:
    for name, gather in itertools.product(PUBLISHED_SCHEDULES, ("tick", "step")):
        for chunks in range(2, _MAX_CHUNKS + 1) if name == "interleaved" else (1,):
            yield PipelineSpec(name, chunks, gather)


def _mesh_changes(mesh: MeshSpec) -> Iterator[MeshSpec]:
    """Meshes with a factor of the devices of one axis on another."""
    for source, target in itertools.permutations(AXES, 2):
        size = mesh.shape[source]
        for factor in divisors(size)[1:]:
            yield dataclasses.replace(mesh, **{source: size // factor, target: mesh.shape[target] * factor})
