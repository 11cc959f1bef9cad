"""Damaged notes of a run, signals, closed pipes, two runs in one workdir, and folders that are not shared."""

import os
import select
import shutil
import signal

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.trial import Trial
from jtrain.runtime.exit_codes import DONE, REFUSED, STOPPED
from jtrain.telemetry import metrics

# Neither UTF-8 nor JSON.
GARBAGE = b'{"step": 7, "loss_nats": \xff\x00 not JSON\n'


@fault(
    "bad-metrics",
    "a line of metrics.jsonl is garbage",
    says="metrics.jsonl",
    leaves=r"^metrics\.jsonl\.damaged$",
    chains=True,
    on_disk=True,
)
def bad_metrics(trial: Trial) -> None:
    """A line in the middle of the file."""
    trial.from_half()
    file = trial.workdir.path / metrics.FILE
    lines = file.read_bytes().splitlines(keepends=True)
    lines.insert(trial.rng.randrange(len(lines) + 1), GARBAGE)
    file.write_bytes(b"".join(lines))


@fault(
    "bad-ledger",
    "goodput.json and its lines are garbage",
    leaves=r"^goodput\.jsonl?\.damaged$",
    chains=True,
    on_disk=True,
)
def bad_ledger(trial: Trial) -> None:
    """All files of the ledger of wall time."""
    trial.from_half()
    for file in trial.workdir.path.glob("goodput.json*"):
        with open(file, "ab") as end:
            end.write(GARBAGE)


def _signalled(trial: Trial, number: signal.Signals) -> None:
    attempt = trial.start()
    signal_step = trial.draw_step(4)
    attempt.until(lambda: trial.workdir.last_step() >= signal_step)
    # A closed terminal signals the whole group; a scheduler may reach any subset.
    attempt.send(number, None if number == signal.SIGHUP else trial.victims())
    attempt.wait()
    trial.record_end(attempt)
    codes = set(attempt.codes.values())
    # All alike: the processes agree on the step at which they stop, or all reach the end.
    if not (codes <= {STOPPED} or codes <= {DONE}):
        trial.wrong(
            f"{number.name} at step {signal_step}: exit codes {attempt.codes} are neither all 75 nor all 0"
        )
    # A stopped run saves at the step where it stops, so nothing is done again.
    if codes == {STOPPED} and max(trial.workdir.committed(), default=0) < trial.workdir.last_step():
        trial.wrong(
            f"{number.name} lost steps: checkpoints {trial.workdir.committed()}, logged "
            f"{trial.workdir.last_step()}"
        )


@fault(
    "sigterm",
    "SIGTERM to any subset of the processes: all save and exit with 75",
    may_keep_others=True,
    chains=True,
)
def sigterm(trial: Trial) -> None:
    """SIGTERM is what schedulers send before they kill."""
    _signalled(trial, signal.SIGTERM)


@fault("sighup", "SIGHUP to all processes: the terminal is closed", may_keep_others=True, chains=True)
def sighup(trial: Trial) -> None:
    """All save and exit with 75, or go on to the end."""
    _signalled(trial, signal.SIGHUP)


@fault("closed-pipe", "the reader of the output goes away, as in `| head`", processes=(1,))
def closed_pipe(trial: Trial) -> None:
    """A run never ends because nobody reads what it prints."""
    # The log of process 0 is a pipe here, whose reader the trial is.
    pipe = trial.folder / "attempt0" / "process0.log"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    # Not blocking: the writer opens the pipe only when the training starts.
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    attempt = trial.start()
    close_step = trial.rng.randint(0, 4)
    attempt.until(
        lambda: (
            # The pipe must be drained, or the training would block on a full one before it is closed.
            select.select([read_end], [], [], 0.1)[0]
            and os.read(read_end, 4096)
            and trial.workdir.last_step() >= close_step
        )
    )
    os.close(read_end)
    pipe.unlink()
    attempt.wait()
    trial.record_end(attempt)
    if attempt.codes != {0: DONE}:
        trial.wrong(f"the run ended with {attempt.codes} when nobody read its output")


@fault("two-runs", "the same command is started while the run goes on", chains=True)
def two_runs(trial: Trial) -> None:
    """The second is refused and names the first, which goes on."""
    first = trial.start()
    first.until(lambda: trial.workdir.last_step() >= 1)
    second = trial.start()
    second.wait()
    text = second.text()
    if not first.running():
        trial.result.notes.append("the first run ended before the second could be refused")
        trial.record_end(first)
        return
    # The message names the process that holds the workdir, so that the user can look at it.
    if set(second.codes.values()) != {REFUSED} or str(first.pids[0]) not in text:
        trial.wrong(
            f"a second run in the same workdir ended with {second.codes} and did not name process "
            f"{first.pids[0]}"
        )
    trial.let_train(first)


@fault("unshared", "each process has a workdir of its own", processes=(2, 4))
def unshared(trial: Trial) -> None:
    """Refused before step 1, in bounded time, by all processes; then the same run with one folder."""
    folders = [trial.folder / f"host{index}" for index in range(trial.recipe.num_processes)]
    attempt = trial.start(workdirs=folders)
    attempt.wait()
    trial.record_end(attempt)
    text = attempt.text()
    # Refused by every process: one that waited for the others would hang.
    if set(attempt.codes.values()) != {REFUSED} or "shared" not in text or "step 1/" in text:
        trial.wrong(
            f"workdirs that are not shared: exit codes {attempt.codes}, expected 2 with `shared` in the "
            "message"
        )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
