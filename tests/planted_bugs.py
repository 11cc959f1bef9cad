"""Bugs that quick tests find: what each replaces, and the test that finds it."""

from tests.planted_bugs_of_models import BUGS_OF_MODELS
from tests.planting import Bug

KERNELS = "kernels/jtrain_kernels/"
OVERLAP = "tests/kernels/overlap/"


FUSED = OVERLAP + "test_gpu_fabric.py::test_the_fused_kernels_give_the_product_although_senders_are_late"
ELSEWHERE = "tests/test_platform_dependent.py::test_an_accelerators_branch_computes_what_the_cpus_does"
IN_FLOAT64 = OVERLAP + "test_api.py::test_values_and_gradients_are_those_of_float64"
STAGES = "tests/pipeline/test_executor.py::test_stages_are_not_a_model"
SPLIT_BACKWARD = "tests/pipeline/test_executor.py::test_split_backward_passes_are_not_a_model"
LAYOUT = "tests/step/test_train_step.py::test_the_layout_is_not_a_model"
SEQUENCES = "tests/step/test_train_step.py::test_split_sequences_are_whole_ones"
IN_8_BITS = "tests/step/test_fp8.py::test_delayed_scaling_is_the_same_on_any_layout"
HOSTS_CORES = "tests/step/test_host_offload.py::test_the_hosts_cores_compute_the_same_update"
DTYPES = "tests/step/test_dtypes.py"
NOISE = "tests/optim/test_state_rounding.py::test_no_two_roundings_share_their_noise"
COLLATED = "tests/data/constructor/test_collate.py"

BUGS = BUGS_OF_MODELS | {
    # A batch whose rows are all alike hides these: the wrong microbatch, group, or row.
    "stages: backward passes with positions and documents of the forward pass": Bug(
        "jtrain/step/pipelined.py",
        "self._shared(parts, row_F[TickColumn.BACKWARD_MICROBATCH])",
        "self._shared(parts, row_F[TickColumn.FORWARD_MICROBATCH])",
        STAGES,
    ),
    "stages: targets of the worker's own forward pass": Bug(
        "jtrain/step/pipelined.py",
        "microbatch = row_F[TickColumn.HEAD_MICROBATCH]\n            nats_part",
        "microbatch = row_F[TickColumn.FORWARD_MICROBATCH]\n            nats_part",
        STAGES,
    ),
    "stages: the embedding's gradient for the tokens that enter": Bug(
        "jtrain/step/pipelined.py",
        "microbatch = row_F[TickColumn.EMBED_GRADIENT_MICROBATCH]",
        "microbatch = row_F[TickColumn.EMBED_MICROBATCH]",
        STAGES,
    ),
    "stages: evaluation with the first microbatch's targets": Bug(
        "jtrain/step/pipeline_ends.py",
        "self.ends.nats(trained, y_BLD, parts.target_BL[microbatch])",
        "self.ends.nats(trained, y_BLD, parts.target_BL[0 * microbatch])",
        STAGES,
    ),
    "stages: gradients of weights from the stash that is being filled": Bug(
        "jtrain/step/pipelined.py",
        "chunk, stash = row_F[TickColumn.WEIGHT_CHUNK], row_F[TickColumn.WEIGHT_STASH]",
        "chunk, stash = row_F[TickColumn.WEIGHT_CHUNK], row_F[TickColumn.BACKWARD_STASH]",
        SPLIT_BACKWARD,
    ),
    "stages: what a worker computes without a microbatch goes into a slot": Bug(
        "jtrain/step/pipeline_chunks.py",
        "leaf = jnp.where(present, leaf, _take(slots, slot, index))",
        "pass",
        "tests/pipeline/test_executor.py::test_what_workers_compute_without_a_microbatch_is_not_kept",
    ),
    # One block, chunk or slice hides these.
    "collation: positions from the beginning of the batch": Bug(
        "jtrain/data/constructor/collate.py",
        "starts[low:high] - np.int32(first_token)",
        "starts[low:high]",
        COLLATED,
    ),
    "collation: ends of documents counted from the beginning of the batch": Bug(
        "jtrain/data/constructor/collate.py",
        "target[ends[low:high] - (first_token + 1)] = IGNORE",
        "target[(ends[low:high] - 1) % len(target)] = IGNORE",
        COLLATED,
    ),
    "tpu: a norm's sums over rows begin anew in each block": Bug(
        KERNELS + "rms_norm/pallas_tpu.py",
        "pl.program_id(1) == 0",
        "pl.program_id(1) >= 0",
        "tests/kernels/test_rms_norm_kernels.py::test_the_tpu_kernel_has_the_formulas_gradients",
    ),
    "tpu: angles of the first block for all": Bug(
        KERNELS + "rope/pallas_tpu.py",
        "table = pl.BlockSpec((block, H), lambda step: (step, 0))",
        "table = pl.BlockSpec((block, H), lambda step: (0, 0))",
        "tests/kernels/test_rope_kernels.py::test_the_tpu_kernel_turns_pairs_half_a_head_apart",
    ),
    "offload: noise of a layer's first slice for all of its slices": Bug(
        "jtrain/step/optimizer_update.py",
        "first = (start[is_stacked] + part * grad.shape[0], *start[is_stacked + 1 :])",
        "first = (start[is_stacked], *start[is_stacked + 1 :])",
        "tests/step/test_host_offload.py::test_every_form_of_state_streams",
    ),
    # Noise that two arrays share.
    "int8: second moments rounded with the noise of the first": Bug(
        "jtrain/optim/state.py",
        'encode(value, blocking, signed=name == "mu", bits=noise.bits(name, value.shape))',
        'encode(value, blocking, signed=name == "mu", bits=noise.bits("mu", value.shape))',
        NOISE,
    ),
    "parameters rounded with the noise of their first moments": Bug(
        "jtrain/optim/optimizer.py", 'noise.bits("param", p.shape)', 'noise.bits("mu", p.shape)', NOISE
    ),
    "layers rounded with the noise of the first one": Bug(
        "jtrain/optim/optimizer.py",
        "Noise(info, update.step, first + y, tuple(inner))",
        "Noise(info, update.step, first + 0 * y, tuple(inner))",
        NOISE,
    ),
    "the same noise in every step": Bug(
        "jtrain/optim/optimizer.py",
        "Noise(info, update.step, first + y, tuple(inner))",
        "Noise(info, 0 * update.step, first + y, tuple(inner))",
        NOISE,
    ),
    "the same noise in every microbatch": Bug(
        "jtrain/step/train_step.py",
        "step * spec.microbatches + index, index)",
        "step * spec.microbatches, index)",
        "tests/step/test_gradient_sums.py::test_each_microbatch_has_noise_of_its_own",
    ),
    # Formats of sums.
    "reduce_dtype ignored for sums over replicas": Bug(
        "jtrain/step/zero.py",
        'dtype = "float32" if p.info.update == "expert_load" else layout.precision.reduce_dtype',
        'dtype = "float32"',
        DTYPES,
    ),
    "reduce_dtype ignored where a step gathers once": Bug(
        "jtrain/step/zero.py",
        "grad = scatter_shards(layout, grad.astype(layout.precision.reduce_dtype), p.zero_dim)\n        "
        "return grad",
        "grad = scatter_shards(layout, grad, p.zero_dim)\n        return grad",
        DTYPES,
    ),
    "copies of shared key heads summed in reduce_dtype": Bug(
        "jtrain/step/zero.py",
        "jnp.sum(parts, axis=heads + 1, dtype=jnp.float32)",
        "jax.lax.reduce_sum(parts, (heads + 1,))",
        DTYPES,
    ),
    "stages: gradients summed in the parameters' format": Bug(
        "jtrain/step/pipeline_chunks.py",
        "jnp.zeros_like(x, dtype=jnp.float32), _parts",
        "jnp.zeros_like(x), _parts",
        DTYPES,
    ),
    # What counts to nothing.
    "stages: padding of a split head as targets": Bug(
        "jtrain/step/pipeline_ends.py",
        "_pad_tokens(value_T, stage, fill)",
        "_pad_tokens(value_T, stage)",
        STAGES,
    ),
    # An option or an axis that is forgotten in one combination.
    "8 bits: largest values not shared over context": Bug(
        "jtrain/step/train_step.py",
        'amax_axes = tuple(axis for axis in axes if axis != "stage")',
        'amax_axes = tuple(axis for axis in axes if axis not in ("stage", "context"))',
        IN_8_BITS,
    ),
    "8 bits: largest values of the last microbatch alone": Bug(
        "jtrain/step/train_step.py",
        "jax.tree.map(jnp.maximum, carry[1], amax)",
        "jax.tree.map(lambda _, new: new, carry[1], amax)",
        IN_8_BITS,
    ),
    "tokens of a batch not counted over context": Bug(
        "jtrain/step/zero.py",
        'tuple(axis for axis in (*BATCH_AXES, "context") if',
        "tuple(axis for axis in BATCH_AXES if",
        SEQUENCES,
    ),
    "a router's tokens not counted over the parts of a sequence": Bug(
        "jtrain/model/router.py",
        "    if axes:\n        chosen_BX = jax.lax.psum(chosen_BX, axes)\n",
        "",
        "tests/step/test_moe_step.py::test_the_layout_is_not_a_mixture",
    ),
    # A rejected step that leaves traces.
    "8 bits: histories advance in a rejected step": Bug(
        "jtrain/step/train_step.py",
        "lambda new, old: jnp.where(scalars.applied, new, old),",
        "lambda new, old: new,",
        IN_8_BITS,
    ),
    "the host's cores apply a rejected update": Bug(
        "jtrain/step/optimizer_update.py",
        'optimizer.update_param(scalars, p.info, grad, state["param"], new_state)',
        'optimizer.update_param(scalars.__class__(**vars(scalars) | {"applied": scalars.step >= 0}), '
        'p.info, grad, state["param"], new_state)',
        HOSTS_CORES,
    ),
    "moments advance in a rejected step": Bug(
        "jtrain/optim/optimizer.py",
        "new_param, new = jax.tree.map(\n"
        "            lambda n, o: jnp.where(update.applied, n, o), (new_param, new), (param, leaf)\n"
        "        )",
        "new_param = jnp.where(update.applied, new_param, param)",
        LAYOUT,
    ),
    "schedule: no wait for what was sent": Bug(
        KERNELS + "overlap/schedule.py",
        'return accumulator, [] if previous_peer is None else [Wait(accumulator, "sent", previous_peer)]',
        "return accumulator, []",
        OVERLAP + "test_schedule.py",
    ),
    "gpu: an output buffer reused one tile early": Bug(
        KERNELS + "overlap/mosaic_gpu/wgmma_tile.py",
        "plgpu.wait_smem_to_gmem(1, wait_read_only=True)",
        "plgpu.wait_smem_to_gmem(2, wait_read_only=True)",
        OVERLAP + "test_mosaic_gpu.py",
    ),
    "gpu: gathered dy without the rank's own rows": Bug(
        KERNELS + "overlap/mosaic_gpu/op.py",
        "plan, keep=True)",
        "plan)",
        OVERLAP + "test_gpu_fabric.py::test_the_gradients_of_the_fused_ops_are_those_of_float64",
    ),
    "gpu: rows used after 1 of 3 senders": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "peers.wait(arrived_rows, (tile.piece, tile.row), SENDERS)",
        "peers.wait(arrived_rows, (tile.piece, tile.row), 1)",
        FUSED,
    ),
    "gpu: rows passed on after 1 of 3 senders": Bug(
        KERNELS + "overlap/mosaic_gpu/send_blocks.py",
        "peers.wait(arrived_rows, (piece, row), SENDERS)",
        "peers.wait(arrived_rows, (piece, row), 1)",
        FUSED,
    ),
    "gpu: landed sums used after 1 of 2 warpgroups": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "(jobs[rank, tile.turn, 4 + j], tile.row, tile.column), WARPGROUPS",
        "(jobs[rank, tile.turn, 4 + j], tile.row, tile.column), 1",
        FUSED,
    ),
    "tokamax: a window one too wide": Bug(
        KERNELS + "attention/tokamax.py",
        "position_1L - mask.window + 1)",
        "position_1L - mask.window)",
        "tests/kernels/test_splash.py",
    ),
    "gpu: a copy to the rank itself": Bug(
        KERNELS + "overlap/mosaic_gpu/send_blocks.py",
        "peers.to_peer(copy_to, inbox, peer, call.program.offsets)",
        "copy_to(mine)",
        FUSED,
    ),
    # Other classes.
    "gpu: the counter of the wrong slot": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "peers.signal(arrived_tiles, (tile.slot, tile.row, tile.column), tile.peer)",
        "peers.signal(arrived_tiles, (0 * tile.slot, tile.row, tile.column), tile.peer)",
        FUSED,
    ),
    "gpu: the first piece of a rank for all of its pieces": Bug(
        KERNELS + "overlap/mosaic_gpu/launch_params.py",
        "self.sizes.row(lax.rem(piece, pieces_per_rank), row, pieces_per_rank)",
        "self.sizes.row(0 * piece, row, pieces_per_rank)",
        FUSED,
    ),
    "gpu: slots that overlap where there are several sequences": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "(tile.slot * sizes.rows + tile.row, tile.column), corner",
        "(tile.slot * sizes.tile_rows_per_sequence + tile.row, tile.column), corner",
        FUSED,
    ),
    "ring: rows of the wrong rank in the second direction": Bug(
        KERNELS + "overlap/xla/lower_schedule.py",
        "(rank - turn * peer) % n * pieces_per_rank + index, piece)",
        "(rank - turn) % n * pieces_per_rank + index, piece)",
        IN_FLOAT64,
    ),
    "ring: a kernel's gradient from the last piece alone": Bug(
        KERNELS + "overlap/xla/op.py",
        "return dx, total + _kernel_part(rows_of(x_BRK, number, rows_per_piece), dy)",
        "return dx, _kernel_part(rows_of(x_BRK, number, rows_per_piece), dy)",
        IN_FLOAT64,
    ),
    "fp8: every rank scales its rows by its own amax": Bug(
        KERNELS + "overlap/fp8.py",
        "        amax = jax.lax.pmax(amax, plan.axis_name)",
        "        pass",
        OVERLAP + "test_fp8.py",
    ),
    "accelerators: a kernel's gradient rounded to bfloat16": Bug(
        KERNELS + "linear/api.py",
        "product=lambda x, dy, dtype: contract(x, dy, 0, 0, dtype))",
        "product=lambda x, dy, dtype: contract(x, dy, 0, 0, x.dtype).astype(dtype))",
        ELSEWHERE,
    ),
    "accelerators: rows exchanged from where they go to where they are": Bug(
        "jtrain/model/expert_dispatch.py",
        "jax.lax.ragged_all_to_all(x, output, first, count, first_there, arriving,",
        "jax.lax.ragged_all_to_all(x, output, first_there, count, first, arriving,",
        ELSEWHERE,
    ),
    "groups: the last row of a group counts to the group, and the first of the next as well": Bug(
        KERNELS + "grouped_matmul/blocked.py",
        "jnp.sum(self.end_X <= row)",
        "jnp.sum(self.end_X < row)",
        "tests/kernels/test_grouped_matmul.py",
    ),
    "context: gradients of keys that stay one device before their owner": Bug(
        KERNELS + "attention/ring.py",
        "    dk, dv = ring.send(dkv)  # back",
        "    dk, dv = dkv  # back",
        "tests/kernels/test_context_attention.py",
    ),
    "window: the first key that a chunk sees left out": Bug(
        KERNELS + "attention/chunks.py",
        "else mask.window - 1",
        "else mask.window - 2",
        "tests/kernels/test_attention.py",
    ),
}
