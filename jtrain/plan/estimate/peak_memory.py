"""Temporaries alive on a device at each moment of a step that can be its peak.

Arguments are not counted, because they live for the whole step. Arrays of the step are what its description
says that layers save and hold at their widest moment, and the layout's blocks of parameters and gradients.
Copies and workspaces of a compiler are in closed form, read off XLA's buffer assignment at its peak for H200
and v5p; comments give its reason.
"""

import functools
from collections.abc import Callable, Iterable

from jax.sharding import PartitionSpec as P

from jtrain.layout.layout import ParamLayout
from jtrain.layout.precision import itemsize
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.saved_activations import copies_weights, kept_names
from jtrain.model.unembedding import loss_chunk, num_parts
from jtrain.optim.state import arrays
from jtrain.plan.estimate.attention_kernel import attention_workspace
from jtrain.plan.estimate.pipeline import device_layers, kept_layers, ticks
from jtrain.plan.estimate.temporaries import Temporaries
from jtrain.plan.estimate.tpu_padding import local_elements
from jtrain.plan.job import Job
from jtrain.step.description.pattern_sizes import FIRST, LAST
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.host_offload import SLICE_ELEMENTS
from jtrain.step.zero import gathers_once
from jtrain_kernels.device import Platform

_F32 = 4


def _gathered(p: ParamLayout) -> P:
    """Partition of a parameter that was gathered from its shards."""
    return p.spec(zero_sharded=False)


def worst_moment(job: Job) -> Temporaries:
    """Returns the temporaries of the moment of a job's step that takes the most memory.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    step = _Step(job)
    moments = [step.loss(), step.layer(), step.embedding(), step.update()]
    moments += [step.single(path) for path in (FIRST, LAST) if step.has(path)]
    return max(moments, key=lambda moment: moment.bytes)


def slot_bytes(job: Job) -> int:
    """Bytes that a chunk of a pipeline keeps of one microbatch between its forward and its backward pass."""
    step = _Step(job)
    assert step.ticks is not None
    return step.layers // step.ticks.chunks * step.layer_activations() + step.x


class _Step:
    """Sizes of one device's arrays while it computes one microbatch, in bytes.

    A layer is a repetition of the model's pattern; those before and after the repetitions are single ones.

    x: residual stream, split by sequence over `tensor`; h: the same, gathered, as matmuls read it.
    """

    def __init__(self, job: Job) -> None:
        model, layout, precision = job.model, job.layout, job.layout.precision
        mesh = layout.mesh
        self.job, self.model, self.layout, self.optimizer = job, model, layout, job.optimizer
        self.platform: Platform = job.platform
        self.tokens = job.rows() * job.seq_len // mesh.context  # of this device
        self.param, self.compute = itemsize(precision.param_dtype), itemsize(precision.compute_dtype)
        self.reduce, self.accumulated = itemsize(precision.reduce_dtype), itemsize(precision.grad_accum_dtype)
        self.casts = precision.param_dtype != precision.compute_dtype
        self.layers, self.ticks = device_layers(layout, model.num_periods), ticks(layout)
        self.shards = mesh.tensor * mesh.stage  # of the vocabulary
        self.saved, self.x = job.step.saved, job.step.named_bytes[LAYER_INPUT]
        self.h = self.x * mesh.tensor
        # A pipeline that gathers once per step holds all weights and gradients of its stage whole.
        self.gathers_all = gathers_once(layout) and mesh.zero_shards > 1
        self.gathers = layout.gathers_weights and not self.gathers_all
        self.sums = sums_gradients(layout)
        self.stacked = [p for p in layout.params if p.info.is_matrix and p.info.dims.startswith("Y")]
        # Frozen parameters have no gradient and are never written.
        self.trained = layout.trained
        self.accumulators = self._sums_in("device")

    # Arrays of the step: gradients
    # ---------------------------------------------------------------------------------------------------

    def _sums_in(self, memory: str) -> int:
        """Sums of gradients over microbatches in this memory; 0 if a step has one set of gradients."""
        summed = [p for p in self.trained if p.gradient_memory == memory] if self.sums else []
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
            trained = [p for p in self.stacked if not p.info.frozen]
            return self._elements(trained, _gathered) // self.layers * self.compute if layers else 0
        params = [p for p in self.trained if p.info.dims.startswith("Y") == layers]
        gradient_bytes = self.param * sum(self._accumulated(p) for p in params)
        return gradient_bytes // self.layers if layers and self.sums else gradient_bytes

    def single_gradients(self, *paths: str) -> int:
        """Gradients of the layers of these paths, which come before the loop's or after them."""
        params = [p for p in self.trained if p.info.path.startswith(paths)]
        return self.param * sum(self._accumulated(p) for p in params)

    def _accumulated(self, p: ParamLayout) -> int:
        summed = _gathered(p) if self.gathers_all else p.accumulator_partition
        return local_elements(self.layout, summed, p.info.shape, self.platform)

    def unembedding_gradient(self) -> int:
        """Unembedding gradient of this device's columns, alive from the loss on: float32 and whole, or a
        shard.
        """
        kernel = self.model.d_model * self.model.vocab_size // self.shards
        if self.ticks is not None or not self._trains_unembedding:
            return 0  # added to its sum at once; a frozen one has none
        if self.gathers and num_parts(self.model.vocab_size, self.shards) > 1:
            return kernel // self.layout.mesh.zero_shards * self.param
        return kernel * _F32

    def _trains(self, path: str) -> bool:
        return any(p.info.path == path for p in self.trained)

    @property
    def _trains_unembedding(self) -> bool:
        return self._trains("embed_VD" if self.model.tie_embeddings else "unembed_DV")

    # Arrays of the step: weights
    # -----------------------------------------------------------------------------------------------------

    def _elements(self, params: Iterable[ParamLayout], spec: Callable[[ParamLayout], P]) -> int:
        """Elements on a device of all layers of these parameters, partitioned by `spec`."""
        return sum(self.layout.local_size(spec(p), p.info.shape) for p in params)

    def layer_elements(self) -> int:
        """Elements of one layer's matrices, gathered from their shards or made of their blocks."""
        return self._elements(self.stacked, _gathered) // self.layers

    def streamed_parameters(self) -> int:
        """Parameters fetched from host memory: those of the current layer and of the next."""
        host_params = [p for p in self.stacked if p.param_memory == "pinned_host"]
        return 2 * self.param * (self._elements(host_params, lambda p: p.param_partition) // self.layers)

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
        stashes = self.ticks.num_stashes * per_chunk
        stashed = stashes * self.job.step.weight_input_bytes if stashes else 0
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
        """Attention's output once more, in the order in which the next matmul reads it: XLA saves both
        without remat, unless an exchange of heads has made that order.
        """
        keeps_all = kept_names(self.layout) is None
        return sum(array.bytes for array in self.saved if keeps_all and array.name == "attention_q")

    def _hoisted(self) -> int:
        """Copies of parameters that XLA hoists out of the loops over layers and microbatches.

        XLA:TPU casts parameters before the loops. XLA:GPU gathers only along an array's slowest dimension, so
        it transposes parameters whose last dimension is split.
        """
        if self.platform == "tpu" and self.casts:
            matrices = [p for p in self.layout.params if p.info.is_matrix and p.shared_by == 1]
            return self.compute * self._elements(matrices, lambda p: p.param_partition)
        if self.platform == "gpu" and self.gathers:
            transposed_params = [p for p in self.stacked if p.zero_dim == len(p.info.shape) - 1]
            return self.param * self._elements(transposed_params, lambda p: p.param_partition)
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
            copies += size * local_elements(self.layout, p.optimizer_partition, p.info.shape, "tpu")
        return self.compute * elements + copies

    # Moments
    # -----------------------------------------------------------------------------------------------------

    def loss(self) -> Temporaries:
        """Temporaries of the loss: a chunk's float32 logits, their exponentials, and their gradient in the
        compute dtype.

        The loss computes its gradient in the same pass, so the float32 gradients of the unembedding and of
        the hidden states are alive too. The vocabulary is taken whole or in parts. Over `tensor` a device has
        its own columns and the hidden states of all devices: one chunk at a time, or all of them if its
        columns come in parts.
        """
        model, tensor = self.model, self.shards
        chunk = min(loss_chunk(model.loss_chunk_tokens), -(-self.tokens // tensor))
        parts = num_parts(model.vocab_size, tensor) if self.gathers else 1
        columns = -(-model.vocab_size // tensor // parts)
        kernel = model.d_model * columns
        gradient = self._trains_unembedding  # the kernel's, in float32
        loss = kernel * (self.compute + gradient * _F32) + 2 * self.x
        if parts > 1:
            # Logits and their exponentials in float32, their gradient in the compute dtype.
            loss += chunk * columns * (2 * _F32 + self.compute)
            loss += (
                self.unembedding_gradient()
                + gradient * kernel * self.reduce
                + 2 * self.h * _F32 // self.compute
            )
        else:
            loss += chunk * tensor * columns * (2 * _F32 + self.compute)
        if tensor > 1:
            loss += 2 * (self.h if parts > 1 else chunk * tensor * model.d_model * self.compute)
        return Temporaries(
            "loss",
            gradients=self.accumulators + self.host_sums(1),  # the last layer's, on their way
            weights=self.layer_weights(),
            # The last layer's are on their way.
            activations=self.activations + self.fetched_activations() // 2 + self.kept_by(FIRST, LAST),
            loss=loss,
        )

    def layer(self) -> Temporaries:
        """Temporaries of a layer's backward pass."""
        weights = self.layer_weights()
        if self.gathers or self.layout.has_blocks:
            weights += self.layer_elements() * self.compute
        if self.layout.spec.zero_stage >= 2 and self.layout.mesh.zero_shards > 1 and not self.gathers_all:
            # A layer's gradients are reduced while the layer before it computes. XLA:TPU keeps only the
            # largest of them waiting.
            trained = [p for p in self.stacked if not p.info.frozen]
            sizes = [self._elements([p], _gathered) // self.layers for p in trained]
            weights += self.reduce * (max(sizes) if self.platform == "tpu" else sum(sizes))
        in_attention = attention_workspace(self.job)
        return Temporaries(
            "layer",
            # The sums of this layer, of the layer before it on their way, and of the one after it on their
            # way back.
            gradients=self.accumulators
            + self.gradients(layers=True)
            + self.single_gradients(LAST)
            + self.host_sums(3),
            weights=weights,
            activations=self.activations + self.fetched_activations() + self.kept_by(FIRST),
            loss=self.unembedding_gradient(),
            workspace=max(
                moment.bytes + moment.in_attention * in_attention for moment in self.job.step.moments
            ),
        )

    def has(self, path: str) -> bool:
        """True if the model has layers of this path beside the loop."""
        return bool(self.job.step.moments_of(path))

    def kept_by(self, *paths: str) -> int:
        """Activations that the layers of these paths keep."""
        return sum(self.job.step.saved_bytes(path) for path in paths)

    def single(self, path: str) -> Temporaries:
        """Temporaries of the backward pass of the layers before the loop, or of those after it."""
        is_last, in_attention = path == LAST, attention_workspace(self.job)
        params = [p for p in self.layout.params if p.info.is_matrix and p.info.path.startswith(path)]
        weights = self.copied_parameters
        if self.gathers or self.layout.has_blocks:
            weights += self.compute * self._elements(params, _gathered)
        stored_bytes = self.kept_by(FIRST, LAST) + self.activations if is_last else self.kept_by(FIRST)
        gradients = 0 if is_last else self.gradients(layers=True) + self.single_gradients(LAST)
        moments = self.job.step.moments_of(path)
        return Temporaries(
            "layer",
            gradients=self.accumulators + gradients + self.single_gradients(path),
            weights=weights,
            activations=stored_bytes,
            loss=self.unembedding_gradient(),
            workspace=max(moment.bytes + moment.in_attention * in_attention for moment in moments),
        )

    def embedding(self) -> Temporaries:
        """Temporaries of the embedding's gradient: a float32 scatter of the residual stream's, then a sum
        over devices.
        """
        model, mesh = self.model, self.layout.mesh
        table = model.vocab_size // self.shards * model.d_model
        workspace = table * _F32 + self.x
        if not self._trains("embed_VD"):
            workspace = self.x
        elif self.gathers:
            # The gradient of all devices' tokens, in this device's columns.
            workspace = table // mesh.zero_shards * _F32 + self.x * (1 + _F32 // self.compute)
        return Temporaries(
            "embedding",
            gradients=self.accumulators + self.gradients(layers=True) + self.single_gradients(FIRST, LAST),
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
            shards = _F32 * self._elements(self.trained, lambda p: p.optimizer_partition)
            gathered_params = [p for p in self.trained if p.param_partition != p.optimizer_partition]
            gathered = self.param * self._elements(gathered_params, lambda p: p.param_partition)
            if spec.zero_stage == 1:
                gradients += shards
            # First all gradients, later their shards with the gathered parameters: the larger moment counts.
            if shards + gathered > gradients:
                gradients, weights = shards, gathered
        streams = any(spec.offload.share(name) > 0 for name in ("optimizer", "gradients")) or (
            copies_weights(self.layout) and not self.gathers
        )
        # A slice is of one layer.
        largest = max(
            self._elements([p], lambda p: p.optimizer_partition) // (self.layers if p.info.is_stacked else 1)
            for p in self.trained
        )
        slices = 4 * _F32 * min(SLICE_ELEMENTS, largest) if streams else 0
        return Temporaries("update", gradients=gradients, weights=weights, workspace=slices)
