"""Two hosts with one workdir: started together, one that stood still and wakes, and clocks that jump."""

import os
import signal
import time

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.other_host import HostSpec
from jtrain.bench.fault_trials.recipe import NUM_STEPS
from jtrain.bench.fault_trials.trial import Trial
from jtrain.runtime.exit_codes import DONE, REFUSED

ONE_PROCESS = (1,)
"""Numbers of processes: a lease has one holder, process 0, whatever the others are."""


@fault(
    "late-hosts",
    "two hosts start the same command, one of them up to a start later",
    processes=ONE_PROCESS,
    chains=True,
)
def late_hosts(trial: Trial) -> None:
    """One trains, and the other is refused with its name."""
    # Later starts are of a third host, which is neither of these two.
    _start_elsewhere(trial)
    first = trial.start(module=HostSpec("host-a").module)
    end_s = time.monotonic() + trial.rng.uniform(0, trial.reference.first_step_s)
    first.until(lambda: time.monotonic() > end_s, poll_s=0.01)
    second = trial.start(module=HostSpec("host-b").module)
    # One of them is refused, or both end one after another: the second one found a finished run.
    first.until(lambda: not (first.running() and second.running()), poll_s=0.01)
    # Where both have ended, the second one counts as the survivor.
    survivor, loser = (first, second) if first.running() else (second, first)
    trial.let_train(survivor)
    loser.wait()
    codes = (loser.codes[0], survivor.codes[0])
    text = first.text() + second.text()
    if loser.codes[0] not in (DONE, REFUSED) or (loser.codes[0] == REFUSED and _IN_USE not in text):
        trial.wrong(f"two hosts that started together ended with {codes}: {text[-500:]}")
    # Both may end well one after the other: the second one then went on from a checkpoint of the first.
    both_done = codes == (DONE, DONE) and not survivor.killed
    if both_done and "resumed from step" not in survivor.text():
        trial.wrong("two hosts trained in one workdir")


_IN_USE = "in use by another run"


@fault(
    "host-paused",
    "a host stands still (SIGSTOP), another one takes its workdir over, and the first wakes",
    processes=ONE_PROCESS,
    may_keep_others=True,
    chains=True,
)
def host_paused(trial: Trial) -> None:
    """The one that woke writes nothing more, says who has the workdir and ends; the other trains on."""
    _start_elsewhere(trial)
    paused = trial.start(module=HostSpec("host-a").module)
    stop_step = trial.draw_step(6)
    paused.until(lambda: trial.workdir.last_step() >= stop_step)
    if not paused.running():
        trial.result.notes.append("the first host ended before it could be stopped")
        trial.record_end(paused)
        return
    # The kernel stops the process where it is, with its files and its lease as they are.
    os.kill(paused.pids[0], signal.SIGSTOP)
    rival = trial.start(module=HostSpec("host-b").module)
    resumed = rival.until(
        lambda: f"step {NUM_STEPS}/" in rival.text() or trial.workdir.last_step() > stop_step + 1
    )
    # It wakes when the rival trains already, so that anything it writes would be a second writer's.
    paused.send(signal.SIGCONT)
    woke_s = time.monotonic()
    paused.wait()
    trial.result.times_s["loser ended"] = time.monotonic() - woke_s
    rival.wait()
    trial.record_end(rival)
    if rival.codes != {0: DONE}:
        trial.wrong(f"the host that took the workdir over ended with {rival.codes}: {rival.text()[-500:]}")
    # It may have been stopped behind its last write, with nothing left to do but to end.
    if paused.codes[0] == DONE and resumed:
        trial.wrong("a host that had lost its workdir ended as if it had trained")
    if paused.codes[0] != DONE and "taken over by" not in paused.text():
        trial.wrong(f"a host that lost its workdir did not say to whom: {paused.text()[-500:]}")


@fault(
    "host-gone",
    "a host is killed, and the run started again on another one",
    processes=ONE_PROCESS,
    chains=True,
)
def host_gone(trial: Trial) -> None:
    """The other one watches for a while whether the first still beats, and takes the workdir over."""
    _start_elsewhere(trial)
    first = trial.start(module=HostSpec("host-a").module)
    kill_step = trial.draw_step(2)
    first.until(lambda: trial.workdir.last_step() >= kill_step)
    first.kill()
    trial.record_end(first)
    second = trial.start(module=HostSpec("host-b").module)
    stop_step = trial.draw_step(2)
    second.until(lambda: trial.workdir.last_step() >= stop_step)
    second.kill()
    trial.record_end(second)


@fault(
    "clock-jump",
    "the clock of the host jumps by hours while the run starts or trains, and so do the times of its files",
    processes=ONE_PROCESS,
    chains=True,
)
def clock_jump(trial: Trial) -> None:
    """Nothing depends on it: the run goes on, is killed and is started again with the right time."""
    _start_elsewhere(trial)
    jump_s = trial.rng.choice((-1, 1)) * trial.rng.uniform(60, 1e6)
    host = HostSpec("host-a", jump_s, after_s=trial.rng.uniform(0, trial.reference.first_step_s + 1))
    trial.result.notes.append(f"clock jumps by {jump_s:.0f} s after {host.after_s:.1f} s")
    attempt = trial.start(module=host.module)
    kill_step = trial.draw_step(2)
    attempt.until(lambda: trial.workdir.last_step() >= kill_step)
    attempt.kill()
    # A file server whose clock is another one.
    for path in sorted(trial.workdir.path.rglob("*")):
        os.utime(path, (path.stat().st_atime + jump_s, path.stat().st_mtime + jump_s))
    trial.record_end(attempt)


def _start_elsewhere(trial: Trial) -> None:
    """Has later starts come from one more host, which waits no longer for a holder than these."""
    trial.module = HostSpec("host-c").module
