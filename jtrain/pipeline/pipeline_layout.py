"""Placement of a model's layers on pipeline stages.

A worker is one place along the mesh axis `stage`. Its chunks are the virtual stages that it computes, and a
chunk has k consecutive places for layers. Arrays with a dimension Y hold their layers in placed order: worker
by worker, chunk by chunk, so that an even split over `stage` gives each worker its own. Where layers do not
fill all places, the last place of some chunks holds an identity layer, whose parameters are zeros: it adds
nothing and its gradients are zero.
"""

import dataclasses
import functools
from pathlib import Path

from jtrain.errors import UserError
from jtrain.pipeline.cells import read_csv
from jtrain.pipeline.checker import check
from jtrain.pipeline.published_schedules import make_schedule
from jtrain.pipeline.schedule import ChunkPlacement, PipelineSchedule, stage_of
from jtrain.pipeline.spec import V_SHAPED, PipelineSpec

IDENTITY = -1
"""Entry of `PipelineLayout.order` for a place without a layer."""

type VirtualStages = tuple[tuple[int, ...], ...]
"""Virtual stage of each worker's chunks, [stages][chunks]. A microbatch runs through them in ascending
order."""


def virtual_stages(spec: PipelineSpec, stages: int) -> VirtualStages:
    """Returns the virtual stages of each worker.

    One chunk per worker is contiguous; several go round and round (worker p has p, p + P, ...), or down and
    up again in a V (worker p has p and 2P - 1 - p).

    Raises:
      UserError: a CSV file cannot be read, or is for another number of stages.
    """
    if spec.is_file:
        # Only the file knows its chunks and placement; `schedule_of` checks the number of microbatches.
        schedule = read_csv(Path(spec.schedule), stages=stages)
        chunks, placement = schedule.chunks, schedule.placement
    else:
        chunks = spec.chunks_per_worker
        placement: ChunkPlacement = "v" if spec.schedule in V_SHAPED else "round_robin"
    return tuple(
        tuple(stage_of(p, chunk, stages, placement) for chunk in range(chunks)) for p in range(stages)
    )


@dataclasses.dataclass(frozen=True)
class PipelineLayout:
    """Layers of a model on workers.

    spec: settings of the run.
    num_layers: layers of the model, Y.
    virtual: virtual stages of each worker's chunks.
    """

    spec: PipelineSpec
    num_layers: int
    virtual: VirtualStages

    @property
    def stages(self) -> int:
        """Number of workers, the size of the mesh axis `stage`."""
        return len(self.virtual)

    @property
    def chunks(self) -> int:
        """Number of chunks on each worker."""
        return len(self.virtual[0])

    @property
    def num_virtual(self) -> int:
        """Number of virtual stages."""
        return self.stages * self.chunks

    @property
    def layers_per_chunk(self) -> int:
        """Number of places for layers in each chunk, k."""
        # Rounded up: every chunk has as many places as the fullest, since all run the same program.
        return -(-self.num_layers // self.num_virtual)

    @property
    def places(self) -> int:
        """Number of places for layers on all workers, the length of Y in the state."""
        return self.num_virtual * self.layers_per_chunk

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Logical layer of every place, `IDENTITY` where there is none.

        Place (worker * chunks + chunk) * k + i is layer i of that chunk. Example: 7 layers in a V over 2
        workers have virtual stages ((0, 3), (1, 2)) of 2, 2, 2 and 1 layers, so the order is
        (0, 1, 6, -1, 2, 3, 4, 5).
        """
        k = self.layers_per_chunk
        layer_of_place: list[int] = []
        for worker in self.virtual:
            for virtual in worker:
                first, count = self.layers_of(virtual)
                # `count` is k or k - 1: at most the last place of a chunk is empty.
                layer_of_place += [first + i if i < count else IDENTITY for i in range(k)]
        return tuple(layer_of_place)

    @property
    def in_order(self) -> bool:
        """True if place y holds layer y for every y: the state then equals that of a run without stages."""
        return self.order == tuple(range(self.num_layers))

    @property
    def num_identity(self) -> int:
        """Number of identity layers."""
        return self.places - self.num_layers

    def layers_of(self, virtual: int) -> tuple[int, int]:
        """Returns the first logical layer of a virtual stage and its number of layers, k or k - 1.

        Early virtual stages have the larger counts.
        """
        # 7 layers over 4 virtual stages: 2, 2, 2, 1.
        base, remainder = divmod(self.num_layers, self.num_virtual)
        return virtual * base + min(virtual, remainder), base + (virtual < remainder)

    def where(self, virtual: int) -> tuple[int, int]:
        """Returns the worker and the chunk that compute a virtual stage."""
        for worker, chunks in enumerate(self.virtual):
            if virtual in chunks:
                return worker, chunks.index(virtual)
        raise AssertionError(f"no worker has virtual stage {virtual}")

    def identity_message(self) -> str | None:
        """Returns the line of the run's plan about identity layers; None where the layers fill all places."""
        if not self.num_identity:
            return None
        return (
            f"model.num_layers={self.num_layers} over {self.num_virtual} chunks of mesh.stage={self.stages}: "
            f"{self.layers_per_chunk} places in each, {self.num_identity} of {self.places} hold an identity "
            "layer, which costs as much as a layer and changes nothing"
        )


@functools.cache
def schedule_of(pipeline: PipelineLayout, microbatches: int) -> PipelineSchedule:
    """Returns the schedule of a pipelined step.

    Raises:
      UserError: the schedule needs more microbatches, its file has another number of them, or the file is
        wrong.
    """
    spec = pipeline.spec
    if not spec.is_file:
        return make_schedule(spec.schedule, pipeline.stages, microbatches, pipeline.chunks)
    schedule = read_csv(Path(spec.schedule), stages=pipeline.stages, microbatches=microbatches)
    # Published schedules are right by construction and tested; a user's file is checked here.
    check(schedule)
    return schedule


def place_layers(
    spec: PipelineSpec, *, stages: int, num_layers: int, blocks: int | None = None
) -> PipelineLayout:
    """Places the layers of a model on `stages` workers.

    Args:
      num_layers: layers that are alike; repetitions of a pattern, each of which is placed as one.
      blocks: blocks of `model.pattern`; None without one.

    Raises:
      UserError: there are more chunks than layers, or as `virtual_stages`.
    """
    # One stage has no pipeline: its layout has `pipeline=None`.
    assert stages > 1
    pipeline = PipelineLayout(spec, num_layers, virtual_stages(spec, stages))
    # A chunk of identity layers alone would cost a layer and compute nothing.
    if pipeline.num_virtual > num_layers:
        per_worker = f" of {pipeline.chunks} chunks each" if pipeline.chunks > 1 else ""
        max_stages = num_layers // pipeline.chunks
        advice = f"Set mesh.stage to at most {max_stages}" if max_stages > 1 else "Set mesh.stage=1"
        or_chunks = ", or a schedule with one chunk (pipeline.schedule=1f1b)" if pipeline.chunks > 1 else ""
        unit, number = "layers", f"model.num_layers={num_layers}"
        if blocks is not None:
            unit, number = "repetitions of model.pattern", f"its {blocks} blocks fit {num_layers} times"
        raise UserError(
            f"mesh.stage={stages}{per_worker} (pipeline.schedule={spec.schedule}) needs at least "
            f"{pipeline.num_virtual} {unit}, but {number}. {advice}{or_chunks}, or add layers."
        )
    return pipeline
