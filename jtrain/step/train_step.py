"""One training step: a pure function of (state, batch), jitted once.

Forward and backward run in one fully-manual `jax.shard_map`, so that every collective is a line here or in
the model and none is left to the partitioner. Each device differentiates its own share of the global loss
with respect to its own shards; `zero.py` gathers weights and reduces gradients.

| zero_stage | in the layer, per microbatch | once per step |
|---|---|---|
| 0 | | all-reduce of gradients |
| 1 | | reduce-scatter of gradients, all-gather of parameters |
| 2 | reduce-scatter of gradients | all-gather of parameters |
| 3 | all-gather of parameters (again in the backward pass), reduce-scatter of gradients | |

The optimizer runs outside the shard_map, on global arrays: `optimizer_update.py`. An update from bad numbers
is not applied: `guard.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import BATCH_AXES
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.model.adapters.dropout import token_bits
from jtrain.model.adapters.dropout_keys import with_dropout_keys
from jtrain.model.fp8_scaling import advance_scaling, amax_probes, check_matmul_dtype, with_fp8
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.optim import Optimizer
from jtrain.step.batch_hash import hash_block, index_in_batch
from jtrain.step.checksums import StateSums
from jtrain.step.gradient_sums import GradientSums, streamed_norm, sums_gradients, zero_sums
from jtrain.step.guard import GuardState, judge_update, not_finite
from jtrain.step.objective import DPO, TOKENS, Objective, scale_of
from jtrain.step.optimizer_update import make_update
from jtrain.step.pipeline_ticks import counts_of
from jtrain.step.pipelined import pipelined_gradients, pipelined_nats
from jtrain.step.preferences.pair_loss import PAIR_MEANS
from jtrain.step.preferences.pair_step import PairStep
from jtrain.step.state import TrainState, abstract_state, shardings_of
from jtrain.step.torus_collectives import along_torus
from jtrain.step.xla_options import Deterministic, compiler_options, kernels_for
from jtrain.step.zero import (
    attach_values,
    exchange_heads,
    finish_gradient,
    param_tree,
    placement_of,
    psum_batch,
    trained_part,
    trained_tree,
)

BATCH_SPEC = P(BATCH_AXES, "context")
"""Partition of [B, L] arrays; devices along `tensor` hold the same tokens."""

type StepMetrics = dict[str, Array]
"""Metrics of a step by name, on the device."""


def make_train_step(
    model: Transformer,
    optimizer: Optimizer,
    layout: Layout,
    mesh: Mesh,
    *,
    sigmas: float | None = 6.0,
    jumps: tuple[int, ...] = (),
    traced: bool = False,
    checksums: bool = False,
    deterministic: Deterministic = "auto",
    objective: Objective = TOKENS,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Returns the jitted `step(state, batch) -> (state, metrics)`; it donates its input state.

    Metrics are scalars: loss_nats (cross entropy per valid target of the global batch, or its mean per
    sample; without z-loss; with pairs their loss, and the metrics reward_margin and accuracy), grad_norm
    (before clipping), learning_rate, tokens (valid targets), batch_hash (2 x uint32), those of
    `guard.judge_update`, and by_device: [devices, 2] f32, in the order of the mesh, each device's share of
    the loss before any sum, and the NaN and infinite elements of its shard of the new state.

    Args:
      sigmas: `GuardSpec.sigmas`.
      jumps: as of `guard.judge_update`.
      traced: a profile window will trace it, so on a GPU its kernels are launched one by one.
      checksums: the step also returns the metrics `checksums.METRIC` and `GRADIENT_BITS`, the sums of the
        bits of state and gradients on every device.
      deterministic: as in `compiler_options`.
      objective: what the loss is the mean over.

    Raises:
      UserError: these devices do not support precision.matmul_dtype; or as `counts_of`.
    """
    check_matmul_dtype(layout.precision, mesh)
    # Only the mesh knows the devices' coordinates, by which ZeRO's collectives follow a torus.
    layout = along_torus(layout, mesh)
    # A pipeline reorders and pads the layers, so the optimizer's state has other shapes than the model's.
    optimizer = optimizer.placed(layout)
    if layout.pipeline is not None:
        counts_of(layout)  # refuses what no pipelined step can do
    gradients = jax.shard_map(
        lambda params, scaling, batch, step: local_gradients(
            model, layout, params, scaling, batch, step, objective
        ),
        mesh=mesh,
        in_specs=(param_tree(layout, lambda p: p.param_partition), layout.per_layer, BATCH_SPEC, P()),
        out_specs=(
            trained_tree(layout, lambda p: p.optimizer_partition),
            layout.per_layer,
            P(),
            P(mesh.axis_names),
        ),
        check_vma=False,  # all sums over axes are explicit: `finish_gradient`
    )

    update = make_update(optimizer, layout, mesh)
    abstract = abstract_state(layout, optimizer, mesh)
    grad_specs = [
        None if p.gradient_memory == "pinned_host" else p.optimizer_partition
        for p in jax.tree.leaves(trained_tree(layout, lambda p: p))
    ]
    state_sums = StateSums(abstract, mesh, grad_specs) if checksums else None

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        # Inside the jitted function: ops choose their kernels while they are traced.
        with kernels_for(layout, mesh):
            grads, amax, metrics, loss_share = gradients(state.params, state.scaling, batch, state.step)
            with jax.named_scope("optimizer"):
                # First of all: the sums must be of the state as it came, and the update waits for them.
                state, grads, sums_before = (
                    state_sums.sum_before_update(state, grads) if state_sums else (state, grads, None)
                )
                # The norm needs every gradient, so it precedes the update of the first parameter.
                scalars = optimizer.begin(grads, state.step, norm=streamed_norm(layout, mesh, grads))
                with jax.named_scope("guard"):
                    assert isinstance(state.guard, GuardState)
                    guard, guard_metrics = judge_update(
                        *(state.guard, state.step, metrics["loss_nats"], scalars.grad_norm),
                        sigmas=sigmas,
                        jumps=jumps,
                    )
                # Each leaf selects its old or new value inside its own update: a select out here would hold
                # two states.
                scalars = dataclasses.replace(scalars, applied=guard_metrics["applied"])
                params, opt_state, num_bad = update(scalars, grads, state.params, state.opt_state)
                # The amax histories stay too: one infinite value in them would scale matmuls of later, good
                # steps.
                scaling = jax.tree.map(
                    lambda new, old: jnp.where(scalars.applied, new, old),
                    advance_scaling(state.scaling, amax),
                    state.scaling,
                )
                with jax.named_scope("guard"):
                    # The histories are replicated but for `stage`, so every device counts them as part of its
                    # own state.
                    num_bad = num_bad + not_finite(scaling).astype(jnp.float32)
                    guard_metrics["by_device"] = gather_rows(mesh, jnp.stack([loss_share, num_bad], axis=1))
                # Skipped updates count as steps: batch k belongs to step k, whatever the guard decides.
                new = TrainState(state.step + 1, params, opt_state, scaling, guard, state.base_hash)
                checksum_metrics = state_sums.metric(sums_before, new) if state_sums else {}
                return new, metrics | scalars.metrics | guard_metrics | checksum_metrics

    # Output shardings are explicit: if XLA inferred others, the second step would compile again.
    state_shardings = shardings_of(abstract)
    # Donated, so that new parameters and moments take the memory of the old ones.
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(state_shardings, NamedSharding(mesh, P())),
        compiler_options=compiler_options(
            mesh,
            layout.precision.matmul_dtype,
            layout.kernels,
            layout.spec.sequence_groups,
            traced=traced,
            deterministic=deterministic,
            offloaded=[name for name in OFFLOADABLE if layout.spec.offload.share(name) > 0],
            plain_tensor=layout.mesh.tensor > 1
            and layout.spec.sequence_groups == 1
            and not layout.spec.tensor_overlap,
        ),
    )


def make_eval_step(
    model: Transformer, layout: Layout, mesh: Mesh, *, top_k: int | None = None
) -> Callable[[Params, Batch], Any]:
    """Returns the jitted `step(params, batch) -> nats_BL`: cross entropy of each token, 0 without a target;
    with `top_k` what the model says of the token after each (`SoftTargets`, [B, L, top_k] and one more
    outcome).

    Every process gets all of it, 4 bytes per token, so that each can sum over documents. A device computes as
    many sequences at a time as in training, so evaluation needs no more memory.
    """
    layout = along_torus(layout, mesh)
    placement = placement_of(layout)

    def local_values(params: Params, batch: Batch) -> Any:
        params, parts = exchange_heads(layout, params), microbatches(layout, batch)
        if layout.pipeline is not None:
            values = pipelined_nats(model, layout, params, parts, top_k=top_k)
        else:
            weights = attach_values(layout, trained_part(layout, params), params)

            def microbatch(_: None, part: Batch) -> tuple[None, Any]:
                if top_k is None:
                    return None, model.token_nats(weights, part, placement)
                x_BLD = model.hidden(weights, part, placement)
                return None, model.top_k_of(weights, x_BLD, top_k, placement)

            _, values = jax.lax.scan(microbatch, None, parts)
        # From microbatches to rows.
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values)

    params_spec = param_tree(layout, lambda p: p.param_partition)
    values_spec = P(BATCH_AXES, ("context", "tensor"))
    sharded_values = jax.shard_map(
        local_values, mesh=mesh, in_specs=(params_spec, BATCH_SPEC), out_specs=values_spec, check_vma=False
    )

    def eval_step(params: Params, batch: Batch) -> Any:
        with kernels_for(layout, mesh):
            return sharded_values(params, batch)

    options = compiler_options(mesh, kernels=layout.kernels, sequence_groups=layout.spec.sequence_groups)
    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, P()), compiler_options=options)


def gather_rows(mesh: Mesh | AbstractMesh, rows: Float[Array, "devices 2"]) -> Float[Array, "devices 2"]:
    """Gives every device the row of each, in one all-gather of 8 bytes per device."""
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    if not axes:
        return rows
    gather = jax.shard_map(
        lambda row: jax.lax.all_gather(row, axes, axis=0, tiled=True),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(),
        check_vma=False,
    )
    return gather(rows)


def local_gradients(
    model: Transformer,
    layout: Layout,
    params: Params,
    scaling: dict[str, Any],
    batch: Batch,
    step: Int[Array, ""],
    objective_spec: Objective = TOKENS,
) -> tuple[Params, dict[str, Any], StepMetrics, Float[Array, "1"]]:
    """Computes one device's part of a step, inside the shard_map.

    Args:
      step: updates completed before this one; seeds the dropout of adapters, and the rounding of gradients
        summed in bfloat16.

    Returns:
      Gradients sharded as the optimizer needs them; the largest values in 8-bit matmuls and the metrics, both
      of the global batch; this device's share of the loss.
    """
    spec = layout.spec
    placement = placement_of(layout)
    # Once per step and not per microbatch: the exchange carries all layers' key heads.
    params = exchange_heads(layout, params)
    with jax.named_scope("batch"):
        scale, batch = scale_of(layout, batch, objective_spec, has_router=model.router is not None)
        num_tokens, weight = scale.num_tokens, scale.unit
        if (dropout := layout.adapter_dropout) is not None:
            rows, columns = batch.token_BL.shape
            index_BL = index_in_batch(rows, placement.context.position_L(columns))
            batch = dataclasses.replace(batch, dropout_BL=token_bits(dropout.seed, step, index_BL))
    pairs = PairStep(objective_spec, model, layout, params) if isinstance(objective_spec, DPO) else None

    def objective(
        trained: Params, probes: Any, part: Batch, sums: GradientSums | None
    ) -> tuple[Float[Array, ""], Any]:
        weights = weights_of(layout, trained, params, scaling, probes, weight, sums)
        if pairs is not None:
            return pairs.loss(weights, part, placement, scale)
        total, nats = model.loss(weights, part, placement, scale.targets_per_token)
        with jax.named_scope("loss"):
            return total * weight, nats * weight

    def differentiate(trained: Params, probes: Any, part: Batch, sums: GradientSums | None) -> Any:
        # The reference is no function of what is trained: computed outside of what JAX differentiates.
        part = part if pairs is None else pairs.with_reference(part)
        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(trained, probes, part, sums)

    def add_microbatch(carry: Any, part_and_index: tuple[Batch, Array]) -> tuple[Any, None]:
        part, index = part_and_index
        # Numbers the microbatches of the whole run: none shares its random bits of rounding with another.
        sums = GradientSums(layout, trained, step * spec.microbatches + index, index)
        (_, loss), (grads, amax) = differentiate(
            sums.trained_arrays(carry[0]), amax_probes(scaling), part, sums
        )
        return (
            sums.add_ends(carry[0], grads),
            jax.tree.map(jnp.maximum, carry[1], amax),
            jax.tree.map(jnp.add, carry[2], loss),
        ), None

    # `add_microbatch` reads `trained` when it is traced, which is below this line.
    trained = trained_part(layout, params)
    if layout.pipeline is not None:
        parts, means = microbatches(layout, batch), None
        if pairs is not None:
            parts, means = pairs.weigh_pipelined(parts, scale)
        grads, amax, loss = pipelined_gradients(model, layout, params, scaling, parts, scale)
        loss = loss if means is None else means
    # A single microbatch needs no float32 sums beside its gradients, 4 bytes per parameter.
    elif not sums_gradients(layout):
        (_, loss), (grads, amax) = differentiate(trained, amax_probes(scaling), batch, None)
    else:
        parts = microbatches(layout, batch)
        no_loss = (
            jnp.zeros((), jnp.float32)
            if pairs is None
            else dict.fromkeys(("loss", *PAIR_MEANS), jnp.float32(0))
        )
        carry = (zero_sums(layout, trained), amax_probes(scaling), no_loss)
        (grads, amax, loss), _ = jax.lax.scan(add_microbatch, carry, (parts, jnp.arange(spec.microbatches)))

    return reduce_step(layout, grads, amax, loss, batch, num_tokens)


def weights_of(
    layout: Layout,
    trained: Params,
    params: Params,
    scaling: dict[str, Any],
    probes: Any,
    unit: Float[Array, ""],
    sums: GradientSums | None,
) -> Params:
    """The weights that a forward pass reads, from what JAX differentiates.

    Args:
      trained: from `zero.trained_part`; of layers the sums of their gradients, if there are any.
      unit: 1 / tokens of the batch.
    """
    weights = attach_values(layout, trained, params) if sums is None else sums.weights(trained, params)
    weights = with_dropout_keys(layout, weights)
    if layout.precision.matmul_dtype == "compute":
        return weights
    return with_fp8(weights, tuple(p.info for p in layout.params), scaling, probes, unit)


def reduce_step(
    layout: Layout, grads: Params, amax: Any, loss: Any, batch: Batch, num_tokens: Int[Array, ""]
) -> tuple[Params, dict[str, Any], StepMetrics, Float[Array, "1"]]:
    """Sums over devices at the end of a step: gradients, largest values, loss and the hash of the batch.

    Args:
      grads, amax, loss: of this device's tokens; of pairs `loss` has several means by name.
      num_tokens: valid targets of the global batch.

    Returns:
      As `local_gradients`.
    """
    axes = tuple(axis for axis, size in layout.mesh.shape.items() if size > 1)
    with jax.named_scope("reduce_gradients"):
        layouts = trained_tree(layout, lambda p: p)
        grads = jax.tree.map(lambda p, g: finish_gradient(layout, p, g), layouts, grads)
        # Each stage has the scales of its own layers.
        amax_axes = tuple(axis for axis in axes if axis != "stage")
        amax = jax.tree.map(lambda amax_Y3: jax.lax.pmax(amax_Y3, amax_axes), amax)
        # The share before the sum tells which device went wrong; the summed loss is NaN on all of them.
        means = loss if isinstance(loss, dict) else {"loss": loss}
        share, means = means["loss"], jax.lax.psum(means, axes)
    with jax.named_scope("batch"):
        # In zig-zag order a device has an early and a late piece of each row.
        position_L = placement_of(layout).context.position_L(batch.token_BL.shape[1])
        hash_2 = psum_batch(layout, hash_block(batch, position_L))
    # [None] adds the dimension along which the shard_map concatenates the devices' shares.
    metrics = {"loss_nats": means.pop("loss"), **means, "tokens": num_tokens, "batch_hash": hash_2}
    return grads, amax, metrics, share[None]


def microbatches(layout: Layout, batch: Batch) -> Batch:
    """Splits one device's rows into microbatches, which become the leading dimension."""
    with jax.named_scope("batch"):
        return jax.tree.map(lambda x: x.reshape(layout.spec.microbatches, -1, *x.shape[1:]), batch)
