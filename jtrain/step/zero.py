"""ZeRO: gathers each weight for the matmul that uses it, and reduces and scatters its gradient.

All collectives run inside the step's fully-manual `jax.shard_map`. Shards lie along `data` and `context`
together (`jtrain.layout.mesh.ZERO_AXES`); `torus_collectives.py` gathers and scatters them. One rule finishes
every gradient: it is summed over each axis that does not split its parameter.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout, ParamLayout
from jtrain.layout.mesh import BATCH_AXES, unsplit_axes
from jtrain.model import ops
from jtrain.model.adapters.block_quantization import BlockQuantized, dequantize, is_quantized
from jtrain.model.adapters.dropout import KEY
from jtrain.model.forward_placement import Placement
from jtrain.model.layer_scan import Detached
from jtrain.model.param import Params, at_path, map_params
from jtrain.model.saved_activations import offloaded_names
from jtrain.model.split_backward import SplitKernel
from jtrain.step.torus_collectives import gather_shards, scatter_shards


def param_tree(layout: Layout, fn: Callable[[ParamLayout], Any]) -> Params:
    """Applies `fn` to the layout of every parameter; returns a tree like the parameters."""
    layouts = {p.info.path: p for p in layout.params}
    return map_params(lambda info: fn(layouts[info.path]), tuple(p.info for p in layout.params))


def trained_tree(layout: Layout, fn: Callable[[ParamLayout], Any]) -> Params:
    """`param_tree` of the parameters that steps change."""
    layouts = {p.info.path: p for p in layout.trained}
    return map_params(lambda info: fn(layouts[info.path]), tuple(p.info for p in layout.trained))


def trained_values(layout: Layout, params: Params) -> Params:
    """The parameters that steps change, without the frozen ones."""
    return map_params(lambda _, value: value, tuple(p.info for p in layout.trained), params)


def placement_of(layout: Layout) -> Placement:
    """Returns the functions and settings by which the model reads its weights inside the shard_map."""
    spec = layout.spec
    layouts = {p.info.path: p for p in layout.params}

    def fetch(path: str, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: fetch(f"{path}.{key}", value) for key, value in tree.items()}
        if isinstance(tree, SplitKernel):
            # Here and not where the layer is called: a layer would keep the copy that has no gradient, as it
            # keeps its input, in every slot of a pipeline.
            return dataclasses.replace(
                tree, value=fetch(path, jax.tree.map(jax.lax.stop_gradient, tree.value))
            )
        if isinstance(tree, ops.Fp8Kernel):
            if gathers_in_8_bits(layout) and _splits_data(layout, layouts[path]):
                with jax.named_scope(path.replace(".", "/")):
                    return _gather_in_8_bits(layout, layouts[path], tree)
            # Otherwise the matmul rounds the weight after it is gathered.
            return dataclasses.replace(tree, value=fetch(path, tree.value))
        if path.endswith(f".{KEY}"):
            return _attach(tree)  # no parameter: `with_dropout_keys`
        # Profiles use these names to tell which weight of which layer a collective moves.
        with jax.named_scope(path.replace(".", "/")):
            in_blocks = isinstance(tree, Detached) and is_quantized(tree.value)
            return (_fetch_blocks if in_blocks else _fetch)(layout, layouts[path], tree)

    return Placement(
        fetch=fetch,
        tensor=layout.mesh.tensor,
        tensor_overlap=spec.tensor_overlap,
        sequence_groups=spec.sequence_groups,
        mlp_chunk=spec.mlp_chunk,
        context=ops.RowSplit(layout.mesh.context, spec.context_attention, layout.context_order),
        expert=layout.mesh.expert,
        remat=spec.remat,
        remat_save=spec.remat_save,
        regather=layout.gathers_weights or layout.has_blocks,  # numbers of blocks are made again, too
        streams=any(p.param_memory == "pinned_host" for p in layout.params),
        offload=offloaded_names(layout),
        lookup=functools.partial(_lookup, layout) if layout.gathers_weights else None,
        adapter_scale=layout.adapter_scale,
        adapter_dropout=layout.adapter_dropout.rate if layout.adapter_dropout else 0.0,
        on_torus=bool(layout.rings),
    )


def exchange_heads(layout: Layout, params: Params) -> Params:
    """Returns the parameters with each shared key head's kernels on the devices that compute it.

    Between steps device i along `tensor` holds the i-th part of D of all heads. An all-to-all gives each
    device all of D of its own head. Under stages 1 and 2 the shards are gathered too, because then weights
    are whole.
    """

    def leaf(p: ParamLayout, value: Any) -> Any:
        # Codes and scales of a matrix in blocks have its dimensions.
        return value if p.shared_by == 1 else jax.tree.map(functools.partial(exchange, p), value)

    def exchange(p: ParamLayout, value: Array) -> Array:
        heads, width = p.info.dims.index("K"), p.info.dims.index("D")
        with jax.named_scope(p.info.path.replace(".", "/")):
            # One copy of a head for each device that computes it.
            value = jnp.repeat(value, p.shared_by, axis=heads)
            value = jax.lax.all_to_all(value, "tensor", split_axis=heads, concat_axis=width, tiled=True)
            # Stage 3 gathers D over ZeRO's axes later, layer by layer.
            if layout.spec.zero_stage in (1, 2) and _splits_data(layout, p):
                value = gather_shards(layout, value, width)
            return value

    return jax.tree.map(leaf, param_tree(layout, lambda p: p), params)


def _sum_shared(p: ParamLayout, grad: Array) -> Array:
    """Sums gradients of shared key heads over their devices; the transpose of `exchange_heads`."""
    heads, width = p.info.dims.index("K"), p.info.dims.index("D")
    parts = jax.lax.all_to_all(grad, "tensor", split_axis=width, concat_axis=heads, tiled=True)
    shape = parts.shape
    # The all-to-all left one copy of each head per device that computed it, side by side.
    parts = parts.reshape(*shape[:heads], -1, p.shared_by, *shape[heads + 1 :])
    return jnp.sum(parts, axis=heads + 1, dtype=jnp.float32)


def _splits_data(layout: Layout, p: ParamLayout) -> bool:
    return p.zero_dim is not None and layout.mesh.zero_shards > 1


def _is_detached(layout: Layout, p: ParamLayout) -> bool:
    """True if the forward pass reads another array than the one JAX differentiates.

    This holds under ZeRO-2 (full parameter, sharded gradient) and for parameters in host memory.
    """
    return p.param_memory == "pinned_host" or (layout.spec.zero_stage == 2 and _splits_data(layout, p))


def trained_part(layout: Layout, params: Params) -> Params:
    """Returns what JAX differentiates: arrays on the device, in the shapes of accumulated gradients.

    Under stage 2 parameters are whole but gradients are sharded, and a parameter in host memory accumulates
    its gradient on the device. Both get a placeholder of zeros with the gradient's shape; XLA removes it, as
    nothing reads its value.
    """
    layouts = {p.info.path: p for p in layout.trained}

    def leaf(info: ParamInfo, value: Array) -> Array:
        p = layouts[info.path]
        if not _is_detached(layout, p):
            return value
        shape = list(value.shape)
        if layout.spec.zero_stage == 2 and _splits_data(layout, p):
            assert p.zero_dim is not None
            shape[p.zero_dim] //= layout.mesh.zero_shards
        return jnp.zeros(shape, value.dtype)

    return map_params(leaf, tuple(p.info for p in layout.trained), params)


def attach_values(layout: Layout, trained: Params, params: Params) -> Params:
    """Pairs each array of `trained` with the one that the forward pass reads, where the two differ.

    Frozen weights of layers are `Detached` from nothing, and other frozen ones stay as they are.
    """

    def leaf(p: ParamLayout, value: Any) -> Any:
        if p.info.frozen:
            return Detached(None, value) if p.info.is_stacked else value
        array = at_path(trained, p.info.path)
        return Detached(array, value) if _is_detached(layout, p) else array

    return jax.tree.map(leaf, param_tree(layout, lambda p: p), params)


def gathers_once(layout: Layout) -> bool:
    """True if a step gathers a stage's weights and reduces their gradients once: `pipeline.gather=step`."""
    return (
        layout.pipeline is not None and layout.pipeline.spec.gather == "step" and layout.spec.zero_stage >= 2
    )


def gathers_in_8_bits(layout: Layout) -> bool:
    """True if 8-bit weights are rounded before they are gathered: half of the bytes, equal numbers.

    Only delayed scaling knows the scale of a whole weight before it is gathered.
    """
    return (
        layout.precision.matmul_dtype == "fp8_delayed"
        and layout.spec.zero_stage == 3
        and layout.pipeline is None
        and not layout.spec.tensor_overlap
    )


def gather_once(layout: Layout, params: Params) -> tuple[Layout, Params]:
    """Returns whole parameters, in the compute dtype, and the layout that uses them as ZeRO-1 does.

    Layers then gather nothing, and their gradients are whole until `scatter_once`.
    """
    # Under ZeRO-1 layers have whole weights and whole gradients, as they do between the two calls.
    spec = dataclasses.replace(layout.spec, zero_stage=1)

    def leaf(p: ParamLayout, value: Any) -> Any:
        if layout.spec.zero_stage < 3 or not _splits_data(layout, p):
            return value
        dim = p.zero_dim
        assert dim is not None
        value = value if is_quantized(value) else value.astype(layout.precision.compute_dtype)
        with jax.named_scope(p.info.path.replace(".", "/")):
            return jax.tree.map(lambda part: gather_shards(layout, part, dim), value)

    full_params = jax.tree.map(leaf, param_tree(layout, lambda p: p), params)
    return dataclasses.replace(layout, spec=spec), full_params


def scatter_once(layout: Layout, grads: Params) -> Params:
    """Returns this device's shards of the sums over `ZERO_AXES` of whole gradients, in float32."""

    def leaf(p: ParamLayout, grad: Array) -> Array:
        if not _splits_data(layout, p):
            return grad
        assert p.zero_dim is not None
        grad = scatter_shards(layout, grad.astype(layout.precision.reduce_dtype), p.zero_dim)
        return grad.astype(jnp.float32)

    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(leaf, trained_tree(layout, lambda p: p), grads)


def _fetch(layout: Layout, p: ParamLayout, leaf: Any) -> Array:
    """Returns one layer's weight for the forward pass: gathered, and matrices in the compute dtype."""
    spec = layout.spec
    if not p.info.is_matrix:
        return _attach(leaf)  # scales multiply in float32
    # A frozen weight has no gradient to scatter: under stage 2 it is whole, as under stage 1.
    if not _splits_data(layout, p) or spec.zero_stage < 2 or (p.info.frozen and spec.zero_stage == 2):
        return _attach(leaf).astype(layout.precision.compute_dtype)
    assert p.zero_dim is not None
    dim = p.zero_dim - p.info.dims.startswith("Y")  # the loop over layers has removed Y
    if spec.zero_stage == 2:
        return _use_full(layout, leaf.trained, leaf.value, dim)
    return _gather(layout, _attach(leaf), dim)


def _fetch_blocks(layout: Layout, p: ParamLayout, leaf: Detached) -> Array:
    """One layer's numbers of a frozen matrix in blocks; codes and scales are gathered, a quarter of the
    bytes.
    """
    blocks: BlockQuantized = jax.lax.stop_gradient(leaf.value)
    if layout.spec.zero_stage == 3 and _splits_data(layout, p) and p.zero_dim is not None:
        dim = p.zero_dim - p.info.dims.startswith("Y")
        blocks = jax.tree.map(lambda part: gather_shards(layout, part, dim), blocks)
    return dequantize(blocks, layout.precision.compute_dtype)


def _attach(leaf: Array | Detached) -> Array:
    """Returns the value for the forward pass; its gradient goes to the array that JAX differentiates."""
    if not isinstance(leaf, Detached):
        return leaf
    if leaf.trained is None:
        return jax.lax.stop_gradient(leaf.value)

    @jax.custom_vjp
    def value_of(trained: Array, value: Array) -> Array:
        del trained
        return value

    # None for `value`: a parameter in host memory gets no gradient there.
    value_of.defvjp(lambda trained, value: (value, None), lambda _, grad: (grad, None))
    return value_of(leaf.trained, leaf.value)


def _gather(layout: Layout, shard: Array, dim: int) -> Array:
    """Gathers a weight from its shards; the backward pass reduce-scatters its gradient."""
    return _scattering(
        layout,
        shard,
        dim,
        lambda shard: gather_shards(layout, shard.astype(layout.precision.compute_dtype), dim),
    )


def _gather_in_8_bits(layout: Layout, p: ParamLayout, kernel: ops.Fp8Kernel) -> ops.Fp8Kernel:
    """Gathers the shards of a weight after rounding them; the backward pass reduce-scatters its gradient."""
    assert p.zero_dim is not None
    shard, dim = _attach(kernel.value), p.zero_dim - p.info.dims.startswith("Y")
    full_shape = [
        size * (layout.mesh.zero_shards if index == dim else 1) for index, size in enumerate(shard.shape)
    ]
    dtype = layout.precision.compute_dtype
    # One scale for all shards, so rounding before the gather gives the bits of rounding after it.
    fp8_shard, amax = ops.rounded_weight(jax.lax.stop_gradient(shard).astype(dtype), kernel.scale_3[1])
    # Zeros that products do not read: they carry the gradient of the full weight back to the shard.
    value = _scattering(layout, shard, dim, lambda _: jnp.zeros(full_shape, dtype))
    return dataclasses.replace(kernel, value=value, rounded=(gather_shards(layout, fp8_shard, dim), amax))


def _scattering(layout: Layout, shard: Array, dim: int, forward_value: Callable[[Array], Array]) -> Array:
    """Returns `forward_value(shard)`; the backward pass reduce-scatters its gradient into the shard's."""
    use = jax.custom_vjp(forward_value)

    def backward(_: None, grad: Array) -> tuple[Array]:
        # Summed in the reduce dtype, then cast, because a cotangent must have its primal's dtype.
        return (scatter_shards(layout, grad.astype(layout.precision.reduce_dtype), dim).astype(shard.dtype),)

    use.defvjp(lambda shard: (use(shard), None), backward)
    return use(shard)


def _use_full(layout: Layout, shard: Array, full_weight: Array, dim: int) -> Array:
    """Returns the full weight in the compute dtype; its gradient is reduce-scattered into `shard`'s."""

    @jax.custom_vjp
    def use(shard: Array, full_weight: Array) -> Array:
        del shard
        return full_weight.astype(layout.precision.compute_dtype)

    def backward(_: None, grad: Array) -> tuple[Array, None]:
        return scatter_shards(layout, grad.astype(layout.precision.reduce_dtype), dim).astype(
            shard.dtype
        ), None

    use.defvjp(lambda shard, full_weight: (use(shard, full_weight), None), backward)
    return use(shard, full_weight)


def _lookup(layout: Layout, table_Vd: Array, token_BL: Array) -> Array:
    """Looks up rows of a table whose columns are split over `ZERO_AXES`.

    Each device looks up the tokens of all devices in its own columns; an all-to-all then gives each device
    all columns of its own tokens. The network carries B * L * D elements; gathering the table would take V *
    D. The gradient of the table is summed in float32 on the device that needs it.
    """
    # 4 bytes per token, against D elements per token on the way back.
    token_BL = jax.lax.all_gather(token_BL, layout.mesh.zero_axes, axis=0, tiled=True)
    x_BLd = ops.embedding_lookup(table_Vd, token_BL).astype(layout.precision.compute_dtype)
    return jax.lax.all_to_all(x_BLd, layout.mesh.zero_axes, split_axis=0, concat_axis=2, tiled=True)


def finish_gradient(layout: Layout, p: ParamLayout, grad: Array) -> Array:
    """Sums a gradient over the axes that do not split its parameter, into the optimizer's sharding.

    The sum is float32. A gradient that needs no sum keeps its dtype: the optimizer computes in float32
    anyway, and a float32 copy of a whole model's bfloat16 gradients would take twice their bytes.
    """
    if layout.spec.zero_stage == 1 and _splits_data(layout, p):
        assert p.zero_dim is not None
        grad = scatter_shards(layout, grad.astype(layout.precision.reduce_dtype), p.zero_dim)
    if p.shared_by > 1:
        grad = _sum_shared(p, grad.astype(layout.precision.reduce_dtype))
    # An axis that splits the gradient has been summed already, by a reduce-scatter or in the layer.
    axes = unsplit_axes(p.optimizer_partition, layout.mesh.shape)
    if not axes:
        return grad
    # Counts of tokens are exact in float32 only.
    dtype = "float32" if p.info.update == "expert_load" else layout.precision.reduce_dtype
    return jax.lax.psum(grad.astype(dtype), axes).astype(jnp.float32)


def psum_batch(layout: Layout, x: Array) -> Array:
    """Sums over the devices that hold different tokens."""
    return jax.lax.psum(x, tuple(axis for axis in (*BATCH_AXES, "context") if layout.mesh.shape[axis] > 1))
