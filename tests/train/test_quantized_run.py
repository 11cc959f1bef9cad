"""Runs with a base in blocks: made from a workdir, resumed, and merged onto either base."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.hf import workdirs
from jtrain.model.adapters.block_quantization import dequantize, quantize
from jtrain.model.param import at_path
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.sampling import load

SETS = ["mesh.data=8", "metrics.log_every_steps=1", "metrics.tensorboard=False", "data.engine=inline"]
SETS += ["eval.every_steps=None", "optimizer.warmup_steps=0", "precision.compute_dtype=float32"]
ADAPTER = ["adapter.rank=2", "adapter.base_dtype=nf4"]

pytestmark = pytest.mark.slow


def train(workdir: Path, *sets: str) -> dict[int, float]:
    fiddlers = ["debug", "lora"] if ADAPTER[0] in sets else ["debug"]
    config = load_config("tiny", fiddlers, [*SETS, *sets])
    assert attempt.train(build_run(config), workdir=workdir, config_text=tree.flat(config)) == 0
    lines = metrics.read(workdir / metrics.FILE)
    return {line["step"]: line["loss_nats"] for line in lines if "loss_nats" in line}


def adapter(base: Path, *sets: str) -> list[str]:
    return [*ADAPTER, f"adapter.base={base}", "num_steps=4", "checkpoint.every_steps=2", *sets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base after two steps, and an adapter on its blocks."""
    folder = tmp_path_factory.mktemp("quantized")
    train(folder / "base", "num_steps=2")
    train(folder / "run", *adapter(folder / "base"))
    return folder


def test_resuming_is_the_unbroken_run_on_any_layout(folder: Path) -> None:
    """The blocks are made again from the base, by other devices; their hash is the same."""
    whole = train(folder / "run", *adapter(folder / "base"))
    assert len(set(whole.values())) == 4
    shutil.copytree(folder / "run", folder / "broken")
    shutil.rmtree(folder / "broken" / "checkpoints" / "4")
    again = train(folder / "broken", *adapter(folder / "base", "mesh.data=4", "mesh.tensor=2"))
    np.testing.assert_allclose([again[step] for step in (3, 4)], [whole[3], whole[4]], rtol=1e-5)


def test_it_merges_onto_either_base_and_says_which(folder: Path, tmp_path: Path, capsys: Any) -> None:
    tensors = {}
    for onto in ("trained", "base"):
        out = tmp_path / onto
        workdirs.export(str(folder / "run"), out, step=None, dtype="float32", onto=onto, with_losses=True)
        assert (
            f"merged onto the {'base in nf4 blocks' if onto == 'trained' else 'base as it was before'}"
            in (capsys.readouterr().out)
        )
        recorded = json.loads((out / "merge.json").read_text())
        assert (recorded["onto"], recorded["base_dtype"]) == (onto, "nf4")
        losses = recorded["losses_nats"]
        assert losses["trained"] == pytest.approx(losses["adapter"], rel=1e-6)
        assert abs(losses["base"] - losses["adapter"]) > 1e-4, "the two bases differ"
        tensors[onto] = load_file(out / "model.safetensors")
    base = load(folder / "base")
    up_YDF = at_path(base.params, "layers.mlp.up_DF")
    [info] = [info for info in base.model.param_infos() if info.path == "layers.mlp.up_DF"]
    of_blocks = np.asarray(dequantize(quantize(info, up_YDF, "nf4"), "float32"))
    name = "model.layers.1.mlp.up_proj.weight"
    product_onto_blocks = tensors["trained"][name].T - of_blocks[1]
    product_onto_base = tensors["base"][name].T - np.asarray(up_YDF)[1]
    assert np.abs(product_onto_base).max() > 1e-4, "the adapter has moved"
    np.testing.assert_allclose(product_onto_blocks, product_onto_base, atol=1e-6)
    assert np.abs(tensors["base"][name] - tensors["trained"][name]).max() > 1e-3
