"""Seconds of a step's matmuls with weights by chip, precision and shape; the step itself says which ones it
has.

A matmul takes the longer of its FLOPs at the chip's rate and of its bytes at the memory's bandwidth. The rate
is the maker's peak times the fraction that matmuls of a whole step reach, times two factors of the shape:
dimensions are padded to the tiles of the matrix unit, and a short reduction spends part of its time on
filling and emptying them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import get_args

from jtrain.errors import UserError
from jtrain.plan.job import Job
from jtrain.step.description.traced_parts import Gradient
from jtrain_kernels.device import DeviceSpec


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """Fractions of a chip's peaks that the matmuls of a step reach at the clock under load, for large shapes.

    bf16, fp8: fraction of the peak of that precision; fp8 includes the casts and scales of the operands.
    tile: side of the matrix unit, to which dimensions are padded.
    """

    bf16: float
    fp8: float
    tile: int


RATES: Mapping[str, MatmulRate] = {
    "v4": MatmulRate(0.84, 0.84, 128),
    "v5e": MatmulRate(0.84, 0.84, 128),
    "v5p": MatmulRate(0.84, 0.84, 128),
    "v6e": MatmulRate(0.59, 0.59, 256),
    "tpu7x": MatmulRate(0.71, 0.64, 256),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), MatmulRate(0.66, 0.47, 128)),
    **dict.fromkeys(("mi300x", "mi325x", "mi355x"), MatmulRate(0.5, 0.4, 128)),
    "trn2": MatmulRate(0.6, 0.5, 128),
}
"""Chip -> rate. Fitted to the published steps of `bench.plan_seconds`: v5p rows 6 and 7, v6e row 5, tpu7x
rows 1 and 2, b200 row 11. v4 and v5e have the matrix units of a v5p and are assumed to do as well, other
Blackwell GPUs as a B200. AMD's and trn2 are assumptions: on an MI300X users report two thirds of the fraction
of an H100."""

NVIDIA = MatmulRate(0.71, 0.47, 128)
"""Rate of every other GPU, fitted to rows 8, 9, 10, 12 and 13. One H100 reached 0.81 in bfloat16 and 0.58 in
8 bits with casts in matmuls of 8192^3 that lasted milliseconds (2026-11-22, JAX 0.11.2): a step draws the
full power, which lowers the clock."""

FILL = 128
"""Length of a reduction whose time goes to filling and emptying the matrix unit's pipeline and writing the
result."""


def rate_of(device: DeviceSpec) -> MatmulRate:
    """The rate of a chip, by its name; that of NVIDIA's GPUs for a chip that is not in the table."""
    return RATES.get(device.name, NVIDIA)


@dataclasses.dataclass(frozen=True)
class StepMatmuls:
    """Seconds of a step's matmuls on one device.

    layers: of the layers' weights, by pass; experts: the part of them that is of the experts of a mixture.
    unembedding_s: logits and their gradients.
    """

    layers: Mapping[Gradient, float]
    experts: Mapping[Gradient, float]
    unembedding_s: float

    @property
    def experts_s(self) -> float:
        """Seconds of all products of experts."""
        return sum(self.experts.values())

    @property
    def all_s(self) -> float:
        """Seconds of all matmuls."""
        return sum(self.layers.values()) + self.unembedding_s

    def scaled(self, factor: float) -> "StepMatmuls":
        """All seconds times a factor."""

        def scale(seconds: Mapping[Gradient, float]) -> dict[Gradient, float]:
            return {when: factor * took_s for when, took_s in seconds.items()}

        return StepMatmuls(scale(self.layers), scale(self.experts), factor * self.unembedding_s)


def matmuls(job: Job, *, memory: float, fraction: float | None = None) -> StepMatmuls:
    """Seconds of all matmuls with weights of one step on one device.

    Args:
      memory: fraction of the memory's bandwidth.
      fraction: fraction of the peak that replaces the chip's rate and the factors of the shape.

    Raises:
      UserError: the device's peak for the compute dtype is not published, or matmuls are in 8 bits and it has
        none.
    """
    assert job.machine is not None, "seconds are those of a machine"
    device = job.machine.device
    assert device.hbm_bytes_per_s is not None
    rate, bytes_per_s = rate_of(device), device.hbm_bytes_per_s * memory
    rates = {False: bf16_peak(job) * (fraction or rate.bf16)}
    if job.layout.precision.matmul_dtype != "compute":
        # Only with 8-bit matmuls: the peak of a device without them is an error that others must not see.
        rates[True] = _fp8_peak(job) * (fraction or rate.fp8)
    # Every pass has an entry, so that readers need not ask which ones a step has.
    layers: dict[Gradient, float] = dict.fromkeys(get_args(Gradient.__value__), 0.0)
    experts, unembedding_s = dict(layers), 0.0
    for product in job.step.products:
        shape = product.rows, product.depth, product.columns, product.groups
        # An assumed fraction stands for the whole efficiency, so the factors of the shape are left out.
        tile = 0 if fraction else rate.tile
        took_s = product.count * _product_s(
            rates[product.in_8_bits], bytes_per_s, tile, product.when == "by_weight", *shape
        )
        if product.part == "loss":
            unembedding_s += took_s
            continue
        layers[product.when] += took_s
        if product.groups:
            experts[product.when] += took_s
    return StepMatmuls(layers, experts, unembedding_s)


@functools.lru_cache(maxsize=100_000)
def _product_s(
    flops_per_s: float,
    bytes_per_s: float,
    tile: int,
    by_weight: bool,
    rows: int,
    depth: int,
    columns: int,
    groups: int,
) -> float:
    """Seconds of a `StepProduct`; cached, because a search asks for few shapes.

    Args:
      flops_per_s: rate of large shapes.
      tile: 0 leaves the factors of the shape out.
    """
    flops, weights = 2.0 * rows * depth * columns, max(1, groups)
    # Two bytes each: operands and result in bfloat16, and every expert's matrix is read.
    moved_s = 2.0 * (rows * (depth + columns) + weights * depth * columns) / bytes_per_s
    if not tile:
        return max(flops / flops_per_s, moved_s)
    # The gradient of a weight sums over rows, of each expert its own; the other passes sum over the depth.
    reduced = max(rows / weights if by_weight else depth, tile)
    # A reduction takes as long as one that is FILL longer and has no start and end.
    filling = (reduced + FILL) / reduced
    return max(flops * _padding(rows, depth, columns, groups, tile) * filling / flops_per_s, moved_s)


def _padding(rows: int, depth: int, columns: int, groups: int, tile: int) -> float:
    """Ratio of the padded to the useful FLOPs; the rows of each expert end in half a tile on average."""
    padded = math.prod(-(-size // tile) * tile / size for size in (depth, columns))
    return padded * ((rows + groups * tile / 2) / rows if groups > 1 else -(-rows // tile) * tile / rows)


def bf16_peak(job: Job) -> float:
    """Peak FLOP/s of a job's compute dtype.

    Raises:
      UserError: it is not published.
    """
    assert job.machine is not None
    device, dtype = job.machine.device, job.layout.precision.compute_dtype
    peak = device.peak_flops(dtype)
    if peak is None:
        raise UserError(
            f"precision.compute_dtype={dtype}: its peak on {device.name} is not published, so no step time "
            "can be predicted. Set precision.compute_dtype=bfloat16."
        )
    return peak


def _fp8_peak(job: Job) -> float:
    """Peak FLOP/s of matmuls in 8 bits.

    Raises:
      UserError: the device has none.
    """
    assert job.machine is not None
    device = job.machine.device
    if device.peak_fp8_flops is None:
        raise UserError(
            f"precision.matmul_dtype={job.layout.precision.matmul_dtype}: {device.name} has no 8-bit "
            "matmuls. Set precision.matmul_dtype=compute."
        )
    return device.peak_fp8_flops
