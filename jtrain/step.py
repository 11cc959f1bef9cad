"""One training step: a pure function of (state, batch), jitted once.

Forward and backward run in one fully-manual `jax.shard_map`, so that every byte on the network is a line here or in
the model: nothing is left to the partitioner. Each device differentiates its own share of the global loss with
respect to what it holds; `gather.py` says how weights come and gradients go.

| zero_stage | in the layer, per microbatch | once per step |
|---|---|---|
| 0 | | all-reduce of gradients |
| 1 | | reduce-scatter of gradients, all-gather of parameters |
| 2 | reduce-scatter of gradients | all-gather of parameters |
| 3 | all-gather of parameters (again in the backward pass), reduce-scatter of gradients | |

The optimizer runs outside, on global arrays: it is elementwise (or, for Muon, layer by layer), and the sharding of
its state says the rest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt

from jtrain.dims import IGNORE, Batch
from jtrain.gather import finish_gradient, param_tree, placement_of, psum_batch, trained_part, with_whole
from jtrain.layout import Layout, ParamLayout
from jtrain.mesh import BATCH_AXES
from jtrain.model.param import Params, init_params
from jtrain.model.transformer import Transformer
from jtrain.optim import Moments, Optimizer

BATCH_SPEC = P(BATCH_AXES, "context")
"""How [B, L] arrays are split; devices along `tensor` hold the same tokens."""

type Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step.

    step: completed updates, an int32 scalar. As a pytree it may hold shapes or shardings in the place of arrays.
    """

    step: Any
    params: Params
    opt_state: Moments


def abstract_state(layout: Layout, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, allocating nothing."""
    shapes = jax.eval_shape(lambda: _first_state(layout, optimizer, 0))
    replicated = NamedSharding(mesh, P())
    params = param_tree(layout, lambda p: NamedSharding(mesh, p.param))
    sharded = param_tree(layout, lambda p: NamedSharding(mesh, p.optimizer))
    shardings = TrainState(replicated, params, optimizer.state_like(sharded))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(layout: Layout, optimizer: Optimizer, mesh: Mesh, *, seed: int) -> TrainState:
    """The state before the first step, made where it lives: no device ever holds more than its share."""
    shardings = shardings_of(abstract_state(layout, optimizer, mesh))
    return jax.jit(lambda: _first_state(layout, optimizer, seed), out_shardings=shardings)()


def shardings_of(state: TrainState) -> TrainState:
    """The sharding of every array of a state, abstract or not."""
    return jax.tree.map(lambda x: x.sharding, state)


def _first_state(layout: Layout, optimizer: Optimizer, seed: int) -> TrainState:
    infos = tuple(p.info for p in layout.params)
    params = init_params(infos, seed=seed, dtype=layout.spec.param_dtype)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    model: Transformer, optimizer: Optimizer, layout: Layout, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`step(state, batch) -> (state, metrics)`, jitted; the state given is donated.

    Metrics are scalars: loss_nats (cross entropy per valid target of the global batch, without z-loss), grad_norm
    (before clipping), learning_rate, tokens (valid targets), batch_hash (2 x uint32).
    """
    gradients = jax.shard_map(
        lambda params, batch: _local_gradients(model, layout, params, batch),
        mesh=mesh,
        in_specs=(param_tree(layout, lambda p: p.param), BATCH_SPEC),
        out_specs=(param_tree(layout, lambda p: p.optimizer), P()),
        check_vma=False,  # the sums over axes are written out, one rule for all parameters
    )

    def constrain(params: Params, of: Callable[[ParamLayout], P]) -> Params:
        shardings = param_tree(layout, lambda p: NamedSharding(mesh, of(p)))
        return jax.tree.map(jax.lax.with_sharding_constraint, params, shardings)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            # The update reads and writes only this device's shard of the parameters, then gathers them again.
            params = constrain(state.params, lambda p: p.optimizer)
            params, opt_state, norms = optimizer.update(grads, state.opt_state, params, state.step)
            params = constrain(constrain(params, lambda p: p.optimizer), lambda p: p.param)
        return TrainState(state.step + 1, params, opt_state), metrics | norms

    # Said, not inferred: a state that came back laid out otherwise would compile the second step anew.
    state_shardings = shardings_of(abstract_state(layout, optimizer, mesh))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, NamedSharding(mesh, P())))


def make_eval_step(model: Transformer, layout: Layout, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """`step(params, batch) -> {"nats", "tokens"}`: sums over the batch, so that batches of any fill average exactly.

    A device computes as many sequences at a time as in training, so evaluating needs no more memory.
    """
    placement = placement_of(layout)

    def local(params: Params, batch: Batch) -> Metrics:
        weights = with_whole(layout, trained_part(layout, params), params)

        def microbatch(nats: Array, part: Batch) -> tuple[Array, None]:
            return nats + model.loss(weights, part, placement)[1], None

        nats, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), _microbatches(layout, batch))
        axes = tuple(axis for axis, size in layout.mesh.shape.items() if size > 1)
        tokens = jnp.sum(batch.target_BL != IGNORE)
        return {"nats": jax.lax.psum(nats, axes), "tokens": psum_batch(layout, tokens)}

    params_spec = param_tree(layout, lambda p: p.param)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(params_spec, BATCH_SPEC), out_specs=P(), check_vma=False))


def _local_gradients(model: Transformer, layout: Layout, params: Params, batch: Batch) -> tuple[Params, Metrics]:
    """One device's part: its gradients as the optimizer wants them, and the global batch's metrics."""
    spec = layout.spec
    placement = placement_of(layout)
    num_tokens = psum_batch(layout, jnp.sum(batch.target_BL != IGNORE))
    # Dividing each microbatch by the whole batch's count, not by its own, is what makes accumulation exact.
    weight = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

    def objective(trained: Params, part: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        total, nats = model.loss(with_whole(layout, trained, params), part, placement)
        return total * weight, nats * weight

    def microbatch(carry: tuple[Params, Array], part: Batch) -> tuple[tuple[Params, Array], None]:
        (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(trained, part)
        return (jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], grads), carry[1] + loss), None

    trained = trained_part(layout, params)
    if spec.microbatches == 1:
        (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(trained, batch)
    else:
        parts = _microbatches(layout, batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
        (grads, loss), _ = jax.lax.scan(microbatch, (zeros, jnp.zeros((), jnp.float32)), parts)

    with jax.named_scope("reduce_gradients"):
        layouts = param_tree(layout, lambda p: p)
        grads = jax.tree.map(lambda p, g: finish_gradient(layout, p, g), layouts, grads)
        loss = jax.lax.psum(loss, tuple(axis for axis, size in layout.mesh.shape.items() if size > 1))
    hash_2 = psum_batch(layout, _hash_block(layout, batch))
    return grads, {"loss_nats": loss, "tokens": num_tokens, "batch_hash": hash_2}


def _microbatches(layout: Layout, batch: Batch) -> Batch:
    """One device's rows in the parts that it computes one after another."""
    return jax.tree.map(lambda x: x.reshape(layout.spec.microbatches, -1, *x.shape[1:]), batch)


def _hash_block(layout: Layout, batch: Batch) -> UInt[Array, "2"]:
    """This device's term of a hash of the global batch: add the terms modulo 2^32.

    Each place of the batch is mixed with its global index, so the sum depends on what stands where but not on how it
    is split. It is computed from what the step was fed, not from what the loader meant to feed.
    """
    rows, cols = batch.token_BL.shape
    row = jnp.arange(rows) + rows * jax.lax.axis_index(BATCH_AXES)
    col = jnp.arange(cols) + cols * jax.lax.axis_index("context")
    index_BL = row[:, None] * (cols * layout.mesh.context) + col[None, :]

    def one(seed: int) -> Array:
        h = jnp.full((rows, cols), seed, jnp.uint32)
        for x_BL in (index_BL, batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL):
            h = _mix(h ^ x_BL.astype(jnp.uint32))
        return jnp.sum(h, dtype=jnp.uint32)

    return jnp.stack([one(0x9E3779B9), one(0x85EBCA6B)])


def _mix(h: Array) -> Array:
    """Murmur3's 32-bit finaliser: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
