"""Memory traffic of a compiled program: bytes that each instruction reads and writes."""

import dataclasses
import re

from jtrain.errors import UserError
from jtrain.hlo.parser import array_bytes, arrays, elements, read

NO_ACCESS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
NO_ACCESS |= {"partition-id", "replica-id"}
"""Opcodes that do not access memory."""

_ON_CHIP = re.compile(r"[a-z]\w*\[[\d,]*\]\{[^{}]*T\([^{}]*S\(1\)[^{}]*\}")
"""Array that a TPU keeps in VMEM: it has tiles and is in memory space 1, which on GPUs is device memory."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Memory pass of one instruction of the entry computation: bytes of its operands and of its results."""

    name: str
    read_bytes: int
    written_bytes: int


def passes(hlo: str) -> tuple[Pass, ...]:
    """Instructions of an optimized program that access memory; each distinct operand counts whole, once.

    Exact for programs of whole-array fusions, slices and copies. An asynchronous instruction reads at its
    start and writes at its done.

    Raises:
      UserError: the program has a loop, conditional or call.
    """
    program = read(hlo)
    instructions = program.computations[program.entry]
    # An array in VMEM counts 0 bytes here, whoever reads or writes it.
    bytes_by_name = {
        instruction.name: array_bytes(_ON_CHIP.sub("", instruction.type)) for instruction in instructions
    }
    memory_passes: list[Pass] = []
    for instruction in instructions:
        if instruction.is_control_flow:
            raise UserError(
                f"{instruction.name} is a {instruction.opcode}: bytes are counted only in programs "
                "without one."
            )
        # ConcatBitcast is a TPU's name for arrays that already lie side by side: nothing moves.
        if instruction.opcode in NO_ACCESS or 'custom_call_target="ConcatBitcast"' in instruction.line:
            continue
        # A set: an operand that is named twice is read once.
        operands = {name for name in instruction.operands if name in bytes_by_name}
        # A pair of start and done is one pass: reads count at the start, writes at the done.
        read_bytes = (
            0 if instruction.opcode.endswith("-done") else sum(bytes_by_name[name] for name in operands)
        )
        if read_bytes and instruction.opcode in ("slice", "slice-start"):  # they read what they give
            read_bytes = array_bytes(
                instruction.type if instruction.opcode == "slice" else elements(instruction.type)[1]
            )
        written_bytes = 0 if instruction.opcode.endswith("-start") else bytes_by_name[instruction.name]
        memory_passes.append(Pass(instruction.name, read_bytes, written_bytes))
    return tuple(memory_passes)


def written_arrays(hlo: str) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of every array that a program writes to memory, in its loops too.

    What exists within a fusion only is not written; every other instruction's results are.
    """
    computations = read(hlo).computations
    fused = {
        name
        for body in computations.values()
        for instruction in body
        if instruction.opcode == "fusion"
        for name in instruction.called
    }
    writers = (
        instruction for name, body in computations.items() if name not in fused for instruction in body
    )
    return frozenset(array for instruction in writers for array in arrays(instruction.type))
