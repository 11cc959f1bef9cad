"""Parser of optimized HLO text: computations, how often each instruction runs, and what overlaps it.

The text is in schedule order. A pair of start and done (`all-gather-start`, `copy-start`, `async-start`, the
`call-start` of a TPU's sparse cores) is asynchronous, and hidden if a matmul runs in between.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all")
KINDS += ("collective-permute", "collective-broadcast")
"""Opcodes of collectives."""

ITEMSIZE = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
ITEMSIZE |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
ITEMSIZE |= dict.fromkeys(("f8e4m3", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu"), 1)

_KERNEL = re.compile(r'custom_call_target="[^"]*(gemm|matmul|mosaic|tpu_custom_call|triton|fmha)')

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")

_CALLED = re.compile(
    r"\b(calls|to_apply|body|branch_computations|(?:true|false)_computation|called_computations)=(?:%([\w.-]+)|\{([^}]*)\})"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO; `type` is a tuple type if the instruction has several results."""

    name: str
    type: str
    opcode: str
    line: str

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        _, _, rest = self.line.partition(f" {self.opcode}(")
        return re.findall(r"%([\w.-]+)", rest.partition("), ")[0])

    @property
    def collective(self) -> str:
        """Kind of the collective that it is or starts, one of `KINDS`; "" for others, and for what ends
        one.
        """
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def op_name(self) -> str:
        """Path of named scopes in its metadata; "" if it has none."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""

    @property
    def is_root(self) -> bool:
        """True if its result is that of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def holds_others(self) -> bool:
        """True for a loop, a conditional or a call."""
        return self.opcode in ("while", "conditional", "call")

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls, without the condition of a loop."""
        matches = _CALLED.finditer(self.line)
        return [name for m in matches for name in ([m[2]] if m[2] else re.findall(r"%([\w.-]+)", m[3]))]

    @property
    def run_by(self) -> list[str]:
        """Names of the computations that it calls, with the condition of a loop."""
        return [*self.called, *re.findall(r"\bcondition=%([\w.-]+)", self.line)]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """Text of a program, parsed.

    header: its first line. computations: instructions of each by name; `entry` is the one that runs.
    """

    header: str
    computations: Mapping[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def types(self) -> dict[str, str]:
        """Result type of every instruction, by name."""
        return {one.name: one.type for body in self.computations.values() for one in body}

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Instructions of the computations that an instruction calls."""
        return [one for name in instruction.called for one in self.computations[name]]

    @functools.cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    def multiplies(self, instruction: Instruction) -> bool:
        """True if an instruction is or contains a matmul, or calls a kernel."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return _KERNEL.search(instruction.line) is not None
        for name in instruction.called:
            if name not in self._known:
                self._known[name] = any(map(self.multiplies, self.computations[name]))
            if self._known[name]:
                return True
        return False

    def trip_count(self, line: str) -> int | None:
        """Trip count of a while loop: the compiler's annotation, else the bound in its condition (from 0 by
        1).
        """
        if noted := re.search(r'"?known_trip_count"?[=:]\{"?n"?[=:]"?(\d+)', line):
            return int(noted[1])
        condition = re.search(r"condition=%([\w.-]+)", line)
        if not condition:
            return None
        bounds: list[int] = []
        pending = [condition[1]]
        compared = False
        while pending:
            for instruction in self.computations[pending.pop()]:
                if constant := re.search(r"= [su]32\[\]\S* constant\((\d+)\)", instruction.line):
                    bounds.append(int(constant[1]))
                compared |= "direction=LT" in instruction.line
                pending += instruction.called
        return bounds[0] if len(bounds) == 1 and compared else None


@dataclasses.dataclass(frozen=True)
class Visit:
    """One instruction at one call site, with its number of executions.

    times: executions per run of the program; None if a loop around it has no known trip count.
    asynchronous, hidden: True if it is part of a pair of start and done, and if a matmul runs in between.
    computation, around: name and instructions of its computation; it is in flight from index `start` to
      `stop`.
    types: result type of every instruction of the program.
    """

    computation: str
    instruction: Instruction
    times: int | None
    asynchronous: bool
    hidden: bool
    around: list[Instruction]
    start: int
    stop: int
    types: Mapping[str, str]


type BranchTimes = Callable[[str], int | None]
"""Executions per run of what a conditional of this op_name computes; None if it computes something every
time."""


def visits(hlo: str, branch_times: BranchTimes | None = None) -> Iterator[Visit]:
    """Every instruction reachable from the entry computation, once per call site.

    Args:
      branch_times: how often branches are taken, which no HLO says; without it, as often as their conditional
        is met.
    """
    program = read(hlo)

    def visit(name: str, times: int | None, asynchronous: bool, hidden: bool) -> Iterator[Visit]:
        instructions = program.computations[name]
        for index, instruction in enumerate(instructions):
            opcode = instruction.opcode
            if opcode.endswith(("-done", "-update")):
                continue
            beside, under, begin, stop = asynchronous, hidden, index, index
            if opcode.endswith("-start") and '"is_sync":true' not in instruction.line:
                beside, begin, stop = True, begin_of(instructions, index), done_of(instructions, index)
                stop = stop or len(instructions)
                between = instructions[begin + 1 : stop]
                under |= any(
                    program.multiplies(i)
                    for i in between
                    if not i.opcode.endswith(("-start", "-update", "-done"))
                )
            yield Visit(name, instruction, times, beside, under, instructions, begin, stop, program.types)
            inner = times
            if opcode == "while":
                trips = program.trip_count(instruction.line)
                inner = None if times is None or trips is None else times * trips
            elif opcode == "conditional" and branch_times is not None:
                taken = branch_times(instruction.op_name)
                inner = times if taken is None else taken
            # The computation of a reduction (to_apply) is visited too; its arithmetic is ignored by all
            # callers.
            for inside in instruction.called:
                yield from visit(inside, inner, beside, under)

    yield from visit(program.entry, 1, False, False)


def begin_of(instructions: list[Instruction], start: int) -> int:
    """Index at which the start at `start` has its data: that of its first update, if the start has no
    operands.

    A TPU's sparse cores are started before the data exist that they will send.
    """
    if instructions[start].operands:
        return start
    name = instructions[start].name
    for index in range(start + 1, len(instructions)):
        if instructions[index].opcode.endswith("-update") and name in instructions[index].operands:
            return index
    return start


def done_of(instructions: list[Instruction], start: int) -> int | None:
    """Index of the done instruction for the start at `start`; None if it is in another computation."""
    waiting = instructions[start].name
    for index in range(start + 1, len(instructions)):
        instruction = instructions[index]
        if instruction.opcode.endswith(("-done", "-update")) and waiting in instruction.operands:
            if instruction.opcode.endswith("-done"):
                return index
            waiting = instruction.name
    return None


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of an array type, or of each array of a tuple type."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(type_)]


def array_bytes(type_: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type."""
    return sum(ITEMSIZE[dtype] * math.prod(dims) for dtype, dims in arrays(type_))


def elements(type_: str) -> list[str]:
    """Element types of a tuple type, split at the commas outside of brackets."""
    depth, parts = 0, [""]
    for char in type_[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def read(hlo: str) -> HloProgram:
    """Parses HLO text."""
    found: dict[str, list[Instruction]] = {}
    entry = ""
    current: list[Instruction] = []
    for line in hlo.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.-]+)[ .]*\(", line)):
            current = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (start := line.find(" = ")) > 0:
            type_, rest = _split_type(line[start + 3 :])
            name = line[:start].split()[-1].removeprefix("%")
            current.append(Instruction(name, type_, rest.partition("(")[0].strip(), line))
        elif current and line.strip() not in ("", "}"):  # metadata of a TPU kernel has lines of its own
            current[-1] = dataclasses.replace(current[-1], line=f"{current[-1].line} {line}")
    return HloProgram(hlo.partition("\n")[0], found, entry)


def _split_type(text: str) -> tuple[str, str]:
    """Splits an instruction after its result type, which for a tuple ends at the closing parenthesis."""
    if not text.startswith("("):
        type_, _, rest = text.partition(" ")
        return type_, rest
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""
