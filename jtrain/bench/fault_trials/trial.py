"""One trial: a training with one fault, the same command until done, and a comparison of the result."""

import contextlib
import random
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.bench.fault_trials.kinds import FaultKind, FaultResult
from jtrain.bench.fault_trials.lab import FaultLab
from jtrain.bench.fault_trials.processes import StillRunning, TrialAttempt, end_descendants, end_strays
from jtrain.bench.fault_trials.recipe import EVERY_STEPS, LAUNCH, NUM_STEPS
from jtrain.bench.fault_trials.stores.google_storage import BUCKET
from jtrain.bench.fault_trials.stores.loopback_store import LoopbackStore, StoreWorkdir
from jtrain.bench.fault_trials.workdir import StateBefore, Workdir, resumed_from
from jtrain.runtime.exit_codes import AWAY, DONE, FAULTY_HARDWARE, REFUSED, STOPPED

MOST_ATTEMPTS = 4
"""Times that the same command is started again after the fault."""


SHORTEST_LIMIT_S, LIMIT_RUNS = 120.0, 20
"""Time in which an attempt must end, before it counts as a hang: at least so long, or so many unbroken
runs."""


class Trial:
    """Folder, command and random numbers of one trial.

    workdir: of the training.
    reference: run to compare with.
    recipe, module: what `start` starts; a kind may change them, and the reference, before its first attempt.
    compared: first words of the names of the arrays whose final values are compared.
    cleanups: called at the end of the trial.
    span: steps from the last logged one within which a fault is drawn: a sequence leaves some for the next.
    part: index of the kind of a sequence that is being injected.
    """

    def __init__(self, kind: FaultKind, lab: FaultLab, folder: Path, seed: int) -> None:
        self.kind = kind
        self.lab = lab
        self.recipe = lab.recipe.changed(*kind.sets)
        self.reference = lab.reference(self.recipe)
        self.folder = folder
        # Kind and seed give the same trial again, whatever ran before it.
        self.rng = random.Random(f"{kind.name} {seed}")
        self.workdir = Workdir(folder / "workdir")
        self.environ: dict[str, str] = {}
        self.loopback: LoopbackStore | None = None
        self.result = FaultResult(kind.name, seed, self.recipe.num_processes)
        self.module: tuple[str, ...] = (LAUNCH,)
        self.compared: tuple[str, ...] = ("",)
        self.cleanups = contextlib.ExitStack()
        self.output = ""
        self.span = NUM_STEPS
        self.part = 0
        self.attempts: list[TrialAttempt] = []
        self._before: dict[TrialAttempt, StateBefore] = {}
        # Kinds from this one on may have cost the next start more than an interval.
        self._unpaid_part = 0

    def from_half(self) -> None:
        """Gives the trial a workdir whose run was killed after two checkpoints, unless a sequence has made
        one.
        """
        if not self.workdir.logged():
            half = self.lab.half(self.recipe)
            shutil.copytree(half, self.workdir.path, symlinks=True, dirs_exist_ok=True)

    def draw_step(self, margin: int) -> int:
        """Draws a step that is not logged yet, at least `margin` before the last one where possible."""
        first = self.workdir.last_step() + 1
        return self.rng.randint(first, max(first, min(NUM_STEPS - margin, first + self.span)))

    def start(self, *extra_arguments: str, workdirs: Sequence[Path] = (), **options: Any) -> TrialAttempt:
        """Starts the training; see `RunRecipe.start`."""
        options.setdefault("module", self.module)
        # Generous, since an attempt that is merely slow must not count as a hang.
        options.setdefault("limit_s", max(SHORTEST_LIMIT_S, LIMIT_RUNS * self.reference.end_s))
        options.setdefault("environ", self.environ)
        logs = self.folder / f"attempt{len(self.attempts)}"
        # Taken before the start, which changes all of them.
        state_before = StateBefore.of(self.workdir, self.part)
        names = [self.workdir.url] if isinstance(self.workdir, StoreWorkdir) else [self.workdir.path]
        attempt = self.recipe.start(workdirs or names, logs, *extra_arguments, **options)
        self.attempts.append(attempt)
        self._before[attempt] = state_before
        return attempt

    def victims(self) -> list[int]:
        """Draws the processes that a fault hits: all of them in one third of the trials."""
        everyone = list(range(self.recipe.num_processes))
        # All at once, as when a machine fails; some of them, as when one machine of several does.
        if len(everyone) == 1 or self.rng.random() < 1 / 3:
            return everyone
        return sorted(self.rng.sample(everyone, self.rng.randint(1, len(everyone) - 1)))

    def kill(self, attempt: TrialAttempt) -> None:
        """Kills drawn processes; the rest of the run is killed up to two seconds later, as by a scheduler."""
        victims = self.victims()
        attempt.kill(victims)
        self.result.notes.append(f"killed processes {victims}")
        end_s = time.monotonic() + self.rng.uniform(0, 2)
        attempt.until(lambda: time.monotonic() > end_s, poll_s=0.01)
        attempt.kill()
        self.record_end(attempt)

    def let_train(self, attempt: TrialAttempt) -> bool:
        """Waits for the end of an attempt and notes what it left; True if it ended by itself.

        With more of a sequence to come, it is killed some steps later: a finished run has no faults.
        """
        if self.part + 1 < len(self.kind.parts):
            kill_step = self.draw_step(1)
            attempt.until(lambda: self.workdir.last_step() >= kill_step)
            attempt.kill()
        attempt.wait()
        self.record_end(attempt)
        return not attempt.killed

    def record_end(self, attempt: TrialAttempt) -> None:
        """Notes what an ended attempt said and left."""
        self.check_strays()
        text = attempt.text()
        self.output += text
        for index, code in attempt.codes.items():
            # A killed attempt may end in any way; others only with codes that mean something.
            if not attempt.killed and code not in (DONE, REFUSED, STOPPED, FAULTY_HARDWARE, AWAY):
                self.wrong(f"process {index} ended with {code}: {_last_lines(attempt.logs[index])}")
        self._check_resumed(attempt, text)

    def check_strays(self) -> None:
        """Waits for the end of all processes below the harness; notes those that stay."""
        for name in end_strays():
            self.wrong(f"a process stayed behind: {name}")

    def wrong(self, text: str) -> None:
        """Notes something wrong."""
        self.result.wrong.append(text)

    def run(self) -> FaultResult:
        """Injects the fault, starts the same command until it is done, and compares."""
        start_s = time.monotonic()
        self.folder.mkdir(parents=True)
        try:
            if self.kind.in_store:
                self._use_store()
            # The kind starts the first attempt itself.
            self.kind.inject(self)
            self._finish()
            self._compare()
        except StillRunning as hang:
            self.wrong(f"{hang}: {_last_lines(self.attempts[-1].logs[0])}")
        finally:
            # Processes first: they may still write to a disk that the cleanups unmount.
            end_descendants()
            self.cleanups.close()
        self.result.seconds = time.monotonic() - start_s
        # Files of a failed trial stay for whoever looks for the reason.
        if self.result.wrong:
            self.result.failed_folder = self.folder
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.result

    def _use_store(self) -> None:
        """Puts the workdir into an object store of the trial's own."""
        self.loopback = LoopbackStore(self.folder / "store")
        self.cleanups.callback(self.loopback.close)
        # Of all trials: the compiled step is in it too.
        cache = self.lab.folder / "cache"
        bucket = self.loopback.folder / BUCKET
        self.workdir = StoreWorkdir(bucket / f"{self.folder.name}", cache=cache)
        self.environ = self.loopback.environ | {"XDG_CACHE_HOME": str(cache)}

    def again(self, *extra_arguments: str) -> TrialAttempt:
        """Starts the same command once more, waits for its end, and counts what it did again."""
        attempt = self.start(*extra_arguments)
        first_step_s: list[float] = []

        def new_step() -> bool:
            resumed = resumed_from(attempt.text())
            # The first new step: one after the step that it resumed from, or step 1.
            return f"step {(resumed or 0) + 1}/" in attempt.text()

        if attempt.until(new_step, poll_s=0.01):
            first_step_s.append(time.monotonic() - attempt.started_s)
            self.result.times_s["again"] = max(self.result.times_s.get("again", 0.0), first_step_s[0])
        attempt.wait()
        self.record_end(attempt)
        return attempt

    def _check_resumed(self, attempt: TrialAttempt, text: str) -> None:
        """Checks where a start went on, if it came to a new step; of a supervised one, its first attempt."""
        state_before = self._before[attempt]
        text = re.split(r"^supervise .*: restart \d+ of", text, maxsplit=1, flags=re.MULTILINE)[0]
        first_resumed = re.search(r"resumed from step (\d+)", text)
        resumed = int(first_resumed[1]) if first_resumed else 0
        if f"step {resumed + 1}/" not in text:
            return
        if attempt is not self.attempts[0]:
            self._note_lost(resumed, state_before.logged_step)
        # A save every EVERY_STEPS, and one more interval for a save that was under way.
        parts = self.kind.parts or (self.kind,)
        lost_steps = sum(part.lost_steps for part in parts[self._unpaid_part : state_before.part + 1])
        self._unpaid_part = state_before.part
        if resumed < state_before.due_step - EVERY_STEPS - lost_steps:
            self.wrong(
                f"more than one interval lost: at step {state_before.logged_step}, resumed from step "
                f"{resumed}"
            )
        if resumed < state_before.newest and not re.search(
            # A newer folder that was passed over must be named in the output.
            rf"checkpoints/{state_before.newest}\b|step {state_before.newest}\b(?!/)",
            text,
        ):
            self.wrong(f"resumed from step {resumed} without a word on checkpoints/{state_before.newest}")
        # A whole checkpoint that is not used is lost work.
        if resumed < state_before.committed and not lost_steps:
            self.wrong(
                f"resumed from step {resumed}, although the checkpoint of step {state_before.committed} is "
                "whole"
            )
        # A step without a checkpoint cannot be resumed from: the state would be of another step.
        if resumed > state_before.committed:
            self.wrong(
                f"resumed from step {resumed}, but the newest checkpoint was that of step "
                f"{state_before.committed}"
            )

    def count_lost(self, text: str, logged_step: int) -> None:
        """Notes a start that went on and the steps up to `logged_step` done again."""
        self._note_lost(resumed_from(text) or 0, logged_step)

    def _note_lost(self, resumed: int, logged_step: int) -> None:
        self.result.recoveries += 1
        self.result.lost_steps = max(self.result.lost_steps, logged_step - resumed)

    def _finish(self) -> None:
        for _ in range(MOST_ATTEMPTS):
            attempt = self.again()
            # One code for all: processes of a run end alike.
            codes = set(attempt.codes.values())
            if codes == {DONE}:
                break
            if codes & {REFUSED, AWAY}:
                self._check_refusal(attempt)
                if self.result.wrong or self.kind.mend is None:
                    return
                self.kind.mend(self)
            elif not codes <= {DONE, STOPPED, FAULTY_HARDWARE}:
                return
        # No start ended with DONE.
        else:
            self.wrong(f"not done after {MOST_ATTEMPTS} starts of the same command")
        if self.kind.must_refuse and not self.result.refused:
            self.wrong("the run went on where it has to refuse")
        if self.kind.says is not None and not re.search(self.kind.says, self.output):
            self.wrong(f"nothing in the output matches {self.kind.says!r}")

    def _check_refusal(self, attempt: TrialAttempt) -> None:
        """A refusal comes before step 1, without a traceback, and names the way out; then it is taken."""
        self.result.refused = True
        text = attempt.text()
        # The last error of the output is the refusal.
        message = text[text.rfind("error:") :].strip()
        if self.kind.refused is None:
            self.wrong(f"refused: {message}")
        elif not re.search(self.kind.refused, message, re.DOTALL):
            self.wrong(f"refused without the way out (expected {self.kind.refused!r}): {message}")
        if re.search(r"^step \d+/", text, re.MULTILINE):
            self.wrong("refused after a step")
        if "Traceback" in text:
            self.wrong(f"a traceback: {_last_lines(attempt.logs[0])}")

    def _compare(self) -> None:
        # Nothing to compare after a failure, or where a refusal is the right end.
        if self.result.wrong or (self.result.refused and self.kind.mend is None):
            return
        want = {step.step: step for step in self.reference.steps}
        got = self.workdir.logged()
        numbers = [step.step for step in got]
        # A run that resumes drops the lines of the steps that it does again (`metrics.drop_after`).
        if numbers != sorted(set(numbers)):
            self.wrong(f"lines of metrics.jsonl are not one per step: {numbers}")
        if not self.kind.lines_lost and set(numbers) != set(want):
            self.wrong(f"lines of metrics.jsonl are missing: steps {sorted(set(want) - set(numbers))}")
        # Bit for bit: losses are compared as text.
        for step in got:
            if step != want.get(step.step):
                self.wrong(f"step {step.step} diverges: {step}, unbroken: {want.get(step.step)}")
                # One line is enough: all later steps differ too.
                break
        want_committed = self.reference.committed
        got_committed = self.workdir.committed()
        stray_names = {
            name
            for name in self.workdir.entries() - self.reference.entries
            if self.kind.leaves is None or not re.search(self.kind.leaves, name)
        }
        if stray_names:
            self.wrong(f"files that an unbroken run does not leave: {sorted(stray_names)}")
        is_expected = got_committed == want_committed
        if self.kind.may_keep_others:
            is_expected = got_committed[-1:] == want_committed[-1:] and len(got_committed) >= len(
                want_committed
            )
        if not is_expected:
            self.wrong(f"checkpoints {got_committed}, unbroken: {want_committed}")
        # Without the last checkpoint there is no final state to compare.
        if want_committed[-1] not in got_committed:
            return
        got_digests = self.workdir.digests(want_committed[-1], self.folder / "digests.log")
        want_digests = self.reference.digests
        names = [name for name in {**want_digests, **got_digests} if name.startswith(self.compared)]
        leaves = [name for name in names if want_digests.get(name) != got_digests.get(name)]
        if leaves:
            self.wrong(
                f"the final state diverges in {len(leaves)} of {len(names)} arrays, such as {leaves[:3]}"
            )


def inject_and_compare(kind: FaultKind, lab: FaultLab, name: str, seed: int) -> FaultResult:
    """Runs a trial in the folder `name`, unless this machine cannot do it."""
    # Checked per trial, because a machine may be unable to do a kind (no root, no mount).
    reason = kind.needs()
    if reason is not None:
        return FaultResult(kind.name, seed, lab.recipe.num_processes, skipped=reason)
    return Trial(kind, lab, lab.folder / name, seed).run()


def _last_lines(log: Path, count: int = 6) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(log.read_text(errors="replace").strip().splitlines()[-count:])
    return ""
