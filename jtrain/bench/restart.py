"""Seconds until a killed run has its next step, by local memory: warm `tiny`, and a state of 1 GiB."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jtrain.bench import Options, Row, option, row

LAUNCH = (sys.executable, "-m", "jtrain.launch", "--config=tiny")
POLL_S = 0.005
TIMEOUT_S = 600.0

LARGE = {
    "model.num_layers": 12,
    "model.d_model": 768,
    "model.num_heads": 12,
    "model.num_kv_heads": 12,
    "model.head_dim": 64,
    "model.d_ff": 2304,
    "data.seq_len": 128,
    "data.global_batch": 1,
    "eval.every_steps": None,
}
"""Settings of `tiny` whose weights and moments in float32 take 1.0 GiB, and whose step is short."""


OPTIONS = (option("--repeats", type=int, default=3, help="restarts of each; the median counts"),)


def run(args: Options) -> list[Row]:
    """Kills a run that has kept its state, and starts its command again; there is no checkpoint to go on from."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as folder:
        tiny, _ = restarts(Path(folder) / "tiny", Path(memory) / "tiny", {}, args.repeats)
        large, size_bytes = restarts(Path(folder) / "large", Path(memory) / "large", LARGE, args.repeats)
    return [
        row("restart to first step, warm tiny, from local memory", statistics.median(tiny), "s", bar="< 8"),
        row("restart to first step, large state, from local memory", statistics.median(large), "s", bar="< 12"),
        row("large state in local memory, one generation", size_bytes / 2**30, "GiB", bar=">= 1"),
    ]


def restarts(workdir: Path, memory: Path, settings: dict[str, object], repeats: int) -> tuple[list[float], int]:
    """Returns the seconds of each restart, and the bytes of a generation."""
    wanted = {
        "num_steps": 100_000,
        "metrics.log_every_steps": 1,
        "checkpoint.every_steps": None,
        "checkpoint.local_every_steps": 2,
        "checkpoint.local_dir": str(memory),
    } | settings
    command = [*LAUNCH, *(word for name, value in wanted.items() for word in ("--set", f"{name}={value!r}"))]
    command += ["--workdir", str(workdir)]
    with _running(command) as ended:
        _until(ended, lambda: _newest(memory) >= 2)
    found, file = [], workdir / "metrics.jsonl"
    for _ in range(repeats):
        before = _newest(memory)
        file.write_text("".join(line for line in file.read_text().splitlines(True) if _step(line) <= before))
        start_s = time.perf_counter()
        with _running(command) as ended:
            _until(ended, lambda before=before: _last_step(file) > before)
            found.append(time.perf_counter() - start_s)
            _until(ended, lambda before=before: _newest(memory) >= before + 2)
    chunks = memory.glob(f"jtrain-{workdir.name}-*/process-0/a/state/*/*")
    return found, sum(file.stat().st_size for file in chunks)


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[Callable[[], str | None]]:
    """Runs a command until the block ends, then kills it; gives a function that returns its output if it has ended."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)

        def ended() -> str | None:
            if process.poll() is None:
                return None
            output.seek(0)
            return output.read()

        try:
            yield ended
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _until(ended: Callable[[], str | None], condition: Callable[[], bool]) -> None:
    end_s = time.perf_counter() + TIMEOUT_S
    while not condition():
        if (output := ended()) is not None or time.perf_counter() > end_s:
            raise RuntimeError(f"the run did not get there:\n{output}")
        time.sleep(POLL_S)  # the generation is a file of another process


def _newest(memory: Path) -> int:
    """Step of the newest whole generation of any run; 0 if there is none."""
    steps = [0]
    for file in memory.glob("*/process-0/*/manifest.json"):
        with contextlib.suppress(FileNotFoundError, ValueError):
            steps.append(json.loads(file.read_bytes())["step"])
    return max(steps)


def _last_step(file: Path) -> int:
    """Largest step of a line of metrics.jsonl; 0 if there is none."""
    return max(map(_step, file.read_text().splitlines()), default=0) if file.exists() else 0


def _step(line: str) -> int:
    """Step of a line; 0 if the line was cut short by the kill."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return 0
