"""Ops of a compiled program: phase, layer, FLOPs, bytes and network traffic of every instruction.

The compiler keeps the path of named scopes that an instruction was traced from as its `op_name`:
`jit(train_step)/shard_map/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/dot_general` belongs to
the backward pass of the MLPs; recomputation counts as backward. Instructions that the compiler adds have no path: they
get the phase and layer of their users, else of their operands, else of the surrounding loop.
"""

import collections
import re
from collections.abc import Iterator, Mapping

from jtrain.errors import UserError
from jtrain.hlo.parser import (
    KINDS,
    Instruction,
    axes_of,
    called,
    groups_of,
    read,
    types_of,
    whole_arrays,
    wire_bytes,
)
from jtrain.profile.analysis.hlo_flops import bytes_accessed, flops
from jtrain.profile.analysis.records import HloOp, OpKind, Phase, TracedCollective

_TOP = ("batch", "embed", "rope", "layers", "final_norm", "loss", "reduce_gradients", "optimizer")
"""Named scopes of `jtrain.step.train_step` and `jtrain.model.transformer`; each is a layer of the report."""

_INSIDE = {"attention": "attention", "attention_norm": "attention", "mlp": "mlp", "mlp_norm": "mlp"}
"""Scope, or component of a weight's path, inside `layers` -> second half of the layer's name."""

_PHASES: dict[str, Phase] = {"optimizer": "optimizer", "reduce_gradients": "backward", "batch": "data"}

_CONTROL = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "constant", "bitcast")
_CONTROL += ("after-all", "opt-barrier", "partition-id", "replica-id")
_NETWORK = (*KINDS, "send", "recv")
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")

type _Mark = tuple[Phase, str]

_NOWHERE: _Mark = ("other", "")


def read_ops(hlo: str, mesh_shape: Mapping[str, int]) -> dict[str, HloOp]:
    """Reads the ops of a program by name. A fusion is one op; instructions inside it are not listed.

    Args:
      hlo: optimized HLO text, as returned by `Compiled.as_text()` or `HloModule.to_string()`.
      mesh_shape: devices along each axis of the mesh that it was compiled for, in the order of `AXES`.

    Raises:
      UserError: the text has no entry computation.
    """
    computations, entry = read(hlo)
    if not computations.get(entry):
        raise UserError("the HLO text has no entry computation: it is truncated, or not a compiled program's text.")
    types = types_of(computations)
    found: dict[str, HloOp] = {}

    def visit(name: str, around: _Mark) -> None:
        body = computations[name]
        marks = _marks(body, computations, around)
        for instruction in body:
            phase, layer = marks[instruction.name]
            if holds_others(instruction):
                for inside in run_by(instruction):
                    visit(inside, (phase, layer))
            found[instruction.name] = _op(instruction, phase, layer, types, computations, mesh_shape, found)

    visit(entry, _NOWHERE)
    return found


def unknown_op(name: str) -> HloOp:
    """Op for a name that is in the trace but in no program: a kernel or copy started by a library or the runtime."""
    low = name.lower()
    kind: OpKind = "communication" if "nccl" in low or "rccl" in low else "copy" if "mem" in low[:4] else "compute"
    return HloOp(name, "", kind, "other", "", "", 0, 0, None)


def scope_mark(scope: str) -> tuple[Phase, str]:
    """Phase and layer of a path of named scopes; ("other", "") if it has none of ours.

    >>> scope_mark("jit(train_step)/shard_map/transpose(jvp(layers))/while/body/checkpoint/mlp/dot_general")
    ('backward', 'layers/mlp')
    """
    names = re.findall(r"[\w.-]+", re.sub(r"\bp?jit\([^)]*\)", "", scope))
    top = next((name for name in names if name in _TOP), None)
    if top is None:
        return _NOWHERE
    if top == "layers":
        inside = next((_INSIDE[name] for name in names[names.index(top) + 1 :] if name in _INSIDE), None)
        layer = f"layers/{inside}" if inside else "layers"
    else:
        layer = top
    if top in _PHASES:
        return _PHASES[top], layer
    return ("backward" if "transpose" in names or "rematted_computation" in names else "forward"), layer


def is_recomputed(op: HloOp) -> bool:
    """True if the op recomputes, in the backward pass, what the forward pass did not save."""
    return "rematted_computation" in op.scope


def _vote(marks: Iterator[_Mark]) -> _Mark:
    counted = collections.Counter(mark for mark in marks if mark != _NOWHERE)
    return counted.most_common(1)[0][0] if counted else _NOWHERE


def _own(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> tuple[_Mark, str]:
    """Mark and path of an instruction: from its own path, else its fusion's root, else most frequent inside it.

    A collective that the compiler combined from several has the paths of all: `jit(f)/(a/psum:b/psum)`.
    """
    scope = instruction.op_name
    head, several, rest = scope.partition("/(")
    mark = _vote(map(scope_mark, rest.split(":"))) if several and ":" in rest else scope_mark(scope)
    if mark != _NOWHERE or holds_others(instruction):
        return mark, scope
    inside = [i for name in called(instruction.line) for i in computations[name]]
    for root in (i for i in inside if i.line.lstrip().startswith("ROOT ")):
        if (of_root := scope_mark(root.op_name)) != _NOWHERE:
            return of_root, root.op_name
    return _vote(scope_mark(i.op_name) for i in inside), scope or head


def _marks(body: list[Instruction], computations: Mapping[str, list[Instruction]], around: _Mark) -> dict[str, _Mark]:
    """Phase and layer of every instruction of a computation."""
    marks = {i.name: _own(i, computations)[0] for i in body}
    users: dict[str, list[str]] = {i.name: [] for i in body}
    operands: dict[str, list[str]] = {}
    for instruction in body:
        operands[instruction.name] = [name for name in instruction.operands if name in users]
        for name in operands[instruction.name]:
            users[name].append(instruction.name)
    # The text is in schedule order, so one pass in each direction reaches every instruction.
    for order, beside in ((reversed(body), users), (body, operands)):
        for instruction in order:
            if marks[instruction.name] == _NOWHERE:
                marks[instruction.name] = _vote(marks[name] for name in beside[instruction.name])
    return {name: around if mark == _NOWHERE else mark for name, mark in marks.items()}


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def holds_others(instruction: Instruction) -> bool:
    """True if the instruction is a loop, a conditional or a call."""
    return instruction.opcode in ("while", "conditional", "call")


def run_by(instruction: Instruction) -> list[str]:
    """Names of the computations that a loop, a conditional or a call runs."""
    return [*called(instruction.line), *re.findall(r"\bcondition=%([\w.-]+)", instruction.line)]


def _op(
    instruction: Instruction,
    phase: Phase,
    layer: str,
    types: Mapping[str, str],
    computations: Mapping[str, list[Instruction]],
    mesh_shape: Mapping[str, int],
    before: Mapping[str, HloOp],
) -> HloOp:
    name, opcode = instruction.name, instruction.opcode
    scope = _own(instruction, computations)[1]
    if opcode.endswith(("-done", "-update")):  # bytes are counted at the matching start
        start = next((before[operand] for operand in instruction.operands if operand in before), None)
        kind: OpKind = start.kind if start is not None else _kind(instruction, None, 0)
        of_start = start.collective if start is not None else None
        waited = TracedCollective(of_start.kind, of_start.axes, 0) if of_start is not None else None
        return HloOp(name, opcode, kind, phase, layer, scope, 0, 0, waited)
    work = flops(instruction, types, computations)
    collective = _collective(instruction, types, computations, mesh_shape)
    kind = _kind(instruction, collective, work)
    if kind != "communication":
        collective = None
    size = 0 if kind in ("control", "communication") else bytes_accessed(instruction, types, computations)
    return HloOp(name, opcode, kind, phase, layer, scope, work, size, collective)


def _kind(instruction: Instruction, collective: TracedCollective | None, work: int) -> OpKind:
    base = _base(instruction.opcode)
    if base in _NETWORK or (collective is not None and not work):
        return "communication"
    if instruction.opcode in _CONTROL:
        return "control"
    return "copy" if base in _COPIES else "compute"


def _collective(
    instruction: Instruction,
    types: Mapping[str, str],
    computations: Mapping[str, list[Instruction]],
    mesh_shape: Mapping[str, int],
) -> TracedCollective | None:
    """Network traffic of an instruction, or of the first collective that it wraps; None if it has none."""
    kind = instruction.collective
    if kind:
        groups = groups_of(instruction, mesh_shape)
        size = max((len(group) for group in groups), default=1)
        sent = sum(wire_bytes(kind, whole, size) for _, whole in whole_arrays(instruction, size, types))
        return TracedCollective(kind, axes_of(groups, mesh_shape), sent)
    if instruction.opcode not in ("fusion", "async-start", "call-start"):
        return None
    inside = [i for name in called(instruction.line) for i in computations[name]]
    return next((found for i in inside if (found := _collective(i, types, computations, mesh_shape))), None)
