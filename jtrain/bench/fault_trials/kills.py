"""Kills (SIGKILL) of any process, or any subset, at every instant of a run."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.processes import TrialAttempt, descendants
from jtrain.bench.fault_trials.recipe import NUM_STEPS
from jtrain.bench.fault_trials.trial import Trial


def _passed(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s


def _started_before_a_save(trial: Trial) -> TrialAttempt:
    """Starts a training, and waits until the first, the second or the third save is the next one."""
    attempt = trial.start()
    # Before the first save, or after that of step 4 or 8.
    saved_step = trial.rng.choice((0, 4, 8))
    attempt.until(lambda: max(trial.workdir.committed(), default=0) >= saved_step)
    return attempt


def _kill_while(trial: Trial, attempt: TrialAttempt, condition: Callable[[], Any], what: str) -> None:
    """Kills at an instant at which `condition` holds; notes if there was none before the run ended."""
    while attempt.until(condition):
        # Looked at again after all are stopped: the condition may have passed between look and signal.
        if attempt.freeze_if(condition):
            break
    else:
        # The kill still happens, as the trial has to end; the note says that it hit nothing in particular.
        trial.result.notes.append(f"the run ended before a kill {what}")
    trial.kill(attempt)


@fault("kill-startup", "while Python imports, processes join and the config is read", chains=True)
def kill_startup(trial: Trial) -> None:
    """At a random time before the run has described itself in run.json."""
    # A real start, since the imports are what the kill should hit.
    attempt = trial.start(imported=False)
    attempt.until(_passed(trial.rng.uniform(0, trial.reference.run_json_s)))
    trial.kill(attempt)


@fault(
    "kill-compile", "between the plan and the first step: the state is made, the step compiled", chains=True
)
def kill_compile(trial: Trial) -> None:
    """At a random time between run.json and the first logged step."""
    attempt, first_step = trial.start(), trial.workdir.last_step()
    # run.json is written once the plan is made.
    attempt.until((trial.workdir.path / "run.json").exists)
    window_s = trial.reference.first_step_s - trial.reference.run_json_s
    late = _passed(trial.rng.uniform(0, window_s))
    attempt.until(lambda: late() or trial.workdir.last_step() > first_step)
    trial.kill(attempt)


@fault("kill-step", "in the middle of any step", chains=True)
def kill_step(trial: Trial) -> None:
    """Up to one step's time after a drawn step was logged."""
    attempt = trial.start()
    kill_step_number = trial.draw_step(1)
    attempt.until(lambda: trial.workdir.last_step() >= kill_step_number)
    # Up to 50 ms, so that the kill falls into the next step or one soon after it.
    attempt.until(_passed(trial.rng.uniform(0, 0.05)))
    trial.kill(attempt)


@fault("kill-save", "while a checkpoint is being written", chains=True)
def kill_save(trial: Trial) -> None:
    """While a folder of an uncommitted checkpoint exists; which save, and how far into it, is drawn."""
    attempt = _started_before_a_save(trial)
    attempt.until(trial.workdir.saving)
    attempt.until(_passed(trial.rng.uniform(0, 0.05)))
    _kill_while(trial, attempt, trial.workdir.saving, "during a save")


@fault("kill-commit", "between the last written byte of a checkpoint and its commit", chains=True)
def kill_commit(trial: Trial) -> None:
    """While a checkpoint has its manifest, but not its name."""
    attempt = _started_before_a_save(trial)
    _kill_while(trial, attempt, trial.workdir.sealed, "between write and commit")


@fault("kill-purge", "while an old checkpoint is being deleted", chains=True)
def kill_purge(trial: Trial) -> None:
    """While a folder of a deletion exists: keep_last=2 makes the third and fourth save delete one."""
    _kill_while(trial, trial.start(), trial.workdir.deleting, "during a deletion")


@fault("kill-restore", "while a checkpoint is being read", chains=True)
def kill_restore(trial: Trial) -> None:
    """While any process has a file of a checkpoint open."""
    trial.from_half()
    attempt = trial.start()

    def reading() -> bool:
        # Any process: with several, each reads its own part.
        return any(trial.workdir.open_checkpoints(attempt.pids[index]) for index in attempt.running())

    attempt.until(reading)
    attempt.until(_passed(trial.rng.uniform(0, 0.05)))
    _kill_while(trial, attempt, lambda: reading() or trial.workdir.last_step() > 0, "during a restore")


@fault("kill-end", "after the last step: the last save, the end of the threads, the exit", chains=True)
def kill_end(trial: Trial) -> None:
    """At a random time between the last logged step and the exit."""
    attempt = trial.start()
    # The last step saves as well, so the kill hits a save, the end of threads or the exit.
    attempt.until(lambda: trial.workdir.last_step() == NUM_STEPS)
    attempt.until(_passed(trial.rng.uniform(0, 0.4)))
    trial.kill(attempt)


@fault("kill-again", "three times in a row, at any time, the restarts included", chains=True)
def kill_again(trial: Trial) -> None:
    """Each attempt is killed before its first step, or after a drawn number of further ones."""
    for _ in range(3):
        attempt = trial.start()
        first = trial.workdir.last_step()
        num_steps = trial.rng.randint(0, 6)
        late = _passed(trial.rng.uniform(0, trial.reference.first_step_s))
        attempt.until(
            lambda num_steps=num_steps, first=first, late=late: (
                # 0 further steps: killed at a random time during startup.
                late() if not num_steps else trial.workdir.last_step() >= first + num_steps
            )
        )
        trial.kill(attempt)


@fault(
    "kill-loader",
    "a process of the data plane: a Source Loader, the Data Constructor, their forkserver",
    chains=True,
)
def kill_loader(trial: Trial) -> None:
    """The training goes on by itself, or ends and is started again."""
    attempt = trial.start()
    kill_step_number = trial.draw_step(4)
    attempt.until(lambda: trial.workdir.last_step() >= kill_step_number)
    trainers = set(attempt.pids)
    # Below the training: loaders, the constructor and their forkserver.
    data_processes = {pid: name for pid, name in descendants().items() if pid not in trainers}
    if data_processes:
        pid = trial.rng.choice(sorted(data_processes))
        trial.result.notes.append(f"killed {data_processes[pid]}")
        os.kill(pid, signal.SIGKILL)
    trial.let_train(attempt)
