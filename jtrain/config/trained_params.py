"""Parameters of checkpoints: of a plain run, of the base of an adapter, and of both together."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config.resume import open_checkpoint
from jtrain.config.run import Run
from jtrain.errors import FileError, UserError
from jtrain.layout.dims import ParamInfo
from jtrain.model.adapters.base_hash import WORDS, hash_base, hex_of
from jtrain.model.adapters.lora import model_infos
from jtrain.model.adapters.merge import merge
from jtrain.model.param import Params, at_path, init_params, map_params
from jtrain.model.transformer import Transformer
from jtrain.runtime.stores import workdir_path

_COMPILED = ("scan_layers", "loss_chunk_tokens", "attention_chunk")
"""Fields of a model that change only how it compiles."""


def read_params(
    checkpoints: Checkpoints, step: int, run: Run, dtype_of: Callable[[ParamInfo], str]
) -> Params:
    """Reads the parameters of the model of a checkpoint onto one device, in the dtypes of `dtype_of`; those of an
    adapter are merged into its base.

    Raises:
      CheckpointError: the checkpoint is damaged.
      FileError: the base of an adapter is not where `adapter.base` says.
      UserError: it is another base.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    # One device: who reads a checkpoint for its weights has no mesh.
    def like(info: ParamInfo, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding)

    infos, own = run.param_infos(), run.precision.param_dtype
    if run.adapter is None:
        params = map_params(lambda info: like(info, dtype_of(info)), infos)
        return checkpoints.restore_part(step, {"params": params})["params"]
    saved = _read_saved(checkpoints, step, run)
    base_likes = map_params(lambda info: like(info, info.dtype or own), _base_infos(run))
    base = read_base(run, base_likes, None)
    if base is None:
        # As the first state of the run draws them.
        drawn = own if run.optimizer.master_dtype == "none" else "float32"
        base = init_params(model_infos(infos), seed=run.seed, dtype=drawn)
        base = map_params(lambda info, value: value.astype(info.dtype or own), _base_infos(run), base)
    check_base(run, saved["base_hash"], hash_base(infos, base))
    everything = map_params(lambda info: at_path(base if info.frozen else saved["params"], info.path), infos)
    return merge(infos, everything, run.adapter.scale, dtype_of)


def read_trained(checkpoints: Checkpoints, step: int, run: Run) -> Params:
    """Reads what a run with an adapter trains onto one device: A and B, and parameters that are trained whole."""
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


def read_base(run: Run, like: Params, order: tuple[int, ...] | None) -> Params | None:
    """Reads the parameters of the base of a run's adapter; None if they are drawn from the seed.

    Args:
      like: shapes, dtypes and shardings of all parameters of the model.
      order: as `Checkpoints.layer_order`.

    Raises:
      FileError: there is no checkpoint.
      UserError: it is of another model, or of an adapter.
    """
    assert run.adapter is not None
    if run.adapter.base is None:
        return None
    path, step = workdir_path(run.adapter.base), None
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        path, step = path.parent.parent, int(path.name)
    with Checkpoints(path, CheckpointSpec(), layer_order=order) as checkpoints:
        if not checkpoints.steps():
            raise FileError(
                f"adapter.base={run.adapter.base} has no checkpoint. Give the workdir of a run, or one that "
                "`jtrain hf import` wrote."
            )
        step, base_run = open_checkpoint(checkpoints, step)
        _check_model(run, base_run)
        return checkpoints.restore_part(step, {"params": like})["params"]


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
    there, here = hex_of(np.asarray(saved)), hex_of(found)
    if there != here:
        place = "drawn from seed" if run.adapter.base is None else f"adapter.base={run.adapter.base}"
        raise UserError(
            f"the adapter was trained on a base with hash {there}, and {place} has hash {here}. Name the "
            "checkpoint that it was trained on, as adapter.base=WORKDIR/checkpoints/STEP."
        )


def _base_infos(run: Run) -> tuple[ParamInfo, ...]:
    """Parameters of the model in a run with an adapter."""
    return tuple(info for info in run.param_infos() if not info.is_adapter)
