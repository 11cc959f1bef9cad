"""Settings of the arrays that a run keeps in host memory between uses."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jtrain.errors import UserError

type Offloadable = Literal["optimizer", "params", "activations", "gradients"]
"""What may be in host memory: fields of `OffloadSpec` with a share."""

OFFLOADABLE: tuple[Offloadable, ...] = ("optimizer", "activations", "params", "gradients")
"""All of them, from the least to the most often copied."""

type Share = float | Literal["none", "as_needed"]
"""Share from 0.0 to 1.0; `none` is 0.0, `as_needed` the smallest share with which the run fits."""


@dataclasses.dataclass(frozen=True)
class OffloadSpec:
    """Offload to host memory; changes speed and device memory, never the losses.

    optimizer: share of the bytes of optimizer state (moments, their scales, master weights). Whole arrays
      move, the largest first, so the share reached may be a little lower; the plan prints it.
    params: share of the bytes of the layers' parameters, also by whole arrays; a layer's part is fetched when
      needed.
    activations: share of the bytes that each layer saves for its backward pass, by whole named activations.
    gradients: share of the bytes of the layers' gradients, by whole arrays: their sums stay on the host from
      one microbatch to the next, and until the update.
    update: where offloaded optimizer state is updated: `device` streams it to the device and back, layer by
      layer; `host` computes AdamW on the host's cores (ZeRO-Offload, arXiv:2101.06840) and streams gradients
      and parameters.
    unified_memory: one address space for host and device (Grace Hopper): the driver moves pages between them.
    """

    optimizer: Share = "none"
    params: Share = "none"
    activations: Share = "none"
    gradients: Share = "none"
    update: Literal["device", "host"] = "device"
    unified_memory: bool = False

    def __post_init__(self) -> None:
        for name in OFFLOADABLE:
            value = getattr(self, name)
            # True would pass as the number 1.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value not in ("none", "as_needed") and not (is_number and 0 <= value <= 1):
                raise UserError(
                    f"layout.offload.{name}={value!r} must be a share from 0.0 to 1.0, `none`, or "
                    "`as_needed`, which takes the smallest share that fits."
                )
        if self.update not in ("device", "host"):
            raise UserError(f"layout.offload.update={self.update!r} must be `device` or `host`.")
        # 0 and `none` mean the same share.
        if self.update == "host" and self.optimizer in ("none", 0):
            raise UserError(
                "layout.offload.update=host updates optimizer state in host memory, but "
                f"layout.offload.optimizer={self.optimizer} keeps none there. Set "
                "layout.offload.optimizer=1.0, or layout.offload.update=device."
            )
        placed = [name for name in OFFLOADABLE if getattr(self, name) not in ("none", 0)]
        if self.unified_memory and placed:
            raise UserError(
                f"layout.offload.unified_memory=True lets the driver place pages, but layout.offload."
                f"{placed[0]}={getattr(self, placed[0])} places arrays. Set "
                f"layout.offload.unified_memory=False, or layout.offload.{placed[0]}=none."
            )

    def share(self, name: Offloadable) -> float:
        """Returns a share as a number.

        Raises:
          UserError: the share is still `as_needed`.
        """
        value = getattr(self, name)
        if value == "as_needed":
            raise UserError(
                f"layout.offload.{name}=as_needed has to be resolved first: no share fits everywhere. "
                "`jtrain.plan` finds the smallest that fits the devices."
            )
        return 0.0 if value == "none" else float(value)


def largest_first[K](budget_bytes: float, sizes: Mapping[K, int]) -> frozenset[K]:
    """Returns keys whose sizes fit the budget together, taken from the largest down."""
    remaining_bytes = budget_bytes * (1 + 1e-6)  # 0.3 of a sum is not exact
    chosen: list[K] = []
    # Goes on after the first that does not fit: a smaller array may fill the rest of the budget.
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= remaining_bytes:
            chosen.append(key)
            remaining_bytes -= size
    return frozenset(chosen)


def check_not_empty[K](
    name: str, share: float, total: int, chosen: frozenset[K], sizes: Mapping[K, int]
) -> frozenset[K]:
    """Returns `chosen`, the arrays to offload, after checking that it is not empty for a positive share.

    Raises:
      UserError: the share is positive, but smaller than the smallest array.
    """
    if share > 0 and not chosen and sizes:
        # The least share that moves anything; `total` has arrays that cannot move as well.
        smallest = min(sizes.values()) / total
        raise UserError(
            f"layout.offload.{name}={share:g} moves nothing: the smallest array is {smallest:.1%} of the "
            f"bytes. Set layout.offload.{name} to at least that, or to `none`."
        )
    return chosen
