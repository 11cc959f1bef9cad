"""Stopped and killed processes of a run that `--supervise` watches: named, ended, training by itself."""

import os
import signal
import time
from pathlib import Path

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.trial import Trial
from jtrain.bench.fault_trials.workdir import resumed_from
from jtrain.runtime.exit_codes import DONE


def training_processes(supervisor: int) -> dict[int, int]:
    """Returns the process ids of the training that a supervisor has started, by their index in the run."""
    pids = {}
    # Children of every thread: the supervisor may start them from any.
    for task in Path(f"/proc/{supervisor}/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # It ended between the listing and the reading.
            except OSError:
                continue
            if b"jtrain.launch" in command:
                numbers = [
                    entry.partition(b"=")[2] for entry in environ if entry.startswith(b"JTRAIN_PROCESS_ID=")
                ]
                # Without the variable the run has one process, number 0.
                pids[int(numbers[0]) if numbers else 0] = int(pid)
    return pids


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _hit(trial: Trial, number: signal.Signals) -> None:
    """Sends a signal to drawn processes after a drawn step; notes when they are named and replaced."""
    attempt = trial.start(supervised=True)
    hit_step_number = trial.draw_step(4)
    attempt.until(lambda: trial.workdir.last_step() >= hit_step_number)
    processes_before = training_processes(attempt.pids[0])
    # A process that has just ended cannot be hit.
    victims = [index for index in trial.victims() if index in processes_before]
    if not victims:
        trial.result.notes.append(f"the run ended before {number.name}")
        attempt.wait()
        trial.record_end(attempt)
        return
    for index in victims:
        os.kill(processes_before[index], number)
    hit_s, hit_step = time.monotonic(), trial.workdir.last_step()
    # Only what is printed from here on tells of this fault.
    printed_before = len(attempt.text())
    trial.result.notes.append(f"{number.name} to processes {victims} of {sorted(processes_before)}")

    def note(name: str, condition: bool) -> None:
        if condition and name not in trial.result.times_s:
            trial.result.times_s[name] = time.monotonic() - hit_s

    def training_again() -> bool:
        output = attempt.text()[printed_before:]
        note(
            "named",
            # A run of one process has no numbers to name.
            any(f"process {index}" in output for index in victims)
            or (len(processes_before) == 1 and "process" in output),
        )
        note("ended", not any(_alive(pid) for pid in processes_before.values()))
        # Training again: the first new step after the one that it resumed from, once the old ones have ended.
        note(
            "trained",
            "ended" in trial.result.times_s and f"step {(resumed_from(output) or 0) + 1}/" in output,
        )
        return "trained" in trial.result.times_s

    if attempt.until(training_again, poll_s=0.02):
        trial.count_lost(attempt.text()[printed_before:], hit_step)
    # The supervisor ends only with the run.
    ended = trial.let_train(attempt)
    missing = [name for name in ("named", "ended", "trained") if name not in trial.result.times_s]
    if missing:
        trial.wrong(f"processes {victims} were never {', '.join(missing)}: {attempt.text()[-2000:]}")
    # The only code is the supervisor's, which is 0 in the end: it started the run again by itself.
    if ended and attempt.codes != {0: DONE}:
        trial.wrong(f"the supervisor ended with {attempt.codes}")


@fault("supervise-kill", "any process is killed while `--supervise` watches", chains=True)
def supervise_kill(trial: Trial) -> None:
    """The supervisor names it, ends the others and starts the run again."""
    _hit(trial, signal.SIGKILL)


@fault("supervise-stop", "any process is stopped (SIGSTOP) while `--supervise` watches", chains=True)
def supervise_stop(trial: Trial) -> None:
    """A process that hangs is named, all are ended, and the run is started again."""
    _hit(trial, signal.SIGSTOP)


@fault(
    "dead-supervisor",
    "a process is stopped (SIGSTOP), and its supervisor killed",
    may_keep_others=True,
    chains=True,
)
def dead_supervisor(trial: Trial) -> None:
    """The kernel continues what was stopped; the processes save and end, and nothing stays."""
    attempt = trial.start(supervised=True)
    stop_step = trial.draw_step(4)
    attempt.until(lambda: trial.workdir.last_step() >= stop_step)
    pids = training_processes(attempt.pids[0])
    victims = [index for index in trial.victims() if index in pids]
    for index in victims:
        os.kill(pids[index], signal.SIGSTOP)
    attempt.kill()
    trial.result.notes.append(f"stopped processes {victims} of {sorted(pids)}, killed the supervisor")
    trial.record_end(attempt)
    if pids and "The supervisor is gone" not in attempt.text():
        trial.wrong("processes whose supervisor was killed did not say so")
