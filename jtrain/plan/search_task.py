"""One candidate of a layout search: the task, and a layout's memory and step time by the closed forms."""

import dataclasses
import functools
import math
from typing import Any

from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.optim import Muon, check_layout
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.step_time import Assumptions, StepTime, step_time
from jtrain.plan.job import Job
from jtrain.step.layout_choices import layout_settings

SLACK = 0.15
"""Error margin of the closed form: the fraction of the memory that an estimate has to leave free."""


@dataclasses.dataclass(frozen=True)
class SearchTask:
    """A job whose layout is searched for, with the limits of the search.

    job: model, optimizer, batch and machine; the search replaces its layout.
    config_spec: layout settings of the config; a search decides `layout_settings` and keeps the others.
    memory_share: fraction of a device's memory that the estimate may fill.
    """

    job: Job
    config_spec: LayoutSpec
    assume: Assumptions = dataclasses.field(default_factory=Assumptions)
    memory_share: float = 1 - SLACK

    @property
    def machine(self) -> Machine:
        """The machine that layouts are compared on."""
        assert self.job.machine is not None, "a search compares times, which take a machine"
        return self.job.machine

    def offloadable(self, spec: LayoutSpec, mesh: MeshSpec) -> tuple[str, ...]:
        """Fields of layout.offload that may be used, from the least to the most often copied.

        Muon updates whole matrices. Only a loop over layers fetches what is not the optimizer's layer by
        layer.
        """
        # Without a loop over layers only the optimizer's state, the first field, can be copied.
        cannot = set[str](() if self.job.model.scan_layers else OFFLOADABLE[1:])
        cannot |= {"optimizer", "gradients"} if isinstance(self.job.optimizer, Muon) else set()
        # Sums leave for the host only from inside the backward loop over layers.
        if mesh.stage > 1 or not spec.sums_within_layers(mesh):
            cannot.add("gradients")
        return tuple(name for name in OFFLOADABLE if name not in cannot)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a step may take on one device by the closed form."""
        # A share of the room, because the closed form errs by up to SLACK.
        return int(self.machine.room_bytes(self.config_spec) * self.memory_share)

    def changed(self, **changes: Any) -> "SearchTask":
        """The same search of a job with other fields."""
        return dataclasses.replace(self, job=dataclasses.replace(self.job, **changes))


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout of a job, with the memory that it takes and the predicted step time.

    timed: None if only memory was asked for.
    """

    job: Job
    plan: MemoryPlan
    timed: StepTime | None

    @property
    def spec(self) -> LayoutSpec:
        return self.job.layout.spec

    @property
    def mesh(self) -> MeshSpec:
        return self.job.layout.mesh

    @functools.cached_property
    def step_s(self) -> float:
        """Predicted step time in seconds; infinite if it was not asked for."""
        return math.inf if self.timed is None else self.timed.step_s

    @property
    def working_s(self) -> float:
        """Predicted step time without waiting for other pipeline stages, which more microbatches shorten."""
        return self.step_s - (0.0 if self.timed is None else self.timed.bubble_s)

    @property
    def settings(self) -> dict[str, object]:
        """Config path -> value of every setting that the search decided."""
        # Axes of one device too: a config may have more along them.
        settings: dict[str, object] = {f"mesh.{axis}": size for axis, size in self.mesh.shape.items()}
        # Only a pipelined layout has a schedule to report.
        if (pipeline := self.job.layout.pipeline) is not None:
            settings |= {
                f"pipeline.{name}": getattr(pipeline.spec, name) for name in ("schedule", "chunks", "gather")
            }
        return settings | layout_settings(self.spec)


def evaluate(task: SearchTask, spec: LayoutSpec, mesh: MeshSpec, *, timed: bool = True) -> Point:
    """Estimates one layout, also one that does not fit.

    Args:
      timed: True if the step time is wanted as well.

    Raises:
      UserError: a dimension or the batch does not split evenly.
    """
    job = task.job.relaid(spec, mesh)
    check_layout(job.optimizer, job.layout)
    return estimate_job(task, job, timed=timed)


def estimate_job(task: SearchTask, job: Job, *, timed: bool) -> Point:
    """Estimates a job as it is laid out; its batch must split evenly."""
    # Bytes are cheap to estimate, a time may take a trace of the step's code.
    point = Point(job, memory(job), None)
    return with_step_time(task, point) if timed else point


def with_step_time(task: SearchTask, point: Point) -> Point:
    """The point with its step time."""
    # A search asks for the time of one point several times.
    if point.timed is not None:
        return point
    return dataclasses.replace(point, timed=step_time(point.job, point.plan, assume=task.assume))


def fits(task: SearchTask, plan: MemoryPlan, *, host_known: bool = True) -> bool:
    """True if a plan fits into the device and its share of the host.

    Args:
      host_known: True if a host of unknown memory counts as having none; False if it counts as having enough.
    """
    if plan.total_bytes > task.budget_bytes:
        return False
    # None means that the host's memory is unknown, and `host_known` says how to count it.
    host_capacity = task.machine.host_bytes_per_device
    return not (plan.host_bytes and host_known) if host_capacity is None else plan.host_bytes <= host_capacity
