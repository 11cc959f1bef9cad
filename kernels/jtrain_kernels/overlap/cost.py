"""How long a collective and a matmul take one after the other, and overlapped: which of the two to take.

Overlapping splits one collective and one matmul into pieces; each piece costs a launch, and small matmuls run below the
speed of large ones. Below a size that loses: of 8 H100, M = N = 4096 and K = 8192 (34 GFLOP a GPU) was measured 93 %
slower by Triton-distributed (pull request 166), while 8192 x 4096 x 4096 a GPU gains 1.3 times (JAX's Pallas guide).
"""

import dataclasses

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.overlap.swizzle import Swizzle

_EFFICIENCY = 0.75
"""Of a large matmul."""

_ALONE_S = {"gpu": 20e-6, "tpu": 5e-6, "cpu": 0.0}
"""Of one collective, whatever its size: launch and synchronisation."""

_PIECE_S = {"gpu": 12e-6, "tpu": 1.5e-6, "cpu": 0.0}
"""Of one piece: a permute's launch and its signal; on a GPU a NCCL kernel, which also holds multiprocessors."""

_NOMINAL_FLOPS, _NOMINAL_BYTES_PER_S = 1e12, 1e10
"""Of a CPU, which has no published figures and no link: hiding always wins there, so what is asked for is tested."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One op on one device.

    rows: of the result, all ranks' together.
    contracted, columns: of this device's kernels: K and N, N summed over kernels.
    sent_bytes: of one row that travels.
    in_8_bits: what is multiplied.
    """

    ranks: int
    rows: int
    contracted: int
    columns: int
    sent_bytes: int
    in_8_bits: bool = False

    def flops(self) -> float:
        return 2.0 * self.rows * self.contracted * self.columns


def plain_s(device: DeviceSpec, work: Work) -> float:
    """First the one, then the other."""
    wire_s = work.rows * work.sent_bytes * (work.ranks - 1) / work.ranks / _link(device, work.ranks)
    return _matmul_s(device, work) + wire_s + _ALONE_S[device.platform]


def overlapped_s(device: DeviceSpec, work: Work, swizzle: Swizzle, parts: int) -> float:
    """Side by side: the longer of the two, and the one piece for which nothing is left to do."""
    directions = 2 if swizzle == "bidirectional" else 1
    pieces = work.ranks * directions * parts
    wire_s = work.rows * work.sent_bytes * (work.ranks - 1) / work.ranks / _link(device, work.ranks)
    if swizzle == "ring" and device.torus_dims is not None:
        wire_s *= 2  # half of the links
    launches_s = pieces * _PIECE_S[device.platform]
    matmul_s = _matmul_s(device, work)
    # Launches delay both; what cannot hide is the last piece's matmul, or of reductions its first.
    return max(matmul_s, wire_s) + launches_s + min(matmul_s, wire_s) / pieces


def smallest_gflop(device: DeviceSpec, work: Work, swizzle: Swizzle, parts: int) -> float:
    """GFLOP of a device from which overlapping wins, as rows are added; infinite if it never does."""
    rows = work.ranks
    while rows < 2**30:
        grown = dataclasses.replace(work, rows=rows)
        if overlapped_s(device, grown, swizzle, parts) < plain_s(device, grown):
            return grown.flops() / 1e9
        rows *= 2
    return float("inf")


def _matmul_s(device: DeviceSpec, work: Work) -> float:
    in_8_bits = device.peak_fp8_flops if work.in_8_bits else None
    peak = in_8_bits or device.peak_bf16_flops or _NOMINAL_FLOPS
    return work.flops() / (peak * _EFFICIENCY)


def _link(device: DeviceSpec, ranks: int) -> float:
    """Bytes per second of one device: all its links where a switch joins them, those of one dimension on a torus."""
    if device.link_bytes_per_s is None:
        return _NOMINAL_BYTES_PER_S
    if ranks > device.linked:
        return device.host.network_bytes_per_s or _NOMINAL_BYTES_PER_S
    return device.link_bytes_per_s / (device.torus_dims or 1)
