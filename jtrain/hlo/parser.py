"""Parser of optimized HLO text: computations, how often each instruction runs, and what overlaps it.

The text is in schedule order. A pair of start and done (`all-gather-start`, `copy-start`, `async-start`, the
`call-start` of a TPU's sparse cores) is asynchronous, and hidden if a matmul runs in between.

Example: a loop of six trips on 8 devices, mesh replica=2, data=4, that gathers a bf16 weight of 8 x 8:

    %body (p: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
      %w = bf16[2,8] get-tuple-element(%p), index=1
      %ag = (bf16[2,8], bf16[8,8]) all-gather-start(%w), replica_groups=[2,4]<=[8], dimensions={0}
      %dot = f32[16,16] dot(%x, %y), lhs_contracting_dims={1}
      %full = bf16[8,8] all-gather-done(%ag)
    }
    ENTRY %main (a: bf16[2,8]) -> bf16[2,8] {
      %loop = (s32[], bf16[2,8]) while(%t), ..., backend_config={"known_trip_count":{"n":"6"}}
    }

`visits` yields loop (once), w, ag and dot (six times each). ag is in flight from index 1 to index 3 of its
computation, and hidden, because dot is at index 2. Its groups [[0, 1, 2, 3], [4, 5, 6, 7]] differ along
`data`; the gathered array has 8 * 8 * 2 = 128 bytes, of which a device sends 3/4 = 96 on the ring, and in all
six trips 576.
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

# Custom calls that multiply matrices: cuBLAS and cuDNN by target, Pallas kernels by their compiler.
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
        # Attributes after the closing parenthesis name computations with % too, so the text ends at "), ".
        _, _, arguments = self.line.partition(f" {self.opcode}(")
        return re.findall(r"%([\w.-]+)", arguments.partition("), ")[0])

    @property
    def collective(self) -> str:
        """Kind of the collective that it is or starts, one of `KINDS`; "" for all else, done included."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def op_name(self) -> str:
        """Path of named scopes in its metadata; "" if it has none."""
        match = re.search(r'op_name="([^"]*)"', self.line)
        return match[1] if match else ""

    @property
    def stack_frame(self) -> int:
        """Number of its innermost stack frame in its metadata; 0 if it has none."""
        match = re.search(r"stack_frame_id=(\d+)", self.line)
        return int(match[1]) if match else 0

    @property
    def is_synchronous(self) -> bool:
        """True if XLA:GPU marked this pair of start and done as one that it will not overlap."""
        return '"is_sync":true' in self.line

    @property
    def is_root(self) -> bool:
        """True if its result is that of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def is_control_flow(self) -> bool:
        """True for a loop, a conditional or a call."""
        return self.opcode in ("while", "conditional", "call")

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls, without the condition of a loop."""
        # m[2] is a single name, m[3] a list in braces (branches of a conditional).
        matches = _CALLED.finditer(self.line)
        return [name for m in matches for name in ([m[2]] if m[2] else re.findall(r"%([\w.-]+)", m[3]))]

    @property
    def called_with_condition(self) -> list[str]:
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
        return {
            instruction.name: instruction.type for body in self.computations.values() for instruction in body
        }

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Instructions of the computations that an instruction calls."""
        return [nested for name in instruction.called for nested in self.computations[name]]

    @functools.cached_property
    def _matmul_by_computation(self) -> dict[str, bool]:
        return {}  # a computation may be called from many places

    def has_matmul(self, instruction: Instruction) -> bool:
        """True if an instruction is or contains a matmul, or calls a kernel."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return _KERNEL.search(instruction.line) is not None
        for name in instruction.called:
            if name not in self._matmul_by_computation:
                self._matmul_by_computation[name] = any(map(self.has_matmul, self.computations[name]))
            if self._matmul_by_computation[name]:
                return True
        return False

    def trip_count(self, line: str) -> int | None:
        """Trip count of a while loop: the compiler's annotation, else its condition's bound (from 0 by 1)."""
        # Written as JSON, or as `known_trip_count={n=4}`.
        if annotation := re.search(r'"?known_trip_count"?[=:]\{"?n"?[=:]"?(\d+)', line):
            return int(annotation[1])
        condition = re.search(r"condition=%([\w.-]+)", line)
        if not condition:
            return None
        # A bound counts only if it is the one integer constant of a condition that compares with "less than".
        bounds: list[int] = []
        pending = [condition[1]]
        compared = False
        while pending:
            for instruction in self.computations[pending.pop()]:
                if constant := re.search(r"= [su]32\[\]\S* constant\((\d+)\)", instruction.line):
                    bounds.append(int(constant[1]))
                # The comparison may be in a fusion that the condition calls.
                compared |= "direction=LT" in instruction.line
                pending += instruction.called
        return bounds[0] if len(bounds) == 1 and compared else None


@dataclasses.dataclass(frozen=True)
class Visit:
    """One instruction at one call site, with its number of executions.

    num_runs: executions per run of the program; None if a loop around it has no known trip count.
    is_async, is_hidden: True if it is part of a pair of start and done, and if a matmul runs in between.
    computation, body: name and instructions of its computation; it is in flight from index `start` to
      `stop`.
    types: result type of every instruction of the program.
    """

    computation: str
    instruction: Instruction
    num_runs: int | None
    is_async: bool
    is_hidden: bool
    body: list[Instruction]
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

    def visit(
        name: str, num_runs: int | None, is_parent_async: bool, is_parent_hidden: bool
    ) -> Iterator[Visit]:
        body = program.computations[name]
        for index, instruction in enumerate(body):
            opcode = instruction.opcode
            # Their start stands for the whole pair.
            if opcode.endswith(("-done", "-update")):
                continue
            is_async, is_hidden, start, stop = is_parent_async, is_parent_hidden, index, index
            if opcode.endswith("-start") and not instruction.is_synchronous:
                is_async, start, stop = True, begin_of(body, index), done_of(body, index)
                # A start whose done is in another computation is in flight until this one ends.
                stop = stop or len(body)
                in_flight = body[start + 1 : stop]
                # A start or done of another pair takes no time itself, so it hides nothing.
                is_hidden |= any(
                    program.has_matmul(overlapped)
                    for overlapped in in_flight
                    if not overlapped.opcode.endswith(("-start", "-update", "-done"))
                )
            yield Visit(name, instruction, num_runs, is_async, is_hidden, body, start, stop, program.types)
            inner_runs = num_runs
            if opcode == "while":
                # Trip counts of nested loops multiply; one unknown count makes all inside it unknown.
                trip_count = program.trip_count(instruction.line)
                inner_runs = None if num_runs is None or trip_count is None else num_runs * trip_count
            elif opcode == "conditional" and branch_times is not None:
                # An absolute count per run of the program, not per visit: it replaces the loops' product.
                branch_runs = branch_times(instruction.op_name)
                inner_runs = num_runs if branch_runs is None else branch_runs
            # The computation of a reduction (to_apply) is visited too; all callers ignore its arithmetic.
            for computation in instruction.called:
                yield from visit(computation, inner_runs, is_async, is_hidden)

    yield from visit(program.entry, 1, False, False)


def begin_of(instructions: list[Instruction], start: int) -> int:
    """Index at which the start at `start` has its data: its first update's, if it has no operands.

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
    flight_name = instructions[start].name
    for index in range(start + 1, len(instructions)):
        instruction = instructions[index]
        # start -> update -> done is a chain: each names the one before as its operand.
        if instruction.opcode.endswith(("-done", "-update")) and flight_name in instruction.operands:
            if instruction.opcode.endswith("-done"):
                return index
            flight_name = instruction.name
    return None


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of an array type, or of each array of a tuple type."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(type_)]


def array_bytes(type_: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type."""
    return sum(ITEMSIZE[dtype] * math.prod(dims) for dtype, dims in arrays(type_))


def elements(type_: str) -> list[str]:
    """Element types of a tuple type, split at the commas outside of brackets."""
    depth, types = 0, [""]
    for character in type_[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        # Commas also stand within dimensions, layouts and nested tuples: (f32[2,4]{1,0}, s32[]).
        if character == "," and depth == 0:
            types.append("")
        else:
            types[-1] += character
    return types


def read(hlo: str) -> HloProgram:
    """Parses HLO text."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current: list[Instruction] = []
    for line in hlo.splitlines():
        # A computation's head names its parameters and result; only the entry's begins with ENTRY.
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.-]+)[ .]*\(", line)):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (start := line.find(" = ")) > 0:
            # `%name = type opcode(operands), attributes`; a ROOT stands before the name of the result.
            type_, tail = _split_type(line[start + 3 :])
            name = line[:start].split()[-1].removeprefix("%")
            current.append(Instruction(name, type_, tail.partition("(")[0].strip(), line))
        elif current and line.strip() not in ("", "}"):  # metadata of a TPU kernel has lines of its own
            current[-1] = dataclasses.replace(current[-1], line=f"{current[-1].line} {line}")
    return HloProgram(hlo.partition("\n")[0], computations, entry)


def _split_type(text: str) -> tuple[str, str]:
    """Splits an instruction after its result type, which for a tuple ends at the closing parenthesis."""
    if not text.startswith("("):
        type_, _, tail = text.partition(" ")
        return type_, tail
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            # Types hold spaces and nested parentheses, so neither a space nor the first ")" ends one.
            return text[: index + 1], text[index + 1 :]
    return text, ""
