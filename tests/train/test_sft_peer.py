"""Fine-tuning by the command line is that of a plain loop of transformers: losses and parameters of a few steps.

The arrays of golden/sft_*.npz are made by tests/train/peers/sft.py, where every conversation went through
transformers alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.hf.peers.draw import draw
from jtrain.telemetry import metrics
from tests.train.sft_runs import (
    CASES,
    CHATS,
    HERE,
    SETTINGS,
    THEIRS,
    conversations,
    conversations_by_step,
    write_conversations,
)

ROOT = Path(__file__).parents[2]
LOSS, DISTANCE = 1e-5, 1e-4
"""Largest relative difference of a loss, and of a parameter from theirs as a share of how far it moved."""


def test_the_loop_of_transformers_had_the_conversations_of_each_batch(tmp_path: Path) -> None:
    """Batches of both are the same conversations, several in a row here."""
    settings = json.loads(SETTINGS.read_text())
    write_conversations(tmp_path / CHATS)
    assert settings["conversations"] == conversations()
    assert settings["batches"] == conversations_by_step(str(tmp_path / CHATS))
    assert min(map(len, settings["batches"])) > 3


def jtrain(folder: Path, *words: str) -> None:
    dropped = ("XLA_FLAGS", "JAX_PLATFORMS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_command_line_trains_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Imports a folder, trains in float32, exports; each loss and each tensor is that of the plain loop."""
    golden = np.load(HERE / "golden" / f"sft_{name}.npz")
    theirs = tmp_path / THEIRS
    theirs.mkdir()
    (theirs / "config.json").write_text(golden["config"].item())
    recipe = json.loads(golden["recipe"].item())
    first = {key: draw(key, tuple(shape), *how) for key, (shape, *how) in recipe.items()}
    save_file(first, theirs / "model.safetensors", metadata={"format": "pt"})
    write_conversations(tmp_path / CHATS)

    config = (f"--config={HERE / 'sft_runs.py'}:sft", "--workdir", "run")
    jtrain(tmp_path, "jtrain.hf", "import", "--from", THEIRS, *config)
    jtrain(tmp_path, "jtrain.launch", *config, "--emulate-devices", "1")
    jtrain(tmp_path, "jtrain.hf", "export", "--workdir", "run", "--out", "ours", "--dtype", "float32")

    lines = [line for line in metrics.read(tmp_path / "run" / metrics.FILE) if "loss_nats" in line]
    losses = np.asarray([line["loss_nats"] for line in lines])
    want = golden["losses"]
    assert want[-1] < want[0] - 0.1, "the loss must move, or equality below proves nothing"
    np.testing.assert_allclose(losses, want, rtol=LOSS)

    ours = {k: v for file in (tmp_path / "ours").glob("*.safetensors") for k, v in load_file(file).items()}
    assert ours.keys() == first.keys()
    for key, start in first.items():
        last = golden[f"last/{key}"].astype(np.float64)
        moved = np.linalg.norm(last - start)
        assert moved > 0
        assert np.linalg.norm(ours[key] - last) <= DISTANCE * moved, key
