"""Plans of a config's pipeline on a machine, one per schedule, and of the same devices under ZeRO-3 alone."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jtrain.config.load import for_devices, set_values
from jtrain.config.run import Run, build_run
from jtrain.errors import UserError
from jtrain.layout.mesh import AXES, BATCH_AXES, shard_size
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.auto_layout import choose_loss_chunk
from jtrain.plan.estimate.collectives import BETWEEN_STAGES, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.from_run import search_task
from jtrain.plan.mesh_options import divisors
from jtrain.plan.search import meshes, resolve_as_needed, search
from jtrain.plan.search_task import Point, SearchTask, evaluate, fits


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A pipeline of a config on a machine; everything but the schedule.

    title: config, machine and mesh.
    run: the config: its layout has the number of microbatches, its mesh that of the stages.
    csv: file of the schedule, if it is one of the user's own.
    alone: the fastest ZeRO-3 layout that fits into the same devices without a pipeline; None if none does.
    """

    title: str
    task: SearchTask
    run: Run
    csv: Path | None
    alone: Point | None

    @property
    def stages(self) -> int:
        """Number of workers."""
        return self.run.mesh.stage

    @property
    def microbatches(self) -> int:
        """Number of microbatches of one step."""
        return self.run.layout.microbatches

    def point(self, schedule: PipelineSchedule) -> Point:
        """The plan of a run with this schedule, as `python -m jtrain.plan` makes it.

        Raises:
          UserError: there are fewer layers than virtual stages, or the layers cannot run under this schedule.
        """
        num_layers, virtual = self.run.model.num_layers, schedule.virtual_stages
        # A virtual stage without layers cannot be a part of the program.
        if virtual > num_layers:
            fewer = (
                f"--stages {num_layers // schedule.chunks} or fewer, or "
                if num_layers >= 2 * schedule.chunks
                else ""
            )
            raise UserError(
                f"schedule {schedule.name} has {virtual} virtual stages, and the config "
                f"model.num_layers={num_layers}: each needs at least one layer. Give {fewer}--schedule 1f1b."
            )
        # A file is named by its path in pipeline.schedule.
        if self.csv is not None:
            pipeline = PipelineSpec(str(self.csv), gather=self.run.pipeline.gather)
        else:
            # Only an interleaved schedule has chunks to set.
            chunks = schedule.chunks if schedule.name == "interleaved" else 1
            pipeline = PipelineSpec(schedule.name, chunks, self.run.pipeline.gather)
        # The schedule decides how many inputs stay in memory, so it is part of the layout.
        layout = dataclasses.replace(self.task.job.layout, pipeline_spec=pipeline)
        task = self.task.changed(layout=layout)
        return evaluate(task, resolve_as_needed(task, self.run.mesh), self.run.mesh)

    def fits(self, point: Point) -> bool:
        """True if a device has the memory."""
        # An unknown host counts as large enough.
        return fits(self.task, point.plan, host_known=False)

    def alone_line(self, best: Point | None) -> str:
        """How ZeRO-3 without a pipeline compares, and why.

        Args:
          best: the best pipeline; None if no pipeline fits.
        """
        if self.alone is None:
            return "ZeRO-3 alone does not fit into these devices with this batch."
        alone_s, waits_s = self.alone.step_s, waiting_s(self.alone)
        mesh = (f"mesh.{axis}={size}" for axis, size in self.alone.mesh.shape.items() if size > 1)
        spec = self.alone.spec
        settings = " ".join((*mesh, f"layout.remat={spec.remat}", f"layout.microbatches={spec.microbatches}"))
        comparison = (
            f"ZeRO-3 alone on the same devices takes {alone_s:,.4g} s at best ({settings}), of which it "
            f"waits {waits_s:,.4g} s for the network"
        )
        if best is None:
            return f"{comparison}."
        assert best.timed is not None
        step_s, bubble_s, network_s = best.step_s, best.timed.bubble_s, waiting_s(best)
        # At least 1, so that the sentence says which is the faster.
        factor = max(step_s, alone_s) / min(step_s, alone_s)
        winner = "the pipeline" if step_s < alone_s else "ZeRO-3 alone"
        return (
            f"{comparison}; the pipeline {step_s:,.4g} s, of which it waits {network_s:,.4g} s for the "
            f"network and {bubble_s:,.4g} s for other stages. {winner} is {factor:.2f} times as fast."
        )


def sent_bytes(point: Point) -> tuple[int, int]:
    """Bytes of one message between stages, and of all that a device's permutes send in a step."""
    # Exactly one collective has this purpose; otherwise unpacking fails.
    [collective_between_stages] = [
        collective for collective in collectives(point.job) if collective.purpose == BETWEEN_STAGES
    ]
    return (
        collective_between_stages.array_bytes // collective_between_stages.count,
        collective_between_stages.array_bytes,
    )


def waiting_s(point: Point) -> float:
    """Seconds of a step in which a device waits for the network."""
    assert point.timed is not None
    return sum(row.exposed_s for row in point.timed.network)


def plan_stages(
    name: str,
    load: Callable[[], Any],
    machine: Machine,
    *,
    stages: int | None,
    microbatches: int | None,
    sets: Sequence[str] = (),
    csv: Path | None = None,
) -> PipelinePlan:
    """Plans the stages of a config.

    Args:
      name: of the config, for messages.
      load: makes the config, each time anew.
      stages, microbatches: None takes those of the config.
      sets: the `--set`s in the config.
      csv: file of a schedule of the user's own.

    Raises:
      UserError: an option is wrong, or the devices, the batch or the model do not split evenly.
    """
    # Checked first, before the config is loaded.
    for text in sets:
        if text.startswith(("pipeline.schedule=", "pipeline.chunks=")):
            option = f"--{text.removeprefix('pipeline.').replace('=', ' ', 1)}"
            raise UserError(
                f"--set {text}: plans of pipelines take it as an option. Give {option} in its place."
            )
    # A config of its own: the values below are written into it.
    config, count = load(), machine.count
    stages = int(config.mesh.stage) if stages is None else stages
    microbatches = int(config.layout.microbatches) if microbatches is None else microbatches
    stage_counts = [n for n in range(2, min(count, config.model.num_layers) + 1) if count % n == 0]
    if stages not in stage_counts:
        *smaller, largest = map(str, stage_counts or [0])
        stage_option = (
            f"--stages {', '.join(smaller)}{' or ' if smaller else ''}{largest}"
            if stage_counts
            else f"--count {count + count % 2} --stages 2"
        )
        raise UserError(
            f"{stages} stages on --count {count} devices: a pipeline has at least 2 stages, a number that "
            f"divides the devices, and a layer for each ({name} has "
            f"model.num_layers={config.model.num_layers}). Give {stage_option}."
        )
    set_values(config, {"mesh.stage": stages})
    # After mesh.stage is set: the data axis takes the devices that are left.
    for_devices(config, count)
    # One microbatch for now, so that the run builds whatever the option says.
    set_values(config, {"layout.microbatches": 1, "layout.auto": False})
    run = build_run(config)
    # Sequences of one device per step.
    rows = shard_size("data.global_batch", run.data.global_batch, run.mesh.shape, BATCH_AXES)
    if microbatches < 1 or rows % microbatches:
        raise UserError(
            f"--microbatches {microbatches}: each device of a stage has {rows} of data.global_batch="
            f"{run.data.global_batch} sequences. Give one of {', '.join(map(str, divisors(rows)))}, or set "
            f"data.global_batch to a multiple of {run.data.global_batch // rows * max(1, microbatches)}."
        )
    set_values(config, {"layout.microbatches": microbatches})
    # After the microbatches: a chunk holds no more tokens than one of them.
    choose_loss_chunk(config, machine.device)
    run = build_run(config)
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1)
    title = f"{name} on {machine}: {mesh} zero_stage={run.layout.zero_stage} remat={run.layout.remat}"
    # A fresh config for ZeRO-3, because this one has stages.
    return PipelinePlan(title, search_task(run, machine), run, csv, _alone(load(), machine))


def _alone(config: Any, machine: Machine) -> Point | None:
    """The fastest ZeRO-3 layout without a pipeline; None if none fits. Changes the config."""
    set_values(config, dict.fromkeys((f"mesh.{axis}" for axis in AXES), 1))
    # Not every mesh has collectives to overlap.
    set_values(config, {"layout.microbatches": 1, "layout.auto": False, "layout.tensor_overlap": False})
    set_values(config, {"layout.sequence_groups": 1})
    choose_loss_chunk(config, machine.device)
    task = search_task(build_run(config), machine)
    # ZeRO-3 over all devices: no replicas.
    sharded = (mesh for mesh in meshes(task) if mesh.replica == 1 and mesh.zero_shards > 1)
    return next(iter(search(task, sharded, keep=1, zero=(3,))), None)
