"""Stopping a run by signals."""

import contextlib
import os
import signal
import subprocess
import threading

import pytest

from jtrain.runtime.multihost import agree
from jtrain.runtime.signals import StopRequest
from tests.processes import program


def start(saving_ticks: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        program(__file__, "loop_until_stopped", saving_ticks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "looping\n"
    return process


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_loop_with_a_save(number: signal.Signals) -> None:
    """The first signal prints a message and interrupts nothing."""
    process = start(1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output == "saving\nsaved\n"
    assert errors.strip() == f"{number.name}: stopping after this step, with a checkpoint."


def test_the_second_ctrl_c_says_that_it_saves_and_the_third_stops_at_once() -> None:
    """A save that hangs can be left with a third Ctrl-C."""
    process = start(3000)
    assert process.stdout is not None
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    said = [process.stderr.readline() for _ in range(4)]
    assert said[1].startswith("SIGINT: stopping")
    assert said[3].startswith("Still saving the checkpoint. Ctrl-C once more to stop at once")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
    assert output == ""


def test_sigterm_asks_however_often_it_comes() -> None:
    """Schedulers repeat SIGTERM, and a save must survive that."""
    process = start(50)
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output == "saved\n"
    assert errors.count("stopping after this step") == 1


def test_the_previous_handlers_come_back() -> None:
    """The handlers return after an error inside the block too."""
    calls: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with contextlib.suppress(RuntimeError), StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("inside")
        assert stop.requested
        assert signal.getsignal(signal.SIGTERM) is mine
        assert calls == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    """`nohup` starts a program with SIGHUP ignored, and it stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_counts_where_a_script_s_background_ignores_it() -> None:
    """A shell without job control starts `command &` with SIGINT ignored; `kill -INT` must still save."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_cannot_ask() -> None:
    """Python's ValueError reaches the caller."""
    errors: list[ValueError] = []

    def enter() -> None:
        try:
            with StopRequest():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_one_process_agrees_with_itself() -> None:
    """One process gets its own flags; for several processes see tests/checkpoint/test_processes.py."""
    assert agree(True, False) == (True, False)
    assert agree(False) == (False,)
