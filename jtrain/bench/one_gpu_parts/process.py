"""One step of one_gpu as a process: its rows, its time limit, and the end of every process it started."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import jtrain
import jtrain_kernels
from jtrain.bench import Row
from jtrain.bench.one_gpu_parts.steps import Step

MARK = "JTRAIN_ONE_GPU"
"""Environment variable of all processes of a step, also of those in sessions of their own: the folder of
--out."""

POLL_S = 0.1
ERROR_CHARACTERS = 1500


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a step ended: `done`, `failed` or `over its limit`; its seconds; and the end of what it printed."""

    outcome: str
    seconds: float
    error: str | None = None


def step_rows(step: Step, out: Path, *, rehearse: bool) -> Generator[Row, None, Ended]:
    """Runs a step and yields its rows as it writes them; returns how it ended, with no process left."""
    lines, log = out / "step.jsonl", out / "log.txt"
    # Left by a call that was killed; its rows are in rows.jsonl already.
    lines.unlink(missing_ok=True)
    arguments = [*step.arguments(str(out), rehearse=rehearse), "--lines", str(lines)]
    started_s, num_yielded, outcome = time.monotonic(), 0, ""
    with open(log, "ab") as file:
        file.write(f"\n== {step.name}: python -m jtrain.bench {' '.join(arguments)}\n".encode())
        # Flushed before the process starts, which writes to the same file.
        file.flush()
        # The error message quotes the log from here on.
        begins = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "jtrain.bench", *arguments],
            env=environment(out, rehearse=rehearse),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the step through this process, which then writes why
        )
    try:
        while not outcome:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # wait with a timeout, so that rows are yielded while the step runs.
                outcome = "failed" if process.wait(POLL_S) else "done"
            if not outcome and time.monotonic() - started_s > step.limit_s:
                outcome = "over its limit"
                # The step's own processes first; the loop then reads the rows that it still wrote.
                end_processes(out)
            rows = _complete(lines)
            yield from rows[num_yielded:]
            num_yielded = len(rows)
    finally:
        # Also when the caller closes this generator in the middle.
        end_processes(out)
        process.wait()
    seconds = time.monotonic() - started_s
    lines.unlink(missing_ok=True)
    if outcome == "done":
        return Ended(outcome, seconds)
    output = log.read_bytes()[begins:].decode(errors="replace").strip()[-ERROR_CHARACTERS:]
    reason = f"exit code {process.returncode}" if outcome == "failed" else f"ended after {step.limit_s} s"
    return Ended(outcome, seconds, f"{reason}: {output or 'it printed nothing'}")


def _complete(lines: Path) -> list[Row]:
    """Rows whose line is whole."""
    if not lines.exists():
        return []
    # The last line may still be in the middle of being written.
    return [json.loads(line) for line in lines.read_text().splitlines(keepends=True) if line.endswith("\n")]


def environment(out: Path, *, rehearse: bool) -> dict[str, str]:
    """Environment of a step: one GPU with most of its memory, or for a rehearsal the CPU."""
    roots = [str(Path(module.__file__ or "").parents[1]) for module in (jtrain, jtrain_kernels)]
    # Sources before anything installed, so that a step measures this tree.
    paths = os.pathsep.join([*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, MARK: str(out.resolve()), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    # A crash in native code then leaves a Python traceback in the log.
    variables["PYTHONFAULTHANDLER"] = "1"
    if rehearse:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1".strip()
        # NPROC, XLA's threads: a warpgroup of an emulated kernel holds one while it waits.
        return variables | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "-1",
            "XLA_FLAGS": flags,
            "NPROC": "64",
        }
    variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in variables:
        # JAX takes 0.75, too little for an 8B on 80 GB.
        variables.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    return variables


def end_processes(out: Path) -> None:
    """Kills every process of a step in this folder, and waits until none is left, for at most ten seconds."""
    end_s = time.monotonic() + 10.0
    # Repeated: a process that is being killed may have started another one.
    while (pids := list(processes(out))) and time.monotonic() < end_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # a killed process takes a moment to leave /proc


def processes(out: Path) -> Iterator[int]:
    """Ids of the processes that carry this folder's mark."""
    mark = f"{MARK}={out.resolve()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # The mark is in the environment, which children inherit, even those in another session.
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if mark in (folder / "environ").read_bytes().split(b"\0") and folder.name != str(os.getpid()):
                yield int(folder.name)
