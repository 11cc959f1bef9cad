"""Training with 8-bit matmuls beside bfloat16 on real text: how far apart the losses end.

    python -m jtrain.bench fp8 --json bench/results/fp8-epyc.json

`configs/tiny.py` (the Python standard library, byte by byte), the same seed, batches and schedule for each
`precision.matmul_dtype`. A CPU computes what a GPU with 8-bit matmuls would, but not as fast: no speed is measured here
(`fp8_speed` does, on a GPU). What the numbers differ by without any change of precision is seen from another seed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from jtrain.bench import Options, Row, option, row
from jtrain.telemetry.metrics import FILE, read

MODES = ("compute", "fp8_current", "fp8_delayed")
LAST_STEPS = 50
"""Training losses that are averaged: one batch's loss says more of the batch than of the model."""


OPTIONS = (option("--steps", type=int, default=300, help="updates of each run (default: %(default)s)"),)


def run(args: Options) -> list[Row]:
    """One run after another, each a process of its own."""
    rows: list[Row] = []
    train, held_out = _trained(args.steps, "compute", seed=0)
    other_train, other_held_out = _trained(args.steps, "compute", seed=1)
    unit = "nats/byte"
    rows.append(row("bfloat16, another seed: training loss", other_train, unit, baseline=train))
    rows.append(row("bfloat16, another seed: held-out loss", other_held_out, unit, baseline=held_out))
    for mode in MODES[1:]:
        mode_train, mode_held_out = _trained(args.steps, mode, seed=0)
        rows.append(row(f"{mode}: training loss, last {LAST_STEPS} steps", mode_train, unit, baseline=train))
        rows[-1]["bar"] = "<= 1.02"
        rows.append(row(f"{mode}: held-out loss", mode_held_out, unit, baseline=held_out, bar="<= 1.02"))
    return rows


def _trained(steps: int, mode: str, *, seed: int) -> tuple[float, float]:
    """Mean training loss of the last steps, and the last held-out loss."""
    sets = (f"precision.matmul_dtype='{mode}'", f"num_steps={steps}", f"seed={seed}", "metrics.log_every_steps=1")
    sets += ("metrics.tensorboard=False", f"eval.every_steps={steps}", "checkpoint.every_steps=None")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--workdir", folder]
        subprocess.run(
            [*command, *(part for text in sets for part in ("--set", text))], check=True, stdout=subprocess.DEVNULL
        )
        lines = read(Path(folder) / FILE)
    losses = [line["loss_nats"] for line in lines if "loss_nats" in line]
    held_out = [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line]
    last = losses[-LAST_STEPS:]
    return sum(last) / len(last), held_out[-1]
