"""The README's first command, whole: seconds from start to exit, and the loss it ends with."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.bench import Options, Row, option, row
from jtrain.telemetry.metrics import FILE, read

OPTIONS = (
    option("--steps", type=int, help="updates; bars are for the config's own number"),
    option("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="change the config"),
)


def run(args: Options) -> list[Row]:
    """Runs `python -m jtrain.launch --config=tiny` into a new workdir, with the compile cache as it is."""
    sets = [*args.sets]
    if args.steps is not None:
        # One evaluation at the end, so that the last line has both losses.
        sets += [f"num_steps={args.steps}", f"eval.every_steps={args.steps}", "metrics.log_every_steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        # A process of its own: imports and the exit are part of the command's time.
        lines = train_config("tiny", sets, Path(folder))
        seconds = time.perf_counter() - start_s
    # The last line may be of an event and have no loss.
    last = [line["loss_nats"] for line in lines if "loss_nats" in line][-1]
    held_out = [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line][-1]
    # Bars are for the command of the README, not for changed settings.
    name, (time_bar, loss_bar) = " ".join(["tiny", *sets]), (None, None) if sets else ("<= 240", "< 2.2")
    return [
        row(f"{name}, whole command", seconds, "s", bar=time_bar),
        row(f"{name}, last training loss", last, "nats/byte", bar=loss_bar),
        row(f"{name}, last evaluation", held_out, "nats/byte", bar=loss_bar),
    ]


def train_config(
    config: str, sets: Sequence[str], workdir: Path, *, stdout: int | None = subprocess.DEVNULL
) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a whole run of `jtrain.launch`, a process of its own."""
    command = [sys.executable, "-m", "jtrain.launch", f"--config={config}", "--workdir", str(workdir)]
    subprocess.run(
        [*command, *(part for setting in sets for part in ("--set", setting))], check=True, stdout=stdout
    )
    return read(workdir / FILE)
