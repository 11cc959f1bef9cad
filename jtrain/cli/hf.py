"""Converts workdirs to Hugging Face model directories and back.

python -m jtrain.hf export runs/tiny out/tiny --dtype bfloat16
python -m jtrain.hf import models/Llama-3.1-8B runs/llama8b --config=llama8b --set data.path=/my/corpus/*.jsonl
"""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import FileError, UserError
from jtrain.runtime import cli
from jtrain.runtime.platform import start_jax
from jtrain.runtime.store_paths import in_store, workdir_path


def parser() -> argparse.ArgumentParser:
    """Parser of the command line; builds without importing jax."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.hf",
        description="Exports checkpoints to Hugging Face Llama, Qwen3 and Qwen3-MoE directories, and imports them.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{export,import}")
    export = verbs.add_parser(
        "export",
        help="write a checkpoint as a directory that transformers loads",
        description="Writes the weights of a checkpoint as config.json and safetensors, with the tokenizer's files.",
        allow_abbrev=False,
    )
    export.add_argument("workdir", metavar="WORKDIR", help="folder or URL of the run")
    export.add_argument("out", type=Path, metavar="OUT", help="a new or empty directory")
    export.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights (default: the run's precision.param_dtype)",
    )
    import_ = verbs.add_parser(
        "import",
        help="write a workdir whose step 0 has the weights of such a directory",
        description="Writes step 0 of a new workdir: the weights of the directory, a fresh optimizer, the first batch. "
        "`python -m jtrain.launch --workdir OUT_WORKDIR` with the same --config, --with and --set continues from it. "
        "`--set data.tokenizer=HF_DIR` keeps its tokenizer.",
        allow_abbrev=False,
    )
    import_.add_argument("folder", type=Path, metavar="HF_DIR", help="directory with config.json and safetensors")
    import_.add_argument("workdir", type=Path, metavar="OUT_WORKDIR", help="a new or empty directory")
    import_.add_argument(
        "--config", required=True, metavar="NAME", help="as for launch; must describe the model of HF_DIR"
    )
    import_.add_argument(
        "--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER", help="as for launch"
    )
    import_.add_argument("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="as for launch")
    return parser


def export(args: argparse.Namespace) -> int:
    """Writes a model directory; returns the exit code."""
    _start_jax()

    import jax  # lazy, here and below: importing jax takes over a second, which --help need not wait for
    import numpy as np

    from jtrain.checkpoint import Checkpoints, CheckpointSpec
    from jtrain.config.resume import run_of_checkpoint
    from jtrain.data import make_tokenizer
    from jtrain.hf.directory import check_empty, write_directory
    from jtrain.hf.model_config import config_from_model
    from jtrain.model.param import map_params

    check_empty(args.out)
    with Checkpoints(workdir_path(args.workdir), CheckpointSpec()) as checkpoints:
        step = checkpoints.latest_step() if args.step is None else args.step
        if step is None:
            raise FileError(f"No checkpoint in {checkpoints.folder}. Give the WORKDIR of another run.")
        run = run_of_checkpoint(checkpoints.config_text(step))
        dtype = args.dtype or run.precision.param_dtype
        tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
        their_config = config_from_model(
            run.model, dtype=dtype, max_seq_len=run.data.seq_len, begin_id=tokenizer.begin_id, end_id=tokenizer.end_id
        )
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        # Read in the output dtype: rounding later would hold the weights in two dtypes at once.
        like = map_params(
            lambda info: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding), run.model.param_infos()
        )
        params = checkpoints.restore_part(step, {"params": like})["params"]
    files = write_directory(
        args.out,
        jax.tree.map(np.asarray, params),  # no copy on a CPU
        run.model,
        their_config,
        dtype=dtype,
        tokenizer_folder=_tokenizer_folder(run.data.tokenizer),
    )
    print(f"step {step} of {args.workdir}, {_size(run.model.param_infos())} parameters, {dtype} -> {args.out}:")
    print(f"  {', '.join(files)}")
    return 0


def import_(args: argparse.Namespace) -> int:
    """Writes a workdir whose step 0 has the weights of a model directory; returns the exit code."""
    _start_jax()

    import jax.numpy as jnp

    from jtrain import optim
    from jtrain.checkpoint import Checkpoints
    from jtrain.config import tree
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run, check_vocabulary
    from jtrain.data import open_dataset
    from jtrain.hf.directory import check_empty, open_tensors, read_config
    from jtrain.hf.mapping import from_hf
    from jtrain.hf.model_config import model_differences, model_from_config
    from jtrain.model.fp8_scaling import first_scaling
    from jtrain.model.param import map_params
    from jtrain.step.state import TrainState

    if in_store(workdir_path(str(args.workdir).replace(":/", "://", 1))):
        raise UserError(f"{args.workdir}: import writes to a disk. Give a folder, and copy it to the store afterwards.")
    check_empty(args.workdir)
    theirs = model_from_config(read_config(args.folder))
    run_config = load_config(args.config, args.fiddlers, args.sets)
    run = build_run(run_config)
    if lines := model_differences(theirs, run.model):
        listed = "".join(f"\n  {line}" for line in lines)
        raise UserError(
            f"{args.folder} is not the model of --config={args.config}:{listed}\nSet these fields by --set."
        )
    dataset = open_dataset(run.data, seed=run.seed)
    check_vocabulary(run.model, dataset.vocab_size)
    with open_tensors(args.folder) as tensors:
        arrays = from_hf(tensors, run.model, dtype=run.precision.param_dtype)
    params = _onto_device(arrays)
    infos = map_params(lambda info: info, run.model.param_infos())
    optimizer = optim.build(run.optimizer, num_steps=run.num_steps, params=infos)
    delayed = run.precision.matmul_dtype == "fp8_delayed"
    scaling = first_scaling(run.model.param_infos(), params) if delayed else {}
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), scaling)
    config_text = tree.flat(run_config)
    args.workdir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(args.workdir, run.checkpoint) as checkpoints:
        checkpoints.save(0, state, dataset.first_state(), config_text)
    # Written last: a config.txt without a checkpoint would let a run start from random weights.
    (args.workdir / "config.txt").write_text(config_text)
    print(f"{args.folder}, {_size(run.model.param_infos())} parameters -> step 0 of {args.workdir}. Train on from it:")
    options = [f"--config={args.config}", *(part for name in args.fiddlers for part in ("--with", name))]
    options += [*(part for text in args.sets for part in ("--set", text)), "--workdir", str(args.workdir)]
    print(f"  python -m jtrain.launch {shlex.join(options)}")
    return 0


def _start_jax() -> None:
    """Starts jax on the CPU: conversion computes nothing, and host memory has room for a whole model."""
    start_jax(os.environ, emulate_devices=1)


def _tokenizer_folder(tokenizer: str) -> Path | None:
    """Folder of a tokenizer's files; None for `bytes`, which has no files."""
    if tokenizer == "bytes":
        return None
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def _onto_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """Converts a tree to jax arrays; empties `arrays` meanwhile, so that the weights are never in memory twice."""
    import jax.numpy as jnp

    out: dict[str, Any] = {}
    for key in list(arrays):
        value = arrays.pop(key)
        out[key] = _onto_device(value) if isinstance(value, dict) else jnp.asarray(value)
    return out


def _size(infos: Any) -> str:
    """Number of parameters, with thousands separators."""
    return f"{sum(info.size for info in infos):,}"


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {"export": export, "import": import_}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: VERBS[args.verb](args))
