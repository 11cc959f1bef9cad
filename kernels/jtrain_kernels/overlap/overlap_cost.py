"""Cost model that decides whether a collective and a matmul are overlapped or run one after the other.

Overlapping splits one collective and one matmul into pieces; each piece costs a launch, and small matmuls run
below the speed of large ones, so below a certain size overlapping loses. On 8 H100, Triton-distributed (pull
request 166) measured it 93 % slower at M = N = 4096 and K = 8192 (34 GFLOP per GPU), while 8192 x 4096 x 4096
per GPU gains a factor of 1.3 (JAX's Pallas guide).

Example: the down projection of Llama 3 8B on 8 H100 (8192 rows, K = 1792, N = 4096 in bfloat16; the
tests of the choice have it): the matmul takes 162 us at 75 % of peak, the wire 130 us at 450 GB/s. One after
the other: 162 + 130 + 20 = 313 us. Permutes around a ring in 8 pieces: 162 + 8 * 12 + 130 / 8 = 274 us. One
fused kernel: 162 + 12 + 130 / 8 = 190 us.
"""

import dataclasses

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.overlap.swizzle import Swizzle

_EFFICIENCY = 0.75
"""Fraction of peak FLOP/s that a large matmul reaches."""

_TILE_KERNEL = 1.0
"""Speed of the fused kernels' matmul over a library's: 791 against 786 TFLOP/s at 8192^3 on one H100
(2026-11-22, `bench gpu_matmul --only matmul`)."""

_ALONE_S = {"gpu": 20e-6, "tpu": 5e-6, "cpu": 0.0}
"""Launch and synchronisation time of one collective, independent of its size."""

_PIECE_S = {"gpu": 12e-6, "tpu": 1.5e-6, "cpu": 0.0}
"""Launch and signal time of the permute of one piece; on a GPU a NCCL kernel, which also occupies
multiprocessors."""

_NOMINAL_FLOPS, _NOMINAL_BYTES_PER_S = 1e12, 1e10
"""Stand-ins for a CPU, which has no published figures and no link: overlapping always wins there, so tests
run it."""


@dataclasses.dataclass(frozen=True)
class OpWork:
    """Sizes of one op on one device.

    rows: rows of the result, summed over ranks.
    contracted, columns: K and N of this device's kernels, N summed over the kernels.
    sent_bytes: bytes of one row that is sent.
    in_8_bits: True if the matmul is in FP8.
    """

    ranks: int
    rows: int
    contracted: int
    columns: int
    sent_bytes: int
    in_8_bits: bool = False

    def flops(self) -> float:
        return 2.0 * self.rows * self.contracted * self.columns


def plain_s(device: DeviceSpec, work: OpWork) -> float:
    """Seconds of the collective and the matmul, one after the other."""
    # Every rank sends all but its own share, (ranks - 1) / ranks of the rows.
    wire_s = work.rows * work.sent_bytes * (work.ranks - 1) / work.ranks / _link(device, work.ranks)
    return _matmul_s(device, work) + wire_s + _ALONE_S[device.platform]


def overlapped_s(device: DeviceSpec, work: OpWork, swizzle: Swizzle, parts: int) -> float:
    """Seconds of both overlapped: the longer of the two, plus the one piece that overlaps with nothing."""
    directions = 2 if swizzle == "bidirectional" else 1
    pieces = work.ranks * directions * parts
    wire_s = work.rows * work.sent_bytes * (work.ranks - 1) / work.ranks / _link(device, work.ranks)
    if swizzle == "ring" and device.torus_dims is not None:
        wire_s *= 2  # one direction uses half of the links
    launches_s = pieces * _PIECE_S[device.platform]
    matmul_s = _matmul_s(device, work)
    # Launches delay both. The last piece's matmul (for reductions the first) has nothing to overlap with.
    return max(matmul_s, wire_s) + launches_s + min(matmul_s, wire_s) / pieces


def fused_s(device: DeviceSpec, work: OpWork, *, sending_cores: int) -> float:
    """Seconds of a kernel that sends from within: one launch; the first or last rank's piece has no overlap.

    Collectives elsewhere in the program, such as those of ZeRO, cannot overlap with such kernels; that is not
    counted.

    Args:
      sending_cores: cores that send and do not multiply.
    """
    # num_cores is None for a CPU, where no cores are set aside.
    cores = device.num_cores or 1
    wire_s = work.rows * work.sent_bytes * (work.ranks - 1) / work.ranks / _link(device, work.ranks)
    # The cores that send do not multiply, so the matmul takes longer by their share.
    matmul_s = _matmul_s(device, work) * cores / max(1, cores - sending_cores)
    # The factor holds for the matmul alone; the wire is as fast under both kernels.
    matmul_s /= _TILE_KERNEL
    return max(matmul_s, wire_s) + min(matmul_s, wire_s) / work.ranks + _PIECE_S[device.platform]


def _matmul_s(device: DeviceSpec, work: OpWork) -> float:
    # A chip without FP8 units computes FP8 values in bfloat16, at bfloat16's speed.
    in_8_bits = device.peak_fp8_flops if work.in_8_bits else None
    peak = in_8_bits or device.peak_bf16_flops or _NOMINAL_FLOPS
    return work.flops() / (peak * _EFFICIENCY)


def _link(device: DeviceSpec, ranks: int) -> float:
    """Bytes per second of one device: all its links behind a switch, one dimension's links on a torus."""
    if device.link_bytes_per_s is None:
        return _NOMINAL_BYTES_PER_S
    # Beyond the links, the rank's share of the network adapters is the bottleneck.
    if ranks > device.linked:
        return device.host.network_bytes_per_s or _NOMINAL_BYTES_PER_S
    # An op's axis uses one dimension of a torus; a switch gives it all links.
    return device.link_bytes_per_s / (device.torus_dims or 1)
