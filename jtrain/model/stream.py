"""The loop over layers, also for weights that live in host memory between uses.

The plain loop is one `jax.lax.scan`. Under it, weights on the host would be copied when a layer starts, and it would
wait for them; and what the forward pass copied would be kept, all layers of it, for the backward pass. So the streamed
loop is written out, forward and backward: each layer computes with weights that arrived during the layer before it,
while those of the layer after it are on their way. Two layers' are on the device at a time.

| per microbatch, of Y layers | weights copied to the device |
|---|---|
| forward | Y + 1: the first layer's, always the next one's, and once more the last one's, for the backward pass |
| backward | Y: always those of the layer before, and once more the first one's, unused |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.model.param import Params

type Stream = Any
"""A pytree of arrays that goes through the layers: the residual stream, and what else they add to."""

type Layer = Callable[[Stream, Params, Any], Stream]
"""(what goes through, one layer's weights, what all layers share) -> what goes through."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detached:
    """A weight whose gradient has a shape or a place of its own.

    trained: what is differentiated; only its shape matters: its value is never read, and XLA drops it.
    value: what computes.
    """

    trained: Array
    value: Array


def scan_layers(layer: Layer, x: Stream, weights: Params, shared: Any, *, unroll: int) -> Stream:
    """`x = layer(x, weights[y], shared)` for every y of the stacked weights, differentiable in x and weights.

    Args:
      layer: must keep for its backward pass nothing made of weights that are streamed: see `transformer.checkpointed`.
      weights: stacked, [Y, ...]; a `Detached` whose value is in host memory is streamed.
      shared: the same for every layer; not differentiated.
      unroll: layers per iteration of the compiled loop.
    """
    leaves = jax.tree.leaves(weights, is_leaf=_is_detached)
    if any(_is_detached(leaf) and _on_host(leaf.value) for leaf in leaves):
        assert unroll == 1, "check_scanned refuses it"
        return _streamed(layer, x, weights, shared)
    return jax.lax.scan(lambda x, w: (layer(x, w, shared), None), x, weights, unroll=unroll)[0]


def check_scanned(scan_layers: bool) -> None:
    """Refuses to stream weights or activations through an unrolled loop.

    Raises:
      ValueError: the loop is unrolled.
    """
    if not scan_layers:
        raise ValueError(
            "model.scan_layers=False with layout.offload.params or .activations: only a loop fetches one layer while "
            "another computes; unrolled, XLA joins all layers' arrays on the device, or on the host's cores, and needs "
            "more memory than without. Set model.scan_layers=True."
        )


def _streamed(layer: Layer, x: Stream, weights: Params, shared: Any) -> Stream:
    leaves, tree = jax.tree.flatten(weights, is_leaf=_is_detached)
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    steps = jnp.arange(num_layers)
    # One entry per weight in each list; None where it does not apply.
    trained = [leaf.trained if _is_detached(leaf) else leaf for leaf in leaves]
    values = [leaf.value if _is_detached(leaf) else None for leaf in leaves]
    near = [None if value is None or _on_host(value) else value for value in values]
    far = [value if value is not None and _on_host(value) else None for value in values]

    def one(x: Stream, trained: list[Array], values: list[Array | None], shared: Any) -> Stream:
        pairs = zip(trained, values, strict=True)
        merged = [t if value is None else Detached(t, value) for t, value in pairs]
        return layer(x, jax.tree.unflatten(tree, merged), shared)

    def fetch(stacked: Any, index: Array | int) -> Any:
        slices = jax.tree.map(lambda value: jax.lax.dynamic_index_in_dim(value, index, keepdims=False), stacked)
        return jax.device_put(slices, jax.memory.Space.Device)

    def loop(compute: Callable[..., tuple[Stream, Any]], x: Stream, trained: Any, near: Any, far: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:
            (x, held), (y, trained, near) = carry, now
            ahead = fetch(far, jnp.minimum(y + 1, num_layers - 1))
            x, kept = compute(x, trained, _either(near, held))
            return (x, ahead), kept

        return jax.lax.scan(body, (x, fetch(far, 0)), (steps, trained, near))

    @jax.custom_vjp
    def run(x: Stream, trained: Any, near: Any, far: Any, shared: Any) -> Stream:
        (x, _), _ = loop(lambda x, trained, values: (one(x, trained, values, shared), None), x, trained, near, far)
        return x

    def forward(x: Stream, trained: Any, near: Any, far: Any, shared: Any) -> Any:
        # Of what a layer was given only its input is kept: the rest is here again in the backward pass.
        keep = (True, False, False, False)

        def compute(x: Stream, trained: Any, values: Any) -> tuple[Stream, Any]:
            return jax.vjp(one, x, trained, values, shared, saveable_args=keep)

        (x, held), vjps = loop(compute, x, trained, near, far)
        return x, (vjps, held, trained, near, far, shared)

    def backward(kept: Any, grad: Stream) -> Any:
        vjps, held, trained, near, far, shared = kept

        def body(carry: Any, now: Any) -> Any:
            (grad, held), (y, vjp, trained, near) = carry, now
            ahead = fetch(far, jnp.maximum(y - 1, 0))
            vjp.args_res[1:] = [trained, _either(near, held), shared]
            grad, trained_grad, _, _ = vjp(grad)
            return (grad, ahead), trained_grad

        xs = (steps, vjps, trained, near)
        (grad, _), trained_grad = jax.lax.scan(body, (grad, held), xs, reverse=True)
        return grad, trained_grad, None, None, None

    run.defvjp(forward, backward)
    return run(x, trained, near, far, shared)


def _either(near: list[Array | None], held: list[Array | None]) -> list[Array | None]:
    return [b if a is None else a for a, b in zip(near, held, strict=True)]


def _is_detached(leaf: Any) -> bool:
    return isinstance(leaf, Detached)


def _on_host(value: Array) -> bool:
    return jax.typeof(value).memory_space is jax.memory.Space.Host
