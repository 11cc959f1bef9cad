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
its state says the rest. What of a parameter and its state is in host memory streams through the update slice by slice
(`offload.py`), every device its shard, with no byte more on the network.
"""

import dataclasses
import math
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
    own_shard,
    param_tree,
    placement_of,
    psum_batch,
    trained_part,
    whole_again,
    with_whole,
)
from jtrain.layout import Layout, LayoutSpec, ParamLayout
from jtrain.mesh import BATCH_AXES
from jtrain.model.param import Params, init_param, init_params
from jtrain.model.scaling import advanced, check_matmul_dtype, first_scaling, unseen, with_fp8
from jtrain.model.transformer import Transformer
from jtrain.offload import (
    Arrays,
    Index,
    Leaf,
    Slices,
    global_start,
    on_host_cores,
    sharding,
    streamed,
    to_device,
    to_host,
)
from jtrain.optim import AdamW, Moments, Muon, Optimizer, Update, check_layout
from jtrain.optim.state import arrays, by_muon, by_path, nested

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


def host_state(layout: Layout, optimizer: Optimizer) -> frozenset[tuple[str, str]]:
    """Arrays of the optimizer's state that are in host memory: path of the parameter, name of the array."""
    kept = {path: arrays(optimizer.spec, info) for path, info in optimizer.infos.items()}
    return layout.host_state(
        {(path, name): math.prod(x.shape) * x.dtype.itemsize for path, of in kept.items() for name, x in of.items()}
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

    update = _make_update(optimizer, layout, mesh)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with kernels_for(layout, mesh):
            grads, seen, metrics = gradients(state.params, state.scaling, batch)
            with jax.named_scope("optimizer"):
                params, opt_state, norms = update(grads, state)
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


def _make_update(
    optimizer: Optimizer, layout: Layout, mesh: Mesh
) -> Callable[[Params, TrainState], tuple[Params, Moments, Metrics]]:
    """`update(grads, state) -> (params, opt_state, metrics)`, traced."""
    kept_on_host = host_state(layout, optimizer)
    on_host: dict[str, frozenset[str]] = {
        p.info.path: frozenset(name for path, name in kept_on_host if path == p.info.path)
        | ({"param"} if _streams(p, optimizer) else frozenset())
        for p in layout.params
    }
    streaming = [p for p in layout.params if on_host[p.info.path]]

    def update(grads: Params, state: TrainState) -> tuple[Params, Moments, Metrics]:
        scalars = optimizer.begin(grads, state.step)
        grad, param = (by_path(optimizer.params, tree) for tree in (grads, state.params))
        leaves = optimizer.leaves(state.opt_state)
        for p in layout.params:
            path = p.info.path
            if not _streams(p, optimizer):
                here = to_device(param[path]) if p.param_memory == "pinned_host" else param[path]
                # The update reads and writes only this device's shard of the parameters, then gathers them again.
                param[path] = own_shard(layout, p, mesh, here)
            if not on_host[path]:
                new = optimizer.update_param(scalars, p.info, grad[path], param[path], leaves[path])
                param[path], leaves[path] = new
        if streaming:
            states = {p.info.path: {"param": param[p.info.path], **leaves[p.info.path]} for p in streaming}
            given = {p.info.path: grad[p.info.path] for p in streaming}
            for path, new in _streamed_update(optimizer, layout, on_host, mesh, scalars, given, states).items():
                param[path] = new.pop("param")
                leaves[path] = new
        for p in layout.params:
            path = p.info.path
            if not _streams(p, optimizer):
                here = whole_again(layout, p, mesh, param[path])
                param[path] = to_host(here) if p.param_memory == "pinned_host" else here
        return nested(optimizer.params, param), optimizer.state(leaves), scalars.metrics

    return update


def _streams(p: ParamLayout, optimizer: Optimizer) -> bool:
    """Whether the parameter itself streams through the update, slice by slice of each device's shard.

    Where it is gathered afterwards it cannot: it is on the device then, whole. Nor where Muon takes whole matrices.
    """
    return p.param_memory == "pinned_host" and p.param == p.optimizer and not by_muon(optimizer.spec, p.info)


def _streamed_update(
    optimizer: Optimizer,
    layout: Layout,
    on_host: dict[str, frozenset[str]],
    mesh: Mesh,
    scalars: Update,
    grads: dict[str, Array],
    states: dict[str, Arrays],
) -> dict[str, Arrays]:
    """The update of what is at least partly in host memory, each device on its shard; everything by path."""
    layouts = [p for p in layout.params if on_host[p.info.path]]

    def leaf(p: ParamLayout, scalars: Update, grad: Array, state: Arrays) -> Leaf:
        stacked = p.info.dims.startswith("Y")
        slices = Slices({"grad": grad, **state}, stacked=stacked)
        start = global_start(p.optimizer, grad.shape)

        def update(index: Index, pieces: Arrays) -> Arrays:
            layer, part = slices.place(index)
            if stacked:
                pieces = {name: x[0] for name, x in pieces.items()}
            grad, param = pieces.pop("grad"), pieces.pop("param")
            first = (start[stacked] + part * grad.shape[0], *start[stacked + 1 :])
            param, of_leaf = optimizer.update_param(
                scalars, p.info, grad, param, pieces, layer=layer if stacked else None, start=first
            )
            new = {"param": param, **of_leaf}
            return {name: x[None] for name, x in new.items()} if stacked else new

        return Leaf({"grad": grad}, state, on_host[p.info.path], slices, update)

    def by_host(p: ParamLayout, scalars: Update, grad: Array, state: Arrays) -> Arrays:
        def update(scalars: Update, grad: Array, state: Arrays) -> Arrays:
            of_leaf = {name: x for name, x in state.items() if name != "param"}
            param, of_leaf = optimizer.update_param(scalars, p.info, grad, state["param"], of_leaf)
            return {"param": param, **of_leaf}

        new = on_host_cores(update, scalars, grad, state)
        return new if "param" in on_host[p.info.path] else new | {"param": to_device(new["param"])}

    def local(scalars: Update, grads: dict[str, Array], states: dict[str, Arrays]) -> dict[str, Arrays]:
        # The host's cores update what has its state there; a parameter that is there alone streams.
        cores = [p for p in layouts if layout.spec.offload.update == "host" and on_host[p.info.path] - {"param"}]
        found = {p.info.path: by_host(p, scalars, grads[p.info.path], states[p.info.path]) for p in cores}
        others = [p for p in layouts if p not in cores]
        leaves = [leaf(p, scalars, grads[p.info.path], states[p.info.path]) for p in others]
        return found | {p.info.path: new for p, new in zip(others, streamed(leaves, scalars.grad_norm), strict=True)}

    specs = {p.info.path: p.optimizer for p in layouts}
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, specs), out_specs=specs, check_vma=False)(
        scalars, grads, states
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
