"""Sums of the gradients of microbatches, in float32, or in bfloat16 with stochastic rounding.

The backward pass of each microbatch adds the gradients of one layer after another to their sums in place
(`jtrain.model.layer_scan.Summed`), so a device never holds the gradients of all layers beside their sums.
Gradients of embedding, unembedding and last norm are added at the end of a microbatch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout, ParamLayout
from jtrain.model.layer_scan import Summed
from jtrain.model.param import Params, at_path, map_params
from jtrain.optim.rounding import Noise, to_bfloat16
from jtrain.optim.state import flatten_by_path
from jtrain.step.host_offload import SliceIndex, Slices, global_start, to_device, to_host
from jtrain.step.zero import attach_values, param_tree, trained_tree


def sums_gradients(layout: Layout) -> bool:
    """True if the backward pass adds gradients to sums; False if it makes one set, unsummed."""
    # bfloat16 sums save memory with one microbatch too: 2 bytes per parameter instead of 4.
    summed = layout.spec.microbatches > 1 or layout.precision.grad_accum_dtype != "float32"
    on_host = any(p.gradient_memory == "pinned_host" for p in layout.params)
    return summed or on_host or layout.pipeline is not None


def zero_sums(layout: Layout, trained: Params) -> Params:
    """Returns the sums before the first microbatch: zeros with the shapes of `zero.trained_part`.

    What is in host memory has any value, which XLA never writes: `GradientSums` reads none in the first
    microbatch. Equal values of one shape would share a buffer and be copied apart.
    """
    dtype = layout.precision.grad_accum_dtype

    def leaf(param_index: int, x: Array) -> Array:
        # The parameter's index as fill value: no two arrays of one shape are equal, so none share a buffer.
        if layout.trained[param_index].gradient_memory == "pinned_host":
            return to_host(jnp.full(x.shape, param_index, dtype))
        return jnp.zeros(x.shape, dtype)

    param_indices = {p.info.path: param_index for param_index, p in enumerate(layout.trained)}
    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(leaf, trained_tree(layout, lambda p: param_indices[p.info.path]), trained)


def streamed_norm(layout: Layout, mesh: Mesh, grads: Params) -> Float[Array, ""] | None:
    """Returns the global norm of gradients of which some are in host memory; None if none are.

    Those are fetched one slice after another, each while the one before is squared.
    """
    on_host = {p.info.path: p for p in layout.params if p.gradient_memory == "pinned_host"}
    if not on_host:
        return None
    grad_by_path = flatten_by_path(trained_tree(layout, lambda p: p.info), grads)
    device_grads = {
        p.info.path: grad_by_path[p.info.path].astype(jnp.float32)
        for p in layout.trained
        if p.info.path not in on_host and p.info.update == "gradient"
    }

    def host_squares(grads: dict[str, Array]) -> Float[Array, ""]:
        parts = [_sum_of_squares(grads[path], stacked=p.info.is_stacked) for path, p in on_host.items()]
        # Each device has squared its own shards; these parameters are split over every axis, so no square
        # counts twice.
        axes = [axis for axis, size in layout.mesh.shape.items() if size > 1]
        return jax.lax.psum(sum(parts, jnp.zeros(())), axes)

    specs = {path: p.optimizer_partition for path, p in on_host.items()}
    sum_host_squares = jax.shard_map(
        host_squares, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    return jnp.sqrt(
        optax.tree.norm(device_grads, squared=True)
        + sum_host_squares({path: grad_by_path[path] for path in on_host})
    )


def _sum_of_squares(grad: Array, *, stacked: bool) -> Float[Array, ""]:
    """Sum of squares of an array in host memory, in float32."""
    slices = Slices({"grad": grad}, stacked=stacked)

    def fetch(index: SliceIndex) -> Array:
        return to_device(slices.take(grad, index))

    def add_slice(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, current = carry
        # The last iteration fetches its own slice once more: a loop cannot leave out a copy.
        following = fetch(jnp.minimum(index + 1, slices.count - 1))
        return total + jnp.sum(jnp.square(current.astype(jnp.float32))), following

    return jax.lax.fori_loop(0, slices.count, add_slice, (jnp.zeros(()), fetch(0)))[0]


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Addition of one microbatch's gradients.

    trained: from `zero.trained_part`.
    seed: different for every microbatch of a run.
    index: number of the microbatch in its step.
    """

    layout: Layout
    trained: Params
    seed: Int[Array, ""]
    index: Int[Array, ""]

    def trained_arrays(self, sums: Params) -> Params:
        """Returns what JAX differentiates: of layers the sums, whose gradients are the new sums."""
        # Ends are differentiated by value and added in `add_ends`; layers add in place, so sums stand for
        # them.
        return {**self.trained, "layers": sums["layers"]}

    def weights(self, differentiated: Params, params: Params) -> Params:
        """Returns the weights that the forward pass reads; those of layers carry their sums."""
        weights = attach_values(self.layout, {**differentiated, "layers": self.trained["layers"]}, params)
        trained = {p.info.path for p in self.layout.trained}

        def summed(info: ParamInfo, weight: Any, add: Any) -> Any:
            if info.path not in trained:
                return weight
            # `Summed` carries the sum into the backward pass, which returns the new sum as its gradient.
            return Summed(weight, at_path(differentiated, info.path), add)

        infos = tuple(p.info for p in self.layout.params if p.info.path.startswith("layers."))
        return {**weights, **map_params(summed, infos, weights, param_tree(self.layout, self._add))}

    def add_ends(self, sums: Params, grads: Params) -> Params:
        """Returns the new sums.

        Args:
          grads: gradients of `trained_arrays`.
        """
        add = {
            path: adders for path, adders in trained_tree(self.layout, self._add).items() if path != "layers"
        }
        ends = {
            path: jax.tree.map(lambda add, a, g: add(a, g, None), adders, sums[path], grads[path])
            for path, adders in add.items()
        }
        return {**ends, "layers": grads["layers"]}

    def _add(self, p: ParamLayout) -> Callable[[Array, Array, Array | None], Array]:
        def add(total: Array, grad: Array, layer: Array | None) -> Array:
            with jax.named_scope("reduce_gradients"):
                if p.gradient_memory == "pinned_host":
                    # Host sums start with any bits, even NaN, so the first microbatch selects zeros instead
                    # of multiplying.
                    is_first = self.layout.spec.microbatches == 1 or self.index == 0
                    total = jnp.where(is_first, jnp.zeros_like(total), total)
                if self.layout.precision.grad_accum_dtype == "float32":
                    return total + grad.astype(total.dtype)
                # Noise is indexed by the global position, so that sums are the same bits on every mesh.
                start = global_start(
                    p.accumulator_partition, (1, *total.shape) if p.info.is_stacked else total.shape
                )
                noise = Noise(p.info, self.seed, layer, start[p.info.is_stacked :])
                sum_ = total.astype(jnp.float32) + grad.astype(jnp.float32)
                return to_bfloat16(sum_, noise.bits("gradient", sum_.shape))

        return add
