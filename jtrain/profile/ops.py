"""Every instruction of a compiled program: its phase and layer, what it computes, what it puts on the network.

The compiler keeps the path of named scopes that an instruction comes from as its `op_name`:
`jit(train_step)/shard_map/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/dot_general` is of the
backward pass (what it computes again counts as that) of the MLPs. What the compiler adds has no path: it belongs to
what uses it, else to what made its operands, else to the loop that it is in.
"""

import collections
import re
from collections.abc import Iterator, Mapping

from jtrain.profile.records import Collective, Kind, Op, Phase
from jtrain.profile.work import flops, moved_bytes
from jtrain.program import KINDS, Instruction, axes_of, called, groups_of, read, whole_arrays, wire_bytes

_TOP = ("batch", "embed", "rope", "layers", "final_norm", "loss", "reduce_gradients", "optimizer")
"""The scopes of `jtrain.step` and `jtrain.model.transformer`, each a layer of the report."""

_INSIDE = {"attention": "attention", "attention_norm": "attention", "mlp": "mlp", "mlp_norm": "mlp"}
"""Inside of `layers`: scope, or component of a weight's path -> the rest of the layer's name."""

_PHASES: dict[str, Phase] = {"optimizer": "optimizer", "reduce_gradients": "backward", "batch": "data"}

_CONTROL = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "constant", "bitcast")
_CONTROL += ("after-all", "opt-barrier", "partition-id", "replica-id")
_NETWORK = (*KINDS, "ragged-all-to-all", "send", "recv")
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")

type _Mark = tuple[Phase, str]

_NOWHERE: _Mark = ("other", "")


def read_ops(hlo: str, mesh_shape: Mapping[str, int]) -> dict[str, Op]:
    """Name -> op, of everything that runs by itself: what is inside a fusion is part of it.

    Args:
      hlo: optimized HLO text, as `Compiled.as_text()` or `HloModule.to_string()` give it.
      mesh_shape: devices along each axis, in the order of `AXES`, of the mesh that it was compiled for.

    Raises:
      ValueError: the text holds no program.
    """
    computations, entry = read(hlo)
    if not computations.get(entry):
        raise ValueError("the HLO text holds no entry computation: it is cut off, or no compiled program's text.")
    types = {i.name: i.type for body in computations.values() for i in body}
    found: dict[str, Op] = {}

    def visit(name: str, around: _Mark) -> None:
        body = computations[name]
        marks = _marks(body, computations, around)
        for instruction in body:
            phase, layer = marks[instruction.name]
            if _holds_others(instruction):
                for inside in _run_by(instruction):
                    visit(inside, (phase, layer))
            found[instruction.name] = _op(instruction, phase, layer, types, computations, mesh_shape, found)

    visit(entry, _NOWHERE)
    return found


def unknown_op(name: str) -> Op:
    """What a trace names but no program does: a kernel or a copy that a library or the runtime started."""
    low = name.lower()
    kind: Kind = "communication" if "nccl" in low or "rccl" in low else "copy" if "mem" in low[:4] else "compute"
    return Op(name, "", kind, "other", "", "", 0, 0, None)


def scope_mark(scope: str) -> tuple[Phase, str]:
    """Phase and layer that a path says; ("other", "") if it says none.

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


def is_recomputed(op: Op) -> bool:
    """Whether it computes again, in the backward pass, what the forward pass did not keep."""
    return "rematted_computation" in op.scope


def scope_of(instruction: Instruction) -> str:
    """The path that the compiler kept; "" if none."""
    found = re.search(r'op_name="([^"]*)"', instruction.line)
    return found[1] if found else ""


def _vote(marks: Iterator[_Mark]) -> _Mark:
    counted = collections.Counter(mark for mark in marks if mark != _NOWHERE)
    return counted.most_common(1)[0][0] if counted else _NOWHERE


def _own(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> tuple[_Mark, str]:
    """Mark and path of an instruction by itself: its own, its fusion's root's, or the most frequent one inside.

    A collective that the compiler joined out of several has the paths of all: `jit(f)/(a/psum:b/psum)`.
    """
    scope = scope_of(instruction)
    head, several, rest = scope.partition("/(")
    mark = _vote(map(scope_mark, rest.split(":"))) if several and ":" in rest else scope_mark(scope)
    if mark != _NOWHERE or _holds_others(instruction):
        return mark, scope
    inside = [i for name in called(instruction.line) for i in computations[name]]
    for root in (i for i in inside if i.line.lstrip().startswith("ROOT ")):
        if (of_root := scope_mark(scope_of(root))) != _NOWHERE:
            return of_root, scope_of(root)
    return _vote(scope_mark(scope_of(i)) for i in inside), scope or head


def _marks(body: list[Instruction], computations: Mapping[str, list[Instruction]], around: _Mark) -> dict[str, _Mark]:
    """Of every instruction of a computation, what it belongs to."""
    marks = {i.name: _own(i, computations)[0] for i in body}
    users: dict[str, list[str]] = {i.name: [] for i in body}
    operands: dict[str, list[str]] = {}
    for instruction in body:
        operands[instruction.name] = [name for name in instruction.operands if name in users]
        for name in operands[instruction.name]:
            users[name].append(instruction.name)
    # The text is in the order of the schedule: one pass each way reaches everything.
    for order, beside in ((reversed(body), users), (body, operands)):
        for instruction in order:
            if marks[instruction.name] == _NOWHERE:
                marks[instruction.name] = _vote(marks[name] for name in beside[instruction.name])
    return {name: around if mark == _NOWHERE else mark for name, mark in marks.items()}


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def _holds_others(instruction: Instruction) -> bool:
    return instruction.opcode in ("while", "conditional", "call")


def _run_by(instruction: Instruction) -> list[str]:
    condition = re.findall(r"\b(?:condition|true_computation|false_computation)=%([\w.-]+)", instruction.line)
    return [*called(instruction.line), *condition]


def _op(
    instruction: Instruction,
    phase: Phase,
    layer: str,
    types: Mapping[str, str],
    computations: Mapping[str, list[Instruction]],
    mesh_shape: Mapping[str, int],
    before: Mapping[str, Op],
) -> Op:
    name, opcode = instruction.name, instruction.opcode
    scope = _own(instruction, computations)[1]
    if opcode.endswith(("-done", "-update")):  # waits for what its start began, and is counted there
        start = next((before[operand] for operand in instruction.operands if operand in before), None)
        kind: Kind = start.kind if start is not None else _kind(instruction, None, 0)
        of_start = start.collective if start is not None else None
        waited = Collective(of_start.kind, of_start.axes, 0) if of_start is not None else None
        return Op(name, opcode, kind, phase, layer, scope, 0, 0, waited)
    work = flops(instruction, types, computations)
    collective = _collective(instruction, computations, mesh_shape)
    kind = _kind(instruction, collective, work)
    if kind != "communication":
        collective = None
    size = 0 if kind in ("control", "communication") else moved_bytes(instruction, types, computations)
    return Op(name, opcode, kind, phase, layer, scope, work, size, collective)


def _kind(instruction: Instruction, collective: Collective | None, work: int) -> Kind:
    base = _base(instruction.opcode)
    if base in _NETWORK or (collective is not None and not work):
        return "communication"
    if instruction.opcode in _CONTROL:
        return "control"
    return "copy" if base in _COPIES else "compute"


def _collective(
    instruction: Instruction, computations: Mapping[str, list[Instruction]], mesh_shape: Mapping[str, int]
) -> Collective | None:
    """Of the instruction, or of the first collective in what it wraps."""
    kind = _base(instruction.opcode)
    if kind in KINDS:
        groups = groups_of(instruction, mesh_shape)
        size = max((len(group) for group in groups), default=1)
        sent = sum(wire_bytes(kind, whole, size) for _, whole in whole_arrays(instruction, kind, size))
        return Collective(kind, axes_of(groups, mesh_shape), sent)
    if _holds_others(instruction) or kind not in ("fusion", "async", "call"):
        return None
    inside = [i for name in called(instruction.line) for i in computations[name]]
    return next((found for i in inside if (found := _collective(i, computations, mesh_shape))), None)
