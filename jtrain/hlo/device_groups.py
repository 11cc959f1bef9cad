"""Collectives of a compiled program: the devices that communicate in each, and the bytes that it moves."""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jtrain.hlo.parser import ITEMSIZE, Instruction, array_bytes, arrays, elements


def whole_arrays(instruction: Instruction, group: int, types: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(dtype, bytes) of each whole array: gathered, reduced before its scatter, or summed.

    The bytes that a ragged all-to-all sends depend on the data. Its operand or its result may have room to
    spare, so the smaller of the two is counted.

    Args:
      group: number of devices that communicate with each other.
      types: name -> result type of every instruction of the program, where operands are looked up.
    """
    kind, type_ = instruction.collective, instruction.type
    if type_.startswith("((") or instruction.opcode in ("all-gather-start", "collective-permute-start"):
        type_ = elements(type_)[1]  # (operands, results, ...): each an array or a tuple of arrays
    arrays_of_type = arrays(type_)
    if kind == "all-to-all":  # the tuple has one piece per device, together one array
        yield arrays_of_type[0][0], array_bytes(type_)
        return
    if kind == "ragged-all-to-all":
        yield arrays_of_type[0][0], min(array_bytes(type_), array_bytes(types[instruction.operands[0]]))
        return
    for dtype, dims in arrays_of_type:
        # A reduce-scatter's result is one shard of what it reduces; an all-reduce's result is the whole sum.
        yield dtype, ITEMSIZE[dtype] * math.prod(dims) * (group if kind == "reduce-scatter" else 1)


def wire_bytes(kind: str, array_bytes: int, group: int) -> int:
    """Bytes that one device sends: (n - 1) / n of the array, twice for an all-reduce, all for a permute."""
    if kind == "collective-permute":
        return array_bytes
    return (2 if kind == "all-reduce" else 1) * array_bytes * (group - 1) // group


def groups_of(instruction: Instruction, mesh_shape: Mapping[str, int]) -> list[list[int]]:
    """Groups of devices that communicate in a collective, as indices into the mesh."""
    line = instruction.line
    if instruction.opcode.startswith("collective-permute"):
        return _permuted_pairs(line)
    # Three ways of writing groups, newest first: a mesh and its axes, a compressed iota, a list of lists.
    size = math.prod(mesh_shape.values())
    # mesh['data'=4,'tensor'=2] {'tensor'}: groups along the named axes.
    if mesh_match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S+)? ?\{([^}]*)\}", line):
        axis_sizes = {name: int(n) for name, n in re.findall(r"'?(\w+)'?=(\d+)", mesh_match[1])}
        axes = re.findall(r"'(\w+)'", mesh_match[2])
        return _groups_along(axis_sizes, axes)
    # [2,4]<=[4,2]T(1,0): reshape 0..7 to [4,2], transpose, read off two groups of four.
    if iota_match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        device_ids = np.arange(size).reshape([int(n) for n in iota_match[3].split(",")])
        if iota_match[4]:
            device_ids = device_ids.transpose([int(n) for n in iota_match[4].split(",")])
        return device_ids.reshape(int(iota_match[1]), int(iota_match[2])).tolist()
    if list_match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", list_match[1])]
    # Without the attribute, or with an empty one, all devices are one group.
    return [list(range(size))]


def _groups_along(shape: Mapping[str, int], axes: list[str]) -> list[list[int]]:
    """Groups of devices that differ only in their position along `axes`."""
    device_ids = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    group_dims = [index for index, name in enumerate(shape) if name in axes]
    other_dims = [index for index, name in enumerate(shape) if name not in axes]
    # The groups' own dimensions go last, so that each row of the result is one group.
    return (
        device_ids.transpose([*other_dims, *group_dims])
        .reshape(-1, math.prod(shape[name] for name in axes))
        .tolist()
    )


def _permuted_pairs(line: str) -> list[list[int]]:
    """(sender, receiver) of each pair of a collective-permute."""
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line)
    return (
        [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])] if pairs else []
    )


def axes_of(groups: list[list[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ."""
    positions_by_group = [np.unravel_index(np.asarray(group), tuple(mesh_shape.values())) for group in groups]
    return tuple(
        axis
        for dim, axis in enumerate(mesh_shape)
        if any(len(set(positions[dim].tolist())) > 1 for positions in positions_by_group)
    )
