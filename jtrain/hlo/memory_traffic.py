"""Memory traffic of a compiled program: bytes of the device's memory that each instruction reads and
writes.
"""

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
    """Every instruction of an optimized program that accesses memory; each distinct operand counts whole,
    once.

    Exact for programs of whole-array fusions, slices and copies. An asynchronous instruction reads at its
    start and writes at its done.

    Raises:
      UserError: the program has a loop, conditional or call.
    """
    program = read(hlo)
    instructions = program.computations[program.entry]
    size = {i.name: array_bytes(_ON_CHIP.sub("", i.type)) for i in instructions}
    found: list[Pass] = []
    for i in instructions:
        if i.holds_others:
            raise UserError(f"{i.name} is a {i.opcode}: bytes are counted only in programs without one.")
        if i.opcode in NO_ACCESS or 'custom_call_target="ConcatBitcast"' in i.line:
            continue
        operands = {name for name in i.operands if name in size}
        read_bytes = 0 if i.opcode.endswith("-done") else sum(size[name] for name in operands)
        if read_bytes and i.opcode in ("slice", "slice-start"):  # they read what they give
            read_bytes = array_bytes(i.type if i.opcode == "slice" else elements(i.type)[1])
        written_bytes = 0 if i.opcode.endswith("-start") else size[i.name]
        found.append(Pass(i.name, read_bytes, written_bytes))
    return tuple(found)


def written_arrays(hlo: str) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of every array that a program writes to memory, in its loops too.

    What exists within a fusion only is not written; every other instruction's results are.
    """
    computations = read(hlo).computations
    fused = {
        name for body in computations.values() for i in body if i.opcode == "fusion" for name in i.called
    }
    written = (i for name, body in computations.items() if name not in fused for i in body)
    return frozenset(array for i in written for array in arrays(i.type))
