"""What a compiled program reads from memory and writes to it, instruction by instruction."""

import dataclasses

from jtrain.program import array_bytes, read

_NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
"""Opcodes that touch no memory."""

_IN_LOOPS = {"while", "conditional", "call"}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One instruction of the entry computation: its name, and bytes of its operands and results."""

    name: str
    read_bytes: int
    written_bytes: int


def passes(hlo: str) -> tuple[Pass, ...]:
    """Every instruction of an optimized program that touches memory, each operand counted whole, once per instruction.

    Exact for programs of whole-array fusions; what a loop does is not looked at.

    Raises:
      ValueError: the program has a loop.
    """
    computations, entry = read(hlo)
    instructions = computations[entry]
    size = {i.name: array_bytes(i.type) for i in instructions}
    found: list[Pass] = []
    for i in instructions:
        if i.opcode in _IN_LOOPS:
            raise ValueError(f"{i.name} is a {i.opcode}: bytes are counted only where nothing loops.")
        if i.opcode in _NOTHING or i.opcode.endswith("-done"):
            continue
        written = size[i.name] if not i.opcode.endswith("-start") else 0
        found.append(Pass(i.name, sum(size[name] for name in set(i.operands) if name in size), written))
    return tuple(found)
