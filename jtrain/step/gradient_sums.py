"""Sums of the gradients of microbatches, in float32, or in bfloat16 with stochastic rounding.

The backward pass of each microbatch adds the gradients of one layer after another to their sums in place
(`jtrain.model.layer_scan.Summed`), so a device never holds the gradients of all layers beside their sums. Gradients of
embedding, unembedding and last norm are added at the end of a microbatch.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jtrain.layout import Layout, ParamLayout
from jtrain.model.layer_scan import Summed
from jtrain.model.param import Params
from jtrain.optim.rounding import Noise, to_bfloat16
from jtrain.step.host_offload import global_start
from jtrain.step.zero import param_tree, with_whole


def sums_gradients(layout: Layout) -> bool:
    """True if the backward pass adds gradients to sums; False if a step has one set, in the parameters' dtype."""
    summed = layout.spec.microbatches > 1 or layout.precision.grad_accum_dtype != "float32"
    return summed or layout.pipeline is not None


def no_sums(layout: Layout, trained: Params) -> Params:
    """Returns the sums before the first microbatch: zeros with the shapes of `trained`, from `zero.trained_part`."""
    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, layout.precision.grad_accum_dtype), trained)


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Addition of one microbatch's gradients.

    trained: from `zero.trained_part`.
    seed: different for every microbatch of a run.
    """

    layout: Layout
    trained: Params
    seed: Int[Array, ""]

    def differentiated(self, sums: Params) -> Params:
        """Returns the arrays that JAX differentiates: for layers the sums, whose gradients are the new sums."""
        return {**self.trained, "layers": sums["layers"]}

    def weights(self, differentiated: Params, params: Params) -> Params:
        """Returns the weights that the forward pass reads; those of layers carry their sums."""
        weights = with_whole(self.layout, {**differentiated, "layers": self.trained["layers"]}, params)
        add = param_tree(self.layout, self._add)["layers"]
        layers = jax.tree.map(
            lambda add, weight, total: Summed(weight, total, add), add, weights["layers"], differentiated["layers"]
        )
        return {**weights, "layers": layers}

    def added(self, sums: Params, grads: Params) -> Params:
        """Returns the new sums.

        Args:
          grads: gradients of `differentiated`.
        """
        add = {path: of for path, of in param_tree(self.layout, self._add).items() if path != "layers"}
        ends = {
            path: jax.tree.map(lambda add, a, g: add(a, g, None), of, sums[path], grads[path])
            for path, of in add.items()
        }
        return {**ends, "layers": grads["layers"]}

    def _add(self, p: ParamLayout) -> Callable[[Array, Array, Array | None], Array]:
        def add(total: Array, grad: Array, layer: Array | None) -> Array:
            with jax.named_scope("reduce_gradients"):
                if self.layout.precision.grad_accum_dtype == "float32":
                    return total + grad.astype(total.dtype)
                start = global_start(p.accumulator, (1, *total.shape) if p.info.is_stacked else total.shape)
                noise = Noise(p.info, self.seed, layer, start[p.info.is_stacked :])
                sum_ = total.astype(jnp.float32) + grad.astype(jnp.float32)
                return to_bfloat16(sum_, noise.bits("gradient", sum_.shape))

        return add
