"""The supervisor's loop: start the processes, watch them, end them in bounded time, start them again."""

import contextlib
import dataclasses
import os
import signal
import socket
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.signals import stop_signals
from jtrain.supervise.child import WatchedProcess
from jtrain.supervise.hosts import Hosts
from jtrain.supervise.restarts import AWAY_S, NEVER_RESTARTED, Restarts, describe_exit, shell_code
from jtrain.supervise.spec import SuperviseSpec
from jtrain.supervise.start_processes import start_processes
from jtrain.supervise.verdict import Hang, find_hang
from jtrain.telemetry.alerts import Alerts, AlertsSpec

TICK_S = 0.1
ALIVE_FILE = "JTRAIN_HEARTBEAT_FILE"
"""Environment variable with a file that the supervisor touches ten times a second, for the probes of
Kubernetes."""
SAME_END_S = 3.0
"""Time for the other processes to end by themselves after the first: the same mistake has a message in
each."""
END_S = 5.0
"""Time between SIGTERM and SIGKILL where no save can be hoped for."""
FROZEN_S = 5.0
"""A tick that took longer means that this process was stopped or the machine suspended: then no verdict is
passed."""
OTHERS_END_S = 60.0
ASK_S = 1.0
"""Time between two looks at the file of the other hosts."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt ended before its time.

    cause: one line that names host and process.
    code: exit code if the run is not started again.
    final: it must not be started again here.
    is_told: the supervisors of other hosts know of it.
    save: the processes may save before they end.
    """

    cause: str
    code: int
    final: bool = False
    is_told: bool = False
    save: bool = False


class Supervisor:
    """Runs one command in one or several processes on this host until it is done, refused or given up.

    Args:
      command: argument vector of a training process.
      environ: environment; names the coordinator and this process's number where there are several hosts.
      processes: processes on this host. With more than one they find each other over a free port on
        localhost.
      workdir: the run's folder; supervisors of several hosts meet there. None for an object store, where they
        rely on jax's own heartbeat and on the time limits.

    Raises:
      UserError: `processes` is not positive, or contradicts the environment.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], *, processes: int, workdir: Path | None
    ) -> None:
        if processes < 1:
            raise UserError(f"--processes {processes} must be at least 1.")
        if processes > 1 and "JTRAIN_COORDINATOR" in environ:
            raise UserError(
                f"--processes {processes} starts all processes of a run on this host, but JTRAIN_COORDINATOR="
                f"{environ['JTRAIN_COORDINATOR']} names others. Unset it, or start one process on each host."
            )
        self._command, self._environ, self._processes = list(command), dict(environ), processes
        self._alive = environ.get(ALIVE_FILE)
        self._host = socket.gethostname()
        self._workdir = workdir
        self._hosts: Hosts | None = None
        self._children: list[WatchedProcess] = []
        self._restarts = Restarts()
        self._signals: list[signal.Signals] = []
        self._stopping: signal.Signals | None = None
        self._last_look_s = 0.0
        self._limits = SuperviseSpec()  # until a process has read the config
        self._alerts: tuple[AlertsSpec, Alerts] | None = None  # from the first hang on, for all attempts

    def run(self) -> int:
        """Runs the command; returns the exit code."""
        with self._handle_signals_and_end_children():
            try:
                return self._run_attempts()
            finally:
                if self._alerts is not None:
                    self._alerts[1].close()
                if self._hosts is not None:
                    self._hosts.close()

    def _run_attempts(self) -> int:
        while True:
            # All start before any is watched: they wait for each other when they join.
            self._children = []
            for child in start_processes(
                self._command, self._environ, count=self._processes, host=self._host
            ):
                # One by one: if a later one cannot be started, `_handle_signals_and_end_children` ends those before it.
                self._children.append(child)
            failure = self._watch_attempt()
            if failure is None:
                return self._exit_code()
            # The other processes of this host may still run.
            self._end_processes(save=failure.save)
            # The cause that another host announced goes first, where both saw the fault.
            code = self._decide_restart(self._failure_elsewhere() or failure)
            if code is not None:
                return code

    def _decide_restart(self, failure: Failure) -> int | None:
        """Returns the exit code to end with after a failure, or None after the pause before a restart."""
        # A signal came first: processes that saved and ended did what they were asked to.
        if self._stopping is not None and all(
            child.code in (exit_codes.DONE, exit_codes.STOPPED) for child in self._children
        ):
            return self._exit_code()
        if failure.final or self._stopping is not None:
            self._announce(failure, final=failure.code)
            if failure.code == exit_codes.FAULTY_HARDWARE:
                say(
                    f"host {self._host} is to be replaced (exit code {failure.code}); the same command goes "
                    "on without"
                )
            elif self._stopping is not None:
                say(
                    f"stopped on {self._stopping.name}, but not all processes saved; the last checkpoint "
                    "stands"
                )
            return failure.code
        # Counts this failure; resumed steps reset the count in `_note_progress`.
        is_away = failure.code == exit_codes.AWAY
        pause_s = (
            self._restarts.away_pause_s(self._limits, now_s=time.monotonic())
            if is_away
            else self._restarts.pause_s(self._limits)
        )
        if pause_s is None:
            self._announce(failure, final=failure.code)
            say(
                f"given up: what the run needs was away for {AWAY_S:g} s; exit code {failure.code}"
                if is_away
                else f"given up after {self._restarts.failures - 1} restarts without a new checkpoint "
                f"(supervise.max_restarts={self._limits.max_restarts}); exit code {failure.code}"
            )
            return failure.code
        self._announce(failure, final=None)
        pause_text = f"in {pause_s:g} s" if pause_s else "at once"
        say(
            f"what the run needs is away (exit code {failure.code}): trying again {pause_text}"
            if is_away
            else f"restart {self._restarts.failures} of {self._limits.max_restarts} {pause_text}"
        )
        # The probe's file is touched during the pause, too.
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s and not self._signals:
            self._tick()
        if self._hosts is not None:
            # All hosts start together, or a new process joins the old coordinator.
            self._hosts.wait_ended(timeout_s=OTHERS_END_S)
        if self._signals:
            say(f"{self._signals[0].name} during the pause: no process runs; the same command goes on")
            return exit_codes.STOPPED
        return None

    def _announce(self, failure: Failure, *, final: int | None) -> None:
        if self._hosts is not None and (final is not None or not failure.is_told):
            self._hosts.announce(failure.cause, final=final, save=failure.save)

    def _tick(self) -> None:
        """Waits for a moment; touches the file by which a probe knows that this process works."""
        if self._alive:
            with contextlib.suppress(OSError):  # a full disk must not end a healthy run
                Path(self._alive).touch()
        time.sleep(TICK_S)  # processes end, and heartbeats and hosts stay away, without telling

    def _watch_attempt(self) -> Failure | None:
        """Watches an attempt; returns None once all processes have ended well or as they were asked to."""
        tick_s = time.monotonic()
        frozen_until_s = 0.0
        while True:
            self._tick()
            before_s, tick_s = tick_s, time.monotonic()
            # Signals first: they set `_stopping`, by which the end of a process is judged.
            self._pass_signals()
            self._note_progress()
            if failure := self._first_failure() or self._failure_elsewhere():
                return failure
            if all(child.code is not None for child in self._children):
                return None
            if tick_s - before_s > FROZEN_S:
                # Until then the heartbeats that waited in the pipes are read.
                frozen_until_s = tick_s + FROZEN_S
            if tick_s > frozen_until_s and (hang := self._find_hang()):
                return self._report_hang(hang)

    def _first_failure(self) -> Failure | None:
        """Returns the failure of the first process that ended badly; others get a moment to end."""
        failed = self._failed_children()
        if not failed:
            return None
        # The others usually end because the first one is gone.
        first = min(failed, key=lambda child: child.ended_s or 0.0)
        assert first.code is not None
        first.join()  # its last lines come before the verdict
        position = "" if first.beat is None else f", in phase {first.beat.phase} of step {first.beat.step}"
        cause = f"{first.name} {describe_exit(first.code)}{position}"
        if first.code != exit_codes.REFUSED:
            say(cause)
        # A process that a signal killed made no mistake that the others would report as well.
        until_s = time.monotonic() + (SAME_END_S if first.code >= 0 else 0.0)
        while time.monotonic() < until_s and any(child.code is None for child in self._children):
            self._tick()
        for child in self._failed_children():
            if child is not first and child.code != first.code:
                say(f"then {child.name} {describe_exit(child.code or 0)}")
        return Failure(cause, shell_code(first.code), final=first.code in NEVER_RESTARTED)

    def _failed_children(self) -> list[WatchedProcess]:
        good_codes = (None, exit_codes.DONE, exit_codes.STOPPED)
        return [child for child in self._children if child.code not in good_codes]

    def _find_hang(self) -> Hang | None:
        snapshots = [child.snapshot() for child in self._children if child.code is None]
        limits = self._limits
        # Reading the other hosts' files costs time, so only once a limit comes near.
        if self._hosts is not None and any(process.quiet_s > 0.5 * limits.step_s for process in snapshots):
            snapshots += self._hosts.other_processes()
        return find_hang(snapshots, limits)

    def _report_hang(self, hang: Hang) -> Failure:
        """Reports a hang with the stacks of all processes, and asks those that still answer to save."""
        lines = hang.lines()
        for line in lines:
            say(line)
        self._send_alert(hang)
        for child in self._children:
            if child.code is None:
                say(f"stacks of {child.name}:\n{child.stacks().rstrip()}")
        # The reason, and the first culprit.
        cause = f"{lines[0]}; {lines[1]}"
        # The exit code for when restarts are used up: a host that hangs again and again is to be replaced.
        failure = Failure(cause, exit_codes.FAULTY_HARDWARE, save=True)
        self._announce(failure, final=None)
        self._end_processes(save=True)
        codes = [child.code for child in self._children]
        saved = all(code in (exit_codes.DONE, exit_codes.STOPPED) for code in codes)
        say(
            "all processes saved and ended"
            if saved
            else "all processes are ended; the last checkpoint stands"
        )
        return dataclasses.replace(failure, is_told=True)

    def _send_alert(self, hang: Hang) -> None:
        """Sends the verdict to whom the config names; a thread delivers it, while the processes are ended."""
        spec = next((child.alerts for child in self._children if child.alerts is not None), None)
        if spec is None:
            return
        if self._alerts is None or self._alerts[0] != spec:  # kept over restarts, for alerts.repeat_minutes
            self._alerts = spec, Alerts(spec, Path(), say=say)
        processes = hang.culprits or hang.waiting_processes
        step = max((process.step for process in processes), default=0)
        self._alerts[1].send(
            "hang", step, "; ".join(hang.lines()), processes=[process.name for process in processes]
        )

    def _end_processes(self, *, save: bool) -> None:
        """Ends all processes and what they started: SIGTERM, then SIGKILL.

        Args:
          save: give them supervise.save_s to begin a save, and as long as it takes to end it.
        """
        running = [child for child in self._children if child.code is None]
        for child in running:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)  # a stopped process does nothing until it is continued
        limits = self._limits
        until_s = time.monotonic() + (limits.save_s if save else END_S)
        while any(child.code is None for child in running):
            # A process that began to save may end it, as long as its heart still beats.
            saving = save and any(
                child.code is None
                and child.snapshot().phase == "checkpoint"
                and child.snapshot().beat_age_s < END_S
                for child in running
            )
            if time.monotonic() > until_s + (limits.checkpoint_s if saving else 0.0):
                break
            self._tick()
        for child in running:
            child.kill()
        for child in self._children:
            child.join()

    def _note_progress(self) -> None:
        """Reads time limits, start step and number of processes from the heartbeats of this host's processes.

        If there are more processes than this host has, meets the supervisors of the other hosts; from then on
        tells them at each call how the processes of this host are.
        """
        beats = [child.beat for child in self._children if child.beat is not None]
        for beat in beats:
            if beat.limits is not None:
                self._limits = beat.limits
            if beat.start_step is not None:
                self._restarts.note_start(beat.start_step)
            if self._hosts is None and self._workdir is not None and beat.process is not None:
                processes = beat.processes or 0
                # More than this host starts: there are other hosts, and each has one process (`__init__`).
                if processes > self._processes:
                    self._hosts = Hosts(self._workdir, process=beat.process, processes=processes)
        if self._hosts is not None:
            self._hosts.tell([child.snapshot() for child in self._children])

    def _failure_elsewhere(self) -> Failure | None:
        """Returns the failure that another supervisor announced, or that it has taken this one's place."""
        if self._hosts is None or all(child.code == exit_codes.DONE for child in self._children):
            return None
        if (holder := self._hosts.replaced_by) is not None:
            cause = f"the place of this supervisor was taken by {holder}"
            say(cause)
            self._hosts.close()
            self._hosts = None  # the others are not to hear of it
            return Failure(cause, exit_codes.STOPPED, final=True, is_told=True)
        now_s, running = time.monotonic(), all(child.code is None for child in self._children)
        # The file is on a shared disk; once a second is enough unless a process has ended.
        if running and now_s - self._last_look_s < ASK_S:
            return None
        self._last_look_s = now_s
        if (next_round := self._hosts.newer_round()) is None:
            return None
        # Before anything else, so that the same news is not found again.
        self._hosts.follow(next_round)
        say(f"another host says: {next_round.cause}")
        if next_round.final == exit_codes.FAULTY_HARDWARE:  # its host is to be replaced, not this one
            return Failure(next_round.cause, exit_codes.STOPPED, final=True, is_told=True)
        code = exit_codes.BUG if next_round.final is None else next_round.final
        return Failure(
            next_round.cause, code, final=next_round.final is not None, is_told=True, save=next_round.save
        )

    def _exit_code(self) -> int:
        for child in self._children:
            child.join()
        codes = {child.code for child in self._children}
        return exit_codes.STOPPED if exit_codes.STOPPED in codes else exit_codes.DONE

    def _pass_signals(self) -> None:
        while self._signals:
            # Popped one by one: the handler may append while this loop runs.
            number = self._stopping = self._signals.pop(0)
            for child in self._children:
                child.send(number)

    @contextlib.contextmanager
    def _handle_signals_and_end_children(self) -> Iterator[None]:
        """Context in which stop signals are noted for `_pass_signals`; on leaving, kills the children that still
        run and puts the handlers back.
        """

        def on_signal(number: int, _frame: types.FrameType | None) -> None:
            # A handler may interrupt anything, so it only takes a note.
            self._signals.append(signal.Signals(number))

        previous_handlers = {number: signal.signal(number, on_signal) for number in stop_signals()}
        try:
            yield
        finally:
            for child in self._children:
                child.kill()
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def say(text: str) -> None:
    """Prints a message of the supervisor on stderr."""
    stamp = ("\r\x1b[K" if os.isatty(2) else "") + "supervise " + time.strftime("%H:%M:%S")
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"{stamp}: {line}\n" for line in text.splitlines()).encode())
