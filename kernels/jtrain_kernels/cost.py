"""Cost model of the ops: predicted seconds of each implementation, from the device table alone.

A part of an op takes the longer of its FLOPs at the chip's matmul rate and its bytes at the memory's
bandwidth, and each kernel takes a launch. A cost is that of the op and its gradients, the work that a train
step has. Costs only rank implementations.

Every fraction of a peak below says whether it was measured, where and by whom; all others are assumptions.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals

MATMUL, MEMORY = 0.65, 0.8
"""Fractions of the published FLOP/s and bytes/s that XLA's matmuls and passes over memory reach, with which
implementations are ranked; the planner has fractions by chip and shape (`jtrain.plan.estimate.matmul_time`).
One H100 reached 0.81 in a matmul of 8192^3 with random bfloat16 inputs (2026-11-22, JAX 0.11.2), and 0.86 in
a copy of 0.5 GiB."""

LAUNCH_S = {"gpu": 4e-6, "tpu": 1e-6, "cpu": 0.0}
"""Seconds of a launch by platform, an assumption: on a GPU a kernel launch, on a TPU the start of a
fusion."""


@dataclasses.dataclass(frozen=True)
class OpPart:
    """Part of the work of an op; parts run one after the other.

    flops: of matmuls; moved: bytes that must be read and written; kernels: kernels that are launched.
    matmul: fraction of the peak that the matmuls reach.
    """

    flops: int | float = 0.0
    moved: int | float = 0.0
    kernels: int = 1
    matmul: float = MATMUL


def matmul_rate(device: DeviceSpec, dtype: str) -> float | None:
    """Peak dense FLOP/s with operands of `dtype`; None if it is unknown.

    16-bit formats share one peak. float32 is half of it on GPUs (TF32) and a sixth on TPUs (six products of
    bfloat16 parts): good enough to rank implementations, and not published, so `DeviceSpec.peak_flops` does
    not return it.
    """
    if dtype.startswith("float8"):
        return device.peak_fp8_flops
    if device.peak_bf16_flops is None:
        return None
    return device.peak_bf16_flops / ((2 if device.platform == "gpu" else 6) if dtype == "float32" else 1)


def seconds(device: DeviceSpec, dtype: str, *parts: OpPart) -> float | None:
    """Predicted seconds of the parts together; None if the device has no published peaks."""
    rate = matmul_rate(device, dtype)
    if rate is None or device.hbm_bytes_per_s is None:
        return None
    memory = device.hbm_bytes_per_s * MEMORY
    return sum(
        # Roofline: the slower of arithmetic and memory hides the other; launches hide behind neither.
        max(part.flops / (rate * part.matmul), part.moved / memory) + part.kernels * LAUNCH_S[device.platform]
        for part in parts
    )


def array(avals: Avals, name: str) -> jax.ShapeDtypeStruct:
    """Shape of the argument `name`, which is an array."""
    aval = avals[name]
    assert isinstance(aval, jax.ShapeDtypeStruct)
    return aval


def size_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array."""
    return x.size * x.dtype.itemsize


# Attention

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 17, 21
"""Bytes of memory traffic per attention score in plain XLA: those that, at `MEMORY`, give the times of one
H100 (2026-11-22, JAX 0.11.2): 17.1 ms forward and 23.1 ms backward for 2 x 8192 positions and 32/8 heads of
128, 39.3 ms together for 8 x 4096 and heads of 64. By counting, the forward pass has 16: float32 scores are
written, read by the maximum and by the exponential, which writes bf16 for the matmul to read."""

BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward pass by those of its forward pass: five matmuls for two."""

ATTENTION: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "tokamax": {64: (0.39, 0.27), 128: (0.62, 0.415), 256: (0.59, 0.14)},
    "cudnn": {64: (0.24, 0.22), 128: (0.32, 0.22), 256: (0.41, 0.28)},
    "splash": {64: (0.30, 0.25), 128: (0.47, 0.375), 256: (0.55, 0.45)},
}
"""Implementation -> head size -> fractions of the peak, forward and backward, of causal attention in long
rows.

The figures of an H100 stand for every NVIDIA GPU. Heads of 64 and 128 of tokamax and cuDNN were measured on
one H100 (2026-11-22, JAX 0.11.2, tokamax 0.0.17, cuDNN 9.19), 32/8 heads, 8 x 4096 and 2 x 8192 positions.

tokamax: 382 and 257 TFLOP/s, 614 to 621 and 411; the 257 are with ranges that have an end, without which
  heads of 128
were 5 % faster. Heads of 256: medians that its wheel ships, measured by its authors on an H100 at 580 and 143
TFLOP/s.

cuDNN: 229 and 217, 309 and 214 TFLOP/s with the additive mask that it needs for segments; the fractions are
  without the
time to write it. Heads of 256 are an assumption: its authors' 601 TFLOP/s forward, as much slower backward as
in Dao-AILab/flash-attention, pull request 1893, and the mask's 1.7 and 7.3 ms with heads of 128 on top.

splash: assumptions, but for heads of 128: row 3 of `bench.plan_seconds`, two thirds of which are attention,
takes as long as published with these fractions of a tpu7x.
"""


def visible(avals: Avals) -> float:
    """Fraction of the L * M scores that the causal mask and the window leave; documents are unknown."""
    (L, M), window = (array(avals, name).shape[1] for name in ("q_BLNH", "k_BMKH")), avals["window"]
    if not avals["causal"]:
        return 1.0
    if not isinstance(window, int):
        # Row i of a causal mask sees i + 1 of L keys, on average (L + 1) / 2.
        return 0.5 * (L + 1) / L
    # All rows see `window` keys but the first ones: row i < window sees i + 1.
    return (window * L - window * (window - 1) / 2) / (L * M)


def attention_passes_s(device: DeviceSpec, avals: Avals, name: str) -> tuple[float, float] | None:
    """Seconds of the forward and of the backward pass by `name`; None without published peaks."""
    parts = _plain_passes(avals) if name == "xla" else _fused_passes(avals, name)
    dtype = str(array(avals, "q_BLNH").dtype)
    forward, backward = (seconds(device, dtype, *of_pass) for of_pass in parts)
    return None if forward is None or backward is None else (forward, backward)


def attention_s(device: DeviceSpec, avals: Avals, name: str) -> float | None:
    """Seconds of both passes by the implementation `name`."""
    passes_s = attention_passes_s(device, avals, name)
    return None if passes_s is None else sum(passes_s)


def _nearest_head(name: str, head_dim: int) -> int:
    """Head size with fractions that stands for `head_dim`: the next larger one, else the largest."""
    # The first field prefers heads that are large enough, the second the nearest of them.
    return min(ATTENTION[name], key=lambda head: (head < head_dim, abs(head - head_dim)))


def padded_head(name: str, head_dim: int) -> int:
    """Head size that a fused kernel computes; all but cuDNN pad heads with zeros."""
    return head_dim if name == "cudnn" else max(head_dim, _nearest_head(name, head_dim))


def _fused_passes(avals: Avals, name: str) -> tuple[list[OpPart], list[OpPart]]:
    """Parts of both passes of a fused kernel, which reads and writes each array once in each pass.

    cuDNN has a mask in addition: [B, 1, L, M] in the queries' dtype, written in both passes. Every head reads
    it, which is in the fractions that were measured; heads of less than 64 read as much, so they take as long
    as those of 64.
    """
    q, k, v = array(avals, "q_BLNH"), array(avals, "k_BMKH"), array(avals, "v_BMKP")
    (B, L, N, H), M, P = q.shape, k.shape[1], v.shape[3]
    scores = B * N * L * M * visible(avals)
    forward, backward = ATTENTION[name][_nearest_head(name, max(H, P))]
    # q and the result have as many heads, k and v fewer; lse is float32.
    arrays, lse = size_bytes(q) * (H + P) // H + size_bytes(k) + size_bytes(v), 4 * B * N * L
    # Smaller heads are padded up, and the arithmetic of the padding counts.
    H, P = (max(size, _nearest_head(name, size)) for size in (H, P))
    flops = 2 * scores * (H + P)
    mask = [OpPart(moved=B * L * M * q.dtype.itemsize)] if name == "cudnn" else []
    return (
        [OpPart(flops, arrays + lse, matmul=forward), *mask],
        # The backward pass reads all four and dy, and writes dq, dk, dv: twice the forward's arrays.
        [OpPart(flops * BACKWARD_FLOPS, 2 * arrays + lse, kernels=2, matmul=backward), *mask],
    )


def _plain_passes(avals: Avals) -> tuple[list[OpPart], list[OpPart]]:
    """Parts of both passes in plain XLA: scores go through memory; two and five matmuls per query chunk."""
    q, v, chunk = array(avals, "q_BLNH"), array(avals, "v_BMKP"), avals["chunk"]
    assert isinstance(chunk, int)
    (B, L, N, H), M = q.shape, v.shape[1]
    # A chunk's scores are a rectangle, of which the diagonal hides half a chunk on average.
    scores = B * N * L * M * min(1.0, visible(avals) + chunk / (2 * M))
    # A short row still has one chunk.
    chunks = max(1, math.ceil(L / chunk))

    def of_pass(flops: float, score_bytes: int, matmuls: int) -> list[OpPart]:
        return [
            OpPart(flops, kernels=matmuls * chunks),
            OpPart(moved=scores * score_bytes, kernels=3 * chunks),
        ]

    flops = 2 * scores * (H + v.shape[3])
    return of_pass(flops, SCORE_BYTES_FORWARD, 2), of_pass(flops * BACKWARD_FLOPS, SCORE_BYTES_BACKWARD, 5)


# Elementwise ops: each pass reads or writes the large array once.


def rms_norm_s(device: DeviceSpec, avals: Avals, *, residual: bool, one_pass: bool) -> float | None:
    """Seconds of a norm; XLA's backward is three kernels of 6 passes (7 with a residual), a fused one 3 (4).

    The counts of passes are those of the programs compiled for an H200 and a v5p.
    """
    x = array(avals, "x")
    # With a residual, its gradient is one more array.
    backward = (3 if one_pass else 6) + residual
    parts = (
        OpPart(moved=2 * size_bytes(x)),
        OpPart(moved=backward * size_bytes(x), kernels=2 if one_pass else 3),
    )
    return seconds(device, str(x.dtype), *parts)


def rope_s(device: DeviceSpec, avals: Avals, *, one_pass: bool) -> float | None:
    """Seconds of both rotations; XLA:TPU moves x eight times for each (compiled for a v5p), others twice."""
    x, cos = array(avals, "x_BLNH"), array(avals, "cos_BLR")
    passes = 2 if one_pass or device.platform != "tpu" else 8
    # The same rotation runs in the backward pass, by the negative angle.
    return seconds(device, str(x.dtype), *[OpPart(moved=passes * size_bytes(x) + 2 * size_bytes(cos))] * 2)


def swiglu_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds of three passes over memory forward and five backward."""
    gate = array(avals, "gate")
    return seconds(
        device, str(gate.dtype), OpPart(moved=3 * size_bytes(gate)), OpPart(moved=5 * size_bytes(gate))
    )


def grouped_swiglu_s(device: DeviceSpec, avals: Avals, *, skips: bool) -> float | None:
    """Seconds of `swiglu_s` over all rows, or over those expected to be in use.

    XLA writes the transposed product, which the gradient of the next matmul's kernel reads, in the same
    backward pass. After a kernel that skips rows, this is a copy of all rows.
    """
    gate, expected = array(avals, "gate"), avals["expected_rows"]
    assert isinstance(expected, int)
    gate_bytes = size_bytes(gate)
    # The transposed product has as many bytes as the gate; a copy of it reads and writes them.
    used_bytes, transposed_bytes = (
        (gate_bytes * expected / gate.shape[0], 2 * gate_bytes) if skips else (gate_bytes, gate_bytes)
    )
    forward, backward = (
        OpPart(moved=3 * used_bytes),
        OpPart(moved=5 * used_bytes + transposed_bytes, kernels=2 if skips else 1),
    )
    return seconds(device, str(gate.dtype), forward, backward)


def embedding_lookup_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds to gather rows, and to add their gradients up in a float32 table that is zeroed and cast."""
    table, token = array(avals, "table_VD"), array(avals, "token_BL")
    rows = token.size * table.shape[1]
    # Each token adds its row in float32 (read and written, 8 bytes); the table is zeroed, read and cast once.
    backward = rows * (table.dtype.itemsize + 8) + table.size * (4 + 4 + table.dtype.itemsize)
    forward = OpPart(moved=2 * rows * table.dtype.itemsize)
    return seconds(device, str(table.dtype), forward, OpPart(moved=backward, kernels=3))


# Matmuls


def linear_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds of the product and of both gradients."""
    x, kernel, num_in = array(avals, "x"), array(avals, "kernel"), avals["num_in"]
    assert isinstance(num_in, int)
    rows = math.prod(x.shape[: x.ndim - num_in])
    y = rows * math.prod(kernel.shape[num_in:])
    product = OpPart(2 * rows * kernel.size, size_bytes(x) + size_bytes(kernel) + y * x.dtype.itemsize)
    # The product and both gradients have the same FLOPs and touch the same three arrays.
    return seconds(device, str(x.dtype), product, product, product)


def grouped_matmul_s(
    device: DeviceSpec, avals: Avals, *, block_rows: int | None = None, step_s: float = 0.0
) -> float | None:
    """Seconds of the product and of both gradients, with all rows in groups.

    Args:
      block_rows: rows of a block where blocks run one after the other, each perhaps on some of the cores;
        None for one kernel over all rows.
      step_s: further seconds of each block.
    """
    x, kernel = array(avals, "x"), array(avals, "kernel")
    (groups, depth, columns), rows = kernel.shape, x.shape[0]
    itemsize = x.dtype.itemsize
    # Each row is read and written once; every group's kernel is read once.
    moved = (rows * (depth + columns) + kernel.size) * itemsize
    if block_rows is None:
        return seconds(device, str(x.dtype), *[OpPart(2 * rows * depth * columns, moved)] * 3)
    # Each group's last block is partly empty: on average half, at most one block per group.
    blocks = rows // block_rows + groups
    # A small block has fewer tiles of 128 x 128 than the chip has cores, and the others idle.
    busy = min(1.0, max(1, block_rows // 128 * columns // 128) / (device.num_cores or 1))
    product = OpPart(2 * block_rows * blocks * depth * columns, moved, kernels=0, matmul=MATMUL * busy)
    compute_s = seconds(device, str(x.dtype), product, product, product)
    return None if compute_s is None else compute_s + 3 * blocks * step_s


# Recurrences


def delta_rule_flops(avals: Avals) -> float:
    """Matmul FLOPs of the forward pass in chunks of C: per token and value head 2 C (2 P + H) for products
    with chunks of tokens and 2 / 3 C^2 for the inverse, 6 H P with the state, and 4 C H for the scores.

    Scores are those of key heads, or of value heads with a decay per channel, where the upper half is left
    out.
    """
    key, value, decay, chunk = (*(array(avals, n) for n in ("k_BLKH", "v_BLNP", "g_BLNE")), avals["chunk"])
    assert isinstance(chunk, int)
    (B, L, K, H), (N, P) = key.shape, value.shape[2:]
    scores = 4 * chunk * H * (K if decay.shape[3] == 1 else N / 2)
    return B * L * (N * (2 * chunk * (2 * P + H) + 2 / 3 * chunk**2 + 6 * H * P) + scores)


def delta_rule_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds of a forward pass, of the same again in the backward pass, and of gradients of twice its FLOPs.

    Matrices of C * C per head and chunk are written and read a few times in float32.
    """
    value, chunk = array(avals, "v_BLNP"), avals["chunk"]
    assert isinstance(chunk, int)
    inputs = sum(size_bytes(array(avals, name)) for name in ("q_BLKH", "k_BLKH", "g_BLNE"))
    moved = inputs + 6 * size_bytes(value) + 6 * 4 * chunk * value.size // value.shape[3]
    forward = OpPart(delta_rule_flops(avals), moved, kernels=4 * value.shape[1] // chunk)
    return seconds(device, str(value.dtype), *[forward] * 4)


def mamba2_flops(avals: Avals) -> float:
    """Matmul FLOPs of the forward pass in chunks of C: 2 C S per token and group for the scores; 2 C P and,
    with the state, 4 S P per token and head.
    """
    x, b, chunk = array(avals, "x_BLNP"), array(avals, "b_BLKS"), avals["chunk"]
    assert isinstance(chunk, int)
    (B, L, N, P), (K, S) = x.shape, b.shape[2:]
    return float(B * L * (2 * chunk * S * K + N * (2 * chunk * P + 4 * S * P)))


def mamba2_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds as `delta_rule_s` has them."""
    x, b, chunk = array(avals, "x_BLNP"), array(avals, "b_BLKS"), avals["chunk"]
    assert isinstance(chunk, int)
    moved = 4 * size_bytes(x) + 2 * size_bytes(b) + 4 * 4 * chunk * x.size // x.shape[3]
    forward = OpPart(mamba2_flops(avals), moved, kernels=2 * x.shape[1] // chunk)
    return seconds(device, str(x.dtype), *[forward] * 4)


def short_conv_s(device: DeviceSpec, avals: Avals) -> float | None:
    """Seconds of two passes over memory forward and three backward."""
    x = array(avals, "x_BLC")
    return seconds(
        device, str(x.dtype), OpPart(moved=2 * size_bytes(x)), OpPart(moved=3 * size_bytes(x), kernels=2)
    )
