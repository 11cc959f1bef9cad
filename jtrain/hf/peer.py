"""Runs transformers' own class of a small model in another Python, and reads what it computed."""

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import FileError, UserError

PROGRAM = Path(__file__).parent / "peers" / "reference.py"
"""The program, which imports nothing of jtrain."""

SETUP = "python3.11 -m venv T && T/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy"


@dataclasses.dataclass(frozen=True)
class PeerBatch:
    """A batch, and what transformers computed for it, each document alone.

    arrays: token_BL, target_BL, position_BL and segment_BL.
    loss: mean cross entropy of the targets, in nats.
    gradients: of the loss, by the names of the saved tensors.
    """

    arrays: dict[str, np.ndarray]
    logits_BLV: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


def run_peer(
    python: str | None, source: str, folder: Path, *, sets: Sequence[str], seed: int
) -> dict[str, Any]:
    """Has transformers build, save and evaluate a small model; returns facts about it.

    Args:
      python: interpreter with torch and transformers; None is refused.
      source: a config.json, a folder with one, or a `model_type`.
      folder: gets config.json, model.safetensors and the results.
      sets: `FIELD=JSON` for fields of config.json.

    Raises:
      FileError: no such interpreter.
      UserError: none is given, it lacks torch or transformers, or transformers refuses the config.
    """
    if python is None:
        raise UserError(
            "prove compares with transformers: give --torch-python, or set PEER_TORCH_PYTHON. Make one with "
            f"`{SETUP}`: T/bin/python."
        )
    if not Path(python).is_file():
        raise FileError(f"--torch-python {python}: no such file. Make one with `{SETUP}`: T/bin/python.")
    options = [option for text in sets for option in ("--set", text)]
    command = [python, str(PROGRAM), source, str(folder), "--seed", str(seed), *options]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
    if "ModuleNotFoundError" in reason:
        raise UserError(f"--torch-python {python}: {reason}. Install it there: `{SETUP}`.")
    # With 2, the line is a sentence for the user; with 1, it is the error of transformers' own code.
    raise UserError(
        reason
        if process.returncode == 2
        else f"transformers cannot build or run {source} at a small size: {reason}. Set the field by --set "
        "FIELD=JSON."
    )


def read_results(folder: Path) -> dict[str, PeerBatch]:
    """The batches by name, as `run_peer` left them."""
    batches: dict[str, PeerBatch] = {}
    with np.load(folder / "reference.npz") as results:
        for label in sorted({key.partition("/")[0] for key in results}, reverse=True):
            arrays = {
                key.removeprefix(f"{label}/"): results[key] for key in results if key.startswith(f"{label}/")
            }
            batches[label] = PeerBatch(
                {key: value for key, value in arrays.items() if key.endswith("_BL")},
                arrays["logits"],
                float(arrays["loss"]),
                {
                    key.removeprefix("grad/"): value
                    for key, value in arrays.items()
                    if key.startswith("grad/")
                },
            )
    return batches
