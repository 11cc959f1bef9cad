"""Stages that rest instead of computing, in the executor's own loop over ticks: who waits for whom.

Its table, conditionals, slots, permutes, embedding and loss are real. Only the layers are synthetic: F, I and
W each call the host, which lets them go on. Rests of different devices overlap whatever the number of cores,
as the work of real devices does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.forward_placement import Placement
from jtrain.model.layer_scan import Layer
from jtrain.model.param import Params, map_params
from jtrain.model.split_backward import multiply
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.objective import LossScale
from jtrain.step.pipelined import pipelined_gradients
from jtrain.step.state import abstract_state
from jtrain.step.zero import param_tree

type Rest = Callable[[int], None]
"""Called on the host with the number of the worker; returns when its rest is over."""


@dataclasses.dataclass(frozen=True)
class Rests:
    """Rests of a layer in its forward pass, in its backward pass by input, and in that by weight."""

    forward: Rest
    by_input: Rest
    by_weight: Rest


class RestingTransformer(Transformer):
    """Transformer whose layers rest instead of computing; embedding and loss are real."""

    def __init__(self, rests: Rests, num_layers: int) -> None:
        sizes: Any = dict(d_model=8, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8, vocab_size=16)
        super().__init__(num_layers=num_layers, **sizes)
        self.rests = rests

    def layer(self, placement: Placement) -> Layer:
        rests = self.rests

        def product(x_BLD: Array, kernel: Array) -> tuple[Array]:
            # The kernel must be used, or it would have no gradient that could rest.
            return (x_BLD + jnp.mean(_rested(None, rests.by_weight, kernel)),)

        def layer(carry: Any, weights: Params, shared: Any) -> Any:
            del shared
            x_BLD, losses = carry
            (y_BLD,) = multiply(product, x_BLD, [weights["mlp"]["down_FD"]])
            return _rested(rests.forward, rests.by_input, y_BLD), losses

        return layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rested(forward: Rest | None, backward: Rest, x: Array) -> Array:
    """Returns x after a rest; its gradient comes after one too."""
    del backward
    return x if forward is None else _after(forward, x)


def _after(rest: Rest, x: Array) -> Array:
    def call(worker: Any, x: Any) -> Any:
        rest(int(worker))
        return x

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("stage"), x)


_rested.defvjp(
    lambda forward, backward, x: (_rested(forward, backward, x), None),
    lambda _, backward, __, dx: (_after(backward, dx),),
)


def make_step(rests: Rests, stages: int, pipeline: PipelineSpec) -> tuple[Layout, Any]:
    """Layout of a step with 2 microbatches per stage and a layer per virtual stage, and a function that runs
    it.
    """
    spec, microbatches = MeshSpec(stage=stages), 2 * stages
    model = RestingTransformer(rests, stages * pipeline.chunks_per_worker)
    infos = model.param_infos()
    layout = make_layout(
        LayoutSpec(microbatches=microbatches, remat="none"),
        spec,
        infos,
        precision=PrecisionSpec(compute_dtype="float32"),
        pipeline=pipeline,
    )
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    optimizer = build(AdamW(peak_lr=1e-3), num_steps=1, params=map_params(lambda info: info, infos))
    like = abstract_state(layout, optimizer, mesh).params
    params = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), like)
    ids = jax.device_put(np.zeros((microbatches, 1, 8), np.int32), NamedSharding(mesh, jax.P()))

    def local(params: Params, ids: Array) -> Float[Array, ""]:
        grads, _, nats = pipelined_gradients(
            model,
            layout,
            params,
            {},
            Batch(ids, ids, ids, ids),
            LossScale(jnp.int32(1), jnp.float32(1.0), None),
        )
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(grads))  # or XLA would drop the gradients
        return jax.lax.psum(nats + total, "stage")

    specs = (param_tree(layout, lambda p: p.param_partition), jax.P())
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))
    compiled = step.lower(params, ids).compile()
    return layout, lambda: compiled(params, ids).block_until_ready()
