"""Ops whose results each op of a compiled program reads, through tuples, loops, branches and calls.

Example: a loop that gathers the next layer's weight while it multiplies by this layer's. `%w` is element 1 of
the loop's state, which `%ag` of the trip before made, or `%first` before the loop:

    %body (p: (f32[8,8], f32[8,8])) -> (f32[8,8], f32[8,8]) {
      %x = f32[8,8] get-tuple-element(%p), index=0
      %w = f32[8,8] get-tuple-element(%p), index=1
      %dot = f32[8,8] dot(%x, %w)
      %ag = f32[8,8] all-gather(%shard)
      ROOT %next = (f32[8,8], f32[8,8]) tuple(%dot, %ag)
    }

so `dot` reads the results of `ag`, `first` and, as `%x`, of itself.
"""

import re
from collections.abc import Mapping

from jtrain.hlo.parser import HloProgram, Instruction

_PASSED_ON = ("bitcast", "opt-barrier", "get-tuple-element", "tuple", "parameter")
_MAKES_NOTHING = ("constant", "iota", "partition-id", "replica-id", "after-all")

type _Element = tuple[str, int | None]
"""An instruction, and which element of its tuple; None for all of it."""


def producers(program: HloProgram) -> dict[str, frozenset[str]]:
    """Names of the ops that make what each op reads; arguments and constants are made by none.

    Computations that a fusion or a reduction calls are part of their op and are not looked into.
    """
    return _Producers(program).by_name()


class _Producers:
    def __init__(self, program: HloProgram) -> None:
        self._program = program
        self._instructions: dict[str, Instruction] = {}
        self._computations: dict[str, str] = {}  # instruction -> the computation that it is in
        self._callers: dict[str, Instruction] = {}  # computation -> the loop, branch or call that runs it
        pending = [program.entry]
        while pending:
            computation = pending.pop()
            for instruction in program.computations[computation]:
                self._instructions[instruction.name] = instruction
                self._computations[instruction.name] = computation
                if instruction.is_control_flow:
                    for called in instruction.called_with_condition:
                        self._callers[called] = instruction
                        pending.append(called)
        self._operands: Mapping[str, list[str]] = {
            name: [operand for operand in instruction.operands if operand in self._instructions]
            for name, instruction in self._instructions.items()
        }

    def by_name(self) -> dict[str, frozenset[str]]:
        return {
            name: frozenset().union(*(self._makers((operand, None)) for operand in self._operands[name]))
            for name, instruction in self._instructions.items()
            if instruction.opcode not in (*_PASSED_ON, *_MAKES_NOTHING) and not instruction.is_control_flow
        }

    def _makers(self, element: _Element) -> set[str]:
        """Names of the ops that may have made an element."""
        makers: set[str] = set()
        seen: set[_Element] = set()
        pending = [element]
        while pending:
            element = pending.pop()
            # A loop's state comes back to itself.
            if element in seen:
                continue
            seen.add(element)
            name, index = element
            instruction, operands = self._instructions[name], self._operands[name]
            if instruction.opcode == "get-tuple-element":
                number = re.search(r"\bindex=(\d+)", instruction.line)
                pending += [(operand, int(number[1]) if number else None) for operand in operands]
            elif instruction.opcode == "tuple" and index is not None:
                pending.append((operands[index], None))
            elif instruction.opcode in ("tuple", "bitcast", "opt-barrier"):
                pending += [(operand, index) for operand in operands]
            elif instruction.opcode == "parameter":
                pending += self._passed_in(instruction, index)
            elif instruction.is_control_flow:
                # A loop of no trips passes its first state on.
                pending += [(operands[0], index)] if instruction.opcode == "while" else []
                pending += [(self._root(called), index) for called in instruction.called]
            elif instruction.opcode not in _MAKES_NOTHING:
                makers.add(name)
                # A trace may have no event of a done: what it waits for is its start.
                if instruction.opcode.endswith(("-done", "-update")):
                    pending += [(operand, None) for operand in operands]
        return makers

    def _passed_in(self, parameter: Instruction, index: int | None) -> list[_Element]:
        """Finds the elements that a parameter of a called computation stands for; none for an argument."""
        computation = self._computations[parameter.name]
        caller = self._callers.get(computation)
        if caller is None:
            return []
        operands = self._operands[caller.name]
        if caller.opcode == "while":
            # The state before the loop, or after the trip before.
            return [(operands[0], index), (self._root(caller.called[0]), index)]
        if caller.opcode == "conditional":
            # Operand 0 chooses the branch; each branch has one operand of its own.
            return [(operands[1 + caller.called.index(computation)], index)]
        number = re.search(r" parameter\((\d+)\)", parameter.line)
        return [(operands[int(number[1]) if number else 0], index)]

    def _root(self, computation: str) -> str:
        return next(i.name for i in self._program.computations[computation] if i.is_root)
