"""The training job that a plan is made for: model, layout, optimizer, batch shape and machine."""

import dataclasses
import functools

from jtrain.layout.batch_split import check_batch
from jtrain.layout.layout import Layout, LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.plan.estimate.machine import Machine
from jtrain.step.description.step_description import StepDescription
from jtrain.step.objective import TOKENS, Objective
from jtrain_kernels.device import Platform


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides the bytes, FLOPs and network traffic of a train step.

    layout: where every array of the model lives, with the number formats.
    global_batch: sequences per step, over all devices; seq_len: tokens of each sequence.
    machine: the devices that the step runs on; None if only bytes are asked for, which are then those of a
      GPU.
    objective: the loss, which may have forward passes of its own.
    """

    model: Transformer
    layout: Layout
    optimizer: AdamW | Muon
    global_batch: int
    seq_len: int
    machine: Machine | None = None
    objective: Objective = TOKENS

    @property
    def platform(self) -> Platform:
        """Platform whose compiler decides what a step keeps in memory."""
        # Bytes without a machine are those of a GPU's compiler.
        return "gpu" if self.machine is None else self.machine.device.platform

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices."""
        return self.global_batch * self.seq_len

    def rows(self) -> int:
        """Sequences that one device computes at a time: its share of one microbatch.

        Raises:
          UserError: the batch does not split evenly over the mesh and the microbatches.
        """
        return check_batch(
            self.layout.spec, self.layout.mesh, global_batch=self.global_batch, seq_len=self.seq_len
        )

    @functools.cached_property
    def step(self) -> StepDescription:
        """Matmuls, messages and saved arrays of the step.

        Raises:
          UserError: as `rows`.
        """
        return StepDescription(self.model, self.layout, self.rows(), self.seq_len, self.objective)

    def relaid(self, spec: LayoutSpec, mesh: MeshSpec, *, global_batch: int | None = None) -> "Job":
        """The same job with another layout, and another batch if one is given.

        Raises:
          UserError: a dimension of the model does not split evenly, as in `make_layout`.
        """
        return dataclasses.replace(
            self,
            layout=self.layout.relaid(spec, mesh),
            # None keeps the batch; a batch of 0 must arrive, so that it is refused.
            global_batch=self.global_batch if global_batch is None else global_batch,
        )
