"""Settings of a pipelined run, `mesh.stage` > 1."""

import dataclasses
from typing import Literal

from jtrain.errors import UserError, did_you_mean
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES

V_SHAPED = ("zbv", "dualpipev")
"""Schedules in which worker p of P has the virtual stages p and 2P - 1 - p."""


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
    """Order and placement of the work of a pipelined run; changes speed and memory, never the losses.

    With mesh.stage=1 nothing reads these fields.

    schedule: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev, or the path of a CSV file with a schedule of
      your own.
    chunks: parts of the model on each worker, for `interleaved`; zbv and dualpipev always have two, a CSV
      file has a number of its own, the others have one.
    gather: gathering of weights that ZeRO splits: in every `tick` that needs them, or once per `step`,
      which holds them whole until its end.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    gather: Literal["tick", "step"] = "tick"

    def __post_init__(self) -> None:
        name = self.schedule
        # A path is told by its ending alone: the file is read when the layout is made.
        if name not in PUBLISHED_SCHEDULES and not self.is_file:
            raise UserError(
                f"pipeline.schedule={name!r} is not a schedule: {did_you_mean(name, PUBLISHED_SCHEDULES)}there are "
                f"{', '.join(PUBLISHED_SCHEDULES)}, or the path of a CSV file (.csv)."
            )
        if name == "interleaved" and self.chunks < 2:
            raise UserError(
                f"pipeline.chunks={self.chunks} with pipeline.schedule=interleaved: it alternates between "
                "the chunks of a worker, at least two. Set pipeline.chunks=2, or pipeline.schedule=1f1b."
            )
        # Refused and not ignored: the number would change nothing.
        if name != "interleaved" and self.chunks != 1:
            reason = (
                "the file says the number of chunks"
                if self.is_file
                else f"{name} always has {self._fixed_chunks}"
            )
            raise UserError(
                f"pipeline.chunks={self.chunks} with pipeline.schedule={name}: {reason} per worker. Leave "
                "pipeline.chunks at 1, or set pipeline.schedule=interleaved."
            )

    @property
    def is_file(self) -> bool:
        """True if `schedule` is the path of a CSV file."""
        return self.schedule.endswith(".csv")

    @property
    def _fixed_chunks(self) -> int:
        return 2 if self.schedule in V_SHAPED else 1

    @property
    def chunks_per_worker(self) -> int:
        """Number of chunks that each worker has; only for schedules by name."""
        # The field counts for interleaved alone; elsewhere the schedule decides.
        return self.chunks if self.schedule == "interleaved" else self._fixed_chunks
