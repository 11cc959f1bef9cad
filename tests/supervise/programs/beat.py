"""Process that beats as a training process does, but needs no jax.

    python beat.py BEHAVIOUR [ARGUMENT...]

A behaviour is a function of `BEHAVIOURS`. The file that the variable ATTEMPTS names has a byte for each
attempt: each is a process of its own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from jtrain.runtime.signals import StopRequest
from jtrain.supervise.heart import start_heart
from jtrain.supervise.spec import SuperviseSpec
from jtrain.telemetry.alerts import AlertsSpec

ATTEMPTS = os.environ["ATTEMPTS"]
LIMITS = SuperviseSpec(step_s=1, step_factor=1, stopped_s=1, save_s=1, max_restarts=2, backoff_s=0.1)

process = int(os.environ.get("JTRAIN_PROCESS_ID", "0"))
started_heart = start_heart(os.environ)
assert started_heart is not None, "a supervisor starts this program"
heart = started_heart
heart.configure(LIMITS)
heart.joined(process, 2)


def count_attempt() -> int:
    """Number of attempts so far, this one included."""
    with open(ATTEMPTS, "ab") as file:
        file.write(b"x")
        return file.tell()


def end(code: str) -> int:
    """Ends with this exit code."""
    count_attempt()
    return int(code)


def crash() -> int:
    """Crashes in each attempt at the same step."""
    heart.started(0)
    time.sleep(0.2)
    count_attempt()
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def be_killed_later_each_time() -> int:
    """Is killed in four attempts, each of which has resumed further on."""
    attempt = count_attempt()
    heart.started(attempt)
    time.sleep(1.5)
    if attempt < 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait_for_the_world() -> int:
    """Is killed, then finds what it needs away three times, more often than it may be restarted."""
    attempt = count_attempt()
    if attempt == 1:
        time.sleep(1.5)  # a beat with the limits must come first
        os.kill(os.getpid(), signal.SIGKILL)
    return 77 if attempt < 5 else 0


def fail_beside_stubborn_processes() -> int:
    """Process 1 gives up once all three run; the others ignore SIGTERM, and have started a process each."""
    count_attempt()
    if process == 1:
        while os.path.getsize(ATTEMPTS) < 3:
            time.sleep(0.05)
        print("process", process, "gives up", flush=True)
        return 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "1000"])
    print("helper", helper.pid, flush=True)
    time.sleep(1000)
    return 0


def save_when_asked() -> int:
    """Trains until it is asked to stop, and saves for half a second."""
    with StopRequest() as stop:
        count_attempt()
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(0.5)
        print("saved", flush=True)
    return 75


def waits_for_a_batch() -> None:
    """Hangs; the test looks for its name in the stack."""
    while True:
        time.sleep(0.05)


def train(at_step_5: Callable[[], None]) -> int:
    """Trains, in steps of 10 ms, until it is asked to stop."""
    heart.started(0)
    with StopRequest() as stop:
        for step in range(1, 1000):
            with heart.during("step", step):
                time.sleep(0.01)
                if step == 5:
                    at_step_5()
            if stop.requested:
                return 75
    return 0


def stop_process_1() -> int:
    """Process 1 of two is stopped by a signal, in the first attempt."""
    heart.configure(SuperviseSpec(stopped_s=1, save_s=120, max_restarts=2, backoff_s=0.1))
    if count_attempt() > 2:
        return 0
    return train(lambda: os.kill(os.getpid(), signal.SIGSTOP) if process == 1 else None)


def hang(webhook: str, file: str) -> int:
    """Makes no step, in the first attempt, and has a hang's alert sent."""
    heart.configure(LIMITS, AlertsSpec(webhook=webhook, file=file))
    return 0 if count_attempt() > 1 else train(waits_for_a_batch)


def count_twice() -> int:
    """Trains until it is asked to stop, and counts that as well."""
    with StopRequest() as stop:
        count_attempt()
        while not stop.requested:
            time.sleep(0.01)
        count_attempt()
    return 0


BEHAVIOURS: tuple[Callable[..., int], ...] = (
    end,
    crash,
    be_killed_later_each_time,
    wait_for_the_world,
    fail_beside_stubborn_processes,
    save_when_asked,
    stop_process_1,
    hang,
    count_twice,
)

name, *arguments = sys.argv[1:]
(behave,) = [behaviour for behaviour in BEHAVIOURS if behaviour.__name__ == name]
sys.exit(behave(*arguments))
