"""Conversion of workdirs to Hugging Face model directories and back."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain import optim
from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import open_checkpoint, read_params
from jtrain.config.run import build_run, check_vocabulary
from jtrain.data import make_tokenizer, open_dataset
from jtrain.errors import UserError
from jtrain.hf.directory import check_empty, open_tensors, read_config, write_directory
from jtrain.hf.mapping import from_hf
from jtrain.hf.model_config import config_from_model, family_in, model_differences, model_from_config
from jtrain.model.fp8_scaling import first_scaling
from jtrain.model.param import map_params
from jtrain.runtime.stores import in_store, workdir_path
from jtrain.step.state import TrainState


def export(workdir: str, out: Path, *, step: int | None, dtype: str | None) -> None:
    """Writes a checkpoint of a run as a model directory, and prints what it wrote.

    Args:
      step: None for the newest.
      dtype: of the weights; None for the run's `precision.param_dtype`.

    Raises:
      FileError: there is no checkpoint, or `out` is not empty.
      UserError: the model cannot be described by a config.json.
    """
    # First: nothing is computed for a directory that cannot be written to.
    check_empty(out)
    with Checkpoints(workdir_path(workdir), CheckpointSpec()) as checkpoints:
        step, run = open_checkpoint(checkpoints, step)
        dtype = dtype or run.precision.param_dtype
        tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
        their_config = config_from_model(
            run.model,
            dtype=dtype,
            # The run's own length: a longer one would promise what the model has not learnt.
            max_seq_len=run.data.seq_len,
            begin_id=tokenizer.begin_id,
            end_id=tokenizer.end_id,
        )
        # Read in the output dtype: rounding later would hold the weights in two dtypes at once.
        params = read_params(checkpoints, step, run, lambda _: dtype)
    files = write_directory(
        out,
        jax.tree.map(np.asarray, params),  # no copy on a CPU
        run.model,
        their_config,
        dtype=dtype,
        tokenizer_folder=_tokenizer_folder(run.data.tokenizer),
    )
    print(f"step {step} of {workdir}, {_size(run.model.param_infos())} parameters, {dtype} -> {out}:")
    print(f"  {', '.join(files)}")


def import_directory(
    folder: Path, workdir: str, *, config: str, fiddlers: Sequence[str], sets: Sequence[str]
) -> None:
    """Writes a workdir whose step 0 has the weights of a model directory, and prints the command that trains
    on.

    Raises:
      FileError: the directory cannot be read, or `workdir` is not empty.
      UserError: it holds another model than the config.
    """
    home = workdir_path(workdir)
    if in_store(home):
        raise UserError(
            f"{workdir}: import writes to a disk. Give a folder, and copy it to the store afterwards."
        )
    # Before the model is read: a full folder needs no import.
    check_empty(home)
    their_config = read_config(folder)
    theirs, family = model_from_config(their_config), family_in(their_config)
    run_config = load_config(config, fiddlers, sets)
    run = build_run(run_config)
    if lines := model_differences(theirs, run.model):
        difference_lines = "".join(f"\n  {line}" for line in lines)
        raise UserError(
            f"{folder} is not the model of --config={config}:{difference_lines}\nSet these fields by --set."
        )
    # The first data state comes from the run's own data: step 0 begins with its first batch.
    dataset = open_dataset(run.data, seed=run.seed)
    check_vocabulary(run.model, dataset.vocab_size)
    with open_tensors(folder) as tensors:
        arrays = from_hf(tensors, run.model, dtype=run.precision.param_dtype, family=family)
    params = _onto_device(arrays)
    infos = map_params(lambda info: info, run.model.param_infos())
    optimizer = optim.build(run.optimizer, num_steps=run.num_steps, params=infos)
    delayed = run.precision.matmul_dtype == "fp8_delayed"
    scaling = first_scaling(run.model.param_infos(), params) if delayed else {}
    # As at the start of a run: step 0, and the optimizer's first state.
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), scaling)
    config_text = tree.flat(run_config)
    home.mkdir(parents=True, exist_ok=True)
    with Checkpoints(home, run.checkpoint) as checkpoints:
        # One checkpoint at step 0, so that the run resumes from the imported weights like from its own.
        checkpoints.save(0, state, dataset.first_state(), config_text)
    # Written last: a config.txt without a checkpoint would let a run start from random weights.
    (home / "config.txt").write_text(config_text)
    print(f"{folder}, {_size(run.model.param_infos())} parameters -> step 0 of {workdir}. Train on from it:")
    options = [f"--config={config}", *(option for name in fiddlers for option in ("--with", name))]
    options += [*(option for text in sets for option in ("--set", text)), "--workdir", workdir]
    print(f"  python -m jtrain.launch {shlex.join(options)}")


def _tokenizer_folder(tokenizer: str) -> Path | None:
    """Folder of a tokenizer's files; None for `bytes`, which has no files."""
    if tokenizer == "bytes":
        return None
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def _onto_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """Converts a tree to jax arrays; empties `arrays` meanwhile, so that the weights are never in memory
    twice.
    """
    out: dict[str, Any] = {}
    for key in list(arrays):
        value = arrays.pop(key)
        out[key] = _onto_device(value) if isinstance(value, dict) else jnp.asarray(value)
    return out


def _size(infos: Any) -> str:
    """Number of parameters, with thousands separators."""
    return f"{sum(info.size for info in infos):,}"
