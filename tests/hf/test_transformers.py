"""Exports load in transformers, and adapters beside them in peft, in a Python environment with torch,
transformers and peft (tests/golden/hf/setup.sh).

PEER_TORCH_PYTHON=/path/to/python pytest -m slow tests/hf/test_transformers.py
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.hf.directory import write_directory
from jtrain.hf.model_config import config_from_model, model_from_config
from jtrain.hf.peft_folders import read_adapter, write_adapter
from jtrain.layout.dims import Batch
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.model.adapters.lora import LoRA
from jtrain.model.adapters.merge import merge
from jtrain.model.param import at_path
from tests.weights import draw_weights

FAMILIES = Path(__file__).parents[1] / "families" / "configs.json"
NO_PEER = "PEER_TORCH_PYTHON names no Python with torch and transformers"


def logits_of_transformers(
    python: str, folder: Path, dtype: str, tokens: np.ndarray
) -> tuple[np.ndarray, Any]:
    logits_BLV, printed = run_peer("logits.py", python, tokens, folder, dtype)
    return logits_BLV, json.loads(printed.splitlines()[-1])


def run_peer(name: str, python: str, tokens: np.ndarray, folder: Path, *args: Any) -> tuple[np.ndarray, str]:
    arrays, out = folder.parent / "tokens.npy", folder.parent / "logits.npy"
    np.save(arrays, tokens)
    program = Path(__file__).parent / "peers" / name
    done = subprocess.run(
        [python, program, folder, *args, arrays, out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return np.load(out), done.stdout


def peer_python() -> str:
    """The Python that PEER_TORCH_PYTHON names; skips the test without one."""
    python = os.environ.get("PEER_TORCH_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip(f"{NO_PEER}: {python!r}")
    return python


@pytest.fixture
def peer() -> str:
    return peer_python()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rslora"),
    [
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("gpt_oss", True),
        ("granitemoe", False),
        ("llama4_text", False),
    ],
)
def test_adapters_of_experts_compute_the_same_in_peft(
    peer: str, family: str, rslora: bool, tmp_path: Path
) -> None:
    """The folder beside the base in peft, and the merged export alone, have our logits within 1e-4.

    Files of Qwen3 have a tensor for each expert, which peft joins for transformers 5; the others one for all.
    """
    model = model_from_config(json.loads(FAMILIES.read_text())[family])
    lora = LoRA(rank=2, alpha=4.0, rslora=rslora)
    infos = [dataclasses.replace(i, std=0.3) if i.is_adapter else i for i in lora.infos(model.param_infos())]
    params = draw_weights(infos, noise=0.0)
    merged = merge(tuple(infos), params, lora.scale, lambda _: "float32")
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 24)).astype(np.int32)
    position = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    batch = jax.tree.map(jax.numpy.asarray, Batch(tokens, tokens, position, np.ones_like(tokens)))
    logits = jax.jit(model.logits)
    want, base = (np.asarray(logits(weights, batch)) for weights in (merged, without_adapter(params)))
    assert np.abs(want - base).max() > 1
    their_config = config_from_model(model, dtype="float32", max_seq_len=256, begin_id=3, end_id=4)
    for name, weights in (("base", without_adapter(params)), ("merged", merged)):
        write_directory(tmp_path / name, weights, model, their_config, dtype="float32")
    write_adapter(tmp_path / "adapter", params, model, lora, dtype="float32")
    beside, _ = run_peer("peft_logits.py", peer, tokens, tmp_path / "base", tmp_path / "adapter")
    np.testing.assert_allclose(beside, want, rtol=0, atol=1e-4)
    alone, _ = logits_of_transformers(peer, tmp_path / "merged", "float32", tokens)
    np.testing.assert_allclose(alone, want, rtol=0, atol=1e-4)
    again = read_adapter(tmp_path / "adapter", model, lora)
    for info in infos:
        if info.is_adapter:
            np.testing.assert_array_equal(at_path(again, info.path), at_path(params, info.path))
