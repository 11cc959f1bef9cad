"""What one execution of an HLO instruction computes and moves, from the shapes in its text.

Counted as floating point operations are matrix products alone, 2 per multiplication and addition: the elementwise rest
is a thousandth of a model, and no peak is quoted for it.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from jtrain.program import Instruction, array_bytes, called, elements

type Computations = Mapping[str, list[Instruction]]

_SLICES = ("dynamic-slice", "gather", "slice")


def flops(instruction: Instruction, types: Mapping[str, str], computations: Computations) -> int:
    """Of a product, of all products in a fusion, or as a kernel says; 0 where nothing says it.

    Args:
      instruction: neither a loop nor a conditional: what those hold is executed, and counted, by itself.
      types: of every instruction of the program, by name.
      computations: as `jtrain.program.read` gives them.
    """
    if instruction.opcode == "dot":
        return _dot(instruction, types)
    if instruction.opcode == "convolution":
        return _convolution(instruction, types)
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, types)
    if instruction.opcode.startswith(("fusion", "async")):
        inside = [i for name in called(instruction.line) for i in computations[name]]
        return sum(flops(i, types, computations) for i in inside)
    return 0


def moved_bytes(instruction: Instruction, types: Mapping[str, str], computations: Computations) -> int:
    """Bytes read and written, each operand once, slices of it only where only slices are used.

    Under the caches' size it is an upper bound on what main memory sees.
    """
    operands = instruction.operands
    sizes = [array_bytes(types.get(name, "")) for name in operands]
    result = array_bytes(instruction.type)
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if instruction.opcode == "fusion":
        inside = [i for name in called(instruction.line) for i in computations[name]]
        for index, of_operand in enumerate(_read_inside(inside, types)):
            if index < len(sizes) and of_operand is not None:
                sizes[index] = of_operand
        root = next((i for i in inside if i.line.lstrip().startswith("ROOT ")), None)
        if root is not None and root.opcode == "dynamic-update-slice":
            result = array_bytes(types.get(root.operands[1], ""))
    return sum(sizes) + result


def _read_inside(inside: list[Instruction], types: Mapping[str, str]) -> list[int | None]:
    """Of each parameter of a fusion, the bytes that it reads; None where that is all of them."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inside:
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    read: dict[int, int | None] = {}
    for parameter in inside:
        if parameter.opcode != "parameter":
            continue
        number = int(re.findall(r"parameter\((\d+)\)", parameter.line)[0])
        parts: list[int | None] = []
        for user in users.get(parameter.name, []):
            first = user.operands[0] == parameter.name
            if first and user.opcode in _SLICES:
                parts.append(array_bytes(user.type))
            elif first and user.opcode == "dynamic-update-slice":
                parts.append(0)  # in place: what it writes is the result
            else:
                parts.append(None)
        whole = any(part is None for part in parts)
        read[number] = None if whole else sum(part or 0 for part in parts)
    return [read.get(index) for index in range(len(read))]


def _dims(type_: str) -> list[int]:
    """Of an array, or of a tuple's first one."""
    found = re.search(r"[a-z]\w*\[([\d,]*)\]", type_)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _dot(instruction: Instruction, types: Mapping[str, str]) -> int:
    left = _dims(types.get(instruction.operands[0], ""))
    over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)
    contracted = [left[int(n)] for n in over[1].split(",") if n] if over else []
    return 2 * math.prod(_dims(instruction.type)) * math.prod(contracted)


def _convolution(instruction: Instruction, types: Mapping[str, str]) -> int:
    """Also the products that XLA:TPU writes as convolutions, batch dimensions among the window's.

    Only places where the window meets the input count: a batched product slides over a padded, dilated input of which
    each place meets one.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    if not labels:
        return 0
    left, right = (_dims(types.get(name, "")) for name in instruction.operands[:2])
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
        at = np.arange(sizes["o"][place])[:, None] * stride - low + np.arange(sizes["r"][place])[None, :] * of_right
        reach = (sizes["l"][place] - 1) * of_left
        met *= int(((at >= 0) & (at <= reach) & (at % of_left == 0)).sum())
    return 2 * met * sizes["o"]["b"] * sizes["o"]["f"] * sizes["r"]["i"]


_DEFAULTS = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def _window(line: str) -> dict[str, list[int]]:
    """size, stride, pad (the low side), lhs_dilate, rhs_dilate, per dimension."""
    found = re.search(r"window=\{([^}]*)\}", line)
    parts = dict(part.split("=") for part in found[1].split()) if found else {}
    return {
        name: [int(n.split("_")[0]) for n in value.split("x")]
        for name, value in parts.items()
        if name != "rhs_reversal"
    }


def _custom_call(instruction: Instruction, types: Mapping[str, str]) -> int:
    """cuBLAS products by their dimension numbers; a kernel by the estimate that it was given."""
    if re.search(r'custom_call_target="__cublas\$', instruction.line):
        over = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.line)
        left = _dims(types.get(instruction.operands[0], ""))
        result = instruction.type
        result = elements(result)[0] if result.startswith("(") else result
        contracted = [left[int(n)] for n in re.findall(r"\d+", over[1])] if over else []
        return 2 * math.prod(_dims(result)) * math.prod(contracted) if contracted else 0
    given = re.search(r'"?cost_estimate"?\s*[:=]\s*\{[^}]*?"?flops"?\s*[:=]\s*"?(\d+)', instruction.line)
    return int(given[1]) if given else 0
