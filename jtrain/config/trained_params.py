"""Parameters of checkpoints: of a plain run, of the base of an adapter, and of both together."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config.resume import open_checkpoint
from jtrain.config.run import Run
from jtrain.errors import FileError, UserError
from jtrain.layout.dims import ParamInfo
from jtrain.model.adapters.base_hash import WORDS, hash_base, hex_of
from jtrain.model.adapters.block_quantization import (
    BlockQuantized,
    is_quantized,
    quantize,
    store,
    stored_arrays,
)
from jtrain.model.adapters.lora import model_infos
from jtrain.model.adapters.merge import merge
from jtrain.model.param import Params, at_path, init_params, map_params, merge_trees
from jtrain.model.transformer import Transformer
from jtrain.runtime.stores import workdir_path

type MergeOnto = Literal["trained", "base"]
"""Weights that an adapter is merged into."""

_COMPILED = ("scan_layers", "loss_chunk_tokens", "attention_chunk")
"""Fields of a model that change only how it compiles."""


def read_params(
    checkpoints: Checkpoints,
    step: int,
    run: Run,
    dtype_of: Callable[[ParamInfo], str],
    *,
    onto: MergeOnto = "trained",
) -> Params:
    """Reads the parameters of the model of a checkpoint onto one device, in the dtypes of `dtype_of`; those
    of an adapter are merged into its base.

    Args:
      onto: `trained` merges into the frozen weights as the steps computed with them; `base` into those of the
        base in the dtypes of `dtype_of`, which differ from them where the run had its base in blocks.

    Raises:
      CheckpointError: the checkpoint is damaged.
      FileError: the base of an adapter is not where `adapter.base` says.
      UserError: it is another base.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    # One device: who reads a checkpoint for its weights has no mesh.
    def like(info: ParamInfo, dtype: str) -> Any:
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
            stored_arrays(info, dtype),
        )

    infos, param_dtype = run.param_infos(), run.precision.param_dtype
    if run.adapter is None:
        params = map_params(lambda info: like(info, dtype_of(info)), infos)
        return checkpoints.restore_part(step, {"params": params})["params"]
    saved = _read_saved(checkpoints, step, run)
    base_infos = _base_infos(run)
    base = read_base(run, map_params(lambda info: like(info, info.dtype or param_dtype), base_infos), None)
    unrounded = None
    if base is None:
        # As the first state of the run draws them.
        drawn = param_dtype if run.optimizer.master_dtype == "none" else "float32"
        unrounded = init_params(model_infos(infos), seed=run.seed, dtype=drawn)
        base = map_params(
            lambda info, value: store(info, value, info.dtype or param_dtype), base_infos, unrounded
        )
    check_base(run, saved["base_hash"], hash_base(infos, base))
    if onto == "base":
        base = unrounded or read_base(
            run, map_params(lambda info: like(info, dtype_of(info)), base_infos), None
        )
        assert base is not None
    everything = map_params(lambda info: at_path(base if info.frozen else saved["params"], info.path), infos)
    return merge(infos, everything, run.adapter.scale, dtype_of)


def read_trained(checkpoints: Checkpoints, step: int, run: Run) -> Params:
    """Reads what a run with an adapter trains onto one device: A and B, and parameters that are trained
    whole.
    """
    return _read_saved(checkpoints, step, run)["params"]


def _read_saved(checkpoints: Checkpoints, step: int, run: Run) -> Params:
    """Trained parameters of a checkpoint, and the hash of its base."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    trained = map_params(
        lambda info: jax.ShapeDtypeStruct(info.shape, run.precision.param_dtype, sharding=sharding),
        tuple(info for info in run.param_infos() if not info.frozen),
    )
    words = jax.ShapeDtypeStruct((WORDS,), "uint32", sharding=sharding)
    return checkpoints.restore_part(step, {"params": trained, "base_hash": words})


def base_workdir(base: str) -> tuple[Path, int | None]:
    """Returns the workdir that `adapter.base` names, and the step if it is a checkpoint; None for the newest."""
    path = workdir_path(base)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, int(path.name)
    return path, None


def read_base(run: Run, like: Params, order: tuple[int, ...] | None) -> Params | None:
    """Reads the parameters of the base of a run's adapter; None if they are drawn from the seed.

    Args:
      like: shapes, dtypes and shardings of all parameters of the model; matrices in blocks are made of those
        that are read one parameter at a time, with no more than a layer of one on a device.
      order: as `Checkpoints.layer_order`.

    Raises:
      FileError: there is no checkpoint.
      UserError: it is of another model, or of an adapter.
    """
    assert run.adapter is not None
    if run.adapter.base is None:
        return None
    path, step = base_workdir(run.adapter.base)
    with Checkpoints(path, CheckpointSpec(), layer_order=order) as checkpoints:
        if not checkpoints.steps():
            raise FileError(
                f"adapter.base={run.adapter.base} has no checkpoint. Give the workdir of a run, or one that "
                "`jtrain hf import` wrote."
            )
        step, base_run = open_checkpoint(checkpoints, step)
        _check_model(run, base_run)
        in_blocks = tuple(info for info in _base_infos(run) if is_quantized(at_path(like, info.path)))
        if not in_blocks:
            return checkpoints.restore_part(step, {"params": like})["params"]
        unblocked = tuple(info for info in _base_infos(run) if info not in in_blocks)
        params = map_params(lambda _, array: array, unblocked, like)
        params = checkpoints.restore_part(step, {"params": params}, whole=False)["params"]
        for info in in_blocks:
            blocks = at_path(like, info.path)
            value = jax.ShapeDtypeStruct(
                blocks.shape, base_run.precision.param_dtype, sharding=_in_host_memory(blocks.codes.sharding)
            )
            # Hashes were compared above.
            read = checkpoints.restore_part(
                step, {"params": map_params(lambda _, x=value: x, (info,))}, verify=False, whole=False
            )["params"]
            quantized = map_params(lambda info, x: _quantized(info, x, info.dtype or ""), (info,), read)
            # One parameter at a time is in host memory.
            params = merge_trees(params, jax.block_until_ready(quantized))
        return params


def _in_host_memory(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same sharding in host memory, where the devices have one."""
    [device, *_] = sharding.device_set
    has_host = "pinned_host" in {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if has_host else sharding


def _quantized(info: ParamInfo, value: jax.Array, dtype: str) -> BlockQuantized:
    """A stack of matrices in blocks; each device makes those of its shard, a layer at a time."""

    def in_blocks(stack: jax.Array) -> BlockQuantized:
        def layer(y: jax.Array) -> BlockQuantized:
            matrix = jax.lax.dynamic_index_in_dim(stack, y, keepdims=False)
            return quantize(info, jax.device_put(matrix, jax.memory.Space.Device), dtype)

        if not info.is_stacked:
            return quantize(info, jax.device_put(stack, jax.memory.Space.Device), dtype)
        return jax.lax.map(layer, jnp.arange(stack.shape[0]))

    if isinstance(value.sharding, jax.sharding.NamedSharding):
        # Not left to XLA: a shard has whole blocks, so that no number moves.
        mesh, spec = value.sharding.mesh, value.sharding.spec
        in_blocks = jax.shard_map(in_blocks, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(in_blocks, out_shardings=value.sharding.with_memory_kind("device"))(value)


def _check_model(run: Run, base_run: Run) -> None:
    assert run.adapter is not None
    if base_run.adapter is not None:
        raise UserError(
            f"adapter.base={run.adapter.base} is a run with an adapter. Merge it first: `jtrain hf export`, "
            "then `jtrain hf import` into another workdir."
        )
    lines = [
        f"\n  model.{field.name}: {getattr(base_run.model, field.name)} there, "
        f"{getattr(run.model, field.name)} here"
        for field in dataclasses.fields(Transformer)
        if field.name not in _COMPILED
        and getattr(base_run.model, field.name) != getattr(run.model, field.name)
    ]
    if lines:
        raise UserError(
            f"adapter.base={run.adapter.base} is of another model:{''.join(lines)}\nSet these fields, or "
            "another adapter.base."
        )


def check_base(run: Run, saved: jax.Array, found: np.ndarray) -> None:
    """Refuses a base that is not the one with which an adapter was trained.

    Args:
      saved: `TrainState.base_hash` of the adapter's checkpoint; found: hash of the base that is there.

    Raises:
      UserError: names both hashes.
    """
    assert run.adapter is not None
    saved_hash, base_hash = hex_of(np.asarray(saved)), hex_of(found)
    if saved_hash != base_hash:
        base_text = "drawn from seed" if run.adapter.base is None else f"adapter.base={run.adapter.base}"
        raise UserError(
            f"the adapter was trained on a base with hash {saved_hash}, and {base_text} has hash "
            f"{base_hash}. Name the checkpoint that it was trained on, as "
            "adapter.base=WORKDIR/checkpoints/STEP."
        )


def _base_infos(run: Run) -> tuple[ParamInfo, ...]:
    """Parameters of the model in a run with an adapter."""
    return tuple(info for info in run.param_infos() if not info.is_adapter)
