"""Stall, slower steps, seconds until durable and host memory of a save, beside plain Orbax and torch's DCP.

    python -m jtrain.bench checkpoint [--torch-python T/bin/python]

The same state in one process after the other: 110 million parameters with both moments of Adam in float32
(1.3 GB), and 1.8 million. Its values are normal random numbers, as the weights of a model are to a
compressor: Orbax compresses. Each step multiplies matrices and updates the whole state, which it donates.
Orbax is its AsyncCheckpointer with StandardSave, torch its `async_save`, both with their defaults. Both force
their arrays to the disk, but not the checkpoint's final name, nor Orbax its lists of arrays; one row more has
Orbax followed by fsync of all files and folders. Neither hashes what it writes nor reads it back, and jtrain
does both.

The stall is the time of `save` and that by which the steps are longer than usual, until nothing of the save
runs any
more: a save that returns at once may still make the next step copy the state; it includes what reads back.
  Durable is
when the checkpoint has its final name. Memory is in units of the state, from before the first save.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jtrain.bench import Options, Row, option, row
from jtrain.checkpoint import CheckpointSpec
from jtrain.errors import UserError

SIZES = ("100M", "small")
PROGRAMS = Path(__file__).parent / "checkpoint_programs"
PEERS = {"orbax": "Orbax", "orbax_fsync": "Orbax with fsync of everything", "torch": "torch's async DCP"}


OPTIONS = (
    option(
        "--torch-python",
        default=os.environ.get("PEER_TORCH_PYTHON"),
        help="interpreter that has torch; or $PEER_TORCH_PYTHON; without either, no rows of torch",
    ),
    option("--saves", type=int, default=3, help="timed saves of each; their median counts (default: 3)"),
    option("--sizes", nargs="+", choices=SIZES, default=SIZES, help="states to save (default: both)"),
    option("--folder", type=Path, help="where to save (default: the folder for temporary files)"),
)


def run(args: Options) -> Iterator[Row]:
    """Rows of each size.

    Raises:
      UserError: the interpreter that was given has no torch.
    """
    python = args.torch_python
    # A subprocess, because torch lives in an environment of its own.
    if python and subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        raise UserError(
            f"checkpoint compares with torch, but {python} cannot import it. Make an environment that can "
            "with `python3 -m venv T && T/bin/pip install torch`, then give --torch-python or "
            "PEER_TORCH_PYTHON; without either, the rows of torch are left out."
        )
    peers = {name: label for name, label in PEERS.items() if python or name != "torch"}
    # The stall is judged by the interval that users get without setting any.
    interval = CheckpointSpec().every_steps
    assert interval is not None
    for size in args.sizes:
        # One program after the other, never two at a time: they would compete for disk and cores.
        figures_of = {
            program: figures(program, size, saves=args.saves, python=python, folder=args.folder)
            for program in ("jtrain", *peers)
        }
        ours = figures_of["jtrain"]
        share = stall_s(ours) / (interval * ours["step_s"])
        yield row(f"{size}: stall, of {interval} steps, the default interval", share, "", bar="<= 0.05")
        for peer, name in peers.items():
            theirs = figures_of[peer]
            # Below 1 means that a save of jtrain delays training less than the peer's.
            yield row(
                f"{size}: stall, against {name}", stall_s(ours), "s", baseline=stall_s(theirs), bar="< 1"
            )
            yield row(
                f"{size}: until durable, against {name}",
                ours["durable_s"],
                "s",
                baseline=theirs["durable_s"],
                bar="< 1",
            )
        # Imports and threads are more than a small state.
        large = size == "100M"
        yield row(
            f"{size}: host memory at rest after {args.saves + 1} saves",
            ours["rest_states"],
            "states",
            bar="<= 0.3" if large else None,
        )
        yield row(
            f"{size}: host memory at most, during a save",
            ours["peak_states"],
            "states",
            bar="<= 1.3" if large else None,
        )
        yield row(f"{size}: host memory that each save leaves", ours["grown_states"], "states", bar="<= 0.05")
        for program, theirs in figures_of.items():
            for key, quantity in (
                ("step_s", "usual step"),
                ("save_s", "save() returns after"),
                ("first_step_s", "longer first step"),
                ("slower_s", "longer steps, all"),
                ("cpu_s", "CPU time of a save"),
                ("durable_s", "until durable"),
            ):
                yield row(f"{size}: {program}, {quantity}", theirs[key], "s")
            if program in peers:
                yield row(f"{size}: {program}, host memory at rest", theirs["rest_states"], "states")
                yield row(f"{size}: {program}, host memory at most", theirs["peak_states"], "states")


def stall_s(figures: dict[str, float]) -> float:
    """Seconds by which a save makes training longer."""
    return figures["save_s"] + figures["slower_s"]


def figures(
    program: str, size: str, *, saves: int, python: str | None, folder: Path | None
) -> dict[str, float]:
    """Runs one program in a process of its own; returns what it measured."""
    script = PROGRAMS / ("checkpoint_torch.py" if program == "torch" else "checkpoint_jax.py")
    interpreter = python if python and program == "torch" else sys.executable
    # Dirty pages of earlier programs would be written during this one's saves.
    os.sync()
    # A fresh folder for each program, removed with its checkpoints before the next one starts.
    with tempfile.TemporaryDirectory(dir=folder) as target:
        command = [interpreter, str(script), program, size, f"{target}/run", str(saves)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    # An error of the program is a bug here, not of the user: its last lines are in the message.
    if process.returncode:
        raise RuntimeError(
            f"it ended, exit code {process.returncode}: {shlex.join(command)}\n{process.stderr[-3000:]}"
        )
    # The figures are the last line; libraries may print before it.
    return json.loads(process.stdout.splitlines()[-1])
