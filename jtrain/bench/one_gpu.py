"""Everything that one NVIDIA GPU can tell, in order of worth: one benchmark after another, within a budget of
time.

    python -m jtrain.bench one_gpu --out DIR --budget 540     a second call goes on where the first stopped
    python -m jtrain.bench one_gpu --out DIR --rehearse     the same steps on a CPU, with tiny shapes

Each step is a process of its own with a time limit, and DIR/rows.jsonl gets each row as soon as it is
measured. A step that has ended, well or with an error, is not done again with the same code, versions and
GPU. Nothing is downloaded.
"""

import dataclasses
import datetime
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jtrain
import jtrain_kernels
from jtrain.bench import REHEARSE, Options, Row, option, rehearsed, row
from jtrain.bench.one_gpu_parts.process import Ended, end_processes, step_rows
from jtrain.bench.one_gpu_parts.steps import STEPS, Step
from jtrain.errors import UserError, did_you_mean
from jtrain.runtime.accelerators import nvidia_gpus
from jtrain.runtime.run_files import git_commit, versions

CORE = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cudnn-cu13",
    "numpy",
    "flax",
    "optax",
    "triton",
)
"""Distributions on which every figure depends; a step's `needs` are added to them."""

DISTRIBUTIONS = {"jax_triton": "jax-triton"}
"""Package -> its distribution, where the names differ."""

RESERVE_S = 5.0
"""Seconds of the budget that are kept for ending the last step and printing the table."""


OPTIONS = (
    option("--out", type=Path, required=True, metavar="DIR", help="rows.jsonl, log.txt and the reports"),
    option(
        "--budget",
        type=float,
        default=540.0,
        metavar="SECONDS",
        help="ends within this time; a step starts only if its limit still fits (default: %(default)g)",
    ),
    option("--only", nargs="+", metavar="STEP", help=f"some of {', '.join(step.name for step in STEPS)}"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of the steps that ended earlier, and of those that are done now.

    Raises:
      UserError: no NVIDIA GPU is here, and it is no rehearsal; an unknown step; the budget is shorter than
        every limit; or another process works in the same folder.
    """
    # The budget counts from here, so imports before it are not in it.
    started_s = time.monotonic()
    steps = choose_steps(args.only)
    gpus = [] if args.rehearse else nvidia_gpus()
    if not gpus and not args.rehearse:
        raise UserError(
            "one_gpu needs an NVIDIA GPU, and nvidia-smi lists none here. Run the same command on a machine "
            "with one, or add --rehearse for the same steps with tiny shapes on this CPU."
        )
    session = GpuSession(
        args.out, args.rehearse, "CPU, rehearsal" if args.rehearse else gpus[0][0], code_digest()
    )
    # Keys hold code, versions and GPU: a step measured with others is left to do.
    remaining_steps = [step for step in steps if session.key(step) not in session.ended()]
    shortest = min((step.limit_s for step in remaining_steps), default=0)
    # Refused at once, because a call that can do nothing would end like one that is complete.
    if args.budget < shortest + RESERVE_S and remaining_steps:
        raise UserError(
            f"--budget {args.budget:g} is too short for any step that is left: the shortest has a limit of "
            f"{shortest} s, and {RESERVE_S:g} s are kept for the end. Give {shortest + RESERVE_S:g} or more."
        )
    # Locked before processes are ended: they could be those of another call.
    with session.locked():
        end_processes(session.out)  # of a call that was killed
        session.begin(args.budget, steps)
        for step in steps:
            # The reserve is for ending the last step and the table.
            yield from session.carry_out(step, until_s=started_s + args.budget - RESERVE_S)
    ended = session.ended()
    missed = [step.name for step in steps if session.key(step) not in ended]
    print(f"{len(steps) - len(missed)} of {len(steps)} steps have ended; rows: {session.rows_file}")
    if missed:
        print(f"not begun for lack of time: {', '.join(missed)}. The same command goes on with them.")


def choose_steps(names: Sequence[str] | None) -> list[Step]:
    """The steps of these names, in their own order; without names, all.

    Raises:
      UserError: no step has such a name.
    """
    by_name = {step.name: step for step in STEPS}
    for name in names or ():
        if name not in by_name:
            raise UserError(
                f"--only {name}: no such step. {did_you_mean(name, by_name)}There are: {', '.join(by_name)}."
            )
    # The order of worth, not that of the command line.
    return [step for step in STEPS if names is None or step.name in names]


def absent_packages(packages: Sequence[str]) -> list[str]:
    """Packages of the list that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def describe_missing(steps: Sequence[Step]) -> list[str]:
    """One line per package that is not installed, with the steps that fail or lack kernels without it."""
    lines: list[str] = []
    for package in absent_packages(
        sorted({package for step in steps for package in (*step.needs, *step.uses)})
    ):
        failing = [step.name for step in steps if package in step.needs]
        lesser = [step.name for step in steps if package in step.uses]
        parts = [f"rows with that error: {', '.join(failing)}"] * bool(failing)
        parts += [f"its kernels are left out of: {', '.join(lesser)}"] * bool(lesser)
        lines.append(f"{package} ({'; '.join(parts)})")
    return lines


def code_digest() -> str:
    """Digest of the sources of jtrain, its kernels and configs: also of a tree with uncommitted changes."""
    packages = [Path(module.__file__ or "").parent for module in (jtrain, jtrain_kernels)]
    digest = hashlib.sha256()
    for folder in (*packages, packages[0].parent / "configs"):
        # Sorted, and with names: the digest must not depend on the file system.
        for file in sorted(folder.rglob("*.py")):
            # The zero byte keeps name and content apart.
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class GpuSession:
    """The folder of --out, and what its rows depend on.

    gpu: name of the device.
    code: digest of the sources.
    """

    out: Path
    rehearse: bool
    gpu: str
    code: str

    @property
    def rows_file(self) -> Path:
        return self.out / "rows.jsonl"

    def key(self, step: Step) -> str:
        """Digest of everything on which the step's rows depend."""
        needs = [DISTRIBUTIONS.get(package, package) for package in (*step.needs, *step.uses)]
        depends = {
            "step": [step.name, *step.arguments("", rehearse=self.rehearse)],
            "code": self.code,
            # The GPU's name: another chip measures again into the same file.
            "gpu": self.gpu,
            "versions": {"python": platform.python_version(), **versions((*CORE, *needs))},
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]

    def lines(self) -> list[dict[str, Any]]:
        """Lines of the rows file; one that was cut off when a call was killed is left out."""
        if not self.rows_file.exists():
            return []
        lines: list[dict[str, Any]] = []
        for line in self.rows_file.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                # A killed call may leave half a line, which the next append ends.
                continue
        return lines

    def ended(self) -> set[str]:
        """Keys of the steps that have ended."""
        return {line["key"] for line in self.lines() if "ended" in line}

    def append(self, **line: Any) -> None:
        """Adds a line with the time to the rows file, on the disk when this returns."""
        timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with open(self.rows_file, "ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the end of a line that a killed call left
                    file.write(b"\n")
            file.write(json.dumps({**line, "time": timestamp}).encode() + b"\n")
            file.flush()
            # The machine may be taken away at any moment, and rows must survive it.
            os.fsync(file.fileno())

    def locked(self) -> IO[str]:
        """File that is locked until it is closed, or this process ends in any way.

        Raises:
          UserError: another process works in this folder.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        lock = (self.out / "lock").open("w")  # closed by the caller
        try:
            # The lock ends with the process, however it ends, so no stale lock file can block.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"another one_gpu works in {self.out}. Wait for it, or give this one another --out."
            ) from None
        return lock

    def begin(self, budget_s: float, steps: Sequence[Step]) -> None:
        """Prints and writes what this call runs on, and what is missing."""
        lacks = describe_missing(steps)
        packages = sorted(
            {DISTRIBUTIONS.get(name, name) for step in steps for name in (*step.needs, *step.uses)}
        )
        installed = {
            name: version for name, version in versions((*CORE, *packages)).items() if version is not None
        }
        installed["python"] = platform.python_version()
        facts = {"gpu": self.gpu, "versions": installed, "commit": git_commit(), "code": self.code}
        self.append(call={**facts, "budget_s": budget_s, "missing": lacks})
        print(
            f"{self.gpu}; {len(steps)} steps; "
            f"{', '.join(f'{name} {version}' for name, version in installed.items())}"
        )
        for line in lacks or ["nothing"]:
            print(f"missing: {line}")

    def carry_out(self, step: Step, *, until_s: float) -> Iterator[Row]:
        """Rows of a step: those of the file if it has ended; none if its limit does not end by `until_s`."""
        key = self.key(step)
        if key in self.ended():
            yield from self._earlier(key)
            return
        # A step never begins that might be cut off by the budget.
        if time.monotonic() + step.limit_s > until_s:
            return
        # Steps without their packages end at once, with a row that says so.
        if lacks := absent_packages(step.needs):
            ended = Ended("failed", 0.0, f"needs {', '.join(lacks)}, not installed here")
        else:
            print(f"{step.name} ...", flush=True)
            # A step that was cut off left rows behind: readers take those after the last line like this.
            self.append(step=step.name, key=key, begun=step.arguments(str(self.out), rehearse=self.rehearse))
            process = step_rows(step, self.out, rehearse=self.rehearse)
            while True:
                try:
                    measured = next(process)
                # A generator's return value arrives in StopIteration, so no for loop.
                except StopIteration as end:
                    ended = end.value
                    break
                if self.rehearse:
                    measured = rehearsed(measured)
                # On the disk before it is yielded: the caller may stop here.
                self.append(step=step.name, key=key, **measured)
                yield measured
        self.append(
            step=step.name, key=key, ended=ended.outcome, seconds=round(ended.seconds, 1), error=ended.error
        )
        print(
            f"{step.name}: {ended.outcome}, {ended.seconds:.0f} s{f': {ended.error}' if ended.error else ''}",
            flush=True,
        )
        if ended.error is not None:
            yield _error_row(step.name, ended.outcome)

    def _earlier(self, key: str) -> Iterator[Row]:
        """Rows of the step's last attempt, which ended."""
        # Rows of earlier attempts stay in the file; those after the last `begun` are of the one that ended.
        mine = [line for line in self.lines() if line.get("key") == key]
        start = max((i for i, line in enumerate(mine) if "begun" in line), default=-1)
        for line in mine[start + 1 :]:
            if "what" in line:
                yield Row(**{name: line[name] for name in Row.__annotations__})
            elif line["error"] is not None:
                yield _error_row(line["step"], line["ended"])


def _error_row(step: str, outcome: str) -> Row:
    return row(f"{step}: {outcome}, the error is in rows.jsonl", None, "")
