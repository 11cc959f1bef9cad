"""Runs with an adapter: what their checkpoints hold, resuming, another base, and the merged weights."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint import files
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import FileError, UserError
from jtrain.hf import workdirs
from jtrain.model.param import at_path
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.sampling import load

SETS = ["mesh.data=8", "metrics.log_every_steps=1", "metrics.tensorboard=False", "data.engine=inline"]
SETS += ["eval.every_steps=None", "optimizer.warmup_steps=0", "precision.compute_dtype=float32"]
ADAPTER = [
    "adapter.rank=2",
    'adapter.targets=("q", "up")',
    'adapter.train=("*norm*",)',
    "adapter.dropout=0.25",
]
NUM_STEPS = 6

pytestmark = pytest.mark.slow


def train(workdir: Path, *sets: str, **options: Any) -> None:
    fiddlers = ["debug", "lora"] if ADAPTER[0] in sets else ["debug"]
    config = load_config("tiny", fiddlers, [*SETS, *sets])
    assert attempt.train(build_run(config), workdir=workdir, config_text=tree.flat(config), **options) == 0


def train_adapter(workdir: Path, base: Path, *sets: str) -> None:
    every = (f"num_steps={NUM_STEPS}", "checkpoint.every_steps=3", f"adapter.base={base}")
    train(workdir, *ADAPTER, *every, *sets)


def losses(workdir: Path) -> dict[int, float]:
    lines = metrics.read(workdir / metrics.FILE)
    return {line["step"]: line["loss_nats"] for line in lines if "loss_nats" in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base after two steps, an adapter on it, and another base."""
    folder = tmp_path_factory.mktemp("adapter")
    train(folder / "base", "num_steps=2")
    train(folder / "other", "num_steps=2", "seed=1")
    train_adapter(folder / "run", folder / "base")
    return folder


def test_a_checkpoint_has_the_size_of_the_adapter(folder: Path) -> None:
    """Parameters and two moments of what is trained, and the hash; nothing of the base."""
    run = build_run(load_config("tiny", ["debug", "lora"], [*SETS, *ADAPTER]))
    trained = [info for info in run.param_infos() if not info.frozen]
    leaves = files.read_manifest(folder / "run" / "checkpoints" / str(NUM_STEPS)).leaves
    of_params = {name for name in leaves if name.startswith("params.")}
    assert of_params == {f"params.{info.path}" for info in trained}
    sizes = {name: leaf.bytes for name, leaf in leaves.items() if not name.startswith("guard.")}
    assert sizes.pop("base_hash") == 32
    assert sum(sizes.values()) == 3 * 4 * sum(info.size for info in trained) + 4


def test_resuming_is_the_unbroken_run(folder: Path) -> None:
    whole = losses(folder / "run")
    assert len(set(whole.values())) == NUM_STEPS
    shutil.copytree(folder / "run", folder / "broken")
    shutil.rmtree(folder / "broken" / "checkpoints" / str(NUM_STEPS))
    (folder / "broken" / metrics.FILE).unlink()
    # The base may lie elsewhere: its hash decides.
    shutil.copytree(folder / "base", folder / "moved")
    train_adapter(folder / "broken", folder / "moved" / "checkpoints" / "2")
    again = losses(folder / "broken")
    assert sorted(again) == [4, 5, 6]
    assert again == {step: whole[step] for step in again}


def test_a_base_that_is_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of an imported model whose base was forgotten trains on random weights: the run says so."""
    train(tmp_path, *ADAPTER, "num_steps=1")
    assert (
        "warning: adapter.base is not set, so the frozen base is drawn from the seed"
        in capsys.readouterr().out
    )


def test_another_base_is_refused_with_both_hashes(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"base with hash [0-9a-f]{64}, and adapter\.base=\S+ has hash [0-9a-f]{64}"
    ):
        train_adapter(folder / "run", folder / "other")


@pytest.mark.parametrize(
    ("base", "sets", "message"),
    [
        ("nowhere", (), r"adapter\.base=\S+nowhere has no checkpoint"),
        ("run", (), "is a run with an adapter"),
        ("base", ("model.d_ff=64",), r"is of another model:\s+model\.d_ff: \d+ there, 64 here"),
    ],
)
def test_what_is_no_base_is_refused(
    folder: Path, tmp_path: Path, base: str, sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises((UserError, FileError), match=message):
        train_adapter(tmp_path / "run", folder / base, *sets)


def test_generate_and_export_read_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    merged, base = (load(folder / name).params for name in ("run", "base"))
    differing = {
        path
        for path in (info.path for info in load(folder / "base").model.param_infos())
        if not np.array_equal(at_path(merged, path), at_path(base, path))
    }
    assert {path.rpartition(".")[2] for path in differing} == {"q_DNH", "up_DF", "scale_D"}
    workdirs.export(str(folder / "run"), tmp_path / "out", step=None, dtype="float32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    up_YDF = np.asarray(at_path(merged, "layers.mlp.up_DF"))
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.up_proj.weight"].T, up_YDF[1])


def test_a_model_is_not_imported_into_the_workdir_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    workdirs.export(str(folder / "base"), tmp_path / "out", step=None, dtype="float32")
    with pytest.raises(UserError, match=r"--set adapter=None"):
        workdirs.import_directory(
            str(tmp_path / "out"),
            str(tmp_path / "new"),
            config="tiny",
            fiddlers=["debug", "lora"],
        )
