"""What a compiled program really puts on the network: collectives read from optimized HLO text, loops counted."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jtrain.mesh import AXES

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")

_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ITEMSIZE |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
_ITEMSIZE |= dict.fromkeys(("f8e4m3", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu"), 1)

_CALLED = re.compile(r"\b(calls|to_apply|body|branch_computations|called_computations)=(?:%([\w.-]+)|\{([^}]*)\})")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind, axes and dtype in one execution of a program, as one device sees them.

    axes: mesh axes that the groups span; None where a group is no product of axes.
    count: arrays. A compiler may join several into one instruction, so instructions are fewer.
    array_bytes: sum over the arrays of the whole array: an all-gather's result, a reduce-scatter's operand, what an
      all-reduce sums.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    count: int
    array_bytes: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    type: str
    opcode: str
    line: str


def traffic(hlo: str, mesh_shape: Mapping[str, int]) -> list[Traffic]:
    """Every collective of optimized HLO, those in loops times the loops' trip counts.

    Args:
      hlo: `Compiled.as_text()`.
      mesh_shape: devices along each axis, in the order of `AXES`, of the mesh that it was compiled for.

    Raises:
      ValueError: a loop around a collective does not say how often it runs.
    """
    computations, entry = _computations(hlo)
    total: collections.Counter[tuple[str, tuple[str, ...] | None, str, str]] = collections.Counter()

    def visit(name: str, times: int | None) -> None:
        for instruction in computations[name]:
            opcode = instruction.opcode
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                if times is None:
                    raise ValueError(
                        f"{kind} in a loop whose trip count the HLO does not say: {instruction.line[:200]}"
                    )
                groups = _groups(instruction.line, mesh_shape)
                for dtype, size in _whole_arrays(instruction, kind, len(groups[0]) if groups else 1):
                    key = (kind, _axes(groups, mesh_shape), dtype)
                    total[*key, "count"] += times
                    total[*key, "bytes"] += times * size
            elif not opcode.endswith(("-done", "-update")):
                inner = times
                if opcode == "while":
                    trips = _trip_count(instruction.line, computations)
                    inner = None if times is None or trips is None else times * trips
                # to_apply of a reduction holds arithmetic only: visiting it finds nothing.
                for called in _called(instruction.line):
                    visit(called, inner)

    visit(entry, 1)
    keys = sorted({key[:3] for key in total}, key=str)
    return [Traffic(*key, count=total[*key, "count"], array_bytes=total[*key, "bytes"]) for key in keys]


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Instructions of each computation by its name, and the name of the entry."""
    found: dict[str, list[_Instruction]] = {}
    entry = ""
    current: list[_Instruction] = []
    for line in hlo.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.-]+)[ .]*\(", line)):
            current = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (start := line.find(" = ")) > 0:
            type_, rest = _split_type(line[start + 3 :])
            current.append(_Instruction(type_, rest.partition("(")[0].strip(), line))
    return found, entry


def _split_type(text: str) -> tuple[str, str]:
    """The result's type, a tuple's to its closing parenthesis, and what follows it."""
    if not text.startswith("("):
        type_, _, rest = text.partition(" ")
        return type_, rest
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


def _called(line: str) -> Iterator[str]:
    for match in _CALLED.finditer(line):
        yield from [match[2]] if match[2] else re.findall(r"%([\w.-]+)", match[3])


def _trip_count(line: str, computations: Mapping[str, list[_Instruction]]) -> int | None:
    """How often a while loop runs: as the compiler noted it, else the bound that a loop from 0 by 1 counts up to."""
    if noted := re.search(r'"?known_trip_count"?[=:]\{"?n"?[=:]"?(\d+)', line):
        return int(noted[1])
    condition = re.search(r"condition=%([\w.-]+)", line)
    if not condition:
        return None
    bounds: list[int] = []
    pending = [condition[1]]
    compared = False
    while pending:
        for instruction in computations[pending.pop()]:
            if constant := re.search(r"= [su]32\[\]\S* constant\((\d+)\)", instruction.line):
                bounds.append(int(constant[1]))
            compared |= "direction=LT" in instruction.line
            pending += _called(instruction.line)
    return bounds[0] if len(bounds) == 1 and compared else None


def _whole_arrays(instruction: _Instruction, kind: str, group: int) -> Iterator[tuple[str, int]]:
    """(dtype, bytes) of each array: see `Traffic.array_bytes`."""
    type_ = instruction.type
    if type_.startswith("((") or instruction.opcode in ("all-gather-start", "collective-permute-start"):
        type_ = _elements(type_)[1]  # (operands, results, ...): each an array or a tuple of arrays
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_):
        size = _ITEMSIZE[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        yield dtype, size * (group if kind == "reduce-scatter" else 1)


def _elements(type_: str) -> list[str]:
    """Elements of a tuple's type, by its commas outside of any bracket."""
    depth, parts = 0, [""]
    for char in type_[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _groups(line: str, mesh_shape: Mapping[str, int]) -> list[list[int]]:
    """The devices that communicate with each other, by their index in the mesh."""
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
    """Groups of devices that differ only in their place along `axes`."""
    ids = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    inside = [index for index, name in enumerate(shape) if name in axes]
    outside = [index for index, name in enumerate(shape) if name not in axes]
    return ids.transpose([*outside, *inside]).reshape(-1, math.prod(shape[name] for name in axes)).tolist()


def _axes(groups: list[list[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    wanted = {frozenset(group) for group in groups}
    used = [axis for axis in AXES if mesh_shape[axis] > 1]
    for mask in range(1 << len(used)):
        axes = [axis for index, axis in enumerate(used) if mask >> index & 1]
        if {frozenset(group) for group in _along(mesh_shape, axes)} == wanted:
            return tuple(axes)
    return None
