"""`jtrain bench faults` with more kinds of trial: two must be found to fail, and one after a kill."""

import shutil
import sys
import time
from typing import Any

from jtrain.bench.__main__ import bench
from jtrain.bench.fault_trials import kinds, processes

kinds.register_all()


@kinds.fault("forgets", "all that a run needs to go on is lost, and a process stays after the training")
def forgets(trial: Any) -> None:
    """Moves away what a run resumes from, and leaves a process that sleeps."""
    shutil.copytree(trial.lab.folder / "unbroken0" / "workdir", trial.workdir.path)
    for name in ("checkpoints", "run.json", "config.txt", "goodput.json"):
        (trial.workdir.path / name).rename(trial.folder / name)
    processes.fork(lambda: time.sleep(600) or 0, trial.folder / "sleeper.log")
    usual_s, processes.ENDED_S = processes.ENDED_S, 1.0  # this one never ends
    trial.cleanups.callback(setattr, processes, "ENDED_S", usual_s)


@kinds.fault("diverges", "a run computes something else")
def diverges(trial: Any) -> None:
    """Runs with another seed."""
    trial.recipe = trial.recipe.changed("seed=1")


@kinds.fault("litters", "a file stays in the workdir of a run that was broken before", chains=True)
def litters(trial: Any) -> None:
    """Leaves nothing in a workdir where nothing has run yet."""
    if trial.workdir.path.exists():
        (trial.workdir.path / "forgotten.tmp").touch()


sys.exit(bench(["faults", *sys.argv[1:]]))
