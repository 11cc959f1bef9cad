"""Config of the checks for silent corruption: bits that change in memory, devices that compute wrongly."""

import dataclasses

from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class IntegritySpec:
    """Checks for silent corruption; they change no number. A finding ends the run with exit code 76 and the
    device.

    checksums: True sums the bits of the state on every device before and after each update. Bits that change
      between steps, and copies of an array that differ between devices, are found by the next step, and
      before each save.
    recompute_every_steps: steps between recomputations of a microbatch on a neighbouring device; None
      disables them. One costs the forward and backward pass of two microbatches.
    """

    checksums: bool = True
    recompute_every_steps: int | None = 2000

    def __post_init__(self) -> None:
        if self.recompute_every_steps is not None and self.recompute_every_steps < 1:
            raise UserError(
                f"integrity.recompute_every_steps={self.recompute_every_steps} must be at least 1, or None "
                "to disable recomputation."
            )
