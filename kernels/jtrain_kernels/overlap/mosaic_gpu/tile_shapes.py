"""Tile sizes of a Hopper matmul, and checks that they fit; without Pallas, which is slow to import."""

import dataclasses
import itertools

from jtrain_kernels.device import DeviceSpec

DTYPES = ("bfloat16", "float16")
"""Dtypes of the operands of wgmma here; sums are float32."""

SHARED_BYTES = 232_448
"""Shared memory that one block may use on Hopper and Blackwell data-centre chips (opt-in limit)."""

WARPGROUPS = 2
"""Warpgroups of a block that multiply; a third one loads."""

THREADS = WARPGROUPS + 1
"""Warpgroups of a block, which JAX calls its threads."""

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers per thread of the loading and the multiplying warpgroups: 128 * (40 + 2 * 232) <= 65536."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tiling of a matmul.

    tile_m, tile_n: tile of the result that one block computes; each of two warpgroups has half the columns.
    tile_k: depth of one stage.
    stages: pairs of operand tiles in flight.
    out_rows, out_columns: piece of the result that a warpgroup writes at once, from one of two buffers.
    group: tiles of one column computed before the next column, so that operands stay in L2.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    out_rows: int = 64
    out_columns: int = 64
    group: int = 8

    @property
    def warpgroup_n(self) -> int:
        return self.tile_n // WARPGROUPS

    def shared_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Shared memory of one block in bytes, without barriers (at most 1 KiB)."""
        # Both operands' tiles, once per stage: 4 * (128 + 256) * 64 * 2 bytes = 196,608 by default.
        operands = self.stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize
        # Two output buffers for each of two warpgroups: 4 * 64 * 64 * 2 bytes = 32,768; 229,376 in all.
        return operands + 2 * WARPGROUPS * self.out_rows * self.out_columns * out_itemsize

    def pieces(self) -> list[tuple[int, int]]:
        """First row and column, within a warpgroup's half of a tile, of each piece that is written."""
        return list(
            itertools.product(
                range(0, self.tile_m, self.out_rows), range(0, self.warpgroup_n, self.out_columns)
            )
        )


def unsupported(device: DeviceSpec) -> str | None:
    """Reason why this chip cannot run the kernels, one sentence; None if it can."""
    # Blackwell (10.x) has tcgen05 in place of wgmma; the instruction is in compute capability 9.0 only.
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return f"{device.name} has no wgmma: this kernel is for Hopper (compute capability 9.0)"
    return None


def does_not_fit(m: int, n: int, k: int, dtype: str, config: TileConfig) -> str | None:
    """Reason why tiles do not fit a matmul, one sentence; None if they fit.

    Args:
      m, n, k: rows and columns of the result and contracted size, of one device.
      dtype: dtype of both operands.
      config: the tiles; each size must be a multiple of its tile size.
    """
    if dtype not in DTYPES:
        return f"operands are {dtype}; wgmma here takes {' or '.join(DTYPES)}"
    for name, size, tile in (("m", m, config.tile_m), ("n", n, config.tile_n), ("k", k, config.tile_k)):
        if size % tile or not size:
            return f"{name}={size} is no multiple of tile_{name}={tile}"
    # Barriers take at most 1 KiB; itemsize 2, as DTYPES are both 16 bits.
    if (need := config.shared_bytes(2, 2) + 1024) > SHARED_BYTES:
        return f"tiles of {config} need {need} bytes of shared memory, a block has {SHARED_BYTES}"
    return None


# Larger tiles read each operand less often: 128 x 256 needs (128 + 256) / (128 * 256) loads per product.
CANDIDATES = tuple(TileConfig(tile_m, tile_n) for tile_m in (128, 64) for tile_n in (256, 128))
"""Tilings, from the fastest to the one that fits most shapes."""
