"""Constants of NCCL's tuning model: NCCL 2.31 (1fc949c5), `src/tuning/`, `graph/search.cc`, `topo.h`.

For GPUs before Blackwell, 2.28.3 has the same constants but one: a hop of NVLSTree between hosts took 14 us
there. Latencies are in microseconds, bandwidths in GB/s (1e9 bytes). Protocols stand in the order of
`PROTOCOLS`.
"""

from typing import Literal

type Algorithm = Literal["Tree", "Ring", "NVLS", "NVLSTree", "PAT"]
"""Algorithm of a collective, by NCCL's name."""

type Protocol = Literal["LL", "LL128", "Simple"]
"""Protocol of a collective's messages, by NCCL's name."""

NCCL_VERSION = "2.31"
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
SIMPLE = PROTOCOLS.index("Simple")

BASE_US: dict[Algorithm, tuple[float, float, float]] = {
    "Tree": (6.8, 14.0, 8.4),
    "Ring": (6.6, 14.0, 8.4),
    "NVLS": (0.0, 0.0, 0.0),
    "NVLSTree": (0.0, 0.0, 0.0),
    "PAT": (8.0, 8.0, 8.0),
}
# NVLS has no base of its own: its hop below has all of its latency.
"""Latency of an algorithm before its first hop."""

LINK_US: dict[Algorithm, tuple[float, float, float]] = {
    "Tree": (0.6, 1.25, 4.0),
    "Ring": (0.6, 1.9, 3.4),
    "NVLS": (0.0, 0.0, 25.0),
    "NVLSTree": (0.0, 0.0, 25.0),
    "PAT": (0.0, 0.0, 4.0),
}
"""Latency of a hop over NVLink."""

NETWORK_US: dict[Algorithm, tuple[float, float, float]] = {
    "Tree": (5.0, 8.5, 14.0),
    "Ring": (2.7, 4.0, 14.0),
    "NVLS": (0.0, 0.0, 18.0),
    "NVLSTree": (0.0, 0.0, 20.9),
    "PAT": (0.0, 0.0, 14.0),
}
"""Latency of a hop between hosts."""

POST_US = {"intel": 1.0, "amd": 2.0}
"""Time in which a host's processor posts one message, by its maker; three times that for the Simple
protocol."""

LL_GB_PER_S = {
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
"""Largest bandwidth of LL on one, two and more hosts; on several, processors of Intel count as volta, AMD as
ampere."""

RING_LL128_GB_PER_S = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 36.7),
    "blackwell": (40.0, 40.0, 40.0),
}
"""Largest bandwidth of a channel of a ring with LL128, on one, two and more hosts."""

TREE_LL128_GB_PER_S = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
"""Largest bandwidth of a channel of a tree with LL128, on one, two and more hosts."""

TREE_GB_PER_S = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
"""Largest bandwidth of a channel of a tree, on one, two and more hosts."""

NVLS_TREE_GB_PER_S = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (0.0, 57.7, 45.5),
    "blackwell": (0.0, 96.0, 80.0),
}
"""Largest bandwidth of a channel of NVLSTree, on one, two and more hosts."""

# Of NVLS only the protocol Simple exists, so the constants of LL and LL128 above are 0.
NVLS_EFFICIENCY = {"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74}
"""Fraction of NVLink's bandwidth that reductions in the NVSwitch reach; 0 where a chip has none."""

TREE_CORRECTION: tuple[tuple[float, ...], ...] = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
        0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ),
)  # fmt: skip
"""Factor of a tree's bandwidth by protocol and size, for powers of two from 64 bytes on."""

PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4, "blackwell": 1.4}
"""Factor of the latency of a ring's all-reduce between hosts, from 64 bytes per rank and channel on
(Simple)."""

COUNTED_LINK = {"volta": 0.8, "ampere": 0.8, "hopper": 20.6 / 25, "blackwell": 40.1 / 50}
"""Fraction of NVLink's line rate that NCCL counts with."""

COUNTED_PCIE = 0.75
"""Fraction of the rate of PCIe that NCCL counts with: 48 of 64 GB/s of PCIe 5.0 x16."""

STEPS_INSIDE = {
    "volta": (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""Bandwidths of a channel that the search for channels tries, on one host; ampere as volta."""

STEPS_BETWEEN = {
    "volta": (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    "hopper": (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    "blackwell": (
        96.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12,
    ),
}  # fmt: skip
"""The same between hosts."""
