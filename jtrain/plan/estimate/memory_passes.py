"""Seconds of a step's passes over memory: norms, residuals, rotations, SwiGLU, rows sent to experts, the
loss, casts.

Those of the layers are read off the step's trace. Those of the loss are in closed form: how often a chunk of
logits passes through memory is a matter of the compiler, for no kernel holds a row of the vocabulary.
"""

import dataclasses

from jtrain.plan.job import Job

LOGIT_BYTES = 12
"""Bytes of memory traffic per logit: float32 logits are written, read for their sum and read for their
gradient."""

CAST_BYTES = 8
"""Bytes per parameter beside the layers and microbatch where parameters have another dtype than matmuls."""


@dataclasses.dataclass(frozen=True)
class MemoryPasses:
    """Seconds of passes over memory of one step on one device.

    experts_s: the part of `forward_s` and `backward_s` that is beside the experts' matmuls.
    """

    forward_s: float
    backward_s: float
    loss_s: float
    experts_s: float

    @property
    def all_s(self) -> float:
        """Seconds of all passes."""
        return self.forward_s + self.backward_s + self.loss_s


def memory_passes(job: Job, bytes_per_s: float) -> MemoryPasses:
    """Seconds at `bytes_per_s`, the bandwidth that passes over memory reach."""
    model, layout, mesh = job.model, job.layout, job.layout.mesh
    passes = job.step.passes
    # The recomputation runs in the backward pass.
    forward_bytes = sum(memory_pass.bytes for memory_pass in passes if memory_pass.when == "forward")
    backward_bytes = sum(memory_pass.bytes for memory_pass in passes if memory_pass.when != "forward")
    # The vocabulary is split over the stages of a pipeline too.
    tokens = job.rows() * layout.spec.microbatches * job.seq_len // mesh.context
    loss_bytes = tokens * model.vocab_size * LOGIT_BYTES / mesh.tensor / mesh.stage
    precision = layout.precision
    unstacked = (
        p for p in layout.params if not p.info.is_stacked and p.dtype(precision) != precision.compute_dtype
    )
    elements = sum(layout.local_size(p.param_partition, p.info.shape) for p in unstacked)
    loss_bytes += elements * CAST_BYTES * layout.spec.microbatches
    return MemoryPasses(
        forward_bytes / bytes_per_s,
        backward_bytes / bytes_per_s,
        loss_bytes / bytes_per_s,
        sum(memory_pass.bytes for memory_pass in passes if memory_pass.of_experts) / bytes_per_s,
    )
