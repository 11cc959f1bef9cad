"""The README's first command, whole: seconds from start to exit, and the loss it ends with."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
        sets += [f"num_steps={args.steps}", f"eval.every_steps={args.steps}", "metrics.log_every_steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--workdir", folder]
        for one in sets:
            command += ["--set", one]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start_s
        lines = read(Path(folder) / FILE)
    last = [line["loss_nats"] for line in lines if "loss_nats" in line][-1]
    held_out = [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line][-1]
    name, (time_bar, loss_bar) = " ".join(["tiny", *sets]), (None, None) if sets else ("<= 240", "< 2.2")
    return [
        row(f"{name}, whole command", seconds, "s", bar=time_bar),
        row(f"{name}, last training loss", last, "nats/byte", bar=loss_bar),
        row(f"{name}, last evaluation", held_out, "nats/byte", bar=loss_bar),
    ]
