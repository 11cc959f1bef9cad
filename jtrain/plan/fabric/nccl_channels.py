"""Channels that NCCL's search finds on hosts with an NVSwitch: their number and the bandwidth of each.

NCCL tries bandwidths of a channel in a fixed order and keeps those that give the most in total. GPU i's
adapter is taken to be next to GPU i, as in DGX, HGX and NVL72 machines.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from jtrain.plan.fabric import nccl_constants as published

type GpuGeneration = Literal["volta", "ampere", "hopper", "blackwell"]
"""Generation of NVIDIA's GPUs in NCCL's tables."""


def generation_of(capability: tuple[int, int] | None) -> GpuGeneration | None:
    """The constants' name of a GPU's generation; None for other makers and before Volta."""
    if capability is None or capability < (7, 0):
        return None
    if capability >= (10, 0):
        return "blackwell"
    return "hopper" if capability >= (9, 0) else "ampere" if capability >= (8, 0) else "volta"


MAX_SEARCHED = 16
"""Channels that the search finds at most, also after it has split them."""

MAX_HEADS = 32
"""GPUs of a domain that may lead a channel of NVLS."""


@dataclasses.dataclass(frozen=True)
class Channels:
    """Channels of one algorithm; `gb_per_s` is the bandwidth of each."""

    count: int
    gb_per_s: float

    @property
    def total(self) -> float:
        """Bandwidth of all channels, in GB/s."""
        return self.count * self.gb_per_s


@dataclasses.dataclass(frozen=True)
class Node:
    """One NVLink domain as NCCL counts it; bandwidths of one GPU, one direction, in GB/s.

    link: all of the GPU's NVLinks. adapter: path from the GPU into the network; None for a job of one domain.
    """

    gpus: int
    generation: GpuGeneration
    link: float
    adapter: float | None

    @property
    def _steps(self) -> tuple[float, ...]:
        # Ampere has no row of its own: NCCL uses Volta's.
        table = published.STEPS_INSIDE if self.adapter is None else published.STEPS_BETWEEN
        return table.get(self.generation, table["volta"])

    def ring(self) -> Channels:
        """Channels of rings, and of trees between hosts but for the bandwidth of NVLink."""
        return self._doubled(self._search(self.link))

    def tree(self) -> Channels:
        """Channels of trees: a chain through the GPUs leaves one hop out, so NVLink carries more of them."""
        return self._doubled(self._search(self.link * self.gpus / max(1, self.gpus - 1)))

    def nvls(self) -> Channels:
        """Channels of NVLS: each has a head, which sends and receives twice what the other GPUs do.

        A single GPU has none, and gets `SLOWEST`.
        """

        def heads(step: float) -> int:
            can_lead = self.gpus > 1 and (self.adapter is None or step <= self.adapter)
            # A GPU heads one channel, where it sends twice as much: h heads take h + 1 steps of its links.
            return min(math.floor(self.link / step) - 1, self.gpus, MAX_HEADS) if can_lead else 0

        return _widest(self._steps, heads)

    def _search(self, link: float) -> Channels:
        def channels(step: float) -> int:
            over_links = math.floor(link / step)
            over_adapters = (
                MAX_SEARCHED if self.adapter is None else self.gpus * math.floor(self.adapter / step)
            )
            return min(over_links, over_adapters, MAX_SEARCHED)

        # Without links the adapter alone bounds a channel.
        if self.gpus == 1:  # every byte goes over the adapter
            link = math.inf if self.adapter is None else self.adapter
        return _widest(self._steps, channels)

    def _doubled(self, channels: Channels) -> Channels:
        """Splits fast channels in two, as NCCL does; on Hopper and later only those of 50 GB/s, or few."""
        is_late = self.generation in ("hopper", "blackwell")
        if channels.gb_per_s < 25 or (is_late and channels.gb_per_s < 50 and channels.count > 4):
            return channels
        return Channels(min(2 * channels.count, MAX_SEARCHED), channels.gb_per_s / 2)


SLOWEST = Channels(1, 0.1)
"""What NCCL goes on with where its search finds nothing: a network below 1 Gbit/s per GPU."""


def _widest(steps: Sequence[float], count: Callable[[float], int]) -> Channels:
    """The fastest step of those whose channels have the most bandwidth together."""
    # `max` takes the first of equals, so of equal totals the fastest step wins.
    options = [Channels(count(step), step) for step in steps if count(step) > 0]
    return max(options, key=lambda channels: channels.total, default=SLOWEST)
