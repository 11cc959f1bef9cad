"""Bytes per device of a train step, by class, in closed form.

What the step is given (parameters, optimizer state, batch) is exact: the compiler's argument bytes, but for its
padding of scalars. The rest is an estimate of the worst of three moments, and each line below says what it stands for.
Compilers differ in what they keep, so the estimate errs by tenths; `tests/plan` holds how far.
"""

import dataclasses
import math

from jtrain.layout import Layout, ParamLayout, check_batch, itemsize
from jtrain.mesh import BATCH_AXES
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, moment_bytes
from jtrain.plan.collectives import kept_activations

_F32 = 4


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device at the worst moment of a step.

    parameters, optimizer, batch: what the step is given; exact.
    gradients: of all parameters, as they accumulate.
    weights: copies of weights that compute: gathered, or in the compute dtype; and a layer's gradient not yet reduced.
    activations: what the forward pass keeps for the backward pass.
    workspace: what one layer's backward pass holds besides, or the loss, or the embedding's gradient.
    moment: which of these it is: `loss`, `layer` or `embedding`.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    weights: int
    activations: int
    workspace: int
    moment: str

    @property
    def argument_bytes(self) -> int:
        return self.parameters + self.optimizer + self.batch

    @property
    def temp_bytes(self) -> int:
        return self.gradients + self.weights + self.activations + self.workspace

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes

    def classes(self) -> dict[str, int]:
        """Bytes of each class, by its name."""
        names = ("parameters", "optimizer", "batch", "gradients", "weights", "activations", "workspace")
        return {name: getattr(self, name) for name in names}


def memory(
    model: Transformer, layout: Layout, optimizer: AdamW | Muon, *, global_batch: int, seq_len: int
) -> MemoryPlan:
    """The closed form; milliseconds for any model.

    Raises:
      ValueError: the batch does not split evenly over the mesh and the microbatches.
    """
    spec, mesh = layout.spec, layout.mesh
    rows = check_batch(spec, mesh, global_batch=global_batch, seq_len=seq_len)
    param_size, compute, reduce = (itemsize(d) for d in (spec.param_dtype, spec.compute_dtype, spec.reduce_dtype))

    parameters = sum(layout.local_size(p.param, p.info.shape) * param_size for p in layout.params)
    state = sum(layout.local_size(p.optimizer, p.info.shape) * moment_bytes(optimizer, p.info) for p in layout.params)
    shards = math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, "context"))
    batch = 4 * 4 * global_batch * seq_len // shards + 4  # four int32 arrays, and the step

    # One microbatch's gradients in the parameters' dtype; added up, if there are several, in float32.
    one_microbatch = sum(layout.local_size(p.accumulator, p.info.shape) for p in layout.params)
    accumulated = one_microbatch * _F32 if spec.microbatches > 1 else 0
    gradients = one_microbatch * param_size + accumulated
    layer_gradients = gradients
    if spec.zero_stage == 1 and mesh.data > 1:
        gradients += sum(layout.local_size(p.optimizer, p.info.shape) * _F32 for p in layout.params)

    kept_per_layer, workspace = _layer(model, layout, rows=rows, seq_len=seq_len)
    activations = model.num_layers * kept_per_layer

    stacked = [p for p in layout.params if p.info.is_matrix and p.info.dims.startswith("Y")]
    one_layer = sum(_whole(layout, p) for p in stacked) // model.num_layers
    copies = (spec.zero_stage == 3 and mesh.data > 1) or spec.param_dtype != spec.compute_dtype
    keeps_copies = copies and kept_activations(layout) is None  # then the forward pass keeps those of all layers
    layer_weights = one_layer * compute * copies * (model.num_layers if keeps_copies else 1)
    reduced_later = spec.zero_stage >= 2 and mesh.data > 1
    layer_weights += max(_whole(layout, p) // model.num_layers for p in stacked) * reduce * reduced_later
    forward_weights = layer_weights if keeps_copies else 0

    # The loss computes its gradient at once, so the unembedding's is there, whole and float32, next to the logits of a
    # chunk: float32, their exponentials, and their gradient in the compute dtype.
    kernel = model.d_model * model.vocab_size
    tokens = rows * seq_len // mesh.tensor
    loss = kernel * (compute + _F32) + min(model.loss_chunk_tokens, tokens) * model.vocab_size * (_F32 + compute)
    loss += 2 * tokens * model.d_model * compute
    # The embedding's gradient is a scatter into a whole table, float32; then it is reduced.
    table = model.vocab_size // mesh.tensor * model.d_model
    embedding = table * _F32 * (1 if spec.zero_stage < 2 or mesh.data == 1 else 2)
    if spec.zero_stage < 2 and spec.microbatches == 1:
        embedding = 0  # it is one of the gradients already

    moments = {
        "loss": (accumulated, forward_weights, activations, loss),
        # The unembedding's gradient waits, in the compute dtype, for a reduction that may be scheduled late.
        "layer": (layer_gradients, layer_weights, activations, workspace + kernel * compute),
        "embedding": (gradients, 0, 0, embedding),
    }
    worst = max(moments, key=lambda name: sum(moments[name]))
    return MemoryPlan(parameters, state, batch, *moments[worst], moment=worst)


def _whole(layout: Layout, p: ParamLayout) -> int:
    """Elements of a parameter, all layers, whole over `data`."""
    return p.info.size // (layout.mesh.tensor if p.tensor_dim is not None else 1)


def _layer(model: Transformer, layout: Layout, *, rows: int, seq_len: int) -> tuple[int, int]:
    """Bytes that a layer keeps for its backward pass, and that its backward pass holds besides.

    Lists what the ops keep: a norm its input; a matmul its input; attention q, k, v, its result (also as the next
    matmul's input, heads last) and a float32 log-partition; SwiGLU gate and up.
    """
    tensor, compute = layout.mesh.tensor, itemsize(layout.spec.compute_dtype)
    tokens = rows * seq_len
    x = tokens // tensor * model.d_model * compute  # the residual stream, split by sequence
    h = tokens * model.d_model * compute  # gathered: what the matmuls read
    q = tokens * model.num_heads // tensor * model.head_dim * compute
    k = tokens * model.num_kv_heads // tensor * model.head_dim * compute
    lse = tokens * model.num_heads // tensor * _F32
    f = tokens * model.d_ff // tensor * compute
    before_norm = q + k if model.qk_norm else 0
    named = {
        "attention_q": q,
        "attention_k": k,
        "attention_v": k,
        "attention": 2 * q + lse,
        "attention_out": x,
        "mlp_gate": f,
        "mlp_up": f,
    }
    # q, k and v each keep the normed input under a shape of their own, and so do gate and up.
    everything = x + 3 * h + sum(named.values()) + before_norm + 2 * h + f
    kept_names = kept_activations(layout)
    kept = everything if kept_names is None else x + sum(named[name] for name in kept_names)
    # Attention's backward pass holds one chunk's probabilities and their gradient, in float32 and in the compute dtype.
    chunk = min(model.attention_chunk, seq_len)
    scores = rows * model.num_heads // tensor * chunk * seq_len * 2 * (_F32 + compute)
    mlp_half = 2 * f + 2 * h
    attention_half = scores + 4 * q + 4 * k * (_F32 // compute)
    once = everything - 3 * h  # recomputed, such copies are one array
    # The backward pass is done with the mlp, and has let go of what it recomputed for it, when it comes to attention.
    mlp_recomputed = 3 * f + h
    recomputed = max(once - kept, 0)
    workspace = max(recomputed + mlp_half, max(recomputed - mlp_recomputed, 0) + attention_half)
    return kept, workspace + 2 * x
