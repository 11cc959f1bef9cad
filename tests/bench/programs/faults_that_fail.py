"""`jtrain bench faults` with three more kinds of trial, each of which must be found to fail."""

import sys
import time
from typing import Any

from jtrain.bench.__main__ import bench
from jtrain.bench.fault_trials import kinds, processes

kinds.register_all()


@kinds.fault("forgets", "all that a run needs to go on is lost")
def forgets(trial: Any) -> None:
    """Moves away what a run resumes from."""
    trial.from_half()
    for name in ("checkpoints", "run.json", "config.txt", "goodput.json"):
        (trial.workdir.path / name).rename(trial.folder / name)


@kinds.fault("diverges", "a run computes something else")
def diverges(trial: Any) -> None:
    """Runs with another seed."""
    trial.recipe = trial.recipe.changed("seed=1")


@kinds.fault("stays", "a process stays after the training")
def stays(trial: Any) -> None:
    """Leaves a process that sleeps."""
    trial.from_half()
    attempt = trial.start()
    processes.fork(lambda: time.sleep(600) or 0, trial.folder / "sleeper.log")
    attempt.wait()
    usual_s, processes.ENDED_S = processes.ENDED_S, 1.0  # this one never ends
    try:
        trial.record_end(attempt)
    finally:
        processes.ENDED_S = usual_s


sys.exit(bench(["faults", *sys.argv[1:]]))
