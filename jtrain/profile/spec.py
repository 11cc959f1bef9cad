"""What of a run is traced, and what is sampled all the time."""

import dataclasses

WINDOW_STEPS = 5
"""How many steps SIGUSR1 traces: clocks differ from step to step, and a trace of many is slow to read."""

CLOCKS = ("auto", "none", "nvml", "amd", "tpu", "cpu")
"""Where clocks and power may come from; `scripted:FILE` besides, for tests."""


@dataclasses.dataclass(frozen=True)
class ProfileSpec:
    """When to trace a window, and where clocks come from.

    steps: the window: from `steps[0]` completed updates to `steps[1]`, so `(20, 25)` traces the five that
      metrics.jsonl numbers 21 to 25; None traces none. SIGUSR1 opens one of `WINDOW_STEPS` at any time.
    clocks: the source of clocks, power and temperature, sampled all the time in a process of its own: `auto` (what the
      devices have), `none`, `nvml`, `amd`, `tpu`, `cpu`, or `scripted:FILE`.
    """

    steps: tuple[int, int] | None = None
    clocks: str = "auto"

    def __post_init__(self) -> None:
        if self.steps is not None:
            first, last = self.steps
            if first < 1:
                raise ValueError(
                    f"profile.steps={self.steps} begins before step 1 is done, which is mostly compilation. Set "
                    f"profile.steps=(1, {max(last, 2)}) or later."
                )
            if last <= first:
                raise ValueError(
                    f"profile.steps={self.steps} holds no step: the second must be above the first. Set "
                    f"profile.steps=({first}, {first + WINDOW_STEPS})."
                )
        if self.clocks not in CLOCKS and not self.clocks.startswith("scripted:"):
            raise ValueError(f"profile.clocks={self.clocks!r} must be one of {', '.join(CLOCKS)}, scripted:FILE.")

    def check_length(self, num_steps: int) -> None:
        """Refuses a window that the run never reaches.

        Raises:
          ValueError: both numbers.
        """
        if self.steps is not None and self.steps[1] > num_steps:
            raise ValueError(
                f"profile.steps={self.steps} ends after the run, num_steps={num_steps}. Set profile.steps within it, "
                f"or num_steps={self.steps[1]} or more."
            )
