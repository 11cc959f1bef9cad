"""Bytes of temporaries alive while each op of a program runs, by the phase that made them.

Computed from the schedule: a buffer lives from the op that makes it to the last op that reads it. As in XLA's
buffer assignment, a loop's state lives in the buffers that enter the loop, and an in-place update in the
buffer that it updates. Arguments, and results that take their place (donation), are not counted: the plan
lists those. The result differs from the allocation where XLA keeps a buffer longer or makes a copy.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from jtrain.hlo.parser import HloProgram, Instruction, array_bytes, elements
from jtrain.hlo.scopes import Phase
from jtrain.profile.analysis.records import HloOp, LiveTrack, OpEvent, StepSpan, Trace

CLASSES: dict[Phase, str] = {
    "forward": "made by the forward pass",
    "backward": "made by the backward pass",
    "optimizer": "made by the update",
    "other": "other",
}
"""Phase of the op that made a buffer -> class of the buffer; all other phases are "other"."""

MOST_POINTS = 500
"""Maximum number of points of a curve; each point is the maximum over the ops that it stands for."""

_NAMES = tuple(CLASSES.values())
_NONE = frozenset[str]()
_ELEMENT = "#"

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

    def visit(name: str, around: np.ndarray) -> None:
        rows = around + _live(name, ops, program)
        for instruction, row in zip(program.computations[name], rows, strict=True):
            alive[instruction.name] = row
            if instruction.holds_others:
                for inside in instruction.called:
                    visit(inside, row)

    visit(program.entry, np.zeros(len(_NAMES), np.int64))
    return alive


def track(trace: Trace, program: HloProgram, ops: Mapping[str, HloOp]) -> LiveTrack | None:
    """Curve over the window's median step on its first device; None if no op of the program ran in that
    step.
    """
    steps = sorted(trace.steps, key=lambda step: step.end_ns - step.start_ns)
    step = steps[len(steps) // 2]
    alive = live_bytes(program, ops)
    device = min((event.device for event in trace.events), default=0)
    events = [e for e in trace.events if e.step == step.step and e.device == device and e.name in alive]
    if not events:
        return None
    return _curve(sorted(events, key=lambda event: event.start_ns), alive, step)


def _curve(events: Sequence[OpEvent], alive: Mapping[str, np.ndarray], step: StepSpan) -> LiveTrack:
    values = np.stack([alive[event.name] for event in events])
    starts = np.array([event.start_ns - step.start_ns for event in events], np.int64)
    size = -(-len(events) // MOST_POINTS)
    firsts = np.arange(0, len(events), size)
    most = [int(first + np.argmax(values[first : first + size].sum(axis=1))) for first in firsts]
    return LiveTrack(
        step=step.step,
        time_s=[float(t) * 1e-9 for t in starts[most]],
        bytes={name: values[most, index].tolist() for index, name in enumerate(_NAMES)},
    )


def _live(
    computation: str, ops: Mapping[str, HloOp], program: HloProgram
) -> Int64[np.ndarray, "instructions classes"]:
    """Bytes of a computation's own buffers while each of its instructions runs."""
    body, is_entry = program.computations[computation], computation == program.entry
    # Indices of the entry's results that reuse the buffer of an argument (donation).
    aliased = {int(index) for index in re.findall(r"\{(\d+)\}: \(\d+, \{\}", program.header)}
    values: dict[str, _Value] = {}
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    made: dict[str, int] = {}
    for index, instruction in enumerate(body):
        given = _given(instruction, values)
        last |= dict.fromkeys(_all(given), index)
        values[instruction.name], own = _value(instruction, given, program)
        for buffer, size in own.items():
            sizes[buffer], made[buffer], last[buffer] = size, index, index
    root = next(i for i in body if i.is_root)
    results = values[root.name]
    parts = results if isinstance(results, tuple) else (results,)
    for place, part in enumerate(parts):
        for buffer in part:
            if not is_entry or place in aliased:
                sizes.pop(buffer, None)  # counted as the loop's state, or in the buffer of an argument
            else:
                last[buffer] = len(body)
    for index, instruction in enumerate(body):
        _take_over(index, instruction, sizes, last, values)
    changes = np.zeros((len(body) + 2, len(_NAMES)), np.int64)
    for buffer, size in sizes.items():
        maker = ops.get(buffer.partition(_ELEMENT)[0])
        phase = "other" if maker is None else maker.phase
        column = _NAMES.index(CLASSES.get(phase, CLASSES["other"]))
        changes[made[buffer], column] += size
        changes[last[buffer] + 1, column] -= size
    return np.cumsum(changes, axis=0)[: len(body)]


def _take_over(
    index: int,
    instruction: Instruction,
    sizes: dict[str, int],
    last: dict[str, int],
    values: Mapping[str, _Value],
) -> None:
    """Lets elementwise results reuse the buffers of operands of the same size that no later instruction
    reads.
    """
    if not (instruction.opcode in _ELEMENTWISE or "kind=kLoop" in instruction.line):
        return
    free = [sizes[buffer] for buffer in _all([values[instruction.name]]) if buffer in sizes]
    for buffer in _all(_given(instruction, values)):
        if last.get(buffer) == index and sizes.get(buffer) in free:
            free.remove(sizes[buffer])
            last[buffer] = index - 1


def _given(instruction: Instruction, values: Mapping[str, _Value]) -> list[_Value]:
    """Buffers of each operand; `%fusion.7#1` is an element of a tuple."""
    _, _, rest = instruction.line.partition(f" {instruction.opcode}(")
    found: list[_Value] = []
    for name, element in re.findall(r"%([\w.-]+)(?:#(\d+))?", rest.partition("), ")[0]):
        value = values.get(name)
        if value is not None:
            found.append(value[int(element)] if element and isinstance(value, tuple) else value)
    return found


def _all(values: Sequence[_Value]) -> frozenset[str]:
    return _NONE.union(
        *(part for value in values for part in (value if isinstance(value, tuple) else (value,)))
    )


def _value(
    instruction: Instruction, given: Sequence[_Value], program: HloProgram
) -> tuple[_Value, dict[str, int]]:
    """Buffers that hold an instruction's result, and the bytes of those that the instruction allocates."""
    opcode = instruction.opcode
    if opcode == "tuple":
        return tuple(_all([value]) for value in given), {}
    if opcode == "get-tuple-element":
        of = given[0] if given else _NONE
        index = int(re.findall(r"index=(\d+)", instruction.line)[0])
        return (of[index] if isinstance(of, tuple) and index < len(of) else _all([of])), {}
    if opcode.endswith(("-done", "-update")) or opcode in (
        "while",
        "bitcast",
        "opt-barrier",
        "dynamic-update-slice",
    ):
        return (given[0] if given else _NONE), {}
    if opcode in _MAKES_NOTHING:
        return _NONE, {}
    if (place := _in_place(instruction, program)) is not None and place < len(given):
        return given[place], {}
    name = instruction.name
    if opcode.endswith("-start"):
        return frozenset({name}), {name: _started_bytes(instruction)}
    if not instruction.type.startswith("("):
        return frozenset({name}), {name: array_bytes(instruction.type)}
    own = {
        f"{name}{_ELEMENT}{place}": array_bytes(type_)
        for place, type_ in enumerate(elements(instruction.type))
    }
    return tuple(frozenset({buffer}) for buffer in own), own


def _in_place(instruction: Instruction, program: HloProgram) -> int | None:
    """Index of the operand that a fusion updates in place; None if its root is not an in-place update."""
    if instruction.opcode != "fusion":
        return None
    inside = {i.name: i for i in program.inside(instruction)}
    at = next((i for i in inside.values() if i.is_root), None)
    while at is not None and at.opcode in ("bitcast", "dynamic-update-slice", "copy") and at.operands:
        updates = at.opcode == "dynamic-update-slice"
        at = inside.get(at.operands[0])
        while updates and at is not None and at.opcode == "bitcast" and at.operands:
            at = inside.get(at.operands[0])
        if updates:
            argument = re.search(r" parameter\((\d+)\)", at.line) if at is not None else None
            return int(argument[1]) if argument else None
    return None


def _started_bytes(instruction: Instruction) -> int:
    """Bytes of an asynchronous op's result, which is the second element of its type (operands, results,
    ...).
    """
    if not instruction.type.startswith("("):
        return array_bytes(instruction.type)
    parts = elements(instruction.type)
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return array_bytes(parts[0])
    return array_bytes(parts[1]) if len(parts) > 1 else array_bytes(instruction.type)
