"""Plan of a config's pipeline stages on a machine, and of the same devices under ZeRO-3 alone."""

import argparse
import dataclasses
import math

from jtrain.config.load import for_devices, load_config, mesh_size, set_values
from jtrain.config.run import Run, build_run
from jtrain.errors import UserError
from jtrain.layout import LayoutSpec
from jtrain.mesh import BATCH_AXES
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.ticks import Ticks
from jtrain.plan.estimate.machine import Machine, make_machine
from jtrain.plan.estimate.pipeline_time import StageWork, stage_work
from jtrain.plan.estimate.step_time import Assumptions
from jtrain.plan.from_run import search_task
from jtrain.plan.search import Point, SearchTask, evaluate, fits
from jtrain_kernels.device import DEVICES


@dataclasses.dataclass(frozen=True)
class Planned:
    """A pipeline of a config on a machine; everything but the schedule.

    alone: the fastest ZeRO-3 layout that fits into the same devices without a pipeline; None if none does.
    """

    config: str
    title: str
    num_layers: int
    stages: int
    microbatches: int
    work: StageWork
    hbm_bytes: int
    tokens: int
    alone: Point | None

    def times(self, schedule: PipelineSchedule) -> tuple[float, float, float]:
        """Seconds of F, I and W of the fullest chunk, for one microbatch.

        Raises:
          UserError: there are fewer layers than virtual stages.
        """
        virtual = schedule.virtual_stages
        if virtual > self.num_layers:
            raise UserError(
                f"schedule {schedule.name} has {virtual} virtual stages, and {self.config} model.num_layers="
                f"{self.num_layers}: each needs at least one layer. Take fewer stages or chunks, or schedule 1f1b."
            )
        share = self._fullest_chunk(schedule)
        return self.work.forward_s * share, self.work.by_input_s * share, self.work.by_weight_s * share

    def _fullest_chunk(self, schedule: PipelineSchedule) -> float:
        """Layers of the fullest chunk over those of an average stage: above 1 / chunks if layers divide unevenly."""
        return -(-self.num_layers // schedule.virtual_stages) * self.stages / self.num_layers

    def step_s(self, makespan_s: float) -> float:
        """Seconds of a step whose pipeline takes `makespan_s`."""
        return makespan_s + self.work.once_s

    def memory_bytes(self, ticks: Ticks) -> int:
        """Peak bytes of a device of the fullest worker, in lockstep: slots have the same number on all workers."""
        kept = ticks.num_inputs * self.work.kept_bytes + ticks.num_stashes * self.work.stash_bytes
        kept = int(kept * self._fullest_chunk(ticks.schedule))
        return self.work.state_bytes + kept + (ticks.num_inputs + ticks.num_cotangents) * self.work.message_bytes

    def fits(self, ticks: Ticks) -> bool:
        """True if the fullest worker's device has the memory."""
        return self.memory_bytes(ticks) <= self.hbm_bytes

    def alone_line(self, step_s: float | None) -> str:
        """How ZeRO-3 without a pipeline compares.

        Args:
          step_s: the best pipeline's step; None if no pipeline fits.
        """
        if self.alone is None:
            return "ZeRO-3 alone does not fit into these devices with this batch."
        timed = self.alone.timed
        assert timed is not None
        waits_s = sum(row.exposed_s for row in timed.network)
        said = (
            f"ZeRO-3 alone on the same devices takes {timed.step_s:,.4g} s with layout.microbatches="
            f"{self.alone.spec.microbatches}, of which it waits {waits_s:,.4g} s for the network"
        )
        if step_s is None:
            return f"{said}."
        wins = step_s < timed.step_s
        factor = max(step_s, timed.step_s) / min(step_s, timed.step_s)
        because = (
            "its gathers do not hide behind the layers"
            if wins
            else "what a pipeline saves of the network is less than its bubble costs"
        )
        winner = "the pipeline" if wins else "ZeRO-3 alone"
        return f"{said}; the pipeline {step_s:,.4g} s. {winner} is {factor:.2f} times as fast: {because}."


def plan_stages(args: argparse.Namespace, stages: int | None, microbatches: int | None) -> Planned:
    """Plans the stages of the config that the command line names.

    Args:
      stages, microbatches: None takes those of the config.

    Raises:
      UserError: an option is wrong, or the devices, the batch or the model do not split evenly.
    """
    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops]
        raise UserError(f"the times of {args.config} need a machine. Give --device, one of {', '.join(names)}.")
    if args.network is not None and not 0 < args.network < math.inf:
        raise UserError(f"--network {args.network} must be a number above 0.")
    config = load_config(args.config, args.fiddlers, args.sets)
    count = mesh_size(config) if args.count is None else args.count
    network = None if args.network is None else args.network * 1e9 / 8
    machine = make_machine(args.device, count, network_bytes_per_s=network)
    stages = int(config.mesh.stage) if stages is None else stages
    microbatches = int(config.layout.microbatches) if microbatches is None else microbatches
    if stages < 1 or count % stages:
        near = [n for n in range(1, count + 1) if count % n == 0]
        raise UserError(
            f"--stages {stages} does not divide --count {count} devices. Numbers that do: {', '.join(map(str, near))}."
        )
    if stages > config.model.num_layers:
        raise UserError(
            f"--stages {stages}: {args.config} has model.num_layers={config.model.num_layers}, and each stage needs at "
            f"least one. Give --stages {config.model.num_layers} or fewer."
        )
    each = dataclasses.replace(machine, count=count // stages)
    set_values(config, {"mesh.stage": 1})
    for_devices(config, each.count)
    set_values(config, {"layout.microbatches": microbatches, "layout.auto": False})
    run = build_run(config)
    assume = Assumptions()
    job = search_task(run, each, assume=assume).job.relaid(run.layout, run.mesh)
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1)
    title = f"{args.config} on {machine}: stage={stages} {mesh} zero_stage={run.layout.zero_stage}"
    work = stage_work(job, stages, machine, assume=assume)
    alone = _alone(args, machine, assume)
    return Planned(
        args.config, title, config.model.num_layers, stages, microbatches, work, machine.hbm_bytes, job.tokens, alone
    )


def _alone(args: argparse.Namespace, machine: Machine, assume: Assumptions) -> Point | None:
    """The fastest ZeRO-3 layout without a pipeline, over all numbers of microbatches; None if none fits."""
    config = load_config(args.config, args.fiddlers, args.sets)
    set_values(config, {"mesh.stage": 1, "layout.auto": False})
    try:
        for_devices(config, machine.count)
        set_values(config, {"layout.microbatches": 1, "layout.zero_stage": 3})
        run = build_run(config)
    except UserError:  # the batch does not split over so many devices
        return None
    task = search_task(run, machine, assume=assume)
    points = [evaluate(task, spec, run.mesh) for spec in _specs(run)]
    return min((point for point in points if _fits(task, point)), key=lambda point: point.step_s, default=None)


def _specs(run: Run) -> list[LayoutSpec]:
    rows = run.data.global_batch // math.prod(run.mesh.shape[axis] for axis in BATCH_AXES)
    return [dataclasses.replace(run.layout, microbatches=m) for m in range(1, rows + 1) if rows % m == 0]


def _fits(task: SearchTask, point: Point) -> bool:
    return fits(task, point.plan, host_known=False)
