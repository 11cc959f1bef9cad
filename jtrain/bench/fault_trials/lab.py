"""Runs that all trials share, made when first needed: unbroken ones to compare with, and a half-done one."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from jtrain.bench.fault_trials.processes import end_strays
from jtrain.bench.fault_trials.recipe import EVERY_STEPS, LAUNCH, RunRecipe
from jtrain.bench.fault_trials.workdir import LoggedStep, Workdir
from jtrain.runtime.exit_codes import DONE


@dataclasses.dataclass(frozen=True)
class Reference:
    """Unbroken run, and times of its start for the faults that come at a random one.

    entries: names of the files and folders that it leaves, as of `Workdir.entries`.
    run_json_s, first_step_s, end_s: from the start to run.json, to the first logged step, to the end, as a
      user starts it.
    """

    steps: tuple[LoggedStep, ...]
    digests: dict[str, str]
    committed: tuple[int, ...]
    entries: frozenset[str]
    run_json_s: float
    first_step_s: float
    end_s: float


class FaultLab:
    """Folder with the runs that trials compare with or copy.

    recipe: of the trials whose kind needs no other.
    """

    def __init__(self, folder: Path, recipe: RunRecipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self._references: dict[tuple[RunRecipe, tuple[str, ...]], Reference] = {}
        self._halves: dict[RunRecipe, Path] = {}

    def reference(self, recipe: RunRecipe, module: Sequence[str] = (LAUNCH,)) -> Reference:
        """Runs the training unbroken, as a user starts it; once for each recipe and module.

        Raises:
          RuntimeError: the command fails without any fault.
        """
        # A kind may change the settings or the module, and then needs an unbroken run of its own.
        key = (recipe, tuple(module))
        if key not in self._references:
            self._references[key] = self._run_unbroken(recipe, module)
        return self._references[key]

    def _run_unbroken(self, recipe: RunRecipe, module: Sequence[str]) -> Reference:
        """Runs the recipe once without faults and times its start."""
        folder = self.folder / f"unbroken{len(self._references)}"
        workdir = Workdir(folder / "workdir")
        # Not forked: the times of a user's start include the imports.
        attempt = recipe.start([workdir.path], folder, imported=False, module=module)
        attempt.until((workdir.path / "run.json").exists)
        run_json_s = time.monotonic() - attempt.started_s
        attempt.until(workdir.last_step)
        first_step_s = time.monotonic() - attempt.started_s
        attempt.wait()
        end_s = time.monotonic() - attempt.started_s
        # The names are dropped: strays are a result of trials with faults, and this run is none.
        end_strays()
        if set(attempt.codes.values()) != {DONE} or not workdir.logged():
            # Without an unbroken run nothing can be compared, so this is no result of a trial.
            raise RuntimeError(f"{recipe.command(workdir.path)} failed without any fault:\n{attempt.text()}")
        steps, committed = tuple(workdir.logged()), workdir.committed()
        digests = workdir.digests(committed[-1], folder / "digests.log")
        entries = workdir.entries()
        return Reference(steps, digests, committed, entries, run_json_s, first_step_s, end_s)

    def half(self, recipe: RunRecipe) -> Path:
        """Returns the workdir of a run that was killed between its second save and its third.

        Raises:
          RuntimeError: no kill met such an instant.
        """
        if recipe in self._halves:
            return self._halves[recipe]
        # The instant is short, so a kill may miss it; each try has a folder of its own.
        for number in range(20):
            folder = self.folder / f"half{len(self._halves)}.{number}"
            workdir = Workdir(folder / "workdir")
            attempt = recipe.start([workdir.path], folder)
            attempt.until(lambda workdir=workdir: _twice_saved(workdir))
            attempt.kill()
            # Helpers of a run that was killed on purpose are no finding: only the files count here.
            end_strays()
            # Checked after the kill, when nothing changes any more.
            if _twice_saved(workdir) and not workdir.saving():
                self._halves[recipe] = workdir.path
                return workdir.path
        raise RuntimeError(f"{recipe.command(self.folder)} was never between its second save and its third")


def _twice_saved(workdir: Workdir) -> bool:
    """True if there are just two checkpoints, and at least one step after them."""
    saved = (EVERY_STEPS, 2 * EVERY_STEPS)
    return workdir.committed() == saved and workdir.last_step() > saved[-1]
