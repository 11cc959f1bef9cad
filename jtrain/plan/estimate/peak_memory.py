"""Temporaries alive on a device at each moment of a step that can be its peak, in closed form.

Arguments are not counted, because they live for the whole step. Every term is an array of
`jtrain.step.train_step`, `jtrain.step.zero` or `jtrain.model`, or a copy of one that a compiler makes;
comments give the compiler's reason.
Source: XLA's buffer assignment at its peak, read for H200 and v5p.
"""

import functools

from jtrain.layout.dims import kv_heads_in_use
from jtrain.layout.layout import ParamLayout
from jtrain.layout.precision import itemsize
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.saved_activations import (
    copies_weights,
    kept_names,
    named_bytes,
    offloaded_names,
    rows_per_token,
    wide_per_token,
)
from jtrain.model.unembedding import num_parts
from jtrain.optim.state import arrays
from jtrain.plan.estimate.attention_time import implementation
from jtrain.plan.estimate.pipeline import device_layers, kept_layers, ticks
from jtrain.plan.estimate.temporaries import Temporaries
from jtrain.plan.estimate.tpu_padding import local_elements
from jtrain.plan.job import Job
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.host_offload import SLICE_ELEMENTS
from jtrain.step.zero import gathers_once
from jtrain_kernels.cost import ATTENTION, padded_head
from jtrain_kernels.device import Platform

_F32 = 4
_VECTOR_MEMORY_BYTES = 48 * 2**20
"""Temporaries that XLA:TPU was seen to place in vector memory on a v5p."""


def worst_moment(job: Job) -> Temporaries:
    """Returns the temporaries of the moment of a job's step that takes the most memory.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    step = _Step(job)
    return max(
        (step.loss(), step.layer(), step.embedding(), step.update()),
        key=lambda temporaries: temporaries.bytes,
    )


def slot_bytes(job: Job) -> int:
    """Bytes that a chunk of a pipeline keeps of one microbatch between its forward and its backward pass."""
    step = _Step(job)
    assert step.ticks is not None
    return step.layers // step.ticks.chunks * step.layer_activations() + step.x


class _Step:
    """Sizes of one device's arrays while it computes one microbatch, in bytes.

    x: residual stream, split by sequence over `tensor`; h: the same, gathered, as matmuls read it.
    q: queries, or attention's output; k: keys, or values; lse: attention's log-partition.
    f: one of the MLP's wide arrays.
    heads: query heads; chunk: queries whose scores exist at a time.
    attention: implementation of attention; per_token: bytes of each named activation; carried: see
      `_accumulators`.
    pairs, rows_x: rows of tokens before and after they are sent to their experts; 0 for a dense model.
    """

    def __init__(self, job: Job) -> None:
        model, layout = job.model, job.layout
        spec, mesh = layout.spec, layout.mesh
        self.model, self.layout, self.rows, self.optimizer = model, layout, job.rows(), job.optimizer
        self.platform: Platform = job.platform
        self.seq_len = job.seq_len // mesh.context  # of this device
        self.param, self.compute, self.reduce = map(
            itemsize,
            (layout.precision.param_dtype, layout.precision.compute_dtype, layout.precision.reduce_dtype),
        )
        self.tokens, tensor = self.rows * self.seq_len, mesh.tensor
        self.layers, self.ticks = device_layers(layout, model.num_layers), ticks(layout)
        self.shards = tensor * mesh.stage  # of the vocabulary
        self.heads, self.chunk = model.num_heads // tensor, min(model.attention_chunk, self.seq_len)
        self.h = self.tokens * model.d_model * self.compute
        self.x = self.h // tensor
        self.q = self.tokens * self.heads * model.head_dim * self.compute
        kv_heads = kv_heads_in_use(model.num_kv_heads, tensor) // tensor
        self.k = self.tokens * kv_heads * model.head_dim * self.compute
        self.f = self.tokens * wide_per_token(layout) // tensor * self.compute
        self.pairs = self.h * (model.moe.top_k if model.moe else 0)
        self.rows_x = self.h * rows_per_token(layout)
        self.lse = self.tokens * self.heads * _F32
        self.casts = layout.precision.param_dtype != layout.precision.compute_dtype
        # A pipeline that gathers once per step holds all weights and gradients of its stage whole.
        self.gathers_all = gathers_once(layout) and mesh.zero_shards > 1
        # Each layer's gradients are reduced as soon as they are there.
        self.reduces = spec.zero_stage >= 2 and mesh.zero_shards > 1 and not self.gathers_all
        self.gathers = layout.gathers_weights and not self.gathers_all
        self.stacked = [p for p in layout.params if p.info.is_matrix and p.info.dims.startswith("Y")]
        self.names, self.offloaded = kept_names(layout), offloaded_names(layout)
        self.attention = implementation(job)
        self.per_token, self.accumulators = named_bytes(layout), self._accumulators()

    # Gradients
    # ---------------------------------------------------------------------------------------------------

    def _accumulators(self) -> int:
        """Sums on the device of gradients over microbatches; 0 if a step has one set of gradients."""
        if not sums_gradients(self.layout):
            return 0
        device_params = [p for p in self.layout.params if p.gradient_memory == "device"]
        return itemsize(self.layout.precision.grad_accum_dtype) * sum(
            self._accumulated(p) for p in device_params
        )

    def host_sums(self, layers: int) -> int:
        """Sums in host memory that are on the device meanwhile, of so many layers."""
        host_params = [p for p in self.layout.params if p.gradient_memory == "pinned_host"]
        layer_elements = sum(self._accumulated(p) for p in host_params) // self.layers
        return layers * layer_elements * itemsize(self.layout.precision.grad_accum_dtype)

    def gradients(self, *, layers: bool) -> int:
        """Gradients of one microbatch in the parameters' dtype: of the layers, or of embedding and
        unembedding.

        Sums get those of a layer before the next layer's are computed.
        """
        if self.ticks is not None:
            return self.layer_elements() * self.compute if layers else 0
        params = [p for p in self.layout.params if p.info.dims.startswith("Y") == layers]
        gradient_bytes = self.param * sum(self._accumulated(p) for p in params)
        return gradient_bytes // self.layers if layers and sums_gradients(self.layout) else gradient_bytes

    def _accumulated(self, p: ParamLayout) -> int:
        summed = p.spec(zero_sharded=False) if self.gathers_all else p.accumulator
        return local_elements(self.layout, summed, p.info.shape, self.platform)

    def unembedding_gradient(self) -> int:
        """Unembedding gradient of this device's columns, alive from the loss on: float32 and whole, or a
        shard.
        """
        kernel = self.model.d_model * self.model.vocab_size // self.shards
        if self.ticks is not None:
            return 0  # added to its sum at once
        if self.gathers and num_parts(self.model.vocab_size, self.shards) > 1:
            return kernel // self.layout.mesh.zero_shards * self.param
        return kernel * _F32

    # Weights
    # -----------------------------------------------------------------------------------------------------

    def gathered_elements(self, p: ParamLayout) -> int:
        """Elements of a parameter, all layers, gathered from its shards."""
        return self.layout.local_size(p.spec(zero_sharded=False), p.info.shape)

    def layer_elements(self) -> int:
        """Elements of one layer's matrices, gathered from their shards."""
        return sum(self.gathered_elements(p) for p in self.stacked) // self.layers

    def _hoisted(self) -> int:
        """Copies of parameters that XLA hoists out of the loops over layers and microbatches.

        XLA:TPU casts parameters before the loops. XLA:GPU gathers only along an array's slowest dimension, so
        it transposes parameters whose last dimension is split.
        """
        if self.platform == "tpu" and self.casts:
            matrices = [p for p in self.layout.params if p.info.is_matrix and p.shared_by == 1]
            return self.compute * sum(self.layout.local_size(p.param, p.info.shape) for p in matrices)
        if self.platform == "gpu" and self.gathers:
            transposed_params = [p for p in self.stacked if p.zero_dim == len(p.info.shape) - 1]
            return self.param * sum(self.layout.local_size(p.param, p.info.shape) for p in transposed_params)
        return 0

    @functools.cached_property
    def copied_parameters(self) -> int:
        """Copies of parameters that live while the layers compute."""
        if self.gathers_all and self.layout.spec.zero_stage == 3:
            gathered_bytes = self.compute * sum(
                self.gathered_elements(p) for p in self.layout.params if p.info.is_matrix
            )
            return gathered_bytes + self._own_heads()
        return self._hoisted() + self._own_heads()

    def _own_heads(self) -> int:
        """Kernels of shared key heads that a device computes with: exchanged at the start of the step, all
        layers.

        XLA:TPU copies parameters and state before the loops to the order in which their gradients will come.
        """
        shared = [p for p in self.layout.params if p.shared_by > 1]
        zero_sharded = self.layout.spec.zero_stage == 3
        size = self.compute if self.platform == "tpu" else self.param  # XLA:TPU casts before the loops
        exchanged = size * sum(
            self.layout.local_size(p.spec(zero_sharded=zero_sharded), p.info.shape) for p in shared
        )
        for p in shared if self.platform == "tpu" else ():
            size = self.param + sum(x.dtype.itemsize for x in arrays(self.optimizer, p.info).values())
            exchanged += size * local_elements(self.layout, p.optimizer, p.info.shape, "tpu")
        return exchanged

    def cast_weights(self) -> int:
        """Casts of the weights that a layer keeps without remat; 0 if the parameters have the compute
        dtype.
        """
        copies = self.casts and self.names is None
        return self.layer_elements() * self.layers * self.compute if copies else 0

    def streamed_parameters(self) -> int:
        """Parameters fetched from host memory: those of the current layer and of the next."""
        host_params = [p for p in self.stacked if p.param_memory == "pinned_host"]
        local = sum(self.layout.local_size(p.param, p.info.shape) for p in host_params) // self.layers
        return 2 * self.param * local

    # Activations
    # -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def activations(self) -> int:
        """Activations of all layers that wait for their backward pass.

        Under a pipeline those of the microbatches in flight, in the slots of `jtrain.pipeline.ticks`: what
        each layer keeps, the inputs and cotangents of chunks, and what gradients of weights still need: for
        each product its input and the gradient of its result. An output and a gradient of a chunk are on
        their way.
        """
        if self.ticks is None:
            return self.layers * self.layer_activations()
        per_chunk = self.layers // self.ticks.chunks
        passing = (self.ticks.num_inputs + self.ticks.num_cotangents + 2) * self.x
        stashed = self.ticks.num_stashes * per_chunk * (4 * self.h + 2 * self.q + 2 * self.k + 3 * self.f)
        return kept_layers(self.layout, self.layers) * self.layer_activations() + passing + stashed

    def layer_activations(self) -> int:
        """Activations that one layer's forward pass keeps on the device for its backward pass.

        Without remat: the inputs and outputs of both norms, q, k, v, attention's output as it is and as the
        next matmul reads it, gate, up and their product.
        """
        if self.names is None:
            before_norm = self.q + self.k if self.model.qk_norm else 0
            of_rows = self.rows_x + self.pairs  # inputs and outputs of the experts
            return (
                2 * self.x
                + 2 * self.h
                + 3 * self.q
                + 2 * self.k
                + self.lse
                + 3 * self.f
                + before_norm
                + of_rows
            )
        on_device = [name for name in (LAYER_INPUT, *self.names) if name not in self.offloaded]
        return sum(self._named(name) for name in on_device)

    def _named(self, name: str) -> int:
        """Bytes of one layer's activation of this name on one device."""
        return self.tokens // self.layout.mesh.tensor * self.per_token[name]

    def fetched_activations(self) -> int:
        """Offloaded activations of the current layer, and those of the next on their way."""
        return 2 * sum(self._named(name) for name in self.offloaded)

    # Moments
    # -----------------------------------------------------------------------------------------------------

    def loss(self) -> Temporaries:
        """Temporaries at the loss: a chunk's float32 logits, their exponentials, and their gradient in the
        compute dtype.

        The loss computes its gradient in the same pass, so the float32 gradients of the unembedding and of
        the hidden states are alive too. The vocabulary is taken whole or in parts. Over `tensor` a device has
        its own columns and the hidden states of all devices: one chunk at a time, or all of them if its
        columns come in parts.
        """
        model, tensor = self.model, self.shards
        chunk = min(model.loss_chunk, -(-self.tokens // tensor))
        parts = num_parts(model.vocab_size, tensor) if self.gathers else 1
        columns = -(-model.vocab_size // tensor // parts)
        kernel = model.d_model * columns
        loss = kernel * (self.compute + _F32) + 2 * self.x
        if parts > 1:
            loss += chunk * columns * (2 * _F32 + self.compute)
            loss += self.unembedding_gradient() + kernel * self.reduce + 2 * self.h * _F32 // self.compute
        else:
            loss += chunk * tensor * columns * (2 * _F32 + self.compute)
        if tensor > 1:
            loss += 2 * (self.h if parts > 1 else chunk * tensor * model.d_model * self.compute)
        return Temporaries(
            "loss",
            gradients=self.accumulators + self.host_sums(1),  # the last layer's, on their way
            weights=self.copied_parameters + self.cast_weights() + self.streamed_parameters(),
            activations=self.activations + self.fetched_activations() // 2,  # the last layer's, on their way
            loss=loss,
        )

    def layer(self) -> Temporaries:
        """Temporaries in a layer's backward pass."""
        weights = self.copied_parameters + self.cast_weights() + self.streamed_parameters()
        if self.gathers:
            weights += self.layer_elements() * self.compute
        if self.reduces:
            # A layer's gradients are reduced while the layer before it computes. XLA:TPU keeps only the
            # largest of them waiting.
            sizes = [self.gathered_elements(p) // self.layers for p in self.stacked]
            weights += self.reduce * (max(sizes) if self.platform == "tpu" else sum(sizes))
        return Temporaries(
            "layer",
            # The sums of this layer, of the layer before it on their way, and of the one after it on their
            # way back.
            gradients=self.accumulators + self.gradients(layers=True) + self.host_sums(3),
            weights=weights,
            activations=self.activations + self.fetched_activations(),
            loss=self.unembedding_gradient(),
            workspace=(self._tpu_workspace() if self.platform == "tpu" else self._workspace())
            + self._over_context(),
        )

    def _mlp(self) -> int:
        """Gate, up and their gradients; if gate and up are kept activations, their product in place of both.

        A mixture adds rows of tokens with their gradients, and one more copy of arriving rows if they are
        exchanged.
        """
        keeps_gate_and_up = self.names is None or {"mlp_gate", "mlp_up"} <= set(self.names)
        copies = 2 if self.layout.mesh.expert == 1 else 3
        return (3 if keeps_gate_and_up else 4) * self.f + 2 * self.pairs + copies * self.rows_x

    def _workspace(self) -> int:
        """Workspace in attention's backward pass on a GPU or CPU, while the MLP's wide arrays are still
        alive.

        The MLP's arrays stay because XLA computes its weight gradients after attention. Besides them there
        are the layer's input and its gradient, the outputs of the norms, attention's output and its gradient,
        and kept activations sliced out of the stack of all layers, or recomputed.
        """
        sliced = 2 * self.h + self.x + self.q if self.names is None else 0
        return self._mlp() + sliced + 2 * self.h + 2 * self.x + 2 * self.q + self._scores()

    def _scores(self) -> int:
        """Workspace of attention's own backward pass on a GPU or CPU.

        In plain XLA probabilities and their gradient, in float32 and in the compute dtype, for a chunk of
        queries with all keys, and for every chunk its float32 mask and its part of the keys. A fused kernel
        holds no scores, but gradients of queries, keys and values, and all arrays once more where it pads
        heads; cuDNN has a mask in the compute dtype.
        """
        if self.attention in ATTENTION:
            mask = self.rows * self.seq_len * self.seq_len * self.compute if self.attention == "cudnn" else 0
            size = self.model.head_dim
            width = padded_head(self.attention, size)
            padded = 4 * (self.q + self.k) // size * width if width > size else 0
            return self.q + 2 * self.k + self.lse + mask + padded
        rows = 1 if self.platform == "cpu" else self.rows
        num_chunks = -(-self.seq_len // self.chunk)
        masks = rows * self.seq_len * (self.seq_len + self.chunk) // 2 * _F32
        keys = 2 * self.k * _F32 // self.compute + self.k * (num_chunks - 1) // 2
        return rows * self.heads * self.chunk * self.seq_len * self._score + masks + keys

    def _tpu_workspace(self) -> int:
        """Workspace of a layer's backward pass on a TPU, in the MLP or in attention, less what vector memory
        holds.

        It holds no experts' rows: grouped matmuls and exchanges take and return arrays in device memory. The
        arrays that both need are those of `_workspace`, with queries, keys and values in chunks as well.
        Attention holds one chunk of queries and one of keys at a time, the gradient of its output in chunks,
        and that of the queries in float32, while the gradients of gate and up are still alive.
        """
        shared_bytes = 2 * self.h + 2 * self.x + 3 * self.q + 4 * self.k
        keys = self.chunk if self.seq_len % self.chunk == 0 else self.seq_len
        attention = self.rows * self.heads * self.chunk * keys * self._score
        if self.seq_len > self.chunk:
            attention += self.q + self.q * _F32 // self.compute
        workspace_bytes = shared_bytes + max(self._mlp(), 2 * self.f + attention)
        return (
            workspace_bytes
            if self.model.moe
            else workspace_bytes - min(_VECTOR_MEMORY_BYTES, workspace_bytes // 3)
        )

    def _over_context(self) -> int:
        """Workspace of attention over `context`.

        A ring holds keys and values of two devices, their float32 gradients, that of the queries, and copies
        of the arrays that a hop pairs. An exchange of heads (ulysses) holds the exchanged arrays.
        """
        if self.layout.mesh.context == 1:
            return 0
        if self.layout.spec.context_attention == "ulysses":
            return 3 * self.q + 4 * self.k
        wide = _F32 // self.compute
        return 6 * self.k + 4 * self.k * wide + 3 * self.q + self.q * wide

    @property
    def _score(self) -> int:
        """Bytes per pair of query and key: probabilities and their gradient, in float32 and in the compute
        dtype.

        XLA:TPU holds one float32 array at a time.
        """
        return (_F32 if self.platform == "tpu" else 2 * _F32) + 2 * self.compute

    def embedding(self) -> Temporaries:
        """Temporaries at the embedding's gradient: a float32 scatter of the residual stream's, then a sum
        over devices.
        """
        model, mesh = self.model, self.layout.mesh
        table = model.vocab_size // self.shards * model.d_model
        workspace = table * _F32 + self.x
        if self.gathers:
            # The gradient of all devices' tokens, in this device's columns.
            workspace = table // mesh.zero_shards * _F32 + self.x * (1 + _F32 // self.compute)
        return Temporaries(
            "embedding",
            gradients=self.accumulators + self.gradients(layers=True),
            weights=self.copied_parameters,
            loss=self.unembedding_gradient(),
            workspace=workspace,
        )

    def update(self) -> Temporaries:
        """Temporaries at the update: all gradients, and under stage 1 their float32 shards.

        Under stages 1 and 2 the new parameters are gathered before they replace the old ones.
        """
        spec = self.layout.spec
        gradients = self.accumulators or self.gradients(layers=True) + self.gradients(layers=False)
        weights = 0
        if spec.zero_stage in (1, 2) and self.layout.mesh.zero_shards > 1:
            shards = _F32 * sum(self.layout.local_size(p.optimizer, p.info.shape) for p in self.layout.params)
            gathered_params = [p for p in self.layout.params if p.param != p.optimizer]
            gathered = self.param * sum(
                self.layout.local_size(p.param, p.info.shape) for p in gathered_params
            )
            if spec.zero_stage == 1:
                gradients += shards
            if shards + gathered > gradients:
                gradients, weights = shards, gathered
        streams = any(spec.offload.share(name) > 0 for name in ("optimizer", "gradients")) or (
            copies_weights(self.layout) and not self.gathers
        )
        sizes = [
            (self.layout.local_size(p.optimizer, p.info.shape), p.info.is_stacked) for p in self.layout.params
        ]
        largest = max(
            size // self.layers if stacked else size for size, stacked in sizes
        )  # a slice is of one layer
        slices = 4 * _F32 * min(SLICE_ELEMENTS, largest) if streams else 0
        return Temporaries("update", gradients=gradients, weights=weights, workspace=slices)
