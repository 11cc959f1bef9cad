"""Precision of a run: the number formats of parameters, activations, gradient sums and matmul operands.

Unlike the layout, the precision changes the losses, so resuming refuses a change unless `--allow-change
precision` is given.
"""

import dataclasses
from typing import Literal

import numpy as np

from jtrain.errors import UserError

type Dtype = Literal["float32", "bfloat16"]
"""Number format of parameters, computation and sums."""

type MatmulDtype = Literal["compute", "fp8_current", "fp8_delayed"]
"""Number format of the layers' matrix products; `compute` is `precision.compute_dtype`."""


@dataclasses.dataclass(frozen=True)
class PrecisionSpec:
    """Number formats of one run.

    param_dtype: format of parameters between steps.
    compute_dtype: format of matmuls and activations; softmax, norms and the loss are always float32.
    reduce_dtype: format in which gradients are summed over devices.
    grad_accum_dtype: format in which a device sums the gradients of microbatches. bfloat16 takes 2 bytes per
      parameter instead of 4, also with one microbatch; each addition is float32 and rounded stochastically,
      so that the sum is right on average.
    matmul_dtype: format of the operands of the layers' weight matmuls in training. `compute` is
      compute_dtype; `fp8_current` and `fp8_delayed` round them to 8-bit floats (e4m3, gradients e5m2), each
      tensor scaled by its own maximum or by that of earlier steps. Evaluation and exports use compute_dtype.
    """

    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    reduce_dtype: Dtype = "float32"
    grad_accum_dtype: Dtype = "float32"
    matmul_dtype: MatmulDtype = "compute"

    def __post_init__(self) -> None:
        if self.matmul_dtype not in ("compute", "fp8_current", "fp8_delayed"):
            raise UserError(
                f"precision.matmul_dtype={self.matmul_dtype!r} must be `compute`, `fp8_current` or "
                "`fp8_delayed`."
            )


BLOCK = 64
"""Numbers of a block of a frozen matrix that have one float32 scale."""

CODES_PER_BYTE = {"nf4": 2, "int8": 1}
"""Formats of blocks: codes in a byte."""


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    # numpy has no bfloat16 of its own; ml_dtypes would be imported for this one number.
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
