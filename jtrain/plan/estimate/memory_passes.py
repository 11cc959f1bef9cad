"""Seconds of a step's passes over memory: norms, residuals, rotations, SwiGLU, rows sent to experts, the
loss, casts.

XLA and the kernels fuse such operations, but each group still reads and writes arrays of the residual stream
or of the feed-forward layer. The counts below are those of kernels that make one pass of a norm and of SwiGLU
(`jtrain_kernels.cost`); XLA alone makes more.
"""

import dataclasses

from jtrain.layout.precision import itemsize
from jtrain.plan.estimate.pipeline import device_layers
from jtrain.plan.job import Job

WIDTH_FORWARD, WIDTH_BACKWARD = 10, 18
"""Passes over an array of [tokens, D]: two norms with the residuals; the backward pass computes the norms
again."""

HEADS = 2
"""Passes over queries and keys in each direction: rotations."""

HIDDEN_FORWARD, HIDDEN_BACKWARD = 3, 5
"""Passes over an array of [tokens, F]: SwiGLU, again if it is recomputed."""

ROUTED, EXCHANGED = 4, 2
"""Passes over the rows of all chosen experts, [tokens * top_k, D], in each of the forward pass, its
recomputation and the backward pass: rows are read and written on their way to the experts and back. An
exchange over `expert` adds 2."""

LOGIT_BYTES = 12
"""Bytes of memory traffic per logit: float32 logits are written, read for their sum and read for their
gradient."""

CAST_BYTES = 8
"""Bytes per parameter and microbatch where parameters have another dtype than matmuls."""


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
    # `tensor` splits the residual stream by sequence and wide arrays by columns: either way 1 / tensor.
    tokens = job.rows() * layout.spec.microbatches * job.seq_len // mesh.context / mesh.tensor
    element_s = itemsize(layout.precision.compute_dtype) / bytes_per_s
    # Seconds of one pass over one column of all tokens in all layers of a device.
    column_s = tokens * device_layers(layout, model.num_layers) * element_s
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    recomputes_mlp = bool({"mlp_gate", "mlp_up"} & job.step.recomputed_names)
    routed = 0.0
    if model.moe is not None:
        routed = model.moe.top_k * model.d_model * (ROUTED + (EXCHANGED if mesh.expert > 1 else 0))
    hidden = model.active_d_ff
    forward = WIDTH_FORWARD * model.d_model + HEADS * heads + HIDDEN_FORWARD * hidden + routed
    backward = WIDTH_BACKWARD * model.d_model + HEADS * heads + HIDDEN_BACKWARD * hidden + routed
    # The recomputation runs in the backward pass.
    backward += recomputes_mlp * (HIDDEN_FORWARD * hidden + routed)
    expert_columns = (HIDDEN_FORWARD * (1 + recomputes_mlp) + HIDDEN_BACKWARD) * hidden + (
        2 + recomputes_mlp
    ) * routed
    # The vocabulary is split over the stages of a pipeline too.
    logits = tokens * model.vocab_size / mesh.stage
    casts_s = 0.0
    if layout.precision.param_dtype != layout.precision.compute_dtype:
        param_elements = sum(layout.local_size(p.param, p.info.shape) for p in layout.params)
        casts_s = param_elements * CAST_BYTES * layout.spec.microbatches / bytes_per_s
    return MemoryPasses(
        forward * column_s,
        backward * column_s,
        logits * LOGIT_BYTES / bytes_per_s + casts_s,
        expert_columns * column_s if model.moe else 0.0,
    )
