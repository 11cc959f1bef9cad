"""Adapters as folders of peft: adapter_config.json and adapter_model.safetensors.

peft stores A as [R, inputs] and B as [outputs, R], by the name of the module that they stand beside. Experts
have a module each where the family's files have a tensor for each, and else `target_parameters`; both are
read. Any other matrix that is a part of a larger tensor, such as gate and up of a dense layer in one, is
refused.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jtrain.errors import FileError, UserError, first_few
from jtrain.hf.directory import check_empty
from jtrain.hf.mapping import DTYPES
from jtrain.hf.peft_tensors import AdapterTensor, adapter_tensors, below_layer, target_names
from jtrain.model.adapters.lora import LoRA
from jtrain.model.families.family import Family
from jtrain.model.param import Params, at_path, map_params
from jtrain.model.transformer import Transformer
from jtrain.runtime.atomic_io import replacing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PLAIN: dict[str, Any] = dict(bias="none", fan_in_fan_out=False, use_dora=False, modules_to_save=None)
"""Fields of adapter_config.json that change what an adapter is, and the values without which it is no `LoRA`.
"""


def write_adapter(
    folder: Path,
    params: Params,
    model: Transformer,
    adapter: LoRA,
    *,
    dtype: str,
    base: str = "",
    family: Family | None = None,
) -> list[str]:
    """Writes A and B of every target as peft does, and returns the names of the files.

    Args:
      params: whole arrays, the layers in the model's order.
      base: name of the base model that peft is told.
      family: whose names the modules have; None for the one that describes the model.

    Raises:
      UserError: `folder` is not empty; a target has no module of its own; or more than A and B is trained.
    """
    check_empty(folder)
    if adapter.train:
        raise UserError(
            f"adapter.train={adapter.train} trains whole parameters, which no folder of peft holds beside A "
            "and B. Export the merged model: leave out --adapter."
        )
    targets = adapter_tensors(model, adapter, family, joins_experts=False)
    tensors = filled_tensors(params, targets, dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as partial:
        partial.mkdir()
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        config = _PLAIN | {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": adapter.rank,
            "lora_dropout": adapter.dropout,
            **target_names(targets, model, family),
            **_scales(targets, adapter),
        }
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return [CONFIG, WEIGHTS]


def filled_tensors(
    params: Params, targets: Mapping[str, AdapterTensor], *, dtype: str
) -> dict[str, np.ndarray]:
    """A and B of every target by their names in peft, of whole arrays, the layers in the model's order."""
    tensors: dict[str, np.ndarray] = {}
    for name, target in targets.items():
        # Zeros, as B has them where it holds nothing of ours.
        tensors[name] = np.zeros(target.shape, DTYPES[dtype])
        for part in target.parts:
            ours = np.asarray(at_path(params, part.info.path)[part.index])
            part.write(ours.astype(DTYPES[dtype]), tensors[name])
    return tensors


def read_adapter(folder: Path, model: Transformer, adapter: LoRA, *, family: Family | None = None) -> Params:
    """Reads A and B of every target from a folder of peft, float32, nested like the parameters.

    Raises:
      FileError: the folder has not the two files.
      UserError: it holds another kind of adapter, another rank or scale, or other targets.
    """
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise FileError(f"{folder} has no {' and no '.join(missing)}. Give a folder that peft saved.")
    config = json.loads((folder / CONFIG).read_text())
    # Without dropout, which is no property of A and B: who goes on with them chooses it anew.
    ours = dict(r=adapter.rank, peft_type="LORA") | _PLAIN
    # Two ways to say one scale are one adapter.
    scale = _scale_of(config, float(config.get("lora_alpha", 0)), config.get("r", 1))
    if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
        ours |= dict(lora_alpha=adapter.alpha, use_rslora=adapter.rslora)
    wrong = [
        f"{name}={config[name]!r} there, {value!r} here"
        for name, value in ours.items()
        if name in config and (config[name] or None) != (value or None)
    ]
    wrong += ["layer_replication is set"] * bool(config.get("layer_replication"))
    if wrong:
        raise UserError(
            f"{folder / CONFIG} is of another adapter than adapter=LoRA(...): {'; '.join(wrong)}. Set the "
            "fields of adapter to what is there, or give another folder."
        )
    tensors = load_file(folder / WEIGHTS)
    targets = _matching(tensors, model, adapter, family, joins_experts=bool(config.get("target_parameters")))
    if targets.keys() != tensors.keys():
        missing, extra = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
        raise UserError(
            f"{folder / WEIGHTS} has other targets than adapter.targets={adapter.targets}: "
            f"missing {len(missing)} ({first_few(missing, 3)}), more {len(extra)} ({first_few(extra, 3)})."
        )
    arrays: dict[str, np.ndarray] = {}
    for name, target in targets.items():
        _check_scale(folder, config, target, adapter)
        for part, matrix in target.read(name, tensors[name].astype(np.float32)):
            stack = arrays.setdefault(part.info.path, np.empty(part.info.shape, np.float32))
            stack[part.index] = matrix
    infos = tuple(info for info in adapter.infos(model.param_infos()) if info.is_adapter)
    return map_params(lambda info: arrays[info.path], infos)


def _matching(
    tensors: Mapping[str, np.ndarray],
    model: Transformer,
    adapter: LoRA,
    family: Family | None,
    *,
    joins_experts: bool,
) -> dict[str, AdapterTensor]:
    """The tensors that a folder has to have; gate and up of one tensor share their A, or have each their own."""
    options: Any = dict(joins_experts=joins_experts)
    targets = adapter_tensors(model, adapter, family, **options)
    shared = adapter_tensors(model, adapter, family, shares_a=True, **options)
    has_shared = all(
        name in tensors and tensors[name].shape == target.shape for name, target in shared.items()
    )
    return shared if has_shared else targets


def _scales(targets: Mapping[str, AdapterTensor], adapter: LoRA) -> dict[str, Any]:
    """Fields of the scale, the same for all targets: alphas, and ranks other than the adapter's."""
    # peft joins experts for transformers 5 with twice the rank and twice the alpha, which is the same scale
    # by alpha / rank alone.
    has_experts = any(part.info.is_experts for target in targets.values() for part in target.parts)
    has_root = adapter.rslora and not has_experts
    alpha = adapter.alpha if has_root == adapter.rslora else adapter.scale * adapter.rank
    ranks = {
        below_layer(target.target): target.rank for target in targets.values() if target.rank != adapter.rank
    }
    alphas = {name: adapter.scale * rank for name, rank in ranks.items()}
    return {"lora_alpha": alpha, "use_rslora": has_root, "rank_pattern": ranks, "alpha_pattern": alphas}


def _check_scale(folder: Path, config: Mapping[str, Any], target: AdapterTensor, adapter: LoRA) -> None:
    """Refuses an adapter whose product has another scale than ours, by a pattern of its config."""
    patterns = (config.get("alpha_pattern") or {}).items()
    # As peft matches them: the whole name, or its end behind a dot.
    alphas = (alpha for key, alpha in patterns if re.fullmatch(rf"(?:.*\.)?(?:{key})", target.target))
    alpha = float(next(alphas, config["lora_alpha"]))
    scale = _scale_of(config, alpha, target.rank)
    if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
        raise UserError(
            f"{folder / CONFIG} scales the adapter of {target.target} by {scale:g} (alpha {alpha:g}, rank "
            f"{target.rank}), adapter=LoRA(...) all by {adapter.scale:g}. Give a folder whose adapters have "
            "one scale."
        )


def _scale_of(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    """Factor of A B."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
