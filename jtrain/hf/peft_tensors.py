"""Tensors of an adapter in a folder of peft: their names, and the part of A or B that each holds.

peft has an adapter for a module, or for a parameter of one (`target_parameters`): so it adapts the experts of
one layer that are one tensor. Of X experts, with rank R, A is [X R, inputs] and B [outputs, R X]. Several
such parameters of a module wrap it one after another: the last one's name is the module's, that of one before
has `.base_layer` more.

A tensor of gate and up together has one A for both. Two of ours become one of rank 2 R: A has the rows of
gate and then those of up, and B is zero where the outputs of one would meet the rows of the other.

Example: X = 8 experts, R = 4, D = 32 inputs, F = 16: `gate_up_proj` of a layer has A [8 * 8, 32] and B [32, 8
  * 8].
"""

import dataclasses
from typing import Any

import numpy as np

from jtrain.errors import UserError
from jtrain.hf.mapping import Part, tensors_of
from jtrain.hf.model_config import family_of
from jtrain.layout.dims import ADAPTER, ParamInfo
from jtrain.model.adapters.lora import LoRA
from jtrain.model.families.family import Family, Tensor
from jtrain.model.transformer import Transformer

PREFIX = "base_model.model."
SUFFIX = ".weight"
_EXPERT = ".{x}."
_TRANSPOSED = ("gpt_oss",)
"""Families whose experts transformers marks as `is_transposed`: [inputs, outputs]. Of Llama 4's, which are
not marked, peft takes the outputs for inputs, and multiplies the same."""


@dataclasses.dataclass(frozen=True)
class AdapterTensor:
    """A or B of one module or parameter.

    target: name of the module, or of the parameter, as the family's files have it.
    is_parameter: True for a parameter.
    rank: its columns of A B, more than the adapter's where one tensor holds several of our matrices.
    parts: what it holds; matrices that share an A have the same part of it.
    """

    target: str
    is_parameter: bool
    rank: int
    parts: list[Part]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.parts[0].shape

    def read(self, name: str, theirs: np.ndarray) -> list[tuple[Part, np.ndarray]]:
        """What the tensor has of A or B of each part.

        Raises:
          UserError: another shape; or numbers that are of no part.
        """
        if theirs.shape != self.shape:
            raise UserError(f"{name} has shape {list(theirs.shape)}, and must have {list(self.shape)}.")
        matrices = [(part, part.read(theirs)) for part in self.parts]
        held = np.zeros_like(theirs)
        for part, matrix in matrices:
            part.write(matrix, held)
        if not np.array_equal(held, theirs):
            raise UserError(
                f"{name} mixes the rows of A of gate and up, which are two adapters here. Use one that peft "
                "made of an adapter for each, or one of rank adapter.rank for both."
            )
        return matrices


def adapter_tensors(
    model: Transformer, adapter: LoRA, family: Family | None, *, joins_experts: bool, shares_a: bool = False
) -> dict[str, AdapterTensor]:
    """The tensors of a folder by name.

    Args:
      family: whose names the modules have; None for the one that describes the model.
      joins_experts: True if experts with a tensor each in the family's files are one, as in memory of
        transformers 5.
      shares_a: True if gate and up of one tensor have the same A, of the adapter's rank.

    Raises:
      UserError: a target is a part of a larger tensor, other than one of experts.
    """
    infos = {info.path: info for info in adapter.infos(model.param_infos()) if info.is_adapter}
    pairs: dict[str, list[ParamInfo]] = {}
    for path in sorted(infos):
        # Sorted: A comes before B.
        pairs.setdefault(path.rpartition(ADAPTER)[0], []).append(infos[path])
    tensors: dict[str, AdapterTensor] = {}
    stacks: dict[str, dict[str, list[Part]]] = {}
    for name, held in tensors_of(model, family).items():
        for part in held:
            if part.info.path not in pairs:
                continue
            if joins_experts and _EXPERT in part.tensor.name:
                if part.index[-1] == 0:
                    module, parameter, stack = _joined(name, part)
                    stacks.setdefault(module, {}).setdefault(parameter, []).append(stack)
            elif "X" in part.info.dims and _EXPERT not in part.tensor.name:
                module, _, parameter = name.removesuffix(SUFFIX).rpartition(".")
                if name.endswith(SUFFIX):
                    # Files of Granite have two modules, memory of transformers 5 has one of the usual names.
                    module, parameter = f"{module}.experts", _parameter_of(part)
                stacks.setdefault(module, {}).setdefault(parameter, []).append(part)
            else:
                tensors |= _of_module(
                    name, part, pairs[part.info.path], adapter.rank, is_alone=len(held) == 1
                )
    is_transposed = (family or family_of(model)).model_type in _TRANSPOSED
    for module, parameters in stacks.items():
        for depth, (parameter, parts) in enumerate(reversed(parameters.items())):
            prefix = f"{PREFIX}{module}{'.base_layer' * depth}"
            shares = 1 if shares_a else len(parts)
            for side, letter in enumerate("AB"):
                stack = [
                    _of_stack(
                        part, pairs[part.info.path], side, adapter.rank, shares, inputs_first=is_transposed
                    )
                    for part in parts
                ]
                tensors[f"{prefix}.lora_{letter}{SUFFIX}"] = AdapterTensor(
                    f"{module}.{parameter}", True, adapter.rank * shares, stack
                )
    return tensors


def _of_module(
    name: str, part: Part, pair: list[ParamInfo], rank: int, *, is_alone: bool
) -> dict[str, AdapterTensor]:
    """A and B beside a matrix that is a module's weight."""
    groups = part.tensor.dims.split()
    if not is_alone or len(groups) != 2 or not name.endswith(SUFFIX) or not all(map(str.isalpha, groups)):
        raise UserError(
            f"adapter.targets names {part.info.path}, which is a part of the tensor {name}: peft has no "
            "module for it alone. Export the merged model: leave out --adapter."
        )
    module, tensors = name.removesuffix(SUFFIX), dict[str, AdapterTensor]()
    # Theirs are [outputs, inputs].
    for letter, info, dims in zip("AB", pair, (f"R {groups[1]}", f"{groups[0]} R"), strict=True):
        tensor = dataclasses.replace(part.tensor, dims=dims)
        pair_part = Part(info, part.index, tensor, {**part.sizes, "R": rank}, part.rotated)
        tensors[f"{PREFIX}{module}.lora_{letter}{SUFFIX}"] = AdapterTensor(module, False, rank, [pair_part])
    return tensors


def _parameter_of(part: Part) -> str:
    """Name of the parameter of transformers 5 that holds a matrix of all experts."""
    return "down_proj" if part.info.path.rpartition(".")[2].startswith("down") else "gate_up_proj"


def _joined(name: str, part: Part) -> tuple[str, str, Part]:
    """Module and parameter of all experts of a layer, of the first expert's tensor, and what of it holds
    ours.
    """
    # Files of Mixtral and MiniMax keep a name that memory of transformers 5 has no more.
    module = name.rpartition(".0.")[0].replace(".block_sparse_moe.", ".mlp.")
    parameter = _parameter_of(part)
    outputs, inputs = part.tensor.dims.split()
    if parameter == "down_proj":
        tensor = Tensor(name, f"X {outputs} {inputs}")
    else:
        # Gate comes first.
        is_up = part.info.path.rpartition(".")[2].startswith("up")
        tensor = Tensor(name, f"X 2{outputs} {inputs}", part=int(is_up))
    return module, parameter, dataclasses.replace(part, index=part.index[:-1], tensor=tensor)


def _of_stack(
    part: Part, pair: list[ParamInfo], place: int, rank: int, shares: int, *, inputs_first: bool
) -> Part:
    """peft's A (`place` 0) or B of the experts of a layer.

    Args:
      shares: matrices that the rows of A are of.
      inputs_first: True if peft knows that inputs are the first of a parameter's dimensions.
    """
    first, second = part.tensor.dims.split()[1:]
    group = (first, second) if inputs_first else (second, first)
    # What A contracts is the first of a matrix's two dimensions. Where peft takes outputs for inputs its A is
    # our B.
    inputs = part.info.dims.removeprefix("Y").removeprefix("X")[0]
    info = pair[0 if inputs in group[place] else 1]
    counted = f"{shares}R" if shares > 1 else "R"
    dims = (f"X{counted} {group[0]}", f"{group[1]} {counted}X")[place]
    tensor = dataclasses.replace(part.tensor, dims=dims)
    return Part(info, part.index, tensor, {**part.sizes, "R": rank}, part.rotated)


def target_names(
    tensors: dict[str, AdapterTensor], model: Transformer, family: Family | None
) -> dict[str, Any]:
    """Fields of adapter_config.json that say which modules and parameters have an adapter."""
    modules = {tensor.target for tensor in tensors.values() if not tensor.is_parameter}
    base_words = {
        name.removesuffix(SUFFIX).rpartition(".")[2]
        for name in tensors_of(model, family)
        if name.removesuffix(SUFFIX) not in modules
    }
    # peft matches the last word, where all modules of that name have an adapter.
    words = {name: name.rpartition(".")[2] for name in modules}
    parameters = {below_layer(tensor.target) for tensor in tensors.values() if tensor.is_parameter}
    return {
        "target_modules": sorted({name if word in base_words else word for name, word in words.items()}),
        "target_parameters": sorted(parameters) or None,
    }


def below_layer(name: str) -> str:
    """The name of a parameter below its layer's number, which is the same for all layers."""
    words = name.split(".")
    number = max((position for position, word in enumerate(words) if word.isdigit()), default=-1)
    return ".".join(words[number + 1 :])
