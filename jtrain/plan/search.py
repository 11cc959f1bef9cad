"""Search for the layout that trains a model fastest on a machine, among the layouts that fit.

The search enumerates every mesh of (replica, data, expert, context, tensor), ZeRO stage, remat and number of
microbatches, and estimates them in closed form. A layout that does not fit is tried again with the smallest
share on the host that makes it fit. Layouts are ranked by predicted step time. More microbatches are never
faster, so of layouts that differ only in microbatches the first that fits is kept.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from jtrain.errors import UserError
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.model.layer_scan import check_scanned
from jtrain.optim import check_layout
from jtrain.plan.job import Job
from jtrain.plan.mesh_options import mesh_options, microbatch_options
from jtrain.plan.search_task import Point, SearchTask, estimate_job, evaluate, fits, with_step_time
from jtrain.step.layout_choices import (
    EVERY,
    ZeroStages,
    alternatives,
    computed_layout,
    open_shares,
    with_shares,
)

SHARES = tuple(k / 20 for k in range(1, 21))
"""Shares of offload to try; whole arrays are moved, so finer steps would seldom move others."""


def meshes(task: SearchTask) -> Iterator[MeshSpec]:
    """Yields every mesh without stages that splits the model and the batch evenly."""
    return mesh_options(task.job)


@dataclasses.dataclass(frozen=True)
class _Series:
    """Layouts of a mesh that differ only in microbatches, of which `parts` are possible, the fewest first.

    job: the job with one microbatch. No other number lays out the parameters anew, which takes as long as an
      estimate.
    """

    job: Job
    parts: tuple[int, ...]

    def at(self, task: SearchTask, index: int, *, timed: bool = True) -> Point:
        """Estimates one of them; an unknown figure of the machine is an error, not a layout that misses."""
        # Only the number changes: the parameters keep their layout, so it is not made anew.
        spec = dataclasses.replace(self.job.layout.spec, microbatches=self.parts[index])
        layout = dataclasses.replace(self.job.layout, spec=spec)
        return estimate_job(task, dataclasses.replace(self.job, layout=layout), timed=timed)


def search(
    task: SearchTask,
    candidate_meshes: Iterable[MeshSpec],
    *,
    keep: int = 10,
    limit_s: float = math.inf,
    zero: ZeroStages = EVERY,
) -> list[Point]:
    """Returns layouts on these meshes that fit, the fastest first: the `keep` fastest, and others met.

    Of a mesh and ZeRO stage the layout that keeps all activations and has the fewest microbatches is the
    fastest. Where it is slower than the `keep` fastest so far, the others are not estimated; nor are they
    where the one that takes the least memory does not fit.

    Args:
      limit_s: seconds per step from which on a layout is of no interest.
      zero: ZeRO stages to try on meshes that can shard.
    """
    points: list[Point] = []
    # Series that need host memory; they are tried last, because copies only slow a step down.
    missed: list[_Series] = []

    def limit() -> float:
        return limit_s if len(points) < keep else min(limit_s, sorted(p.step_s for p in points)[keep - 1])

    has_host_memory = task.machine.host_bytes_per_device is not None
    # One estimate per mesh and ZeRO stage: its first series is the fastest of the group.
    grouped = [
        (series_list[0].at(task, 0), series_list)
        for mesh in candidate_meshes
        for series_list in _by_stage(task, mesh, zero)
    ]
    for fastest, series_list in sorted(grouped, key=lambda group: group[0].working_s):
        # The groups are sorted, so no later one can be faster either.
        if fastest.working_s >= limit():
            break
        frugal = series_list[-1]
        # The last index has the most microbatches, the first the fewest: one alone needs no accumulator.
        ends = (len(frugal.parts) - 1, 0)
        # Where the smallest layout of a group does not fit, none of the group does.
        any_fits = any(fits(task, frugal.at(task, index, timed=False).plan) for index in ends)
        # Stages are not combined with layouts that are made to fit by the host.
        with_host = has_host_memory and frugal.job.layout.mesh.stage == 1
        if not any_fits and not (with_host and any(_fits_on_host(task, frugal, index) for index in ends)):
            continue
        for series in series_list:
            # The first series has been estimated above, with its time.
            first = fastest if series is series_list[0] else series.at(task, 0, timed=False)
            is_missed = with_host and not fits(task, first.plan)
            fitting = list(_fitting_points(task, series, first)) if any_fits else []
            # A time may take a trace of the step's code, so layouts that cannot be used have none.
            lead = first if is_missed else next(iter(fitting), None)
            if lead is None or with_step_time(task, lead).working_s >= limit():
                continue
            if is_missed:
                missed.append(series)
            points += [with_step_time(task, point) for point in fitting]
    if has_host_memory:
        points += _offloaded_points(task, missed, min((point.step_s for point in points), default=math.inf))
    return sorted(points, key=lambda point: (point.step_s, point.plan.total_bytes))


def _fitting_points(task: SearchTask, series: _Series, first: Point) -> Iterator[Point]:
    """Yields the fitting layout of the fewest microbatches, untimed; with stages all that fit."""
    if fits(task, first.plan):
        yield first
    if series.job.layout.mesh.stage > 1:
        points = (series.at(task, index, timed=False) for index in range(1, len(series.parts)))
        yield from (point for point in points if fits(task, point.plan))
    elif not fits(task, first.plan):
        # Bytes fall with the microbatches, after the accumulator that two need.
        index = _fewest(
            len(series.parts), lambda index: fits(task, series.at(task, index, timed=False).plan), 1
        )
        if index < len(series.parts):
            yield series.at(task, index, timed=False)


def _offloaded_points(task: SearchTask, missed: Iterable[_Series], best_s: float) -> Iterator[Point]:
    """Yields layouts of `missed` that fit with host memory and were faster than `best_s` without it."""
    queue: list[tuple[float, int, int, _Series, Point]] = []
    tie_breaker = itertools.count()  # decides between equal times

    def push(series: _Series, index: int) -> None:
        if index < len(series.parts) and not fits(task, (point := series.at(task, index)).plan):
            heapq.heappush(queue, (point.step_s, next(tie_breaker), index, series, point))

    for series in missed:
        fit = functools.partial(_fits_on_host, task, series)
        push(series, 0 if fit(0) else _fewest(len(series.parts), fit, 1))
    # Fastest miss first: once it is slower than the best that fits, every later one is too.
    while queue:
        step_s, _, index, series, miss = heapq.heappop(queue)
        if step_s >= best_s:
            return
        for offloaded in _with_host(task, miss):
            best_s = min(best_s, offloaded.step_s)
            yield offloaded
        # The next number of microbatches enters only now, because it is slower than this one.
        push(series, index + 1)


def _fewest(count: int, fit: Callable[[int], bool], low: int) -> int:
    """The first index from `low` on that fits, if all after one that fits do; `count` if none does."""
    # `count` itself is never tested: it stands for no fit.
    high = count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle + 1, high)
    return low


def _fits_on_host(task: SearchTask, series: _Series, index: int) -> bool:
    """True if a layout's bytes on the device fit with all that can be on the host there."""
    spec, mesh = series.job.layout.spec, series.job.layout.mesh
    everything = with_shares(spec, task.config_spec, dict.fromkeys(task.offloadable(spec, mesh), 1.0))
    # The job of a series has one microbatch.
    spec = dataclasses.replace(everything, microbatches=series.parts[index])
    return evaluate(task, spec, mesh, timed=False).plan.total_bytes <= task.budget_bytes


def fastest_miss(task: SearchTask, candidate_meshes: Iterable[MeshSpec]) -> Point | None:
    """The layout that would be fastest if memory did not matter; None if it fits."""
    points = (
        series.at(task, 0)
        for mesh in candidate_meshes
        for series_list in _by_stage(task, mesh, EVERY)
        for series in series_list
    )
    point = min(points, key=lambda point: point.step_s, default=None)
    return None if point is None or fits(task, point.plan) else point


def resolve_as_needed(task: SearchTask, mesh: MeshSpec) -> LayoutSpec:
    """The config's layout with every `as_needed` share resolved: the smallest that fits, or `none`.

    Shares are raised from the least to the most often copied: optimizer, activations, params, gradients.

    Raises:
      UserError: the run does not fit even with all of them on the host.
    """
    open_fields = open_shares(task.config_spec)
    # Shares start at 0, so nothing goes to the host that fits on the device.
    spec = with_shares(task.config_spec, task.config_spec, dict.fromkeys(open_fields, 0.0))
    if set(open_fields) - {"optimizer"}:
        check_scanned(task.job.model.scan_layers)
    if not open_fields or fits(task, evaluate(task, spec, mesh, timed=False).plan):
        return spec
    for name in open_fields:
        if (shared := _smallest_share(task, spec, mesh, name)) is not None:
            return shared
        # All of this field is not enough, so it goes to the host whole and the next field follows.
        spec = with_shares(spec, task.config_spec, {name: 1.0})
    plan = evaluate(task, spec, mesh, timed=False).plan
    host_capacity = task.machine.host_bytes_per_device
    host_text = (
        "an unknown size (give it with --host-memory)"
        if host_capacity is None
        else f"{host_capacity / 2**30:.1f}"
    )
    raise UserError(
        f"layout.offload.{', .'.join(open_fields)}=as_needed: with all of it on the host a device needs "
        f"{plan.total_bytes / 2**30:.1f} GiB of {task.budget_bytes / 2**30:.1f} that may be used, and its "
        f"share of the host {plan.host_bytes / 2**30:.1f} GiB of {host_text}. Set layout.auto=True, or more "
        "of layout.zero_stage, layout.remat, layout.microbatches or mesh.data."
    )


def _by_stage(task: SearchTask, mesh: MeshSpec, zero: ZeroStages) -> Iterator[list[_Series]]:
    """Yields the series of each ZeRO stage, the one that keeps all activations first."""
    # Offload is off here; `_offloaded_points` adds it to the layouts that miss.
    plain = with_shares(task.config_spec, task.config_spec, dict.fromkeys(OFFLOADABLE, 0.0))
    if (plain := computed_layout(task.job.model, plain, mesh)) is None:
        return
    for specs in alternatives(dataclasses.replace(plain, microbatches=1, auto=False), mesh, zero):
        try:
            # One job for all layouts of a ZeRO stage: they shard the parameters alike.
            job = task.job.relaid(specs[0], mesh)
            # Other numbers are refused when the schedule is made.
            in_groups = job.layout.pipeline_spec.schedule == "interleaved"
            parts = microbatch_options(job.rows(), mesh.stage, multiple_of=mesh.stage if in_groups else 1)
            check_layout(job.optimizer, job.layout)
        except ValueError:
            continue  # does not split evenly
        if parts:
            layouts = (dataclasses.replace(job.layout, spec=spec) for spec in specs)
            yield [_Series(dataclasses.replace(job, layout=layout), parts) for layout in layouts]


def _with_host(task: SearchTask, miss: Point) -> Iterator[Point]:
    """Yields layouts that make a miss fit with host memory, each with the smallest share of one field."""
    offloadable = task.offloadable(miss.spec, miss.mesh)
    all_on_host = with_shares(miss.spec, task.config_spec, dict.fromkeys(offloadable, 1.0))
    offloaded_plan = evaluate(task, all_on_host, miss.mesh, timed=False).plan
    # With everything on the host it still does not fit, so no combination of fields does.
    if offloaded_plan.total_bytes > task.budget_bytes:
        return
    host_sizes = (
        offloaded_plan.host_optimizer,
        offloaded_plan.host_activations,
        offloaded_plan.host_parameters,
        offloaded_plan.host_gradients,
    )
    saved_bytes: dict[str, int] = dict(zip(OFFLOADABLE, host_sizes, strict=True))
    # Fewest fields first.
    for size in range(1, len(offloadable) + 1):
        for fields in itertools.combinations(offloadable, size):
            if miss.plan.total_bytes - sum(saved_bytes[name] for name in fields) > task.budget_bytes:
                continue  # not enough, even with all of these on the host
            # The field that is copied most often is the last; only its share is searched.
            *full_fields, last_field = fields
            spec = with_shares(miss.spec, task.config_spec, dict.fromkeys(full_fields, 1.0))
            if (shared := _smallest_share(task, spec, miss.mesh, last_field)) is not None:
                yield evaluate(task, shared, miss.mesh)


def _smallest_share(task: SearchTask, spec: LayoutSpec, mesh: MeshSpec, field: str) -> LayoutSpec | None:
    """`spec` with the smallest share of `field` on the host that fits; None if all of it is not enough."""

    def with_share(share: float) -> LayoutSpec:
        return with_shares(spec, task.config_spec, {field: share})

    def fits_device(share: float) -> bool:
        try:
            return evaluate(task, with_share(share), mesh, timed=False).plan.total_bytes <= task.budget_bytes
        except ValueError:
            return False  # the share is smaller than the smallest array

    if not fits_device(1.0):
        return None
    # SHARES[high] fits throughout, as 1.0 does above.
    low, high = 0, len(SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_device(SHARES[middle]) else (middle + 1, high)
    smallest = with_share(SHARES[high])
    # It fits the device; the host must hold its share too.
    return smallest if fits(task, evaluate(task, smallest, mesh, timed=False).plan) else None
