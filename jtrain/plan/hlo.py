"""What a compiled program really moves: collectives and copies to and from host memory, loops counted."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jtrain.program import (
    KINDS,
    Instruction,
    Visit,
    array_bytes,
    axes_of,
    called,
    done_of,
    elements,
    groups_of,
    visits,
    whole_arrays,
    wire_bytes,
)

_HOST = "S(5)"
"""The memory space of pinned host memory, on TPUs and GPUs."""

type _Direction = Literal["to host", "to device"]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind, axes, group and dtype in one execution of a program, as one device sees them.

    axes: mesh axes that the groups span, whole or, if `group` is smaller than their product, in part.
    group: devices that communicate with each other.
    count: arrays. A compiler may join several into one instruction, so instructions are fewer.
    array_bytes: sum over the arrays of the whole array: an all-gather's result, a reduce-scatter's operand, what an
      all-reduce sums; of a ragged all-to-all the smaller of what it is given and has room for.
    async_bytes: of these, in pairs of start and done.
    hidden_bytes: of those, in pairs with a matmul in between.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    count: int
    array_bytes: int
    async_bytes: int
    hidden_bytes: int

    def on_wire(self, array_bytes: int) -> int:
        """What one device sends of that."""
        return wire_bytes(self.kind, array_bytes, self.group)

    @property
    def wire_bytes(self) -> int:
        return self.on_wire(self.array_bytes)


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """All copies in one direction between a device's memory and the host's, in one execution of a program.

    count, bytes: of arrays, or of slices where only slices move.
    async_bytes, hidden_bytes: as in `Traffic`.
    duplex_bytes: of the asynchronous ones, those in flight at the same time as a copy in the other direction.
    """

    direction: _Direction
    count: int
    bytes: int
    async_bytes: int
    hidden_bytes: int
    duplex_bytes: int


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of what is on the network is beside something else: bytes that one device sends per execution."""

    wire_bytes: int
    async_bytes: int
    hidden_bytes: int


def overlap(collectives: Iterable[Traffic]) -> Overlap:
    """The sums over all collectives, in bytes on the wire."""
    rows = list(collectives)
    return Overlap(*(sum(t.on_wire(getattr(t, name)) for t in rows) for name in ("array_bytes", *_OVERLAP)))


_OVERLAP = ("async_bytes", "hidden_bytes")


def traffic(hlo: str, mesh_shape: Mapping[str, int]) -> list[Traffic]:
    """Every collective of optimized HLO, those in loops times the loops' trip counts.

    Args:
      hlo: `Compiled.as_text()`.
      mesh_shape: devices along each axis, in the order of `AXES`, of the mesh that it was compiled for.

    Raises:
      ValueError: a loop around a collective does not say how often it runs.
    """
    total: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for visit in visits(hlo):
        instruction = visit.instruction
        kind = instruction.opcode.removesuffix("-start")
        if kind not in (*KINDS, "ragged-all-to-all"):
            continue
        times = _known(visit, kind)
        groups = groups_of(instruction, mesh_shape)
        group = max(len(g) for g in groups) if groups else 1
        for dtype, size in whole_arrays(instruction, kind, group):
            if kind == "ragged-all-to-all":
                size = min(size, _operand_bytes(visit))
            key = (kind, axes_of(groups, mesh_shape), group, dtype)
            _add(total, key, visit, times, size)
    return [Traffic(*key, *_sums(total, key)) for key in sorted({key[:-1] for key in total}, key=str)]


def _operand_bytes(visit: Visit) -> int:
    """Of the first operand. What a ragged all-to-all sends depends on the data: of what it is given and what it may
    receive, the smaller has no room to spare where all is sent.
    """
    name = visit.instruction.operands[0]
    return next(array_bytes(other.type) for other in visit.around if other.name == name)


def host_copies(hlo: str) -> list[HostCopies]:
    """Every copy between device and host memory in optimized HLO, those in loops times the loops' trip counts.

    Raises:
      ValueError: a loop around one does not say how often it runs.
    """
    total: collections.Counter[tuple[Any, ...]] = collections.Counter()
    counted: set[str] = set()  # computations that a start wraps
    for visit in visits(hlo):
        moved = None if visit.computation in counted else _host_move(visit.instruction, visit.around)
        if moved is not None:
            direction, size = moved
            counted.update(called(visit.instruction.line))
            times = _known(visit, "copy")
            _add(total, (direction,), visit, times, size)
            total[direction, "duplex_bytes"] += times * size * _meets_opposite(visit, direction)
    found = sorted({key[:-1] for key in total})
    return [HostCopies(*key, *_sums(total, key), duplex_bytes=total[*key, "duplex_bytes"]) for key in found]


def _meets_opposite(visit: Visit, direction: _Direction) -> bool:
    """Whether an asynchronous copy is in flight together with one in the other direction."""
    for index, other in enumerate(visit.around if visit.asynchronous else ()):
        moved = _host_move(other, visit.around)
        if moved is not None and moved[0] != direction and index < visit.stop:
            stop = done_of(visit.around, index) if other.opcode.endswith("-start") else index
            if stop is not None and stop > visit.start:
                return True
    return False


def _add(total: collections.Counter[Any], key: tuple[Any, ...], visit: Visit, times: int, size: int) -> None:
    total[*key, "count"] += times
    total[*key, "bytes"] += times * size
    total[*key, "async_bytes"] += times * size * visit.asynchronous
    total[*key, "hidden_bytes"] += times * size * visit.hidden


def _sums(total: collections.Counter[Any], key: tuple[Any, ...]) -> list[int]:
    return [total[*key, name] for name in ("count", "bytes", *_OVERLAP)]


def _known(visit: Visit, what: str) -> int:
    if visit.times is None:
        line = visit.instruction.line[:200]
        raise ValueError(f"{what} in a loop whose trip count the HLO does not say: {line}")
    return visit.times


def _host_move(instruction: Instruction, around: list[Instruction]) -> tuple[_Direction, int] | None:
    """Direction and bytes of what an instruction moves between the memories; None if it moves nothing.

    A start says the types of its operands and its result, whatever it starts: a slice, or a fusion that wraps one.
    """
    opcode, type_ = instruction.opcode, instruction.type
    if opcode == "copy-start":
        result, *given = elements(type_)[:2]
    elif opcode.endswith("-start") and type_.startswith("(("):
        given, result = elements(elements(type_)[0]), elements(type_)[1]
    elif opcode in ("copy", "dynamic-slice", "dynamic-update-slice"):
        types = {i.name: i.type for i in around}
        given, result = [types.get(name, "") for name in instruction.operands], type_
    else:
        return None
    if _HOST not in result:
        return ("to device", array_bytes(result)) if any(_HOST in one for one in given) else None
    if _HOST not in given[0]:
        return "to host", array_bytes(result)
    written = [one for one in given[1:2] if _HOST not in one]  # in place
    return ("to host", array_bytes(written[0])) if written else None
