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
    # An async wrapper and a fusion hold the product in the computation that they call, not on their line.
    if instruction.opcode.startswith(("fusion", "async")):
        return sum(flops(nested, program) for nested in program.inside(instruction))
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
    # A slice reads as many bytes as it gives; its operand may be the whole parameter stack.
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        # XLA updates in place: the update is read and written, the array around it is not touched.
        return 2 * sizes[1]
    if instruction.opcode == "fusion":
        body = program.inside(instruction)
        # Operand k of a fusion is parameter k of its computation.
        for number, read_bytes in enumerate(_read_inside(body)):
            if number < len(sizes) and read_bytes is not None:
                sizes[number] = read_bytes
        # A bitcast changes the type only, so the instruction that writes is behind it.
        root = next((nested for nested in body if nested.is_root), None)
        while root is not None and root.opcode == "bitcast":
            root = next((nested for nested in body if nested.name == root.operands[0]), None)
        if root is not None and root.opcode == "dynamic-update-slice":
            # The result's type is the whole updated array, but only the update is written.
            result = array_bytes(program.types.get(root.operands[1], ""))
    return sum(sizes) + result


def _read_inside(body: list[Instruction]) -> list[int | None]:
    """Bytes that a fusion reads of each parameter, also through bitcasts; None for the whole array."""
    users: dict[str, list[Instruction]] = {}
    for instruction in body:
        # An instruction may name an operand twice, as in multiply(x, x); it reads it once.
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)

    def user_bytes(name: str) -> Iterator[int | None]:
        for user in users.get(name, []):
            # Operands after the first are indices or the update, which are read whole.
            is_first_operand = user.operands[0] == name
            if user.opcode == "bitcast":
                yield from user_bytes(user.name)
            elif is_first_operand and user.opcode in _SLICES:
                yield array_bytes(user.type)
            elif is_first_operand and user.opcode == "dynamic-update-slice":
                yield 0  # updated in place: the bytes written count as the result
            else:
                yield None

    bytes_by_number: dict[int, int | None] = {}
    for parameter in body:
        if parameter.opcode != "parameter":
            continue
        # Parameters may stand in any order in the text; the number says which operand each is.
        number = int(re.findall(r"parameter\((\d+)\)", parameter.line)[0])
        reads = list(user_bytes(parameter.name))
        is_read_whole = any(part is None for part in reads)
        bytes_by_number[number] = None if is_read_whole else sum(part or 0 for part in reads)
    return [bytes_by_number.get(index) for index in range(len(bytes_by_number))]


def _dims(type_: str) -> tuple[int, ...]:
    """Dimensions of an array type, or of a tuple's first array."""
    return next((dims for _, dims in arrays(type_)), ())


def _dot(instruction: Instruction, operands: list[str]) -> int:
    left_dims = _dims(operands[0])
    attribute = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)
    contracted = [left_dims[int(n)] for n in attribute[1].split(",") if n] if attribute else []
    # Every element of the result is a sum over the contracted dimensions; batch dimensions are in the result.
    return 2 * math.prod(_dims(instruction.type)) * math.prod(contracted)


def _convolution(instruction: Instruction, operands: list[str]) -> int:
    """FLOPs of a convolution, including the matrix products that XLA:TPU writes as convolutions.

    Counts only window positions that meet the input: XLA:TPU makes batch dimensions spatial, and the window
    of a batched product slides over a padded, dilated input of which each position meets one element.
    """
    # `bf01_01io->bf01`: which letter or digit each dimension of left, right and result stands for.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    if not labels:
        return 0
    left_dims, right_dims = map(_dims, operands[:2])
    result_dims = _dims(instruction.type)
    sizes = {
        array_key: dict(zip(letters, dims, strict=True))
        for array_key, letters, dims in zip(
            "lro", labels.groups(), (left_dims, right_dims, result_dims), strict=True
        )
    }
    window = _window(instruction.line)
    # Spatial dimensions are independent, so the pairs of window and input positions multiply.
    num_met = 1
    for index, spatial_label in enumerate(sorted(label for label in sizes["o"] if label.isdigit())):
        stride, padding, left_dilation, right_dilation = (
            window[name][index] if name in window else default for name, default in _DEFAULTS
        )
        # Row: position in the result; column: position in the window; entry: position in the dilated input.
        input_positions = (
            np.arange(sizes["o"][spatial_label])[:, None] * stride
            - padding
            + np.arange(sizes["r"][spatial_label])[None, :] * right_dilation
        )
        last_position = (sizes["l"][spatial_label] - 1) * left_dilation
        # Positions in the padding, or between the elements of a dilated input, multiply by zero: no FLOPs.
        num_met *= int(
            (
                (input_positions >= 0)
                & (input_positions <= last_position)
                & (input_positions % left_dilation == 0)
            ).sum()
        )
    # "i" of the right array is the number of input features that one group of features sums over.
    return 2 * num_met * sizes["o"]["b"] * sizes["o"]["f"] * sizes["r"]["i"]


_DEFAULTS = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def _window(line: str) -> dict[str, list[int]]:
    """Window attributes per dimension: size, stride, pad (low side), lhs_dilate, rhs_dilate."""
    attribute = re.search(r"window=\{([^}]*)\}", line)
    sizes_by_name = dict(part.split("=") for part in attribute[1].split()) if attribute else {}
    return {
        # `pad=1_2x0_0`: low and high side of each dimension; only the low side shifts positions.
        name: [int(n.split("_")[0]) for n in value.split("x")]
        for name, value in sizes_by_name.items()
        if name != "rhs_reversal"
    }


def _custom_call(instruction: Instruction, operands: list[str]) -> int:
    """FLOPs of a cuBLAS product from its dimension numbers, or of another kernel from its cost estimate."""
    if re.search(r'custom_call_target="__cublas\$', instruction.line):
        attribute = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.line)
        left_dims = _dims(operands[0])
        result_type = instruction.type
        # cuBLAS calls return (result, workspace); the workspace has no FLOPs.
        result_type = elements(result_type)[0] if result_type.startswith("(") else result_type
        contracted = [left_dims[int(n)] for n in re.findall(r"\d+", attribute[1])] if attribute else []
        return 2 * math.prod(_dims(result_type)) * math.prod(contracted) if contracted else 0
    # Pallas writes its `cost_estimate=` into the call; quotes and signs differ between forms of the text.
    estimate = re.search(r'"?cost_estimate"?\s*[:=]\s*\{[^}]*?"?flops"?\s*[:=]\s*"?(\d+)', instruction.line)
    return int(estimate[1]) if estimate else 0
