"""Temporaries alive on a device at each moment of a step that can be its peak.

Arguments are not counted, because they live for the whole step. Arrays of the step are what its description
says that layers save, and the layout's blocks of parameters and gradients. Copies and workspaces of a compiler
are in closed form, read off XLA's buffer assignment at its peak for H200 and v5p; comments give its reason.
"""

import functools
from collections.abc import Callable, Iterable

from jax.sharding import PartitionSpec as P

from jtrain.layout.layout import ParamLayout
from jtrain.layout.precision import itemsize
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.saved_activations import copies_weights, kept_names, rows_per_token
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


def _gathered(p: ParamLayout) -> P:
    """Partition of a parameter that was gathered from its shards."""
    return p.spec(zero_sharded=False)


def worst_moment(job: Job) -> Temporaries:
    """Returns the temporaries of the moment of a job's step that takes the most memory.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    step = _Step(job)
    return max((step.loss(), step.layer(), step.embedding(), step.update()), key=lambda moment: moment.bytes)


def slot_bytes(job: Job) -> int:
    """Bytes that a chunk of a pipeline keeps of one microbatch between its forward and its backward pass."""
    step = _Step(job)
    assert step.ticks is not None
    return step.layers // step.ticks.chunks * step.layer_activations() + step.x


class _Step:
    """Sizes of one device's arrays while it computes one microbatch, in bytes.

    x: residual stream, split by sequence over `tensor`; h: the same, gathered, as matmuls read it.
    q: queries, or attention's output; k: keys, or values; lse: attention's log-partition.
    f: one of the MLP's wide arrays; pairs, rows_x: rows of tokens before and after they are sent to their
      experts, 0 for a dense model.
    """

    def __init__(self, job: Job) -> None:
        model, layout, precision = job.model, job.layout, job.layout.precision
        mesh, named, tensor = layout.mesh, job.step.named_bytes, layout.mesh.tensor
        self.model, self.layout, self.rows, self.optimizer = model, layout, job.rows(), job.optimizer
        self.platform: Platform = job.platform
        self.attention = implementation(job)
        self.seq_len = job.seq_len // mesh.context  # of this device
        self.tokens = self.rows * self.seq_len
        self.param, self.compute = itemsize(precision.param_dtype), itemsize(precision.compute_dtype)
        self.reduce, self.accumulated = itemsize(precision.reduce_dtype), itemsize(precision.grad_accum_dtype)
        self.casts = precision.param_dtype != precision.compute_dtype
        self.layers, self.ticks = device_layers(layout, model.num_layers), ticks(layout)
        self.shards = tensor * mesh.stage  # of the vocabulary
        self.heads, self.chunk = model.num_heads // tensor, min(model.attention_chunk, self.seq_len)
        self.names, self.saved = kept_names(layout), job.step.saved
        self.x, self.q, self.k, self.f = (
            named[name] for name in (LAYER_INPUT, "attention_q", "attention_k", "mlp_gate")
        )
        self.h, self.lse = self.x * tensor, named["attention"] - self.q
        self.pairs, self.rows_x = (
            self.h * (model.moe.top_k if model.moe else 0),
            self.h * rows_per_token(layout),
        )
        # A pipeline that gathers once per step holds all weights and gradients of its stage whole.
        self.gathers_all = gathers_once(layout) and mesh.zero_shards > 1
        self.gathers = layout.gathers_weights and not self.gathers_all
        self.sums = sums_gradients(layout)
        self.stacked = [p for p in layout.params if p.info.is_matrix and p.info.dims.startswith("Y")]
        self.accumulators = self._sums_in("device")

    # Arrays of the step: gradients
    # ---------------------------------------------------------------------------------------------------

    def _sums_in(self, memory: str) -> int:
        """Sums of gradients over microbatches in this memory; 0 if a step has one set of gradients."""
        summed = [p for p in self.layout.params if p.gradient_memory == memory] if self.sums else []
        return self.accumulated * sum(self._accumulated(p) for p in summed)

    def host_sums(self, layers: int) -> int:
        """Sums in host memory that are on the device meanwhile, of so many layers."""
        return layers * (self._sums_in("pinned_host") // self.layers)

    def gradients(self, *, layers: bool) -> int:
        """Gradients of one microbatch in the parameters' dtype: of the layers, or of embedding and
        unembedding.

        Sums get those of a layer before the next layer's are computed.
        """
        if self.ticks is not None:
            return self.layer_elements() * self.compute if layers else 0
        params = [p for p in self.layout.params if p.info.dims.startswith("Y") == layers]
        gradient_bytes = self.param * sum(self._accumulated(p) for p in params)
        return gradient_bytes // self.layers if layers and self.sums else gradient_bytes

    def _accumulated(self, p: ParamLayout) -> int:
        summed = _gathered(p) if self.gathers_all else p.accumulator
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

    # Arrays of the step: weights
    # -----------------------------------------------------------------------------------------------------

    def _elements(self, params: Iterable[ParamLayout], spec: Callable[[ParamLayout], P]) -> int:
        """Elements on a device of all layers of these parameters, partitioned by `spec`."""
        return sum(self.layout.local_size(spec(p), p.info.shape) for p in params)

    def layer_elements(self) -> int:
        """Elements of one layer's matrices, gathered from their shards."""
        return self._elements(self.stacked, _gathered) // self.layers

    def streamed_parameters(self) -> int:
        """Parameters fetched from host memory: those of the current layer and of the next."""
        host_params = [p for p in self.stacked if p.param_memory == "pinned_host"]
        return 2 * self.param * (self._elements(host_params, lambda p: p.param) // self.layers)

    def layer_weights(self) -> int:
        """Copies of weights that live while the layers compute, with those that all layers save."""
        saved = self.layers * sum(array.bytes for array in self.saved if array.of_weights)
        return self.copied_parameters + saved + self.streamed_parameters()

    @functools.cached_property
    def copied_parameters(self) -> int:
        """Copies of parameters of all layers that live while the layers compute."""
        if self.gathers_all and self.layout.spec.zero_stage == 3:
            matrices = [p for p in self.layout.params if p.info.is_matrix]
            return self.compute * self._elements(matrices, _gathered) + self._own_heads()
        return self._hoisted() + self._own_heads()

    # Arrays of the step: activations
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
        """Activations that one layer's forward pass keeps on the device for its backward pass."""
        return self._saved_in("device") + self._output_copy()

    def _saved_in(self, memory: str) -> int:
        """Bytes of one layer's saved activations in this memory."""
        return sum(array.bytes for array in self.saved if array.memory == memory and not array.of_weights)

    def fetched_activations(self) -> int:
        """Offloaded activations of the current layer, and those of the next on their way."""
        return 2 * self._saved_in("pinned_host")

    # Copies and workspaces of the compilers
    # -----------------------------------------------------------------------------------------------------

    def _output_copy(self) -> int:
        """Attention's output once more, in the order in which the next matmul reads it: XLA saves both without
        remat, unless an exchange of heads has made that order.
        """
        reads_output = self.names is None and any(array.name == "attention_q" for array in self.saved)
        return reads_output * self.q

    def _hoisted(self) -> int:
        """Copies of parameters that XLA hoists out of the loops over layers and microbatches.

        XLA:TPU casts parameters before the loops. XLA:GPU gathers only along an array's slowest dimension, so
        it transposes parameters whose last dimension is split.
        """
        if self.platform == "tpu" and self.casts:
            matrices = [p for p in self.layout.params if p.info.is_matrix and p.shared_by == 1]
            return self.compute * self._elements(matrices, lambda p: p.param)
        if self.platform == "gpu" and self.gathers:
            transposed_params = [p for p in self.stacked if p.zero_dim == len(p.info.shape) - 1]
            return self.param * self._elements(transposed_params, lambda p: p.param)
        return 0

    def _own_heads(self) -> int:
        """Kernels of shared key heads that a device computes with: exchanged at the start of the step, all
        layers.

        XLA:TPU casts them before the loops, and copies parameters and state to the order in which their
        gradients will come.
        """
        shared = [p for p in self.layout.params if p.shared_by > 1]
        elements = self._elements(shared, lambda p: p.spec(zero_sharded=p.zero_stage == 3))
        if self.platform != "tpu":
            return self.param * elements
        copies = 0
        for p in shared:
            size = self.param + sum(x.dtype.itemsize for x in arrays(self.optimizer, p.info).values())
            copies += size * local_elements(self.layout, p.optimizer, p.info.shape, "tpu")
        return self.compute * elements + copies

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

    # Moments
    # -----------------------------------------------------------------------------------------------------

    def loss(self) -> Temporaries:
        """Temporaries of the loss: a chunk's float32 logits, their exponentials, and their gradient in the compute
        dtype.

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
            weights=self.layer_weights(),
            activations=self.activations + self.fetched_activations() // 2,  # the last layer's, on their way
            loss=loss,
        )

    def layer(self) -> Temporaries:
        """Temporaries of a layer's backward pass."""
        weights = self.layer_weights()
        if self.gathers:
            weights += self.layer_elements() * self.compute
        if self.layout.spec.zero_stage >= 2 and self.layout.mesh.zero_shards > 1 and not self.gathers_all:
            # A layer's gradients are reduced while the layer before it computes. XLA:TPU keeps only the
            # largest of them waiting.
            sizes = [self._elements([p], _gathered) // self.layers for p in self.stacked]
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

    def embedding(self) -> Temporaries:
        """Temporaries of the embedding's gradient: a float32 scatter of the residual stream's, then a sum over
        devices.
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
        """Temporaries of the update: all gradients, and under stage 1 their float32 shards.

        Under stages 1 and 2 the new parameters are gathered before they replace the old ones.
        """
        spec = self.layout.spec
        gradients = self.accumulators or self.gradients(layers=True) + self.gradients(layers=False)
        weights = 0
        if spec.zero_stage in (1, 2) and self.layout.mesh.zero_shards > 1:
            shards = _F32 * self._elements(self.layout.params, lambda p: p.optimizer)
            gathered_params = [p for p in self.layout.params if p.param != p.optimizer]
            gathered = self.param * self._elements(gathered_params, lambda p: p.param)
            if spec.zero_stage == 1:
                gradients += shards
            if shards + gathered > gradients:
                gradients, weights = shards, gathered
        streams = any(spec.offload.share(name) > 0 for name in ("optimizer", "gradients")) or (
            copies_weights(self.layout) and not self.gathers
        )
        # A slice is of one layer.
        largest = max(
            self._elements([p], lambda p: p.optimizer) // (self.layers if p.info.is_stacked else 1)
            for p in self.layout.params
        )
        slices = 4 * _F32 * min(SLICE_ELEMENTS, largest) if streams else 0
        return Temporaries("update", gradients=gradients, weights=weights, workspace=slices)
