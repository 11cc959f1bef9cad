"""Exports load in transformers, in a Python environment with torch and transformers
(tests/golden/hf/setup.sh).

PEER_TORCH_PYTHON=/path/to/python pytest -m slow tests/hf/test_transformers.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.hf.directory import write_directory
from jtrain.hf.model_config import config_from_model

NO_PEER = "PEER_TORCH_PYTHON names no Python with torch and transformers"


def logits_of_transformers(
    python: str, folder: Path, dtype: str, tokens: np.ndarray
) -> tuple[np.ndarray, Any]:
    arrays, out = folder.parent / "tokens.npy", folder.parent / "logits.npy"
    np.save(arrays, tokens)
    done = subprocess.run(
        [python, Path(__file__).parent / "peers" / "logits.py", folder, dtype, arrays, out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return np.load(out), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def peer() -> str:
    python = os.environ.get("PEER_TORCH_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip(f"{NO_PEER}: {python!r}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 30_000], ids=["one file", "several files"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_same_model_in_transformers(
    peer: str, reference: Any, dtype: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    """An export loads in its dtype without missing or unexpected tensors and computes our logits within
    1e-4.
    """
    model, out = reference.model, tmp_path / "out"
    their_config = config_from_model(model, dtype=dtype, max_seq_len=256, begin_id=3, end_id=4)
    write_directory(out, reference.params, model, their_config, dtype=dtype, max_shard_bytes=max_shard_bytes)
    got, facts = logits_of_transformers(peer, out, dtype, reference.tokens)
    assert facts == {"class": reference.config["architectures"][0], "bos": 3, "eos": 4}
    rounded = jax.tree.map(lambda x: jax.numpy.asarray(x, dtype).astype("float32"), reference.params)
    want = jax.jit(lambda p: model.logits(p, reference.batch))(rounded)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    apart = np.abs(got - reference.logits).max()
    assert (apart < 1e-4) == (dtype == "float32"), "rounding shows, so the rounded weights were compared"
