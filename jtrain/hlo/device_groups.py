"""Collectives of a compiled program: the devices that communicate in each, and the bytes that it moves."""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jtrain.hlo.parser import ITEMSIZE, Instruction, array_bytes, arrays, elements


def whole_arrays(instruction: Instruction, group: int, types: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(dtype, bytes) of each whole array: an all-gather's result, a reduce-scatter's operand, an all-reduce's
    sum.

    The bytes that a ragged all-to-all sends depend on the data. Its operand or its result may have room to
    spare, so the smaller of the two is counted.

    Args:
      types: those of the program.
    """
    kind, type_ = instruction.collective, instruction.type
    if type_.startswith("((") or instruction.opcode in ("all-gather-start", "collective-permute-start"):
        type_ = elements(type_)[1]  # (operands, results, ...): each an array or a tuple of arrays
    each = arrays(type_)
    if kind == "all-to-all":  # the tuple has one piece per device, together one array
        yield each[0][0], array_bytes(type_)
        return
    if kind == "ragged-all-to-all":
        yield each[0][0], min(array_bytes(type_), array_bytes(types[instruction.operands[0]]))
        return
    for dtype, dims in each:
        yield dtype, ITEMSIZE[dtype] * math.prod(dims) * (group if kind == "reduce-scatter" else 1)


def wire_bytes(kind: str, array_bytes: int, group: int) -> int:
    """Bytes that one device sends: (n - 1) / n of the array on a ring, twice for an all-reduce, all for a
    permute.
    """
    if kind == "collective-permute":
        return array_bytes
    return (2 if kind == "all-reduce" else 1) * array_bytes * (group - 1) // group


def groups_of(instruction: Instruction, mesh_shape: Mapping[str, int]) -> list[list[int]]:
    """Groups of devices that communicate in a collective, as indices into the mesh."""
    line = instruction.line
    if instruction.opcode.startswith("collective-permute"):
        return _permuted(line)
    size = math.prod(mesh_shape.values())
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S+)? ?\{([^}]*)\}", line):
        shape = {name: int(n) for name, n in re.findall(r"'?(\w+)'?=(\d+)", named[1])}
        names = re.findall(r"'(\w+)'", named[2])
        return _along(shape, names)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        ids = np.arange(size).reshape([int(n) for n in iota[3].split(",")])
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return ids.reshape(int(iota[1]), int(iota[2])).tolist()
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [list(range(size))]


def _along(shape: Mapping[str, int], axes: list[str]) -> list[list[int]]:
    """Groups of devices that differ only in their position along `axes`."""
    ids = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    inside = [index for index, name in enumerate(shape) if name in axes]
    outside = [index for index, name in enumerate(shape) if name not in axes]
    return ids.transpose([*outside, *inside]).reshape(-1, math.prod(shape[name] for name in axes)).tolist()


def _permuted(line: str) -> list[list[int]]:
    """(sender, receiver) of each pair of a collective-permute."""
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line)
    return (
        [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])] if pairs else []
    )


def axes_of(groups: list[list[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ."""
    places = [np.unravel_index(np.asarray(group), tuple(mesh_shape.values())) for group in groups]
    return tuple(
        axis
        for index, axis in enumerate(mesh_shape)
        if any(len(set(place[index].tolist())) > 1 for place in places)
    )
