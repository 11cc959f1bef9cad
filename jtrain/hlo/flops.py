"""FLOPs and bytes of one execution of an HLO instruction, from the shapes in its text.

FLOPs are those of matrix products, 2 per multiply-add. Elementwise operations are left out: they are about a
thousandth of a model's, and vendors quote no peak for them.
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from jtrain.hlo.parser import HloProgram, Instruction, array_bytes, arrays, elements

_SLICES = ("dynamic-slice", "gather", "slice")


def flops(instruction: Instruction, program: HloProgram) -> int:
    """FLOPs of a matrix product, of all products in a fusion, or of a kernel's cost estimate; 0 if unknown.

    Args:
      instruction: not a loop or conditional; their bodies are executed, and counted, on their own.
    """
    if instruction.opcode.startswith(("fusion", "async")):
        return sum(flops(one, program) for one in program.inside(instruction))
    count = {"dot": _dot, "convolution": _convolution, "custom-call": _custom_call}.get(instruction.opcode)
    if count is None:
        return 0
    return count(instruction, [program.types.get(name, "") for name in instruction.operands])


def bytes_accessed(instruction: Instruction, program: HloProgram) -> int:
    """Bytes read and written: each operand once, or only its slices if only slices are used.

    For arrays that fit in a cache this is an upper bound on the traffic to main memory.
    """
    sizes = [array_bytes(program.types.get(name, "")) for name in instruction.operands]
    result = array_bytes(instruction.type)
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if instruction.opcode == "fusion":
        inside = program.inside(instruction)
        for index, of_operand in enumerate(_read_inside(inside)):
            if index < len(sizes) and of_operand is not None:
                sizes[index] = of_operand
        root = next((i for i in inside if i.is_root), None)
        while root is not None and root.opcode == "bitcast":
            root = next((i for i in inside if i.name == root.operands[0]), None)
        if root is not None and root.opcode == "dynamic-update-slice":
            result = array_bytes(program.types.get(root.operands[1], ""))
    return sum(sizes) + result


def _read_inside(inside: list[Instruction]) -> list[int | None]:
    """Bytes that a fusion reads of each of its parameters, also through bitcasts; None if it reads the whole
    array.
    """
    users: dict[str, list[Instruction]] = {}
    for instruction in inside:
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)

    def bytes_of(name: str) -> Iterator[int | None]:
        for user in users.get(name, []):
            first = user.operands[0] == name
            if user.opcode == "bitcast":
                yield from bytes_of(user.name)
            elif first and user.opcode in _SLICES:
                yield array_bytes(user.type)
            elif first and user.opcode == "dynamic-update-slice":
                yield 0  # updated in place: the bytes written count as the result
            else:
                yield None

    read: dict[int, int | None] = {}
    for parameter in inside:
        if parameter.opcode != "parameter":
            continue
        number = int(re.findall(r"parameter\((\d+)\)", parameter.line)[0])
        parts = list(bytes_of(parameter.name))
        whole = any(part is None for part in parts)
        read[number] = None if whole else sum(part or 0 for part in parts)
    return [read.get(index) for index in range(len(read))]


def _dims(type_: str) -> tuple[int, ...]:
    """Dimensions of an array type, or of a tuple's first array."""
    return next((dims for _, dims in arrays(type_)), ())


def _dot(instruction: Instruction, operands: list[str]) -> int:
    left = _dims(operands[0])
    over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)
    contracted = [left[int(n)] for n in over[1].split(",") if n] if over else []
    return 2 * math.prod(_dims(instruction.type)) * math.prod(contracted)


def _convolution(instruction: Instruction, operands: list[str]) -> int:
    """FLOPs of a convolution, including the matrix products that XLA:TPU writes as convolutions.

    Counts only window positions that meet the input: XLA:TPU makes batch dimensions spatial, and the window
    of a batched product slides over a padded, dilated input of which each position meets one element.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    if not labels:
        return 0
    left, right = map(_dims, operands[:2])
    result = _dims(instruction.type)
    sizes = {
        key: dict(zip(of, dims, strict=True))
        for key, of, dims in zip("lro", labels.groups(), (left, right, result), strict=True)
    }
    window = _window(instruction.line)
    met = 1
    for index, place in enumerate(sorted(key for key in sizes["o"] if key.isdigit())):
        stride, low, of_left, of_right = (
            window[name][index] if name in window else default for name, default in _DEFAULTS
        )
        at = (
            np.arange(sizes["o"][place])[:, None] * stride
            - low
            + np.arange(sizes["r"][place])[None, :] * of_right
        )
        reach = (sizes["l"][place] - 1) * of_left
        met *= int(((at >= 0) & (at <= reach) & (at % of_left == 0)).sum())
    return 2 * met * sizes["o"]["b"] * sizes["o"]["f"] * sizes["r"]["i"]


_DEFAULTS = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def _window(line: str) -> dict[str, list[int]]:
    """Window attributes per dimension: size, stride, pad (low side), lhs_dilate, rhs_dilate."""
    found = re.search(r"window=\{([^}]*)\}", line)
    parts = dict(part.split("=") for part in found[1].split()) if found else {}
    return {
        name: [int(n.split("_")[0]) for n in value.split("x")]
        for name, value in parts.items()
        if name != "rhs_reversal"
    }


def _custom_call(instruction: Instruction, operands: list[str]) -> int:
    """FLOPs of a cuBLAS product from its dimension numbers, or of another kernel from its cost estimate."""
    if re.search(r'custom_call_target="__cublas\$', instruction.line):
        over = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.line)
        left = _dims(operands[0])
        result = instruction.type
        result = elements(result)[0] if result.startswith("(") else result
        contracted = [left[int(n)] for n in re.findall(r"\d+", over[1])] if over else []
        return 2 * math.prod(_dims(result)) * math.prod(contracted) if contracted else 0
    given = re.search(r'"?cost_estimate"?\s*[:=]\s*\{[^}]*?"?flops"?\s*[:=]\s*"?(\d+)', instruction.line)
    return int(given[1]) if given else 0
