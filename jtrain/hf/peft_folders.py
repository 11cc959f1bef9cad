"""Adapters as folders of peft: adapter_config.json and adapter_model.safetensors.

peft stores A as [R, inputs] and B as [outputs, R], by the name of the module that they stand beside. A matrix that is a
part of a larger tensor in the family's files, such as fused gate and up, has no module of its own, and is refused.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jtrain.errors import FileError, UserError, first_few
from jtrain.hf.directory import check_empty
from jtrain.hf.mapping import DTYPES, Part, tensors_of
from jtrain.model.adapters.lora import LoRA
from jtrain.model.families.family import Family
from jtrain.model.param import Params, at_path, map_params
from jtrain.model.transformer import Transformer
from jtrain.runtime.atomic_io import replacing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_SUFFIX = ".weight"
_PLAIN: dict[str, Any] = dict(
    bias="none", fan_in_fan_out=False, use_dora=False, modules_to_save=None, target_parameters=None
)
"""Fields of adapter_config.json that change what an adapter is, and the values without which it is no `LoRA`."""


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
            f"adapter.train={adapter.train} trains whole parameters, which no folder of peft holds beside A and B. "
            "Export the merged model: leave out --adapter."
        )
    parts = adapter_parts(model, adapter, family)
    tensors = adapter_tensors(params, parts, dtype=dtype)
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
            "lora_alpha": adapter.alpha,
            "lora_dropout": 0.0,
            "use_rslora": adapter.rslora,
            "target_modules": _target_modules(parts, model, family),
        }
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return [CONFIG, WEIGHTS]


def adapter_tensors(params: Params, parts: dict[str, Part], *, dtype: str) -> dict[str, np.ndarray]:
    """A and B of every target by their names in peft, of whole arrays, the layers in the model's order."""
    tensors: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        tensors[name] = np.empty(part.shape, DTYPES[dtype])
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
    ours = (
        dict(r=adapter.rank, lora_alpha=adapter.alpha, use_rslora=adapter.rslora, peft_type="LORA") | _PLAIN
    )
    wrong = [
        f"{name}={config[name]!r} there, {value!r} here"
        for name, value in ours.items()
        if name in config and (config[name] or None) != (value or None)
    ]
    wrong += [
        f"{name} is set"
        for name in ("rank_pattern", "alpha_pattern", "layer_replication")
        if config.get(name)
    ]
    if wrong:
        raise UserError(
            f"{folder / CONFIG} is of another adapter than adapter=LoRA(...): {'; '.join(wrong)}."
        )
    parts, tensors = adapter_parts(model, adapter, family), load_file(folder / WEIGHTS)
    if parts.keys() != tensors.keys():
        missing, extra = sorted(parts.keys() - tensors.keys()), sorted(tensors.keys() - parts.keys())
        raise UserError(
            f"{folder / WEIGHTS} has other targets than adapter.targets={adapter.targets}: "
            f"missing {len(missing)} ({first_few(missing, 3)}), more {len(extra)} ({first_few(extra, 3)})."
        )
    arrays: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        if tensors[name].shape != part.shape:
            raise UserError(
                f"{name} has shape {list(tensors[name].shape)}, and must have {list(part.shape)}."
            )
        stack = arrays.setdefault(part.info.path, np.empty(part.info.shape, np.float32))
        stack[part.index] = part.read(tensors[name].astype(np.float32))
    infos = tuple(info for info in adapter.infos(model.param_infos()) if info.is_adapter)
    return map_params(lambda info: arrays[info.path], infos)


def adapter_parts(model: Transformer, adapter: LoRA, family: Family | None) -> dict[str, Part]:
    """Tensors of peft, and the layer or expert of A or B that each holds.

    Raises:
      UserError: a target has no module of its own.
    """
    infos = {info.path: info for info in adapter.infos(model.param_infos())}
    parts: dict[str, Part] = {}
    for name, held in tensors_of(model, family).items():
        for part in held:
            pair = sorted(path for path in infos if path.startswith(f"{part.info.path}_lora."))
            if not pair:
                continue
            groups = part.tensor.dims.split()
            if (
                len(held) > 1
                or len(groups) != 2
                or not name.endswith(_SUFFIX)
                or not all(map(str.isalpha, groups))
            ):
                raise UserError(
                    f"adapter.targets names {part.info.path}, which is a part of the tensor {name}: peft has no module "
                    "for it alone. Export the merged model: leave out --adapter."
                )
            # Theirs are [outputs, inputs].
            for path, dims in zip(pair, (f"R {groups[1]}", f"{groups[0]} R"), strict=True):
                info = infos[path]
                sizes = {**part.sizes, "R": adapter.rank}
                key = f"{_PREFIX}{name.removesuffix(_SUFFIX)}.lora_{path.rpartition('.')[2][0]}{_SUFFIX}"
                tensor = dataclasses.replace(part.tensor, dims=dims)
                parts[key] = Part(info, part.index, tensor, sizes, part.rotated)
    return parts


def _target_modules(parts: dict[str, Part], model: Transformer, family: Family | None) -> list[str]:
    """Names of modules as peft matches them: the last word, where all modules of that name have an adapter."""
    targets = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in parts}
    modules = [name.removesuffix(_SUFFIX) for name in tensors_of(model, family)]
    others = {name.rpartition(".")[2] for name in modules if name not in targets}
    words = {name: name.rpartition(".")[2] for name in targets}
    return sorted({name if word in others else word for name, word in words.items()})
