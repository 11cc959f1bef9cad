"""Plan = compiler: bytes of the run's real step, by formula and by the compiler of a machine."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jtrain.check.lines import Differs, DoesNotApply
from jtrain.errors import UserError
from jtrain.plan.report.plan_sheet import TOLERANCE


class CompiledPlan:
    """Plan that another process compiles while the other lines are proved."""

    def __init__(self, words: list[str], device: str, count: int, *, is_wanted: bool = True) -> None:
        self.command = ["plan", *words, "--device", device, "--count", str(count), "--compile"]
        self.machine = f"{device}:{count}"
        self.is_wanted = is_wanted
        self.has_compiler = is_wanted and importlib.util.find_spec("libtpu") is not None
        if not self.has_compiler:
            return
        handle, name = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        self._file = Path(name)
        self._process = subprocess.Popen(
            # Behind the other lines: two cores are few.
            [sys.executable, "-m", f"jtrain.{self.command[0]}", *self.command[1:], "--json", name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Without the flag that emulates devices in this process.
            env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            preexec_fn=lambda: os.nice(5),
        )

    def proof(self, timeout_s: float) -> str:
        """Compares the two; waits for the compiler at most so long.

        Raises:
          Differs: formula and compiler are too far apart.
          DoesNotApply: there is no compiler, or it has not ended.
        """
        command = f"jtrain {' '.join(self.command)}"
        if not self.is_wanted:
            raise DoesNotApply(f"left out. `{command}` shows it")
        if not self.has_compiler:
            raise DoesNotApply(
                f"no compiler is here. pip install 'jtrain[aot]', or run `{command}` where it is"
            )
        try:
            _, errors = self._process.communicate(timeout=max(timeout_s, 0.1))
        except subprocess.TimeoutExpired:
            self.close()
            raise DoesNotApply(f"the compiler of {self.machine} needs longer. Run `{command}`") from None
        document = json.loads(self._file.read_text() or "{}")
        compiled, formula = document.get("compiler"), document.get("formula")
        self.close()
        last = errors.strip().splitlines()[-1:] or [""]
        if not compiled:
            raise UserError(f"{last[0].removeprefix('error: ')} (`{command}`)")
        difference = formula["peak_bytes"] / compiled["peak_bytes"] - 1
        text = (
            f"{formula['peak_bytes'] / 2**30:.2f} GiB by formula and {compiled['peak_bytes'] / 2**30:.2f} "
            f"by the compiler of {self.machine}, {difference:+.1%}, bound {TOLERANCE:.0%}"
        )
        if abs(difference) > TOLERANCE:
            raise Differs(text)
        if self._process.returncode:
            raise UserError(f"{text}; {last[0].removeprefix('error: ')}")
        return text

    def close(self) -> None:
        """Ends the process, if it is still there, and removes its file."""
        if self.has_compiler:
            if self._process.poll() is None:
                self._process.kill()
                self._process.communicate()
            self._file.unlink(missing_ok=True)
