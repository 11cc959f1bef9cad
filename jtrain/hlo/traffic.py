"""Traffic of a compiled program: collectives and host-memory copies, times the trip counts of loops."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jtrain.errors import UserError
from jtrain.hlo.device_groups import axes_of, groups_of, whole_arrays, wire_bytes
from jtrain.hlo.parser import BranchTimes, Instruction, Visit, array_bytes, done_of, elements, visits

_HOST = "S(5)"
"""Memory space of pinned host memory in HLO, on TPUs and GPUs."""

type _Direction = Literal["to host", "to device"]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind, axes, group size and dtype in one execution, as one device sees them.

    axes: mesh axes that the groups span, entirely or, if `group` is smaller than their product, in part.
    group: number of devices that communicate with each other.
    count: number of arrays; instructions may be fewer, as the compiler may combine several arrays into one.
    array_bytes: bytes of the unsharded arrays: an all-gather's result, a reduce-scatter's operand, an
      all-reduce's sum; for a ragged all-to-all the smaller of its operand and its result.
    async_bytes: part of array_bytes in pairs of start and done.
    hidden_bytes: part of async_bytes in pairs with a matmul in between.
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
        """Bytes that one device sends for `array_bytes` of unsharded arrays."""
        return wire_bytes(self.kind, array_bytes, self.group)

    @property
    def wire_bytes(self) -> int:
        return self.on_wire(self.array_bytes)


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """All copies in one direction between a device's memory and host memory, in one execution of a program.

    count, bytes: copied arrays, or slices where only slices are copied.
    async_bytes, hidden_bytes: as in `Traffic`.
    duplex_bytes: part of async_bytes in flight at the same time as a copy in the other direction.
    """

    direction: _Direction
    count: int
    bytes: int
    async_bytes: int
    hidden_bytes: int
    duplex_bytes: int


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Network bytes that a device sends per execution: all, asynchronous ones, those hidden by a matmul."""

    wire_bytes: int
    async_bytes: int
    hidden_bytes: int


def overlap(collectives: Iterable[Traffic]) -> Overlap:
    """Sums over all collectives, in bytes that one device sends."""
    rows = list(collectives)
    return Overlap(
        *(sum(row.on_wire(getattr(row, name)) for row in rows) for name in ("array_bytes", *_OVERLAP))
    )


_OVERLAP = ("async_bytes", "hidden_bytes")


def traffic(
    hlo: str, mesh_shape: Mapping[str, int], branch_times: BranchTimes | None = None
) -> list[Traffic]:
    """Every collective of optimized HLO, multiplied by the trip counts of the loops around it.

    Args:
      hlo: `Compiled.as_text()`.
      mesh_shape: devices along each axis of the mesh that it was compiled for, in the order of `AXES`.
      branch_times: as in `visits`.

    Raises:
      UserError: the trip count of a loop around a collective is unknown.
    """
    # Keys as `_add` makes them: the fields of a row, and then the name of a sum: (kind, axes, group, dtype,
    # name). Each row has four entries: count, bytes, async_bytes and hidden_bytes.
    total: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for visit in visits(hlo, branch_times):
        instruction = visit.instruction
        kind = instruction.collective
        if not kind:
            continue
        num_runs = _known_num_runs(visit, kind)
        # The largest group stands for all: XLA gives the groups of one collective the same size.
        groups = groups_of(instruction, mesh_shape)
        group = max(len(members) for members in groups) if groups else 1
        # One instruction may carry arrays of several dtypes, each a row of its own.
        for dtype, array_size_bytes in whole_arrays(instruction, group, visit.types):
            key = (kind, axes_of(groups, mesh_shape), group, dtype)
            _add(total, key, visit, num_runs, array_size_bytes)
    # `key[:-1]` drops the name of the sum: one row for the four entries.
    return [Traffic(*key, *_sums(total, key)) for key in sorted({key[:-1] for key in total}, key=str)]


def host_copies(hlo: str, branch_times: BranchTimes | None = None) -> list[HostCopies]:
    """Every copy between device and host memory in optimized HLO, times the trip counts of its loops.

    Args:
      branch_times: as in `visits`.

    Raises:
      UserError: the trip count of a loop around a copy is unknown.
    """
    # Keys: (direction, name of the sum).
    total: collections.Counter[tuple[Any, ...]] = collections.Counter()
    counted_computations: set[str] = set()  # computations inside a start that is counted already
    for visit in visits(hlo, branch_times):
        transfer = (
            None if visit.computation in counted_computations else host_copy(visit.instruction, visit.body)
        )
        if transfer is not None:
            direction, copied_bytes = transfer
            # The copy inside an async start is the start itself: counting both would double it.
            counted_computations.update(visit.instruction.called)
            num_runs = _known_num_runs(visit, "copy")
            _add(total, (direction,), visit, num_runs, copied_bytes)
            total[direction, "duplex_bytes"] += num_runs * copied_bytes * _meets_opposite(visit, direction)
    keys = sorted({key[:-1] for key in total})
    return [HostCopies(*key, *_sums(total, key), duplex_bytes=total[*key, "duplex_bytes"]) for key in keys]


def _meets_opposite(visit: Visit, direction: _Direction) -> bool:
    """True if an asynchronous copy is in flight at the same time as a copy in the other direction."""
    for index, neighbour in enumerate(visit.body if visit.is_async else ()):
        transfer = host_copy(neighbour, visit.body)
        # A neighbour that starts after this copy's done cannot overlap it.
        if transfer is not None and transfer[0] != direction and index < visit.stop:
            # A synchronous copy occupies its own index only.
            stop = done_of(visit.body, index) if neighbour.opcode.endswith("-start") else index
            if stop is not None and stop > visit.start:
                return True
    return False


def _add(
    total: collections.Counter[Any], key: tuple[Any, ...], visit: Visit, num_runs: int, size_bytes: int
) -> None:
    """Adds `num_runs` executions of an array of `size_bytes` to the four sums of the row `key`."""
    total[*key, "count"] += num_runs
    total[*key, "bytes"] += num_runs * size_bytes
    # A bool counts as 0 or 1.
    total[*key, "async_bytes"] += num_runs * size_bytes * visit.is_async
    total[*key, "hidden_bytes"] += num_runs * size_bytes * visit.is_hidden


def _sums(total: collections.Counter[Any], key: tuple[Any, ...]) -> list[int]:
    """Returns the four sums of the row `key`, in the order of the fields of `Traffic` and `HostCopies`."""
    return [total[*key, name] for name in ("count", "bytes", *_OVERLAP)]


def _known_num_runs(visit: Visit, name: str) -> int:
    """Returns how often an instruction runs per execution of the program; refuses an unknown trip count."""
    if visit.num_runs is None:
        line = visit.instruction.line[:200]
        raise UserError(f"{name} is in a loop whose trip count is not in the HLO: {line}")
    return visit.num_runs


def host_copy(instruction: Instruction, body: list[Instruction]) -> tuple[_Direction, int] | None:
    """Direction and bytes of an instruction's copy between host and device memory; None if it copies nothing.

    The type of a start names the types of operands and result, whether it starts a slice or a fusion around
    one.
    """
    opcode, type_ = instruction.opcode, instruction.type
    if opcode == "copy-start":
        # copy-start: (destination, source, context).
        result, *operand_types = elements(type_)[:2]
    elif opcode.endswith("-start") and type_.startswith("(("):
        # async-start: ((operands), result, context).
        operand_types, result = elements(elements(type_)[0]), elements(type_)[1]
    elif opcode in ("copy", "dynamic-slice", "dynamic-update-slice"):
        types = {i.name: i.type for i in body}
        operand_types, result = [types.get(name, "") for name in instruction.operands], type_
    else:
        return None
    # Host memory shows in an array's layout as memory space 5; everything else is on the device.
    if _HOST not in result:
        return (
            ("to device", array_bytes(result)) if any(_HOST in operand for operand in operand_types) else None
        )
    # Host to host moves nothing over the bus, except an update with a device array.
    if _HOST not in operand_types[0]:
        return "to host", array_bytes(result)
    # An in-place update copies only its second operand.
    update_types = [operand for operand in operand_types[1:2] if _HOST not in operand]
    return ("to host", array_bytes(update_types[0])) if update_types else None
