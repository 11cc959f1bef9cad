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

The optimizer runs outside, on global arrays: `update.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jtrain.batch_hash import hash_block
from jtrain.compiler import compiler_options, kernels_for
from jtrain.dims import IGNORE, Batch, ParamInfo
from jtrain.gather import (
    along_torus,
    finish_gradient,
    param_tree,
    placement_of,
    psum_batch,
    trained_part,
    with_whole,
)
from jtrain.layout import Layout, LayoutSpec
from jtrain.mesh import BATCH_AXES
from jtrain.model.param import Params, init_param, init_params
from jtrain.model.scaling import advanced, check_matmul_dtype, first_scaling, unseen, with_fp8
from jtrain.model.transformer import Transformer
from jtrain.offload import (
    sharding,
    to_host,
)
from jtrain.optim import AdamW, Moments, Muon, Optimizer, check_layout
from jtrain.update import host_state, make_update

BATCH_SPEC = P(BATCH_AXES, "context")
"""How [B, L] arrays are split; devices along `tensor` hold the same tokens."""

type Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step.

    step: completed updates, an int32 scalar. As a pytree it may hold shapes or shardings in the place of arrays.
    scaling: with layout.matmul_dtype=fp8_delayed, by which 8-bit matmuls are scaled (`jtrain.model.scaling`).
    """

    step: Any
    params: Params
    opt_state: Moments
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_offload(spec: LayoutSpec, optimizer: AdamW | Muon) -> None:
    """Refuses to offload what cannot stream.

    Raises:
      ValueError: Muon's momentum; random bits on the host's cores.
    """
    by_chance = optimizer.moment_dtype in ("int8", "bfloat16_sr") or optimizer.param_rounding == "stochastic"
    if spec.offload.update == "host" and by_chance:
        raise ValueError(
            f"layout.offload.update=host with optimizer.moment_dtype={optimizer.moment_dtype} and optimizer."
            f"param_rounding={optimizer.param_rounding}: rounding by chance is not for the host's cores. Set "
            "layout.offload.update=device, or optimizer.moment_dtype=float32 and param_rounding=nearest."
        )
    if isinstance(optimizer, Muon) and spec.offload.optimizer not in ("none", 0):
        raise ValueError(
            f"layout.offload.optimizer={spec.offload.optimizer} with Muon: its update takes whole matrices, so no part "
            "of its state can stream. Set layout.offload.optimizer=none, or use AdamW."
        )


def abstract_state(layout: Layout, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, allocating nothing.

    Raises:
      ValueError: the optimizer's state cannot be laid out or offloaded so, or these devices have no host memory.
    """
    check_layout(optimizer.spec, layout)
    check_offload(layout.spec, optimizer.spec)
    on_host = host_state(layout, optimizer)
    layouts = {p.info.path: p for p in layout.params}
    shapes = jax.eval_shape(lambda: _first_state(layout, optimizer, 0))
    params = param_tree(layout, lambda p: sharding(mesh, p.param, p.param_memory))
    opt_state = optimizer.state_map(
        lambda info, name: sharding(
            mesh, layouts[info.path].optimizer, "pinned_host" if (info.path, name) in on_host else "device"
        )
    )
    scaling = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes.scaling)
    shardings = TrainState(NamedSharding(mesh, P()), params, opt_state, scaling)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(layout: Layout, optimizer: Optimizer, mesh: Mesh, *, seed: int) -> TrainState:
    """The state before the first step, made where it lives: no device ever holds more than its share.

    What is offloaded is made on the host: zeros there, and drawn values written over them layer by layer.
    """
    like = abstract_state(layout, optimizer, mesh)
    drawn = TrainState(
        None,
        optimizer.params,
        optimizer.state_map(lambda i, name: i if name == "master" else None),
        jax.tree.map(lambda _: None, like.scaling),
    )
    leaves, structure = jax.tree.flatten(like)
    infos = jax.tree.leaves(drawn, is_leaf=lambda x: x is None)
    here = [x.sharding.memory_kind != "pinned_host" for x in leaves]

    def first_here() -> list[Array]:
        values = jax.tree.leaves(_first_state(layout, optimizer, seed))
        return [value for value, is_here in zip(values, here, strict=True) if is_here]

    of_here = [x.sharding for x, is_here in zip(leaves, here, strict=True) if is_here]
    made = iter(jax.jit(first_here, out_shardings=of_here)())
    states = [next(made) if h else _first_on_host(x, i, seed) for x, i, h in zip(leaves, infos, here, strict=True)]
    return jax.tree.unflatten(structure, states)


def _first_on_host(like: jax.ShapeDtypeStruct, info: ParamInfo | None, seed: int) -> Array:
    """Zeros in host memory, or the first values of a parameter, of which the device holds one layer at a time."""
    shape = like.sharding.shard_shape(like.shape)
    zeros = jax.make_array_from_callback(like.shape, like.sharding, lambda _: np.zeros(shape, like.dtype))
    if info is None:
        return zeros
    dtype = like.dtype.name

    def fill(x: Array) -> Array:
        if not info.dims.startswith("Y"):
            return to_host(init_param(info, seed=seed, dtype=dtype))

        def layer(y: Array, x: Array) -> Array:
            value = to_host(init_param(info, seed=seed, dtype=dtype, layer=y))
            return jax.lax.dynamic_update_index_in_dim(x, value, y, 0)

        return jax.lax.fori_loop(0, info.shape[0], layer, x)

    return jax.jit(fill, donate_argnums=0, out_shardings=like.sharding)(zeros)


def shardings_of(state: TrainState) -> TrainState:
    """The sharding of every array of a state, abstract or not."""
    return jax.tree.map(lambda x: x.sharding, state)


def _first_state(layout: Layout, optimizer: Optimizer, seed: int) -> TrainState:
    infos = tuple(p.info for p in layout.params)
    # Masters begin unrounded; a parameter's bits are the same rounded at once or later.
    masters = optimizer.spec.master_dtype != "none"
    params = init_params(infos, seed=seed, dtype="float32" if masters else layout.spec.param_dtype)
    opt_state = optimizer.init(params)
    params = jax.tree.map(lambda x: x.astype(layout.spec.param_dtype), params)
    scaling = first_scaling(infos) if layout.spec.matmul_dtype == "fp8_delayed" else {}
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, scaling)


def make_train_step(
    model: Transformer, optimizer: Optimizer, layout: Layout, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`step(state, batch) -> (state, metrics)`, jitted; the state given is donated.

    Metrics are scalars: loss_nats (cross entropy per valid target of the global batch, without z-loss), grad_norm
    (before clipping), learning_rate, tokens (valid targets), batch_hash (2 x uint32).

    Raises:
      ValueError: layout.matmul_dtype is of no use on these devices.
    """
    check_matmul_dtype(layout.spec, mesh)
    layout = along_torus(layout, mesh)
    gradients = jax.shard_map(
        lambda params, scaling, batch: _local_gradients(model, layout, params, scaling, batch),
        mesh=mesh,
        in_specs=(param_tree(layout, lambda p: p.param), P(), BATCH_SPEC),
        out_specs=(param_tree(layout, lambda p: p.optimizer), P(), P()),
        check_vma=False,  # the sums over axes are written out, one rule for all parameters
    )

    update = make_update(optimizer, layout, mesh)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with kernels_for(layout, mesh):
            grads, seen, metrics = gradients(state.params, state.scaling, batch)
            with jax.named_scope("optimizer"):
                params, opt_state, norms = update(grads, state.step, state.params, state.opt_state)
                scaling = advanced(state.scaling, seen)
                return TrainState(state.step + 1, params, opt_state, scaling), metrics | norms

    # Said, not inferred: a state that came back laid out otherwise would compile the second step anew.
    state_shardings = shardings_of(abstract_state(layout, optimizer, mesh))
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(state_shardings, NamedSharding(mesh, P())),
        compiler_options=compiler_options(mesh, layout.spec.matmul_dtype),
    )


def make_eval_step(model: Transformer, layout: Layout, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """`step(params, batch) -> {"nats", "tokens"}`: sums over the batch, so that batches of any fill average exactly.

    A device computes as many sequences at a time as in training, so evaluating needs no more memory.
    """
    layout = along_torus(layout, mesh)
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
    sums = jax.shard_map(local, mesh=mesh, in_specs=(params_spec, BATCH_SPEC), out_specs=P(), check_vma=False)

    def eval_step(params: Params, batch: Batch) -> Metrics:
        with kernels_for(layout, mesh):
            return sums(params, batch)

    return jax.jit(eval_step, compiler_options=compiler_options(mesh))


def _local_gradients(
    model: Transformer, layout: Layout, params: Params, scaling: dict[str, Any], batch: Batch
) -> tuple[Params, dict[str, Any], Metrics]:
    """One device's part: its gradients as the optimizer wants them, and of the global batch what its 8-bit matmuls saw
    and the metrics.
    """
    spec = layout.spec
    placement = placement_of(layout)
    infos = tuple(p.info for p in layout.params)
    with jax.named_scope("batch"):
        num_tokens = psum_batch(layout, jnp.sum(batch.target_BL != IGNORE))
        # Dividing each microbatch by the whole batch's count, not by its own, is what makes accumulation exact.
        weight = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

    def objective(trained: Params, seen: Any, part: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        weights = with_whole(layout, trained, params)
        if spec.matmul_dtype != "compute":
            weights = with_fp8(weights, infos, scaling, seen, weight)
        total, nats = model.loss(weights, part, placement)
        with jax.named_scope("loss"):
            return total * weight, nats * weight

    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)

    def microbatch(carry: Any, part: Batch) -> tuple[Any, None]:
        (_, loss), (grads, seen) = differentiate(trained, unseen(scaling), part)
        with jax.named_scope("reduce_gradients"):
            grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], grads)
            return (grads, jax.tree.map(jnp.maximum, carry[1], seen), carry[2] + loss), None

    trained = trained_part(layout, params)
    if spec.microbatches == 1:
        (_, loss), (grads, seen) = differentiate(trained, unseen(scaling), batch)
    else:
        parts = _microbatches(layout, batch)
        with jax.named_scope("reduce_gradients"):
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
        carry = (zeros, unseen(scaling), jnp.zeros((), jnp.float32))
        (grads, seen, loss), _ = jax.lax.scan(microbatch, carry, parts)

    axes = tuple(axis for axis, size in layout.mesh.shape.items() if size > 1)
    with jax.named_scope("reduce_gradients"):
        layouts = param_tree(layout, lambda p: p)
        grads = jax.tree.map(lambda p, g: finish_gradient(layout, p, g), layouts, grads)
        seen = jax.tree.map(lambda amax_Y3: jax.lax.pmax(amax_Y3, axes), seen)
        loss = jax.lax.psum(loss, axes)
    with jax.named_scope("batch"):
        hash_2 = psum_batch(layout, hash_block(batch, placement.context.position_L(batch.token_BL.shape[1])))
    return grads, seen, {"loss_nats": loss, "tokens": num_tokens, "batch_hash": hash_2}


def _microbatches(layout: Layout, batch: Batch) -> Batch:
    """One device's rows in the parts that it computes one after another."""
    with jax.named_scope("batch"):
        return jax.tree.map(lambda x: x.reshape(layout.spec.microbatches, -1, *x.shape[1:]), batch)
