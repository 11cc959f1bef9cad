"""Seconds until `--help` answers, and from process start to the end of the first step of `tiny`."""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jtrain.bench import Options, Row, option, row

LAUNCH = (sys.executable, "-m", "jtrain.launch")
POLL_S = 0.005
TIMEOUT_S = 300.0


OPTIONS = (option("--repeats", type=int, default=3, help="times each is measured; the median counts"),)


def run(args: Options) -> list[Row]:
    """Medians of whole processes; the first start fills the compile cache and is a row of its own."""
    with tempfile.TemporaryDirectory() as folder:
        filling_s = first_step_s(Path(folder) / "filling")
        warm_s = statistics.median(first_step_s(Path(folder) / str(index)) for index in range(args.repeats))
    return [
        row("python -m jtrain.launch --help", statistics.median(help_s() for _ in range(args.repeats)), "s", bar="< 1"),
        row("import of everything but the loop", statistics.median(import_s() for _ in range(args.repeats)), "s"),
        row("first tiny step, compile cache as it was", filling_s, "s"),
        row("first tiny step, warm compile cache", warm_s, "s", bar="< 8"),
    ]


def help_s() -> float:
    """A whole `--help` process."""
    return process_s([*LAUNCH, "--help"])


def import_s() -> float:
    """A whole process that prints a config: every library is imported, no backend is started."""
    return process_s([*LAUNCH, "--config=tiny", "--print-config"])


def process_s(command: list[str]) -> float:
    """Wall time of a command that succeeds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def first_step_s(workdir: Path) -> float:
    """From process start until the first step's metrics are on disk; the loop writes them one dispatch later.

    Raises:
      RuntimeError: the run ended, or took five minutes, without a first line.
    """
    sets = ["--set", "num_steps=1000", "--set", "metrics.log_every_steps=1"]
    metrics = workdir / "metrics.jsonl"
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*LAUNCH, "--config=tiny", *sets, "--workdir", str(workdir)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - start > TIMEOUT_S:
                    output.seek(0)
                    raise RuntimeError(f"tiny wrote no first step:\n{output.read()}")
                time.sleep(POLL_S)
            return time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
