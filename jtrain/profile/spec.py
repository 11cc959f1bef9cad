"""Profiling settings of a run: the traced steps and the source of clock samples."""

import dataclasses
from pathlib import Path

from jtrain.errors import TakenWorkdir, UserError
from jtrain.profile.trace_dir import FOLDER

WINDOW_STEPS = 5
"""Steps that SIGUSR1 traces: clocks vary between steps, and a trace of many steps is slow to read."""

CLOCKS = ("auto", "none", "nvml", "amd", "tpu", "cpu")
"""Sources of clocks and power; tests also use `scripted:FILE`."""


@dataclasses.dataclass(frozen=True)
class ProfileSpec:
    """Profiling settings of a run.

    steps: trace window from `steps[0]` to `steps[1]` completed updates: `(20, 25)` traces the five steps that
      metrics.jsonl numbers 21 to 25; None traces none. SIGUSR1 opens a window of `WINDOW_STEPS` at any time.
    clocks: source of clocks, power and temperature, sampled during the whole run by a separate process:
      `auto` (by platform), `none`, `nvml`, `amd`, `tpu`, `cpu`, or `scripted:FILE`.
    """

    steps: tuple[int, int] | None = None
    clocks: str = "auto"

    def __post_init__(self) -> None:
        if self.steps is not None:
            # The window opens after step `first`, so the first traced one is first + 1.
            first, last = self.steps
            if first < 1:
                raise UserError(
                    f"profile.steps={self.steps} includes step 1, which is mostly compilation. Set "
                    f"profile.steps=(1, {max(last, 2)}) or later."
                )
            if last <= first:
                raise UserError(
                    f"profile.steps={self.steps} holds no step: the second number must be above the first. "
                    f"Set profile.steps=({first}, {first + WINDOW_STEPS})."
                )
        if self.clocks not in CLOCKS and not self.clocks.startswith("scripted:"):
            raise UserError(
                f"profile.clocks={self.clocks!r} must be one of {', '.join(CLOCKS)}, scripted:FILE."
            )

    def check_steps_to_come(self, workdir: Path, *, saved_step: int, num_steps: int) -> None:
        """Checks that a run has steps to trace, or has traced them.

        Args:
          workdir: folder of the run.
          saved_step: step of its newest checkpoint, 0 without one.

        Raises:
          UserError: the run is done without a trace of the window.
        """
        if self.steps is None or saved_step < num_steps:
            return
        if (workdir / FOLDER / str(self.steps[0])).exists():
            return
        error = TakenWorkdir(
            f"profile.steps={self.steps} can trace nothing: the run in {workdir} is done, at step "
            f"{saved_step} of {num_steps}. Add --workdir {workdir}-profile to train and trace it there."
        )
        error.ending = "-profile"
        raise error

    def check_length(self, num_steps: int) -> None:
        """Checks that the window ends within the run.

        Raises:
          UserError: the window ends after `num_steps`.
        """
        if self.steps is not None and self.steps[1] > num_steps:
            raise UserError(
                f"profile.steps={self.steps} ends after the run, num_steps={num_steps}. Set profile.steps "
                f"within it, or num_steps={self.steps[1]} or more."
            )
