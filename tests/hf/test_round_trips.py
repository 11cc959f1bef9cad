"""Models of transformers through the command line and back: as they came, trained, and with an adapter merged.

PEER_TORCH_PYTHON=/path/to/python pytest -m slow tests/hf/test_round_trips.py
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.layout.dims import Batch
from jtrain.train.sampling import load
from tests.hf.test_transformers import logits_of_transformers, peer_python

MESSAGES = [{"role": "user", "content": "How many words?"}]
# In float32, since sampling takes the weights in the compute dtype and transformers' logits are of float32.
STEPS = (
    "precision.compute_dtype=float32",
    "num_steps=3",
    "data.global_batch=8",
    "data.seq_len=128",
    "eval.every_steps=None",
    "checkpoint.every_steps=3",
)
WAYS = {
    "plain": (),
    "tuned": (),
    "merged": ("--with", "lora", "--set", "adapter.rank=4"),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A folder of transformers, and the folder in which the command line works."""

    folder: Path
    home: Path
    peer: str

    def jtrain(self, *words: str) -> str:
        command = [sys.executable, "-m", "jtrain", *words]
        # One device, and the compiler as a user has it.
        environment = os.environ | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
        done = subprocess.run(
            command, cwd=self.home, env=environment, capture_output=True, text=True, check=False, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def chat(self, folder: Path) -> dict[str, Any]:
        """What transformers says of the chat model in a folder."""
        program = Path(__file__).parent / "peers" / "chat.py"
        done = subprocess.run(
            [self.peer, program, folder, json.dumps(MESSAGES)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The model of transformers, its config, and `base`, the workdir that it was imported to."""
    python = peer_python()
    home = tmp_path_factory.mktemp(request.param)
    program = Path(__file__).parent / "peers" / "make_chat_model.py"
    subprocess.run([python, program, request.param, home / "theirs"], check=True, capture_output=True)
    given = Published(home / "theirs", home, python)
    given.jtrain("hf", "config", "--from", "theirs", "--base", "tiny_sft", "--out", "mine.py")
    sets = [word for text in (*STEPS, "data.tokenizer=theirs") for word in ("--set", text)]
    given.jtrain("hf", "import", "--from", "theirs", "--config=mine.py:run", *sets, "--workdir", "base")
    return given


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_comes_back_as_it_was_but_for_what_training_changed(
    published: Published, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits within 1e-5 of their largest, greedy answers, templates, configs, stop tokens, context and dtype."""
    workdir, out = published.home / ("base" if way == "plain" else way), published.home / f"{way}-hf"
    if way != "plain":
        sets = [word for text in (*STEPS, "data.tokenizer=theirs") for word in ("--set", text)]
        if way == "merged":
            sets += ["--set", f"adapter.base={published.home / 'base'}"]
        else:
            sets += ["--set", "optimizer.peak_lr=1e-3"]
            published.jtrain(
                "hf", "import", "--from", "theirs", "--config=mine.py:run", *sets, "--workdir", str(workdir)
            )
        published.jtrain("launch", "--config=mine.py:run", *WAYS[way], *sets, "--workdir", str(workdir))
    published.jtrain("hf", "export", "--workdir", str(workdir), "--out", str(out), "--dtype", "float32")

    monkeypatch.chdir(published.home)  # the config names its tokenizer from there
    trained = load(workdir)
    tokens = np.random.default_rng(0).integers(0, 260, (2, 48)).astype(np.int32)
    position = np.tile(np.arange(48, dtype=np.int32), (2, 1))
    batch = jax.tree.map(jax.numpy.asarray, Batch(tokens, tokens, position, np.ones_like(tokens)))
    ours = np.asarray(jax.jit(trained.model.logits)(trained.params, batch))
    theirs, _ = logits_of_transformers(published.peer, out, "float32", tokens)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5 * np.abs(ours).max())

    before, after = published.chat(published.folder), published.chat(out)
    for name in ("text", "ids", "generation", "longest"):
        assert after[name] == before[name], name
    said = published.jtrain(
        "generate",
        "--workdir",
        str(workdir),
        "--chat",
        MESSAGES[0]["content"],
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    )
    assert said.removesuffix("\n") == after["answer"]
    config_before, config_after = (
        json.loads((f / "config.json").read_text()) for f in (published.folder, out)
    )
    changed = {k for k in config_before | config_after if config_before.get(k) != config_after.get(k)}
    assert changed <= {"dtype", "torch_dtype", "transformers_version"}
    if way == "plain":
        assert after["answer"] == before["answer"]
        own = published.home / "own-dtype"
        published.jtrain("hf", "export", "--workdir", str(workdir), "--out", str(own))
        assert published.chat(own) == before
    else:
        original, _ = logits_of_transformers(published.peer, published.folder, "bfloat16", tokens)
        assert np.abs(original - ours).max() > 1e-3 * np.abs(ours).max(), "training changed the model"
