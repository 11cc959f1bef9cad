"""`python -m jtrain.hf`: import of a Hugging Face directory to a workdir, and export of a workdir."""

import dataclasses
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.cli.hf import main
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import check_same_run
from jtrain.config.run import build_run
from jtrain.config.trained_params import base_workdir
from jtrain.hf.directory import write_directory
from jtrain.hf.imported_files import ImportedFiles
from jtrain.hf.model_config import config_from_model, family_in
from jtrain.layout.layout import make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.step.state import abstract_state

SIZES: dict[str, Any] = dict(
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    vocab_size=256,
    tie_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class Given:
    """A directory as others publish it, and the options that configure its model."""

    folder: Path
    model: Transformer
    options: list[str]
    tmp_path: Path

    def run(self, *arguments: object) -> int:
        return main([str(argument) for argument in arguments])


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setenv("XLA_FLAGS", "")  # the verb adds to it
    model = Transformer(**SIZES)
    rng = np.random.default_rng(0)
    params = map_params(lambda info: rng.standard_normal(info.shape, np.float32), model.param_infos())
    their_config = config_from_model(model, dtype="float32", max_seq_len=64, begin_id=0, end_id=0)
    write_directory(tmp_path / "theirs", params, model, their_config, dtype="float32")
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    sets = {f"model.{key}": value for key, value in SIZES.items()}
    sets |= {
        "data.path": tmp_path / "text.txt",
        "data.seq_len": 32,
        "data.global_batch": 4,
        "data.eval_fraction": 0.0,
    }
    sets |= {"data.text_piece_bytes": 512, "eval.every_steps": None}
    options = [
        "--config=tiny",
        *(part for key, value in sets.items() for part in ("--set", f"{key}={value}")),
    ]
    return Given(tmp_path / "theirs", model, options, tmp_path)


def test_imported_and_exported_again_is_bitwise(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    """Import and export keep all tensors, and the import prints the command that continues training."""
    workdir, out = given.tmp_path / "run", given.tmp_path / "out"
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *given.options) == 0
    said = capsys.readouterr().out
    assert "step 0 of" in said
    assert "jtrain launch --config=tiny --set model.num_layers=2 --set" in said
    assert f"--workdir {workdir}" in said
    assert given.run("export", "--workdir", workdir, "--out", out) == 0
    want, got = load_file(given.folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(got) == set(want)
    for name in want:
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    their_config, our_config = (
        json.loads((folder / "config.json").read_text()) for folder in (given.folder, out)
    )
    assert our_config == their_config


def test_export_keeps_what_training_did_not_change(given: Given) -> None:
    """The longest text, ids, the dtype, unread fields and how texts are sampled are those of the imported directory.

    The directory has fields as transformers 5 writes them, and texts are longer than in training.
    """
    config_file, weights_file = given.folder / "config.json", given.folder / "model.safetensors"
    theirs = json.loads(config_file.read_text())
    rope = {"rope_type": "default", "rope_theta": theirs.pop("rope_theta")}
    del theirs["torch_dtype"]
    theirs |= {
        "dtype": "bfloat16",
        "rope_parameters": rope,
        "max_position_embeddings": 40_960,
        "bos_token_id": None,
        "eos_token_id": [7, 9],
        "pad_token_id": 3,
        "use_cache": False,
    }
    config_file.write_text(json.dumps(theirs))
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.95}
    (given.folder / "generation_config.json").write_text(json.dumps(generation))
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(weights_file).items()}
    save_file(rounded, weights_file, metadata={"format": "pt"})
    workdir, out = given.tmp_path / "run", given.tmp_path / "out"
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *given.options) == 0
    assert given.run("export", "--workdir", workdir, "--out", out) == 0
    del theirs["dtype"]
    written = json.loads((out / "config.json").read_text())
    assert written == theirs | {"torch_dtype": "bfloat16"}
    assert json.loads((out / "generation_config.json").read_text()) == generation
    got = load_file(out / "model.safetensors")
    assert all(np.array_equal(got[name], rounded[name]) for name in rounded)
    assert (
        given.run("export", "--workdir", workdir, "--out", given.tmp_path / "whole", "--dtype", "float32")
        == 0
    )
    assert json.loads((given.tmp_path / "whole" / "config.json").read_text())["torch_dtype"] == "float32"
    # The base of an adapter may be named by its checkpoint.
    found, step = base_workdir(str(workdir / "checkpoints" / "0"))
    assert (found, step) == (workdir, 0)
    assert ImportedFiles.read(found).generation == generation
    assert base_workdir(str(workdir)) == (workdir, None)
    assert ImportedFiles.read(given.tmp_path) == ImportedFiles({}, {})


def test_a_changed_model_has_the_fields_that_it_needs() -> None:
    """Of the imported directory it keeps its ids alone: other fields may speak of another model."""
    model = Transformer(**SIZES)
    theirs = config_from_model(model, dtype="bfloat16", max_seq_len=64, begin_id=0, end_id=5)
    imported = ImportedFiles(theirs, {})
    assert imported.family_of(model) is family_in(theirs)
    changed = Transformer(**SIZES, norm_eps=1e-6)
    assert imported.family_of(changed) is None
    written = config_from_model(changed, dtype="float32", max_seq_len=32, begin_id=1, end_id=2)
    ids = {"bos_token_id": 0, "eos_token_id": 5}
    assert imported.config_with(written, is_same_model=False) == written | ids


def test_export_rounds_to_bfloat16(given: Given) -> None:
    """`--dtype` sets the dtype of the tensors and of config.json."""
    workdir, out = given.tmp_path / "run", given.tmp_path / "out"
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *given.options) == 0
    assert given.run("export", "--workdir", workdir, "--out", out, "--step", 0, "--dtype", "bfloat16") == 0
    want, got = load_file(given.folder / "model.safetensors"), load_file(out / "model.safetensors")
    for name in want:
        np.testing.assert_array_equal(got[name], want[name].astype(got[name].dtype), err_msg=name)
    assert got["model.norm.weight"].dtype.name == "bfloat16"
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_launch_can_start_from_what_import_wrote(given: Given) -> None:
    """Step 0 restores as the first state of the config: imported weights, zero moments, the first batch."""
    workdir = given.tmp_path / "run"
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *given.options) == 0
    run_config = load_config(
        "tiny", sets=[text for text in given.options if "=" in text and "--" not in text]
    )
    text = tree.flat(run_config)
    assert (workdir / "config.txt").read_text() == text
    check_same_run(workdir, text)
    run = build_run(run_config)
    layout = make_layout(run.layout, MeshSpec(), run.model.param_infos())
    optimizer = build(
        run.optimizer, num_steps=run.num_steps, params=map_params(lambda i: i, run.model.param_infos())
    )
    like = abstract_state(layout, optimizer, make_mesh(MeshSpec(), jax.devices()[:1]))
    with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        assert checkpoints.latest_step() == 0
        assert checkpoints.config_text(0) == text
        state, data_state = checkpoints.restore(0, like)
    assert int(state.step) == 0
    np.testing.assert_array_equal(
        state.params["embed_VD"], load_file(given.folder / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    from jtrain.data import open_dataset

    dataset = open_dataset(run.data, seed=run.seed)
    first, restored = (next(dataset.train_batches(s, inline=True)) for s in (None, data_state))
    np.testing.assert_array_equal(first.token_BL, restored.token_BL)


def test_another_model_is_refused_field_by_field(
    given: Given, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differing models are refused with one line per difference, and nothing is written; the command that the
    message gives writes a config that is taken.
    """
    workdir = given.tmp_path / "run"
    options = [*given.options, "--set", "model.d_ff=64", "--set", "model.norm_eps=1e-6"]
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *options) == 2
    said = capsys.readouterr().err
    assert "model.d_ff: 48 there, 64 here" in said
    assert "model.norm_eps: 1e-05 there, 1e-06 here" in said
    assert not workdir.exists()
    # The way out, word for word: the command is between backticks.
    monkeypatch.chdir(given.tmp_path)
    assert given.run(*shlex.split(said.split("`")[1])[2:]) == 0
    # What is left are the settings of the data.
    kept = [word for word in given.options if word.startswith(("data.", "eval."))]
    options = ["--config=model.py:run", *(word for text in kept for word in ("--set", text))]
    assert given.run("import", "--from", given.folder, "--workdir", workdir, *options) == 0


def test_mistakes_exit_2_with_a_message(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    """Occupied folders, folders without a model, runs without checkpoints and missing steps are refused."""
    run, tmp_path = given.run, given.tmp_path
    assert run("import", "--from", given.folder, "--workdir", tmp_path, *given.options) == 2
    assert f"{tmp_path} is there already and not empty" in capsys.readouterr().err
    assert run("import", "--from", tmp_path, "--workdir", tmp_path / "run", *given.options) == 2
    assert "config.json: no such file" in capsys.readouterr().err
    assert run("import", "--from", given.folder, "--workdir", tmp_path / "run", "--config=tinny") == 2
    assert "Did you mean tiny, tiny_sft, tiny_moe?" in capsys.readouterr().err
    assert run("export", "--workdir", tmp_path / "nowhere", "--out", tmp_path / "out") == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert run("import", "--from", given.folder, "--workdir", tmp_path / "run", *given.options) == 0
    capsys.readouterr()
    assert run("export", "--workdir", tmp_path / "run", "--out", given.folder) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert run("export", "--workdir", tmp_path / "run", "--out", tmp_path / "out", "--step", 7) == 2
    assert "No complete checkpoint of step 7" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_dtype_is_refused(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    assert given.run("export", "--workdir", "W", "--out", "OUT", "--dtype", "float8") == 2
    assert "error: --dtype invalid choice: 'float8'" in capsys.readouterr().err


@pytest.mark.slow
def test_export_while_the_run_goes_on(given: Given) -> None:
    """A checkpoint after each step, of which the last alone is kept: each export has one of them, whole."""
    workdir = given.tmp_path / "run"
    sets = ["num_steps=60", "checkpoint.every_steps=1", "checkpoint.keep_last=1"]
    options = [*given.options, *(word for text in sets for word in ("--set", text)), "--device", "cpu"]
    command = [sys.executable, "-m", "jtrain.launch", *options, "--workdir", str(workdir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not list(workdir.glob("checkpoints/*/manifest.json")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        exports = [given.tmp_path / f"out{number}" for number in range(4)]
        for out in exports:
            assert given.run("export", "--workdir", workdir, "--out", out) == 0
            assert len(load_file(out / "model.safetensors")) == len(
                load_file(given.folder / "model.safetensors")
            )
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
