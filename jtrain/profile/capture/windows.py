"""Trace windows of a run: when they open and close, and the postprocessing that writes their reports."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.profile.spec import WINDOW_STEPS, ProfileSpec
from jtrain.profile.trace_dir import FOLDER, other_parts, part_of


class Windows:
    """Trace windows of one attempt: the one of `profile.steps`, and one for each SIGUSR1.

    Inside the `with` block SIGUSR1 only sets `requested`. All processes take the same decisions, and each
    traces its own devices into its folder of the window (`part_of`). A failure to trace becomes a message;
    training goes on.

        with Windows(workdir, spec) as windows:
            ...
            if windows.decide_to_open(step, is_requested=windows.requested): windows.open(step, facts())
            with windows.step(step + 1): ...
            if windows.should_close(step, last=step == num_steps): windows.close(programs, save_samples)
    """

    def __init__(self, workdir: Path, spec: ProfileSpec, *, process: int = 0, num_processes: int = 1) -> None:
        self.requested = False
        self._folder = workdir / FOLDER
        self._spec = spec
        self._process = process
        self._num_processes = num_processes
        self._last_step: int | None = None
        self._window: Any = None
        self._opened_ns = 0
        self._window_folder = self._folder
        self._postprocessing: list[tuple[Path, subprocess.Popen[Any]]] = []
        self._previous_handler: Any = None

    @property
    def is_open(self) -> bool:
        """True while a window is open, even if this process failed to start its trace."""
        return self._last_step is not None

    def missed_message(self, start_step: int) -> str | None:
        """Message if this attempt starts too late to trace the window of `profile.steps`, else None."""
        steps = self._spec.steps
        # Step 1 of an attempt compiles, so a window that begins with it would show the compiler.
        if (
            steps is None
            or start_step < steps[0]
            or (self._folder / str(steps[0]) / "breakdown.json").exists()
        ):
            return None
        return (
            f"profile.steps={steps} is not traced: this attempt starts at step {start_step}, and its first "
            f"step compiles. kill -USR1 {os.getpid()} traces the next {WINDOW_STEPS} steps."
        )

    def decide_to_open(self, step: int, *, is_requested: bool) -> bool:
        """Decides if a window opens after `step`, and with which step it ends.

        Args:
          is_requested: True if `requested` is set in any process; must be the same in all.
        """
        if self.is_open:
            return False
        if is_requested:
            self.requested = False
            self._last_step = step + WINDOW_STEPS
        elif self._spec.steps is not None and self._spec.steps[0] == step:
            self._last_step = self._spec.steps[1]
        return self.is_open

    def open(self, step: int, facts: dict[str, Any]) -> str | None:
        """Starts the trace; call it when no step is in flight. Returns an error message, or None."""
        from jtrain.profile.capture.trace import Window

        self._window_folder = part_of(self._folder / str(step), self._process)
        self._opened_ns = time.time_ns()
        try:
            self._window_folder.mkdir(parents=True, exist_ok=True)
            self._clear_folder()
            window = Window(self._window_folder, facts=facts)
            # The lines above may fail as well, as on a full disk: the run goes on untraced.
            window.start()
        except Exception as error:  # the profiler raises many types, and none of them may end the run
            return f"no trace of the steps after {step}: {type(error).__name__}: {error}"
        self._window = window
        return None

    def _clear_folder(self) -> None:
        """Removes files of an attempt that was killed in this window, or of a signal at the same step."""
        other_folders = {} if self._process else other_parts(self._window_folder)
        # The other processes of this run clear their own folders.
        live_folders = {path for process, path in other_folders.items() if process < self._num_processes}
        for path in set(self._window_folder.iterdir()) - live_folders:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Marks one step in the trace if a window is open; wrap each step in it."""
        if self._window is None:
            yield
            return
        with self._window.step(step):
            yield

    def should_close(self, step: int, *, last: bool) -> bool:
        """True if the open window ends with `step`; the run's last step ends it early."""
        return self._last_step is not None and (last or step >= self._last_step)

    def close(
        self, programs: Callable[[], dict[str, str]], save_samples: Callable[[Path, int, int], None]
    ) -> str | None:
        """Stops the trace and starts its postprocessing as a process. Returns an error message, or None.

        Args:
          programs: returns the compiled text of the step, by module.
          save_samples: writes the clock samples between two times, in nanoseconds since the epoch, to a
            folder.
        """
        # Closed first, so that a failure below does not leave it open in this process alone.
        window, self._window, self._last_step = self._window, None, None
        if window is None:
            return None
        try:
            # The program's text is asked for only now: the step must have run to be compiled.
            window.stop(programs())
            save_samples(self._window_folder, self._opened_ns, time.time_ns())
        except Exception as error:  # as in `open`
            return f"the trace in {self._window_folder} is incomplete: {type(error).__name__}: {error}"
        environment = os.environ | {
            # The devices belong to the run; the analysis needs none.
            "JAX_PLATFORMS": "cpu",
            # Flags of the run, such as a number of emulated devices, are not meant for this process.
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        try:
            with open(self._window_folder / "postprocess.log", "wb") as log:
                command = [sys.executable, "-m", "jtrain.profile.postprocess", str(self._window_folder)]
                # A new session, so that Ctrl-C in the terminal stops only the run.
                streams: dict[str, Any] = dict(
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                self._postprocessing.append(
                    (self._window_folder, subprocess.Popen(command, env=environment, **streams))
                )
        except OSError as error:  # a full disk, or no memory for another process
            return (
                f"no report of {self._window_folder}: {error}. Later: python -m jtrain.profile.postprocess "
                f"{self._window_folder}"
            )
        return None

    def collect_reports(self, *, wait: bool = False) -> list[str]:
        """Lines for each window whose postprocessing has ended since the last call: report or error."""
        messages = []
        # A copy of the list, from which finished ones are removed.
        for folder, process in list(self._postprocessing):
            # At the end of a run there is time to wait; during it nobody may block a step.
            code = process.wait() if wait else process.poll()
            if code is None:
                continue
            self._postprocessing.remove((folder, process))
            lines: list[str] = []
            with contextlib.suppress(OSError):
                lines = (folder / "postprocess.log").read_text(errors="replace").strip().splitlines()
            if code == 0:
                messages.append(f"profile after step {folder.name}: {folder / 'report.html'}")
                messages += [f"profile after step {folder.name}: {line}" for line in lines]
                continue
            lines = lines or [f"exit code {code}"]
            messages.append(f"no report of {folder}: {lines[-1]} (full log: {folder / 'postprocess.log'})")
        return messages

    def __enter__(self) -> "Windows":
        self._previous_handler = signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(
            signal.SIGUSR1, self._previous_handler if self._previous_handler is not None else signal.SIG_DFL
        )
        if self._window is not None:  # the run failed inside the window
            window, self._window = self._window, None
            with contextlib.suppress(Exception):
                window.stop({})

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.requested = True
