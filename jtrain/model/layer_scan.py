"""Loop over layers, with prefetch of what lives in host memory, and with sums of gradients in place.

The plain loop is one `jax.lax.scan`. With weights or saved activations in host memory, a plain scan would
start each copy when its layer starts and wait for it, and it would save the weights of all layers for the
backward pass. Where the gradients of several microbatches are summed, it would hold the gradients of all
layers beside their sums. For all three there is a loop with its own forward and backward pass, which adds
each layer's gradients to their sums in place. A layer computes with arrays that arrived during the previous
layer, while those of the next layer are being copied: the arrays of two layers are on the device at a time.

| per microbatch, of Y layers | weights copied to the device | activations |
|---|---|---|
| forward | Y + 1: each layer once, and the last layer a second time, for the backward pass | 1: the last layer's |
| backward | Y: the previous layer each time, and the first layer a second time, unused | Y, the same |

Sums of gradients in host memory are fetched and written back Y + 1 times per microbatch, those of a layer
while the layers beside it compute: the sums of three layers are on the device at a time.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from jtrain.errors import UserError
from jtrain.model.param import Params

LAYER_INPUT = "layer_input"
"""The residual stream that enters a layer: always saved for the backward pass, on the device or in host
memory."""

type LayerCarry = Any
"""Pytree carried from layer to layer: the residual stream, and sums that layers add to (router losses)."""

type Layer = Callable[[LayerCarry, Params, Any], LayerCarry]
"""(carry, one layer's weights, values shared by all layers) -> carry."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detached:
    """Weight whose gradient has another shape or sharding than the weight itself.

    trained: the array that JAX differentiates; only its shape matters, its value is never read and XLA drops
      it.
    value: the array that the forward pass computes with.
    """

    trained: Array
    value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed:
    """Weight whose gradient is added to a sum while the backward pass goes from layer to layer.

    The gradient of `total` is the new sum. The weight itself gets no gradient.

    weight: stacked, [Y, ...], or a `Detached`.
    total: sum of the gradients of earlier microbatches, [Y, ...]; in host memory each layer's streams to the
      device and back.
    add: (sum of one layer, its gradient, number of the layer) -> new sum of the layer, in the dtype of
      `total`.
    """

    weight: Any
    total: Array
    add: Callable[[Array, Array, Array], Array] = dataclasses.field(metadata=dict(static=True))


def scan_layers(
    layer: Layer, x: LayerCarry, weights: Params, shared: Any, *, unroll: int, offload: tuple[str, ...] = ()
) -> LayerCarry:
    """`x = layer(x, weights[y], shared)` for every y of the stacked weights, differentiable in x and weights.

    Args:
      layer: must not save values derived from streamed weights: see `placement.checkpointed`.
      weights: stacked, [Y, ...]; a `Detached` whose value is in host memory is streamed, the gradient of a
        `Summed` is added to its sum.
      shared: values passed to every layer; not differentiated.
      unroll: layers per iteration of the compiled loop.
      offload: names of saved activations that are in host memory between the passes: LAYER_INPUT, and those
        of `checkpoint_name`.
    """
    leaves = jax.tree.leaves(weights, is_leaf=_is_leaf)
    streams = offload or any(map(_streams, leaves))
    if streams or any(isinstance(leaf, Summed) for leaf in leaves):
        check_scanned(unroll == 1 or not streams)
        return _looped(layer, x, weights, shared, unroll=unroll, offload=offload)
    return jax.lax.scan(lambda x, w: (layer(x, w, shared), None), x, weights, unroll=unroll)[0]


def check_scanned(scan_layers: bool) -> None:
    """Refuses offloaded weights, activations or gradients in an unrolled loop.

    Raises:
      UserError: the loop is unrolled.
    """
    if not scan_layers:
        raise UserError(
            "model.scan_layers=False with layout.offload.params, .activations or .gradients: only a loop "
            "fetches one layer while another computes; unrolled, XLA joins all layers' arrays on the device, "
            "or on the host's cores, and needs more memory than without. Set model.scan_layers=True."
        )


def _looped(
    layer: Layer, x: LayerCarry, weights: Params, shared: Any, *, unroll: int, offload: tuple[str, ...]
) -> LayerCarry:
    given, tree = jax.tree.flatten(weights, is_leaf=_is_leaf)
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    steps = jnp.arange(num_layers)
    # Each list has one entry per weight: None where the weight has no such array.
    leaves = [leaf.weight if isinstance(leaf, Summed) else leaf for leaf in given]
    sums = [leaf.total if isinstance(leaf, Summed) else None for leaf in given]
    near_sums = [None if total is None or _on_host(total) else total for total in sums]
    far_sums = [total if total is not None and _on_host(total) else None for total in sums]
    trained = [leaf.trained if _is_detached(leaf) else leaf for leaf in leaves]
    values = [leaf.value if _is_detached(leaf) else None for leaf in leaves]
    near = [None if value is None or _on_host(value) else value for value in values]
    far = [value if value is not None and _on_host(value) else None for value in values]

    def one(x: LayerCarry, trained: list[Array], values: list[Array | None], shared: Any) -> LayerCarry:
        pairs = zip(trained, values, strict=True)
        merged = [t if value is None else Detached(t, value) for t, value in pairs]
        return layer(x, jax.tree.unflatten(tree, merged), shared)

    def fetch(stacked: Any, index: Array | int) -> Any:
        slices = jax.tree.map(
            lambda value: jax.lax.dynamic_index_in_dim(value, index, keepdims=False), stacked
        )
        return jax.device_put(slices, jax.memory.Space.Device)

    def loop(
        compute: Callable[..., tuple[LayerCarry, Any]], x: LayerCarry, trained: Any, near: Any, far: Any
    ) -> Any:
        def body(carry: Any, now: Any) -> Any:
            (x, held), (y, trained, near) = carry, now
            ahead = fetch(far, jnp.minimum(y + 1, num_layers - 1))
            x, kept = compute(x, trained, _either(near, held))
            return (x, ahead), kept

        return jax.lax.scan(body, (x, fetch(far, 0)), (steps, trained, near), unroll=unroll)

    @jax.custom_vjp
    def run(
        x: LayerCarry, trained: Any, near: Any, far: Any, shared: Any, near_sums: Any, far_sums: Any
    ) -> LayerCarry:
        del near_sums, far_sums
        (x, _), _ = loop(
            lambda x, trained, values: (one(x, trained, values, shared), None), x, trained, near, far
        )
        return x

    def forward(
        x: LayerCarry, trained: Any, near: Any, far: Any, shared: Any, near_sums: Any, far_sums: Any
    ) -> Any:
        # Only the layer's input is saved; the backward pass gets weights and shared values again.
        keep = (True, False, False, False)

        def differentiate(*args: Any) -> tuple[LayerCarry, Any]:
            return jax.vjp(one, *args, shared, saveable_args=keep)

        def compute(*args: Any) -> tuple[LayerCarry, Any]:
            x, vjp = differentiate(*args)
            # The layer's input is an argument and has no name: for a name `jax.checkpoint` would save a copy
            # of it.
            saved: list[Any] = [vjp.args_res[0], *vjp.opaque_residuals]
            names: list[str | None] = [LAYER_INPUT]
            if offload:
                names += _names(lambda *args: differentiate(*args)[1].opaque_residuals, *args)
            goes = [name in offload for name, _ in itertools.zip_longest(names, saved)]
            vjp.args_res[0], *vjp.opaque_residuals = (
                None if go else x for go, x in zip(goes, saved, strict=True)
            )
            on_host = [x if go else None for go, x in zip(goes, saved, strict=True)]
            return x, (vjp, jax.device_put(on_host, jax.memory.Space.Host))

        (x, held), (vjps, saved) = loop(compute, x, trained, near, far)
        # Of the last layer, while the loss computes.
        back, sum_back = fetch((saved, far_sums), num_layers - 1)
        return x, (vjps, saved, held, back, trained, near, far, shared, near_sums, far_sums, sum_back)

    def backward(kept: Any, grad: LayerCarry) -> Any:
        vjps, saved, held, back, trained, near, far, shared, near_sums, far_sums, sum_back = kept

        def body(carry: Any, now: Any) -> Any:
            (grad, held, back, near_sums, far_sums, sum_back, new), (y, vjp, trained, near) = carry, now
            *ahead, sum_ahead = fetch((far, saved, far_sums), jnp.maximum(y - 1, 0))
            x, *vjp.opaque_residuals = _either([vjp.args_res[0], *vjp.opaque_residuals], back)
            vjp.args_res[:] = [x, trained, _either(near, held), shared]
            grad, trained_grad, _, _ = vjp(grad)
            if any(far_sum is not None for far_sum in far_sums):
                # Fetch before writing the same array: XLA does not know that the layers differ, and would
                # copy all of it. The largest gradient is known halfway: fetches run in the first half, writes
                # in the second.
                half = max(range(len(given)), key=lambda i: trained_grad[i].size)
                together = far_sums, sum_ahead, trained_grad[half]
                far_sums, sum_ahead, trained_grad[half] = jax.lax.optimization_barrier(together)
                # Of the layer after this one; the first time of this layer, unchanged.
                far_sums = _put(far_sums, new, jnp.minimum(y + 1, num_layers - 1))
            of_layer = jax.tree.map(
                lambda total: jax.lax.dynamic_index_in_dim(total, y, keepdims=False), near_sums
            )
            found = zip(given, _either(of_layer, sum_back), trained_grad, strict=True)
            added = [leaf.add(total, g, y) if isinstance(leaf, Summed) else None for leaf, total, g in found]
            here = [None if total is None else one for total, one in zip(near_sums, added, strict=True)]
            new = [None if total is None else one for total, one in zip(far_sums, added, strict=True)]
            rest = [
                None if isinstance(leaf, Summed) else g for leaf, g in zip(given, trained_grad, strict=True)
            ]
            return (grad, *ahead, _put(near_sums, here, y), far_sums, sum_ahead, new), rest

        first = (grad, held, back, near_sums, far_sums, sum_back, sum_back)
        xs = (steps, vjps, trained, near)
        (grad, *_, near_sums, far_sums, _, new), trained_grad = jax.lax.scan(
            body, first, xs, reverse=True, unroll=unroll
        )
        return grad, trained_grad, None, None, None, near_sums, _put(far_sums, new, 0)

    run.defvjp(forward, backward)
    return run(x, trained, near, far, shared, near_sums, far_sums)


def _put(totals: Any, new: Any, y: Array | int) -> Any:
    """Writes the sums of layer y into those of all layers, in place, in whichever memory they are."""

    def put(total: Array, new: Array) -> Array:
        if _on_host(total):
            new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
            new = jax.device_put(new, jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(total, new, y, 0)

    return jax.tree.map(put, totals, new)


def _names(fn: Callable[..., list[Array]], *args: Any) -> list[str | None]:
    """Returns the `checkpoint_name` of each array that `fn` returns; None for one without."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    names: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            names[eqn.outvars[0]] = eqn.params["name"]
        elif eqn.primitive.name == "reduce_precision" and eqn.invars[0] in names:
            names[eqn.outvars[0]] = names[eqn.invars[0]]  # `jax.checkpoint` rounds what it saves
    return [names.get(var) for var in jaxpr.outvars]


def _either(near: list[Any], held: list[Any]) -> list[Any]:
    return [b if a is None else a for a, b in zip(near, held, strict=True)]


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Detached | Summed)


def _is_detached(leaf: Any) -> bool:
    return isinstance(leaf, Detached)


def _streams(leaf: Any) -> bool:
    weight = leaf.weight if isinstance(leaf, Summed) else leaf
    far_sum = isinstance(leaf, Summed) and _on_host(leaf.total)
    return far_sum or (_is_detached(weight) and _on_host(weight.value))


def _on_host(value: Array) -> bool:
    return jax.typeof(value).memory_space is jax.memory.Space.Host
