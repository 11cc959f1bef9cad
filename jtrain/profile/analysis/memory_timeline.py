"""Bytes of temporaries alive while each op of a program runs, by the phase that made them.

Computed from the schedule: a buffer lives from the op that makes it to the last op that reads it. As in XLA's
buffer assignment, a loop's state lives in the buffers that enter the loop, and an in-place update in the
buffer that it updates. Arguments, and results that take their place (donation), are not counted: the plan
lists those. The result differs from the allocation where XLA keeps a buffer longer or makes a copy.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from jtrain.hlo.parser import HloProgram, Instruction, array_bytes, elements
from jtrain.hlo.scopes import Phase
from jtrain.profile.analysis.hlo_ops import ARRAYS_OF_SHAPE, unknown_op
from jtrain.profile.analysis.records import HloOp, LiveBuffer, LiveTrack, OpEvent, StepSpan, Trace
from jtrain.profile.analysis.timeline import median_step

CLASSES: dict[Phase, str] = {
    "forward": "made by the forward pass",
    "backward": "made by the backward pass",
    "optimizer": "made by the update",
    "other": "other",
}
"""Phase of the op that made a buffer -> class of the buffer; all other phases are "other"."""

MAX_POINTS = 500
"""Maximum number of points of a curve; each point is the maximum over the ops that it stands for."""

MAX_BUFFERS = 12
"""Maximum number of buffers at the peak that a report names."""

_NAMES = tuple(CLASSES.values())
_NO_BUFFERS = frozenset[str]()
_ELEMENT = "#"

# Their results are in memory already, or are no arrays.
_MAKES_NOTHING = (
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "while",
    "after-all",
    "opt-barrier",
)
_MAKES_NOTHING += ("dynamic-update-slice", "partition-id", "replica-id")
# Element k of the result needs element k of an operand only, so XLA may write over the operand.
_ELEMENTWISE = ("add", "subtract", "multiply", "divide", "convert", "select", "maximum", "negate")
_ELEMENTWISE += ("exponential", "tanh")

type _Value = frozenset[str] | tuple[frozenset[str], ...]
"""Names of the buffers that hold a value: one set for an array, one set per element for a tuple."""


def live_bytes(program: HloProgram, ops: Mapping[str, HloOp]) -> dict[str, Int64[np.ndarray, " classes"]]:
    """Bytes alive while each instruction runs, by class in the order of `CLASSES`.

    Args:
      program: optimized and scheduled.
      ops: the result of `jtrain.profile.analysis.hlo_ops.read_ops` for this program.
    """
    alive: dict[str, Int64[np.ndarray, " classes"]] = {}

    def visit(name: str, outer_bytes: np.ndarray) -> None:
        # Buffers of the computations around this one stay alive while it runs.
        rows = outer_bytes + _computation_bytes(name, ops, program)
        for instruction, row in zip(program.computations[name], rows, strict=True):
            alive[instruction.name] = row
            if instruction.is_control_flow:
                for body_name in instruction.called:
                    visit(body_name, row)

    visit(program.entry, np.zeros(len(_NAMES), np.int64))
    return alive


def buffers_alive(program: HloProgram, ops: Mapping[str, HloOp], name: str) -> list[LiveBuffer]:
    """Buffers that are alive while an instruction runs, largest first; arguments as for `live_bytes`."""
    callers = {
        called: (computation, instruction.name)
        for computation, body in program.computations.items()
        for instruction in body
        if instruction.is_control_flow
        for called in instruction.called
    }
    place = next(
        (computation, name)
        for computation, body in program.computations.items()
        if any(instruction.name == name for instruction in body)
    )
    alive: list[LiveBuffer] = []
    # From the innermost loop out: what is alive around a loop is alive while it runs.
    while place is not None:
        computation, inner_name = place
        index = [instruction.name for instruction in program.computations[computation]].index(inner_name)
        for buffer, size, first, last in _lifetimes(computation, program):
            if first <= index <= last and size:
                maker, _, element = buffer.partition(_ELEMENT)
                op = ops.get(maker) or unknown_op(maker)
                shape = op.shape.split(", ")[int(element or 0)] if int(element or 0) < ARRAYS_OF_SHAPE else ""
                alive.append(LiveBuffer(maker, op.layer, op.phase, shape, op.source, size))
        place = callers.get(computation)
    return sorted(alive, key=lambda buffer: -buffer.bytes)


def track(trace: Trace, program: HloProgram, ops: Mapping[str, HloOp]) -> LiveTrack | None:
    """Curve over the window's median step on its first device; None if no op of the program ran in it."""
    step = median_step(trace)
    alive = live_bytes(program, ops)
    device = min((event.device for event in trace.events), default=0)
    events = [e for e in trace.events if e.step == step.step and e.device == device and e.name in alive]
    if not events:
        return None
    peak = max(events, key=lambda event: alive[event.name].sum())
    return _curve(
        sorted(events, key=lambda event: event.start_ns),
        alive,
        step,
        buffers_alive(program, ops, peak.name)[:MAX_BUFFERS],
    )


def _curve(
    events: Sequence[OpEvent],
    alive: Mapping[str, np.ndarray],
    step: StepSpan,
    largest: list[LiveBuffer],
) -> LiveTrack:
    values = np.stack([alive[event.name] for event in events])
    starts = np.array([event.start_ns - step.start_ns for event in events], np.int64)
    # Rounded up, so that there are at most MAX_POINTS points.
    ops_per_point = -(-len(events) // MAX_POINTS)
    firsts = np.arange(0, len(events), ops_per_point)
    # The peak op of each group, not its mean: a short peak is what decides if memory suffices.
    peak_indices = [
        int(first + np.argmax(values[first : first + ops_per_point].sum(axis=1))) for first in firsts
    ]
    return LiveTrack(
        step=step.step,
        time_s=[float(offset_ns) * 1e-9 for offset_ns in starts[peak_indices]],
        bytes={name: values[peak_indices, index].tolist() for index, name in enumerate(_NAMES)},
        largest=largest,
    )


def _computation_bytes(
    computation: str, ops: Mapping[str, HloOp], program: HloProgram
) -> Int64[np.ndarray, "instructions classes"]:
    """Bytes of a computation's own buffers while each of its instructions runs."""
    num_instructions = len(program.computations[computation])
    # Differences at begin and end, summed up below: one pass over buffers, however long they live.
    changes = np.zeros((num_instructions + 2, len(_NAMES)), np.int64)
    for buffer, size, first, last in _lifetimes(computation, program):
        # A tuple's elements are buffers of their own, named fusion.7#1; the op is fusion.7.
        maker = ops.get(buffer.partition(_ELEMENT)[0])
        phase = "other" if maker is None else maker.phase
        column = _NAMES.index(CLASSES.get(phase, CLASSES["other"]))
        changes[first, column] += size
        changes[last + 1, column] -= size
    return np.cumsum(changes, axis=0)[:num_instructions]


def _lifetimes(computation: str, program: HloProgram) -> list[tuple[str, int, int, int]]:
    """(buffer, bytes, first, last) of a computation's own buffers: alive from index first to index last."""
    body, is_entry = program.computations[computation], computation == program.entry
    # Indices of the entry's results that reuse the buffer of an argument (donation).
    aliased = {int(index) for index in re.findall(r"\{(\d+)\}: \(\d+, \{\}", program.header)}
    values: dict[str, _Value] = {}
    sizes: dict[str, int] = {}
    last_use: dict[str, int] = {}
    first_use: dict[str, int] = {}
    for index, instruction in enumerate(body):
        operand_buffers = _operand_buffers(instruction, values)
        last_use |= dict.fromkeys(_all_buffers(operand_buffers), index)
        values[instruction.name], new_buffers = _result_buffers(instruction, operand_buffers, program)
        for buffer, size in new_buffers.items():
            # A result that nobody reads lives while its own op runs.
            sizes[buffer], first_use[buffer], last_use[buffer] = size, index, index
    root = next(i for i in body if i.is_root)
    results = values[root.name]
    parts = results if isinstance(results, tuple) else (results,)
    for position, buffers in enumerate(parts):
        for buffer in buffers:
            if not is_entry or position in aliased:
                sizes.pop(buffer, None)  # counted as the loop's state, or in the buffer of an argument
            else:
                # A result of the step outlives it.
                last_use[buffer] = len(body)
    for index, instruction in enumerate(body):
        _reuse_operands(index, instruction, sizes, last_use, values)
    return [(buffer, size, first_use[buffer], last_use[buffer]) for buffer, size in sizes.items()]


def _reuse_operands(
    index: int,
    instruction: Instruction,
    sizes: dict[str, int],
    last_use: dict[str, int],
    values: Mapping[str, _Value],
) -> None:
    """Lets elementwise results reuse buffers of operands of the same size that nothing reads later."""
    if not (instruction.opcode in _ELEMENTWISE or "kind=kLoop" in instruction.line):
        return
    # Each result takes over one buffer at most, so a used size leaves the list.
    free_sizes = [sizes[buffer] for buffer in _all_buffers([values[instruction.name]]) if buffer in sizes]
    # In the order of the operands: a set of names has another order in each process.
    by_operand = [sorted(_all_buffers([value])) for value in _operand_buffers(instruction, values)]
    for buffer in itertools.chain.from_iterable(by_operand):
        if last_use.get(buffer) == index and sizes.get(buffer) in free_sizes:
            free_sizes.remove(sizes[buffer])
            # The operand's buffer counts until the op before; from here on it is counted as the result's.
            last_use[buffer] = index - 1


def _operand_buffers(instruction: Instruction, values: Mapping[str, _Value]) -> list[_Value]:
    """Buffers of each operand; `%fusion.7#1` is an element of a tuple."""
    _, _, arguments = instruction.line.partition(f" {instruction.opcode}(")
    operand_buffers: list[_Value] = []
    for name, element in re.findall(r"%([\w.-]+)(?:#(\d+))?", arguments.partition("), ")[0]):
        value = values.get(name)
        if value is not None:
            operand_buffers.append(value[int(element)] if element and isinstance(value, tuple) else value)
    return operand_buffers


def _all_buffers(values: Sequence[_Value]) -> frozenset[str]:
    return _NO_BUFFERS.union(
        *(buffers for value in values for buffers in (value if isinstance(value, tuple) else (value,)))
    )


def _result_buffers(
    instruction: Instruction, operand_buffers: Sequence[_Value], program: HloProgram
) -> tuple[_Value, dict[str, int]]:
    """Buffers that hold an instruction's result, and the bytes of those that the instruction allocates."""
    opcode = instruction.opcode
    if opcode == "tuple":
        return tuple(_all_buffers([value]) for value in operand_buffers), {}
    if opcode == "get-tuple-element":
        tuple_buffers = operand_buffers[0] if operand_buffers else _NO_BUFFERS
        index = int(re.findall(r"index=(\d+)", instruction.line)[0])
        return (
            tuple_buffers[index]
            if isinstance(tuple_buffers, tuple) and index < len(tuple_buffers)
            else _all_buffers([tuple_buffers])
        ), {}
    # These results are the first operand's buffers: a loop's state, a finished copy, an updated array.
    if opcode.endswith(("-done", "-update")) or opcode in (
        "while",
        "bitcast",
        "opt-barrier",
        "dynamic-update-slice",
    ):
        return (operand_buffers[0] if operand_buffers else _NO_BUFFERS), {}
    if opcode in _MAKES_NOTHING:
        return _NO_BUFFERS, {}
    if (position := _in_place(instruction, program)) is not None and position < len(operand_buffers):
        return operand_buffers[position], {}
    name = instruction.name
    if opcode.endswith("-start"):
        return frozenset({name}), {name: _started_bytes(instruction)}
    if not instruction.type.startswith("("):
        return frozenset({name}), {name: array_bytes(instruction.type)}
    new_buffers = {
        f"{name}{_ELEMENT}{position}": array_bytes(type_)
        for position, type_ in enumerate(elements(instruction.type))
    }
    return tuple(frozenset({buffer}) for buffer in new_buffers), new_buffers


def _in_place(instruction: Instruction, program: HloProgram) -> int | None:
    """Index of the operand that a fusion updates in place; None if its root is not an in-place update."""
    if instruction.opcode != "fusion":
        return None
    by_name = {nested.name: nested for nested in program.inside(instruction)}
    current = next((nested for nested in by_name.values() if nested.is_root), None)
    # From the root down: bitcasts and copies do not change which operand is updated.
    while (
        current is not None
        and current.opcode in ("bitcast", "dynamic-update-slice", "copy")
        and current.operands
    ):
        is_update = current.opcode == "dynamic-update-slice"
        current = by_name.get(current.operands[0])
        # The updated array is the update's first operand, perhaps behind bitcasts.
        while is_update and current is not None and current.opcode == "bitcast" and current.operands:
            current = by_name.get(current.operands[0])
        if is_update:
            argument = re.search(r" parameter\((\d+)\)", current.line) if current is not None else None
            return int(argument[1]) if argument else None
    return None


def _started_bytes(instruction: Instruction) -> int:
    """Bytes of an asynchronous op's result, the second element of its type (operands, results, ...)."""
    if not instruction.type.startswith("("):
        return array_bytes(instruction.type)
    types = elements(instruction.type)
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return array_bytes(types[0])
    return array_bytes(types[1]) if len(types) > 1 else array_bytes(instruction.type)
