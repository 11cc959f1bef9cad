"""When a trace window opens and closes, and what is made of it afterwards."""

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

FOLDER = "profile"
"""In a workdir: what holds one folder per trace window, named by the step before it."""


def part_of(window: Path, process: int) -> Path:
    """Where a process leaves its trace and its report: the first in the window's folder, each other in one in it."""
    return window if process == 0 else window / f"process-{process}"


def other_parts(window: Path) -> dict[int, Path]:
    """The folders of the other processes that are there, by process."""
    found = {p.name.removeprefix("process-"): p for p in window.glob("process-*") if p.is_dir()}
    return dict(sorted((int(index), p) for index, p in found.items() if index.isdecimal()))


class Windows:
    """The windows of one attempt: the one of `profile.steps`, and one for each SIGUSR1.

    Entered, SIGUSR1 only sets `requested`. Every process takes the same decisions and traces its own devices, into
    `part_of` the window. One that cannot be traced is said, and training goes on.

        with Windows(workdir, spec) as windows:
            ...
            if windows.opens(step, asked=windows.requested): windows.open(step, facts())
            with windows.step(step + 1): ...
            if windows.closes(step): windows.close(program)
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
        self._here = self._folder
        self._finishing: list[tuple[Path, subprocess.Popen[Any]]] = []
        self._before: Any = None

    @property
    def is_open(self) -> bool:
        """Whether steps are traced now, in whichever process."""
        return self._last_step is not None

    def missed(self, start_step: int) -> str | None:
        """What to say of a window that this attempt cannot trace, since it begins in or after it."""
        steps = self._spec.steps
        if steps is None or start_step < steps[0] or (self._folder / str(steps[0]) / "breakdown.json").exists():
            return None
        return (
            f"profile.steps={steps} is over: this attempt began at step {start_step}, whose first step compiles. "
            f"kill -USR1 {os.getpid()} traces the next {WINDOW_STEPS} steps."
        )

    def opens(self, step: int, *, asked: bool) -> bool:
        """Whether a window opens after `step`; `asked` is what the processes agree on of `requested`."""
        if self.is_open:
            return False
        if asked:
            self.requested = False
            self._last_step = step + WINDOW_STEPS
        elif self._spec.steps is not None and self._spec.steps[0] == step:
            self._last_step = self._spec.steps[1]
        return self.is_open

    def open(self, step: int, facts: dict[str, Any]) -> str | None:
        """Starts the trace; call it when no step is in flight. Returns what went wrong, if something did."""
        from jtrain.profile.trace import Window

        self._here = part_of(self._folder / str(step), self._process)
        self._here.mkdir(parents=True, exist_ok=True)
        self._clear()
        self._opened_ns = time.time_ns()
        try:
            window = Window(self._here, facts=facts)
            window.start()
        except Exception as error:  # of the profiler, which raises many kinds; a trace is not worth the run
            return f"no trace of the steps after {step}: {type(error).__name__}: {error}"
        self._window = window
        return None

    def _clear(self) -> None:
        """Removes what is here of an attempt that was killed in this window, or of a signal at the same step."""
        others = {} if self._process else other_parts(self._here)
        theirs = {path for process, path in others.items() if process < self._num_processes}  # they clear themselves
        for path in set(self._here.iterdir()) - theirs:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step: in a window marks it in the trace."""
        if self._window is None:
            yield
            return
        with self._window.step(step):
            yield

    def closes(self, step: int, *, last: bool) -> bool:
        """Whether the open window ends with `step`; the run's last step ends it early."""
        return self._last_step is not None and (last or step >= self._last_step)

    def close(
        self, programs: Callable[[], dict[str, str]], save_samples: Callable[[Path, int, int], None]
    ) -> str | None:
        """Stops the trace and starts to read it, in a process of its own. Returns what went wrong, if something did.

        Args:
          programs: gives the compiled text of the step, by module.
          save_samples: writes the clocks between two times, in nanoseconds since the epoch, into a folder.
        """
        window, self._window, self._last_step = self._window, None, None
        if window is None:
            return None
        try:
            window.stop(programs())
            save_samples(self._here, self._opened_ns, time.time_ns())
        except Exception as error:  # as above
            return f"the trace in {self._here} is not whole: {type(error).__name__}: {error}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(self._here / "finish.log", "wb") as log:
            command = [sys.executable, "-m", "jtrain.profile.finish", str(self._here)]
            # In a session of its own: Ctrl-C is for the run.
            streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            self._finishing.append((self._here, subprocess.Popen(command, env=environment, **streams)))
        return None

    def finished(self, *, wait: bool = False) -> list[str]:
        """What came of windows since the last call: a line each."""
        said = []
        for folder, process in list(self._finishing):
            code = process.wait() if wait else process.poll()
            if code is None:
                continue
            self._finishing.remove((folder, process))
            lines = (folder / "finish.log").read_text(errors="replace").strip().splitlines()
            if code == 0:
                but = f" ({lines[-1]})" if lines else ""
                said.append(f"profile after step {folder.name}: {folder / 'report.html'}{but}")
                continue
            lines = lines or [f"exit code {code}"]
            said.append(f"no report of {folder}: {lines[-1]} (all of it: {folder / 'finish.log'})")
        return said

    def __enter__(self) -> "Windows":
        self._before = signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        signal.signal(signal.SIGUSR1, self._before if self._before is not None else signal.SIG_DFL)
        if self._window is not None:  # the run failed in the window
            window, self._window = self._window, None
            with contextlib.suppress(Exception):
                window.stop({})

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.requested = True
