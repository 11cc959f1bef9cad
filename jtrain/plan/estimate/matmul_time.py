"""Seconds of a step's matmuls with weights, op by op: by chip, precision and shape.

A matmul takes the longer of its FLOPs at the chip's rate and of its bytes at the memory's bandwidth. The rate is the
maker's peak times the fraction that matmuls of a whole step reach, times two factors of the shape: dimensions are
padded to the tiles of the matrix unit, and a short reduction spends part of its time on filling and emptying them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jtrain.errors import UserError
from jtrain.layout.dims import kv_heads_in_use
from jtrain.plan.estimate.pipeline import layers_here
from jtrain.plan.job import Job
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
"""Chip -> rate. Fitted to the published steps of `bench.plan_seconds`: v5p rows 6 and 7, v6e row 5, tpu7x rows 1
and 2, b200 row 11. v4 and v5e have the matrix units of a v5p and are assumed to do as well, other Blackwell GPUs as a
B200. AMD's and trn2 are assumptions: on an MI300X users report two thirds of the fraction of an H100."""

NVIDIA = MatmulRate(0.71, 0.47, 128)
"""Rate of every other GPU, fitted to rows 8, 9, 10, 12 and 13. One H100 reached 0.81 in bfloat16 and 0.58 in 8 bits
with casts in matmuls of 8192^3 that lasted milliseconds (2026-11-22, JAX 0.11.2): a step draws the full power, which
lowers the clock."""

FILL = 128
"""Length of a reduction whose time goes to filling and emptying the matrix unit's pipeline and writing the result."""


def rate_of(device: DeviceSpec) -> MatmulRate:
    """The rate of a chip, by its name; that of NVIDIA's GPUs for a chip that is not in the table."""
    return RATES.get(device.name, NVIDIA)


@dataclasses.dataclass(frozen=True)
class MatmulPasses:
    """Seconds of the product of the forward pass, and of the gradients of its input and of its weights."""

    forward_s: float = 0.0
    by_input_s: float = 0.0
    by_weight_s: float = 0.0

    @property
    def all_s(self) -> float:
        """Seconds of all three."""
        return self.forward_s + self.by_input_s + self.by_weight_s

    def __add__(self, other: "MatmulPasses") -> "MatmulPasses":
        return MatmulPasses(
            self.forward_s + other.forward_s, self.by_input_s + other.by_input_s, self.by_weight_s + other.by_weight_s
        )

    def times(self, count: float | int) -> "MatmulPasses":
        """Seconds of `count` of them."""
        return MatmulPasses(self.forward_s * count, self.by_input_s * count, self.by_weight_s * count)


@dataclasses.dataclass(frozen=True)
class StepMatmuls:
    """Seconds of a step's matmuls on one device.

    layers: the layers' weights.
    experts, experts_again_s: the parts of `layers` and `recomputed_s` that are of the experts of a mixture.
    recomputed_s: products that the backward pass repeats.
    unembedding: logits and their gradients.
    """

    layers: MatmulPasses
    experts: MatmulPasses
    experts_again_s: float
    recomputed_s: float
    unembedding: MatmulPasses

    @property
    def experts_s(self) -> float:
        """Seconds of all products of experts."""
        return self.experts.all_s + self.experts_again_s

    @property
    def all_s(self) -> float:
        """Seconds of all matmuls."""
        return self.layers.all_s + self.recomputed_s + self.unembedding.all_s

    def scaled(self, factor: float) -> "StepMatmuls":
        """All seconds times a factor."""
        return StepMatmuls(
            self.layers.times(factor),
            self.experts.times(factor),
            self.experts_again_s * factor,
            self.recomputed_s * factor,
            self.unembedding.times(factor),
        )


def matmuls(job: Job, *, memory: float, fraction: float | None = None) -> StepMatmuls:
    """Seconds of all matmuls with weights of one step on one device.

    Args:
      memory: fraction of the memory's bandwidth.
      fraction: fraction of the peak that replaces the chip's rate and the factors of the shape.

    Raises:
      UserError: the device's peak for the compute dtype is not published, or matmuls are in 8 bits and it has none.
    """
    assert job.machine is not None, "seconds are those of a machine"
    model, layout, device = job.model, job.layout, job.machine.device
    mesh, tensor = layout.mesh, layout.mesh.tensor
    rows = job.rows() * job.seq_len // mesh.context  # per device, or per group along `tensor`
    assert device.hbm_bytes_per_s is not None
    rate, bytes_per_s = rate_of(device), device.hbm_bytes_per_s * memory
    peak, eight = bf16_peak(job), layout.precision.matmul_dtype != "compute"
    layers_peak = _fp8_peak(job) if eight else peak

    def one(
        depth: int, columns: int, *, of_rows: int = rows, experts: int = 1, in_8_bits: bool = eight
    ) -> MatmulPasses:
        at = layers_peak if in_8_bits else peak
        share = fraction or (rate.fp8 if in_8_bits else rate.bf16)
        tile = 0 if fraction else rate.tile
        return _passes(at * share, bytes_per_s, tile, of_rows, depth, columns, experts)

    width, heads = model.d_model, model.num_heads * model.head_dim // tensor
    keys = kv_heads_in_use(model.num_kv_heads, tensor) * model.head_dim // tensor
    moe = model.moe
    experts = MatmulPasses()
    named = {
        "attention_q": one(width, heads),
        "attention_k": one(width, keys),
        "attention_v": one(width, keys),
        "attention_out": one(heads, width),
    }
    if moe is None:
        up, down, router = one(width, model.d_ff // tensor), one(model.d_ff // tensor, width), MatmulPasses()
    else:
        # Each device has the rows of `expert` devices for its own experts, if all are chosen equally often.
        of_rows, num, each = rows * moe.top_k, max(1, moe.num_experts // mesh.expert), model.d_ff // tensor
        up, down = (one(*shape, of_rows=of_rows, experts=num) for shape in ((width, each), (each, width)))
        experts = up + up + down
        if moe.shared_experts:
            wide = moe.shared_experts * model.d_ff // tensor
            up, down = up + one(width, wide), down + one(wide, width)
        router = one(width, moe.num_experts, in_8_bits=False)
    named |= {"mlp_gate": up, "mlp_up": up}
    repeated = job.repeated()
    times = layers_here(layout, model.num_layers) * layout.spec.microbatches
    layer = functools.reduce(MatmulPasses.__add__, named.values(), down + router)
    again = {name: named[name].forward_s for name in named if name in repeated}
    recomputed_s = sum(again.values(), 0.0)
    experts_again_s = 0.0 if moe is None else again.get("mlp_gate", 0.0) + again.get("mlp_up", 0.0)
    unembedding = one(width, model.vocab_size // tensor // mesh.stage, in_8_bits=False)
    return StepMatmuls(
        layer.times(times),
        experts.times(times),
        experts_again_s * times,
        recomputed_s * times,
        unembedding.times(layout.spec.microbatches),
    )


@functools.lru_cache(maxsize=100_000)
def _passes(
    flops_per_s: float, bytes_per_s: float, tile: int, rows: int, depth: int, columns: int, experts: int
) -> MatmulPasses:
    """Seconds of [rows, depth] x [depth, columns] and of both gradients; cached, because a search asks for few shapes.

    Args:
      flops_per_s: rate of large shapes.
      tile: 0 leaves the factors of the shape out.
    """
    flops = 2.0 * rows * depth * columns
    moved_s = 2.0 * (rows * (depth + columns) + experts * depth * columns) / bytes_per_s
    padding = _padding(rows, depth, columns, experts, tile) if tile else 1.0

    def seconds(reduced: float | int) -> float:
        reduced = max(reduced, tile)
        filling = (reduced + FILL) / reduced if tile else 1.0
        return max(flops * padding * filling / flops_per_s, moved_s)

    return MatmulPasses(seconds(depth), seconds(columns), seconds(rows / experts))


def _padding(rows: int, depth: int, columns: int, experts: int, tile: int) -> float:
    """Ratio of the padded to the useful FLOPs; the rows of each expert end in half a tile on average."""
    padded = math.prod(-(-size // tile) * tile / size for size in (depth, columns))
    return padded * ((rows + experts * tile / 2) / rows if experts > 1 else -(-rows // tile) * tile / rows)


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
            f"precision.compute_dtype={dtype}: its peak on {device.name} is not published, so no step time can be "
            "predicted. Set precision.compute_dtype=bfloat16."
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
            f"precision.matmul_dtype={job.layout.precision.matmul_dtype}: {device.name} has no 8-bit matmuls. Set "
            "precision.matmul_dtype=compute."
        )
    return device.peak_fp8_flops
