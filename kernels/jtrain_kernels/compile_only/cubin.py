"""Resources of compiled NVIDIA kernels, read from the machine code: registers, stack, shared memory.

A program compiled for NVIDIA contains its kernels as cubins (ELF files), XLA's fusions as well as Mosaic's
kernels, so no tool or environment variable is needed. The attributes are those of `.nv.info` that `cuobjdump
-elf` prints.
"""

import dataclasses
import struct
from collections.abc import Iterator

from jtrain_kernels.compile_only.riegeli import records

_MAGIC, _MACHINE = b"\x7fELF\x02\x01", 190  # 64 bits, little-endian; EM_CUDA
_SVAL, _FRAME_SIZE, _REGISTERS = 4, 0x11, 0x2F
"""Format code of an attribute with a sized value, and the codes of two attributes (EIATTR_*)."""


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """Resources of one compiled kernel.

    registers: registers per thread.
    stack_bytes: local memory per thread, which holds spilled registers; 0 means no spill.
    static_shared_bytes: static shared memory per block; dynamic shared memory is set at launch and not
      included.
    """

    name: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int


@dataclasses.dataclass(frozen=True)
class _Section:
    name: str
    body: bytes
    size: int
    info: int


def kernels(program: bytes) -> tuple[KernelResources, ...]:
    """All kernels of the cubins in `program`, a serialised executable, in order.

    Mosaic's cubins are inside an object file for the host and are found. jax-triton's are compressed in its
    custom call and are not found.
    """
    kernels_found: list[KernelResources] = []
    for record in records(program):
        start = record.find(_MAGIC)
        while start >= 0:
            # The machine is at byte 18 of an ELF header; the host's object files share the magic number.
            if struct.unpack_from("<H", record, start + 18)[0] == _MACHINE:
                kernels_found += _kernels(record[start:])
            # Searched on inside of the record: Mosaic's cubin lies within the ELF file of the host.
            start = record.find(_MAGIC, start + 1)
    return tuple(kernels_found)


def _kernels(elf: bytes) -> Iterator[KernelResources]:
    sections = {s.name: s for s in _sections(elf)}
    names = _symbols(sections)
    registers, stack = {}, {}
    for attribute, symbol, value in _attributes(sections[".nv.info"].body):
        # .nv.info of the whole cubin: both attributes name their kernel by its index in the symbol table.
        {_REGISTERS: registers, _FRAME_SIZE: stack}[attribute][names[symbol]] = value
    for section in sections:
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            shared = sections.get(f".nv.shared.{name}")
            yield KernelResources(
                name, registers.get(name, 0), stack.get(name, 0), shared.size if shared else 0
            )


def _sections(elf: bytes) -> Iterator[_Section]:
    # ELF64: the section table's offset at byte 40; entry size, count and index of the names from byte 58.
    table = struct.unpack_from("<Q", elf, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQII", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, _, info in headers:
        end = elf.index(b"\0", names + name)
        no_bits = kind == 8  # shared memory: a size, no content
        yield _Section(
            elf[names + name : end].decode(), b"" if no_bits else elf[offset : offset + size], size, info
        )


def _symbols(sections: dict[str, _Section]) -> list[str]:
    """Names in the symbol table, by index."""
    table, text = sections[".symtab"].body, sections[".strtab"].body
    # An ELF64 symbol has 24 bytes and begins with the offset of its name.
    starts = [struct.unpack_from("<I", table, offset)[0] for offset in range(0, len(table), 24)]
    return [text[start : text.index(b"\0", start)].decode() for start in starts]


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of the frame sizes and register counts."""
    offset = 0
    # Records are a header of 4 bytes; those of another form have their value in the header's size field.
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SVAL:
            if attribute in (_FRAME_SIZE, _REGISTERS):
                yield (attribute, *struct.unpack_from("<II", info, offset))
            offset += size
