"""Seconds until `--help` answers, until the first step of `tiny`, and until a killed run has its next step.

    python -m jtrain.bench startup
    python -m jtrain.bench startup --only restart

A restart goes on by local memory, without a checkpoint: of warm `tiny`, and of a state of 1 GiB.
"""

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

LAUNCH = (sys.executable, "-m", "jtrain.launch")
TINY = (*LAUNCH, "--config=tiny")
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


OPTIONS = (
    option("--repeats", type=int, default=3, help="times each is measured; the median counts"),
    option("--only", choices=("start", "restart"), help="one of the two"),
)


def run(args: Options) -> Iterator[Row]:
    """Medians of whole processes; the first start fills the compile cache and is a row of its own."""
    if args.only != "restart":
        yield from start_rows(args.repeats)
    if args.only != "start":
        yield from restart_rows(args.repeats)


def start_rows(repeats: int) -> Iterator[Row]:
    """Seconds of `--help`, of a printed config (imports all, starts no backend), and of a first step."""
    with tempfile.TemporaryDirectory() as folder:
        # The first start may have to compile, and fills the cache for the others.
        filling_s = first_step_s(Path(folder) / "filling")
        warm_s = statistics.median(first_step_s(Path(folder) / str(index)) for index in range(repeats))
    for label, words, bar in (
        ("python -m jtrain.launch --help", (*LAUNCH, "--help"), "< 1"),
        ("import of everything but the loop", (*TINY, "--print-config"), None),
    ):
        # Compilation is in neither of these commands, so they need no warm cache.
        yield row(label, statistics.median(process_s(words) for _ in range(repeats)), "s", bar=bar)
    yield row("first tiny step, compile cache as it was", filling_s, "s")
    yield row("first tiny step, warm compile cache", warm_s, "s", bar="< 8")


def restart_rows(repeats: int) -> Iterator[Row]:
    """Seconds from the start of a killed run's command to its next step, without any checkpoint."""
    # /dev/shm: local memory that survives the process.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as folder:
        tiny, _ = restarts(Path(folder) / "tiny", Path(memory) / "tiny", {}, repeats)
        large, size_bytes = restarts(Path(folder) / "large", Path(memory) / "large", LARGE, repeats)
    yield row("restart to first step, warm tiny, from local memory", statistics.median(tiny), "s", bar="< 8")
    yield row(
        "restart to first step, large state, from local memory", statistics.median(large), "s", bar="< 12"
    )
    yield row("large state in local memory, one generation", size_bytes / 2**30, "GiB", bar=">= 1")


def process_s(command: tuple[str, ...]) -> float:
    """Wall time of a command that succeeds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def first_step_s(workdir: Path) -> float:
    """Seconds from process start until the first step's metrics are on disk, one dispatch after the step."""
    metrics = workdir / "metrics.jsonl"
    start_s = time.perf_counter()
    with _running(_command(workdir, {"num_steps": 1000})) as ended:
        # Not empty: the file is made before the first line is written.
        _until(ended, lambda: metrics.exists() and metrics.stat().st_size > 0)
        return time.perf_counter() - start_s


def restarts(
    workdir: Path, memory: Path, settings: dict[str, object], repeats: int
) -> tuple[list[float], int]:
    """Returns the seconds of each restart, and the bytes of a generation."""
    local = {
        "checkpoint.every_steps": None,
        "checkpoint.local_every_steps": 2,
        "checkpoint.local_dir": str(memory),
    }
    # Far more steps than it will make: the run ends by being killed.
    command = _command(workdir, {"num_steps": 100_000} | local | settings)
    with _running(command) as ended:
        # The first generation is at step 2; a restart needs one.
        _until(ended, lambda: _newest(memory) >= 2)
    seconds, file = [], workdir / "metrics.jsonl"
    for _ in range(repeats):
        killed_step = _newest(memory)
        # Lines beyond the generation go, so that the next line is a step that the restart has made itself.
        file.write_text(
            "".join(line for line in file.read_text().splitlines(True) if _step(line) <= killed_step)
        )
        start_s = time.perf_counter()
        with _running(command) as ended:
            _until(ended, lambda killed_step=killed_step: _last_step(file) > killed_step)
            seconds.append(time.perf_counter() - start_s)
            # The next round needs a newer generation than the one that this round started from.
            _until(ended, lambda killed_step=killed_step: _newest(memory) >= killed_step + 2)
    # Generation `a` of process 0 is the whole state, as the run has one process.
    chunks = memory.glob(f"jtrain-{workdir.name}-*/process-0/a/state/*/*")
    return seconds, sum(file.stat().st_size for file in chunks)


def _command(workdir: Path, settings: dict[str, object]) -> list[str]:
    settings = {"metrics.log_every_steps": 1} | settings
    # repr, because `--set` reads Python literals.
    words = (word for name, value in settings.items() for word in ("--set", f"{name}={value!r}"))
    return [*TINY, *words, "--workdir", str(workdir)]


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[Callable[[], str | None]]:
    """Runs a command until the block ends, then kills it; gives a function that returns its output if it has
    ended.
    """
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
            # SIGKILL, as by a machine that fails: the run must not save anything.
            process.send_signal(signal.SIGKILL)
            process.wait()


def _until(ended: Callable[[], str | None], condition: Callable[[], bool]) -> None:
    """Waits for a condition of files that the run writes.

    Raises:
      RuntimeError: the run ended, or took ten minutes, without it.
    """
    end_s = time.perf_counter() + TIMEOUT_S
    while not condition():
        if (output := ended()) is not None or time.perf_counter() > end_s:
            raise RuntimeError(f"the run did not get there:\n{output}")
        time.sleep(POLL_S)  # the files are those of another process


def _newest(memory: Path) -> int:
    """Step of the newest whole generation of any run; 0 if there is none."""
    steps = [0]
    for file in memory.glob("*/process-0/*/manifest.json"):
        # The manifest may be replaced while it is read.
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
