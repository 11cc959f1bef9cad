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

Example, Y = 3 with weights in host memory: forward fetches layer 0, then computes layer 0 beside the fetch of
layer 1, layer 1 beside that of 2, and layer 2 beside that of 2 again: 4 fetches. Backward starts with that
copy and computes layer 2 beside the fetch of 1, layer 1 beside that of 0, layer 0 beside that of 0 again: 3
fetches.

Sums of gradients in host memory are fetched and written back Y + 1 times per microbatch, those of a layer
while the layers beside it compute: the sums of three layers are on the device at a time. With Y = 3 the
backward pass of layer 1 adds to sum 1 while sum 0 is fetched and sum 2 is written back.
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
      it. None for a frozen weight, which has no gradient.
    value: the array that the forward pass computes with, or a frozen matrix in blocks.
    """

    trained: Array | None
    value: Any


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
      layer: must not save values derived from streamed weights: see `forward_placement.checkpoint_layer`.
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
        return _streaming_loop(layer, x, weights, shared, unroll=unroll, offload=offload)
    # Nothing streams and nothing is summed: JAX's own backward pass of the scan suffices.
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


def _streaming_loop(
    layer: Layer, x: LayerCarry, weights: Params, shared: Any, *, unroll: int, offload: tuple[str, ...]
) -> LayerCarry:
    """The loop of `scan_layers` with a backward pass of its own; arguments and result are the same.

    The weights are taken apart into lists with one entry per weight, of arrays [Y, ...], or None where a
    weight has no such array. They differ in how one layer's array gets to the layer:

    trained: what JAX differentiates: the weight itself, or `Detached.trained`. Sliced by the scan.
    resident: values of `Detached` weights that are on the device. Sliced by the scan.
    streamed: values in host memory. Fetched while the layer before computes.
    resident_sums, streamed_sums: `Summed.total` on the device, or in host memory. Only the backward pass
      reads and writes them.
    """
    wrapped, tree = jax.tree.flatten(weights, is_leaf=_is_leaf)
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    # Layer numbers, and not a counter in the carry: a reverse scan then counts down by itself.
    layer_numbers = jnp.arange(num_layers)
    leaves = [leaf.weight if isinstance(leaf, Summed) else leaf for leaf in wrapped]
    sums = [leaf.total if isinstance(leaf, Summed) else None for leaf in wrapped]
    resident_sums = [None if total is None or _on_host(total) else total for total in sums]
    streamed_sums = [total if total is not None and _on_host(total) else None for total in sums]
    trained = [leaf.trained if _is_detached(leaf) else leaf for leaf in leaves]
    values = [leaf.value if _is_detached(leaf) else None for leaf in leaves]
    resident = [None if value is None or _on_host(value) else value for value in values]
    streamed = [value if value is not None and _on_host(value) else None for value in values]

    def run_layer(x: LayerCarry, trained: list[Array | None], values: list[Any], shared: Any) -> LayerCarry:
        pairs = zip(trained, values, strict=True)
        # Back to the leaves that the layer's `fetch` knows.
        merged = [t if value is None else Detached(t, value) for t, value in pairs]
        return layer(x, jax.tree.unflatten(tree, merged), shared)

    def fetch(stacked: Any, index: Array | int) -> Any:
        """Copies one layer's arrays of a pytree of stacked ones to the device."""
        slices = jax.tree.map(
            lambda value: jax.lax.dynamic_index_in_dim(value, index, keepdims=False), stacked
        )
        return jax.device_put(slices, jax.memory.Space.Device)

    def loop(
        compute: Callable[..., tuple[LayerCarry, Any]],
        x: LayerCarry,
        trained: Any,
        resident: Any,
        streamed: Any,
    ) -> Any:
        """Goes through the layers in ascending order.

        Args:
          compute: (x, trained, values) of one layer -> (x, what to save of the layer).

        Returns:
          ((x of the last layer, its streamed values), the saved arrays of all layers, stacked).
        """

        def body(carry: Any, xs: Any) -> Any:
            (x, current), (y, trained, resident) = carry, xs
            # Asked for before the layer computes, so that the copy runs beside it; the last layer fetches
            # itself.
            following = fetch(streamed, jnp.minimum(y + 1, num_layers - 1))
            x, saved = compute(x, trained, _fill_missing(resident, current))
            return (x, following), saved

        return jax.lax.scan(body, (x, fetch(streamed, 0)), (layer_numbers, trained, resident), unroll=unroll)

    @jax.custom_vjp
    def run(
        x: LayerCarry,
        trained: Any,
        resident: Any,
        streamed: Any,
        shared: Any,
        resident_sums: Any,
        streamed_sums: Any,
    ) -> LayerCarry:
        # Arguments for the backward pass only: it returns the new sums as the gradients of the old ones.
        del resident_sums, streamed_sums
        # Without differentiation nothing is saved.
        (x, _), _ = loop(
            lambda x, trained, values: (run_layer(x, trained, values, shared), None),
            x,
            trained,
            resident,
            streamed,
        )
        return x

    def forward(
        x: LayerCarry,
        trained: Any,
        resident: Any,
        streamed: Any,
        shared: Any,
        resident_sums: Any,
        streamed_sums: Any,
    ) -> Any:
        # Only the layer's input is saved; the backward pass gets weights and shared values again.
        keep = (True, False, False, False)

        def differentiate(*args: Any) -> tuple[LayerCarry, Any]:
            return jax.vjp(run_layer, *args, shared, saveable_args=keep)

        def compute(*args: Any) -> tuple[LayerCarry, Any]:
            x, vjp = differentiate(*args)
            # The layer's input is an argument and has no name: for a name `jax.checkpoint` would save a copy
            # of it.
            saved: list[Any] = [vjp.args_res[0], *vjp.opaque_residuals]
            names: list[str | None] = [LAYER_INPUT]
            # Without `offload` the other names are None, which stays on the device.
            if offload:
                names += _names(lambda *args: differentiate(*args)[1].opaque_residuals, *args)
            is_offloaded = [name in offload for name, _ in itertools.zip_longest(names, saved)]
            vjp.args_res[0], *vjp.opaque_residuals = (
                None if offloads else x for offloads, x in zip(is_offloaded, saved, strict=True)
            )
            on_host = [x if offloads else None for offloads, x in zip(is_offloaded, saved, strict=True)]
            return x, (vjp, jax.device_put(on_host, jax.memory.Space.Host))

        (x, current), (vjps, saved) = loop(compute, x, trained, resident, streamed)
        # Those of the last layer are fetched while the loss computes.
        last_saved, last_sum = fetch((saved, streamed_sums), num_layers - 1)
        return x, (
            vjps,
            saved,
            current,
            last_saved,
            trained,
            resident,
            streamed,
            shared,
            resident_sums,
            streamed_sums,
            last_sum,
        )

    def backward(residuals: Any, grad: LayerCarry) -> Any:
        (
            vjps,
            saved,
            current,
            current_saved,
            trained,
            resident,
            streamed,
            shared,
            resident_sums,
            streamed_sums,
            current_sum,
        ) = residuals

        def body(carry: Any, xs: Any) -> Any:
            # `current`, `current_saved` and `current_sum` are the streamed values, offloaded activations and
            # streamed sums of layer y, fetched while layer y + 1 computed. `pending` has the new sums of
            # layer y + 1, which are not written to host memory yet.
            (
                (grad, current, current_saved, resident_sums, streamed_sums, current_sum, pending),
                (y, vjp, trained, resident),
            ) = carry, xs
            *previous, previous_sum = fetch((streamed, saved, streamed_sums), jnp.maximum(y - 1, 0))
            # None marks what went to host memory: its copy came back during the layer before.
            layer_input, *vjp.opaque_residuals = _fill_missing(
                [vjp.args_res[0], *vjp.opaque_residuals], current_saved
            )
            vjp.args_res[:] = [layer_input, trained, _fill_missing(resident, current), shared]
            grad, trained_grad, _, _ = vjp(grad)
            if any(total is not None for total in streamed_sums):
                # Fetch before writing the same array: XLA does not know that the layers differ, and would
                # copy all of it. The largest gradient is known halfway: fetches run in the first half, writes
                # in the second.
                largest = max(
                    (i for i, grad in enumerate(trained_grad) if grad is not None),
                    key=lambda i: trained_grad[i].size,
                )
                ordered = streamed_sums, previous_sum, trained_grad[largest]
                streamed_sums, previous_sum, trained_grad[largest] = jax.lax.optimization_barrier(ordered)
                # Sums of the layer after this one; the first time those of this layer, unchanged.
                streamed_sums = _put(streamed_sums, pending, jnp.minimum(y + 1, num_layers - 1))
            layer_sums = jax.tree.map(
                lambda total: jax.lax.dynamic_index_in_dim(total, y, keepdims=False), resident_sums
            )
            sums_and_grads = zip(wrapped, _fill_missing(layer_sums, current_sum), trained_grad, strict=True)
            added = [
                leaf.add(total, g, y) if isinstance(leaf, Summed) else None
                for leaf, total, g in sums_and_grads
            ]
            new_resident = [
                None if total is None else new_sum
                for total, new_sum in zip(resident_sums, added, strict=True)
            ]
            pending = [
                None if total is None else new_sum
                for total, new_sum in zip(streamed_sums, added, strict=True)
            ]
            # Summed gradients must not leave the loop as well: stacked they would be all layers' at once.
            direct_grads = [
                None if isinstance(leaf, Summed) else g for leaf, g in zip(wrapped, trained_grad, strict=True)
            ]
            return (
                grad,
                *previous,
                _put(resident_sums, new_resident, y),
                streamed_sums,
                previous_sum,
                pending,
            ), direct_grads

        # The last layer's old sum stands for a pending one: it is written back unchanged.
        start = (grad, current, current_saved, resident_sums, streamed_sums, current_sum, current_sum)
        xs = (layer_numbers, vjps, trained, resident)
        (grad, *_, resident_sums, streamed_sums, _, pending), trained_grad = jax.lax.scan(
            body, start, xs, reverse=True, unroll=unroll
        )
        # Values and shared inputs are not differentiated; the gradients of sums are the new sums.
        return grad, trained_grad, None, None, None, resident_sums, _put(streamed_sums, pending, 0)

    run.defvjp(forward, backward)
    return run(x, trained, resident, streamed, shared, resident_sums, streamed_sums)


def _put(totals: Any, new: Any, y: Array | int) -> Any:
    """Writes the sums of layer y into those of all layers, in place, in whichever memory they are."""

    def put(total: Array, new: Array) -> Array:
        if _on_host(total):
            # By rows, as it lies in host memory.
            new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
            new = jax.device_put(new, jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(total, new, y, 0)

    return jax.tree.map(put, totals, new)


def _names(fn: Callable[..., list[Array]], *args: Any) -> list[str | None]:
    """Returns the `checkpoint_name` of each array that `fn` returns; None for one without."""
    # Arrays carry no names: only the trace knows which `checkpoint_name` made each.
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    names: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            names[eqn.outvars[0]] = eqn.params["name"]
        elif eqn.primitive.name == "reduce_precision" and eqn.invars[0] in names:
            names[eqn.outvars[0]] = names[eqn.invars[0]]  # `jax.checkpoint` rounds what it saves
    return [names.get(var) for var in jaxpr.outvars]


def _fill_missing(resident: list[Any], fetched: list[Any]) -> list[Any]:
    """Replaces each None of `resident` by the entry of `fetched` at the same place."""
    return [
        fetched_value if value is None else value
        for value, fetched_value in zip(resident, fetched, strict=True)
    ]


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Detached | Summed)


def _is_detached(leaf: Any) -> bool:
    return isinstance(leaf, Detached)


def _streams(leaf: Any) -> bool:
    """True if a weight's value, or the sum of its gradients, is in host memory."""
    weight = leaf.weight if isinstance(leaf, Summed) else leaf
    sum_streams = isinstance(leaf, Summed) and _on_host(leaf.total)
    return sum_streams or (_is_detached(weight) and _on_host(weight.value))


def _on_host(value: Any) -> bool:
    # Codes and scales of a matrix in blocks are in one memory.
    return jax.typeof(jax.tree.leaves(value)[0]).memory_space is jax.memory.Space.Host
