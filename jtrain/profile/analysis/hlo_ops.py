"""Ops of a compiled program: phase, layer, FLOPs, bytes and network traffic of every instruction.

Instructions that the compiler adds have no path of named scopes (`jtrain.hlo.scopes`): they get the phase and
layer of their users, else of their operands, else of the surrounding loop.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jtrain.errors import UserError
from jtrain.hlo.device_groups import axes_of, groups_of, whole_arrays, wire_bytes
from jtrain.hlo.flops import bytes_accessed, flops
from jtrain.hlo.parser import KINDS, HloProgram, Instruction, arrays
from jtrain.hlo.scopes import UNMARKED, Phase, scope_mark
from jtrain.profile.analysis.records import HloOp, OpKind, OpTraffic

# Instructions that run nothing themselves: a trace has no event for them, or one around others.
_CONTROL = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "constant", "bitcast")
_CONTROL += ("after-all", "opt-barrier", "partition-id", "replica-id")
_NETWORK = (*KINDS, "send", "recv")
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")

ARRAYS_OF_SHAPE = 3
"""Arrays of a tuple that an op's shape names."""

type _Mark = tuple[Phase, str]


def read_ops(
    program: HloProgram, mesh_shape: Mapping[str, int], sources: Mapping[int, str] | None = None
) -> dict[str, HloOp]:
    """Reads the ops of a program by name. A fusion is one op; instructions inside it are not listed.

    Args:
      mesh_shape: devices along each axis of the mesh that it was compiled for, in the order of `AXES`.
      sources: lines of source code by stack frame (`jtrain.hlo.source_lines`).

    Raises:
      UserError: the text has no entry computation.
    """
    if not program.computations.get(program.entry):
        raise UserError(
            "the HLO text has no entry computation: it is truncated, or not a compiled program's text."
        )
    ops: dict[str, HloOp] = {}

    def visit(name: str, outer_mark: _Mark) -> None:
        marks, lines = _marks(name, program, outer_mark), _sources(name, program, sources or {})
        for instruction in program.computations[name]:
            phase, layer = marks[instruction.name]
            if instruction.is_control_flow:
                # With the condition of a loop: the trace has its ops too.
                for computation in instruction.called_with_condition:
                    visit(computation, (phase, layer))
            op = _op(instruction, phase, layer, program, mesh_shape, ops)
            ops[op.name] = dataclasses.replace(
                op,
                shape=_shape(instruction.type),
                source=lines[instruction.name],
                is_async=instruction.opcode.endswith("-start") and not instruction.is_synchronous,
            )

    visit(program.entry, UNMARKED)
    return ops


def unknown_op(name: str) -> HloOp:
    """Op for a name that is in no program: a kernel or copy that a library or the runtime started."""
    # Names of kernels: ncclDevKernel_AllReduce..., MemcpyD2D, memset.
    low = name.lower()
    kind: OpKind = (
        "communication" if "nccl" in low or "rccl" in low else "copy" if "mem" in low[:4] else "compute"
    )
    return HloOp(name, "", kind, "other", "", "", 0, 0, None)


def is_recomputed(op: HloOp) -> bool:
    """True if the op recomputes, in the backward pass, what the forward pass did not save."""
    return "rematted_computation" in op.scope


def _vote[Value](values: Iterable[Value], unknown: Value) -> Value:
    """The most frequent known value; `unknown` if there is none."""
    counted = collections.Counter(value for value in values if value != unknown)
    # Of equally frequent values the first wins, so the result does not depend on hashes.
    return counted.most_common(1)[0][0] if counted else unknown


def _mark_and_scope(instruction: Instruction, program: HloProgram) -> tuple[_Mark, str]:
    """Mark and path of an instruction: its own, else its fusion's root's, else the most frequent inside.

    A collective that the compiler combined from several has the paths of all: `jit(f)/(a/psum:b/psum)`.
    """
    scope = instruction.op_name
    outer_scope, separator, scopes = scope.partition("/(")
    # The most frequent mark wins: gradients of many layers are combined into one all-reduce.
    mark = (
        _vote(map(scope_mark, scopes.split(":")), UNMARKED)
        if separator and ":" in scopes
        else scope_mark(scope)
    )
    if mark != UNMARKED or instruction.is_control_flow:
        return mark, scope
    # The root's result is what the fusion is for; only if it has no scope, all of the fusion votes.
    nested_instructions = program.inside(instruction)
    for root in (nested for nested in nested_instructions if nested.is_root):
        if (root_mark := scope_mark(root.op_name)) != UNMARKED:
            return root_mark, root.op_name
    return _vote(
        (scope_mark(nested.op_name) for nested in nested_instructions), UNMARKED
    ), scope or outer_scope


def _marks(computation: str, program: HloProgram, outer_mark: _Mark) -> dict[str, _Mark]:
    """Phase and layer of every instruction of a computation."""
    body = program.computations[computation]
    marks = _with_neighbours(body, {i.name: _mark_and_scope(i, program)[0] for i in body}, UNMARKED)
    return {name: outer_mark if mark == UNMARKED else mark for name, mark in marks.items()}


def _with_neighbours[Value](
    body: Sequence[Instruction], values: Mapping[str, Value], unknown: Value
) -> dict[str, Value]:
    """Values of a computation's instructions; those without one have that of their users, else their operands."""
    values = dict(values)
    users: dict[str, list[str]] = {i.name: [] for i in body}
    operands: dict[str, list[str]] = {}
    for instruction in body:
        operands[instruction.name] = [name for name in instruction.operands if name in users]
        for name in operands[instruction.name]:
            users[name].append(instruction.name)
    # The text is in schedule order, so one pass in each direction reaches every instruction.
    for order, neighbours in ((reversed(body), users), (body, operands)):
        for instruction in order:
            if values[instruction.name] == unknown:
                values[instruction.name] = _vote(
                    (values[name] for name in neighbours[instruction.name]), unknown
                )
    return values


def _shape(type_: str) -> str:
    """`bf16[8,4096]`: a type without layouts; of a tuple the first arrays."""
    names = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in arrays(type_)]
    return ", ".join(names[:ARRAYS_OF_SHAPE]) + (", ..." if len(names) > ARRAYS_OF_SHAPE else "")


def _sources(computation: str, program: HloProgram, sources: Mapping[int, str]) -> dict[str, str]:
    """Line of source code of every instruction of a computation; "" where none is known."""
    body = program.computations[computation]

    def lines(instruction: Instruction) -> str:
        nested_instructions = () if instruction.is_control_flow else program.inside(instruction)
        return sources.get(instruction.stack_frame) or _vote(
            (sources.get(nested.stack_frame, "") for nested in nested_instructions), ""
        )

    return _with_neighbours(body, {instruction.name: lines(instruction) for instruction in body}, "")


def _base_opcode(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def _op(
    instruction: Instruction,
    phase: Phase,
    layer: str,
    program: HloProgram,
    mesh_shape: Mapping[str, int],
    earlier_ops: Mapping[str, HloOp],
) -> HloOp:
    name, opcode = instruction.name, instruction.opcode
    scope = _mark_and_scope(instruction, program)[1]
    if opcode.endswith(("-done", "-update")):  # bytes are counted at the matching start
        # The start stands earlier in the schedule, so its op exists already.
        start = next(
            (earlier_ops[operand] for operand in instruction.operands if operand in earlier_ops), None
        )
        kind: OpKind = start.kind if start is not None else _kind(instruction, None, 0)
        start_traffic = start.collective if start is not None else None
        # 0 bytes: the wait at the done is time on the network, but its bytes were sent once.
        done_traffic = (
            OpTraffic(start_traffic.kind, start_traffic.axes, 0) if start_traffic is not None else None
        )
        return HloOp(name, opcode, kind, phase, layer, scope, 0, 0, done_traffic)
    work = flops(instruction, program)
    collective = _collective(instruction, program, mesh_shape)
    kind = _kind(instruction, collective, work)
    # A fusion that multiplies and gathers counts as compute; its bytes on the wire are not counted.
    if kind != "communication":
        collective = None
    # Control ops contain others, which count their own bytes.
    size = 0 if kind in ("control", "communication") else bytes_accessed(instruction, program)
    return HloOp(name, opcode, kind, phase, layer, scope, work, size, collective)


def _kind(instruction: Instruction, collective: OpTraffic | None, work: int) -> OpKind:
    base = _base_opcode(instruction.opcode)
    # A fusion around a collective without a product does nothing but communicate.
    if base in _NETWORK or (collective is not None and not work):
        return "communication"
    if instruction.opcode in _CONTROL:
        return "control"
    return "copy" if base in _COPIES else "compute"


def _collective(
    instruction: Instruction, program: HloProgram, mesh_shape: Mapping[str, int]
) -> OpTraffic | None:
    """Network traffic of an instruction, or of the first collective that it wraps; None if it has none."""
    kind = instruction.collective
    if kind:
        groups = groups_of(instruction, mesh_shape)
        size = max((len(group) for group in groups), default=1)
        sent_bytes = sum(
            wire_bytes(kind, whole_bytes, size)
            for _, whole_bytes in whole_arrays(instruction, size, program.types)
        )
        return OpTraffic(kind, axes_of(groups, mesh_shape), sent_bytes, tuple(map(tuple, groups)))
    if instruction.opcode not in ("fusion", "async-start", "call-start"):
        return None
    traffics = (_collective(nested, program, mesh_shape) for nested in program.inside(instruction))
    return next((collective for collective in traffics if collective), None)
