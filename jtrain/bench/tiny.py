"""The README's first command, whole: seconds from start to exit, and the loss it ends with."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jtrain.bench import Row, row
from jtrain.telemetry.metrics import FILE, read


def run(args: argparse.Namespace) -> list[Row]:
    """Runs `python -m jtrain.launch --config=tiny` into a new workdir, with the compile cache as it is."""
    del args
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--workdir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start_s
        lines = read(Path(folder) / FILE)
    last = [line["loss_nats"] for line in lines if "loss_nats" in line][-1]
    held_out = [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line][-1]
    return [
        row("tiny, whole command", seconds, "s", bar="<= 240"),
        row("tiny, last training loss", last, "nats/byte", bar="< 2.2"),
        row("tiny, last evaluation", held_out, "nats/byte", bar="< 2.2"),
    ]
