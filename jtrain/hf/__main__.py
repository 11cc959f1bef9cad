"""Workdirs to Hugging Face model directories and back.

python -m jtrain.hf export runs/tiny out/tiny --dtype bfloat16
python -m jtrain.hf import models/Llama-3.1-8B runs/llama8b --config=llama8b --set data.path=/my/corpus/*.jsonl
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jtrain import verb


def parser() -> argparse.ArgumentParser:
    """The command line; no jax is imported to read it."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.hf",
        description="Exports checkpoints to Hugging Face Llama, Qwen3 and Qwen3-MoE directories, and imports those.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{export,import}")
    export = verbs.add_parser(
        "export",
        help="a checkpoint to a directory that transformers loads",
        description="Writes the weights of a checkpoint as config.json and safetensors, with the tokenizer's files.",
        allow_abbrev=False,
    )
    export.add_argument("workdir", type=Path, metavar="WORKDIR", help="of the run")
    export.add_argument("out", type=Path, metavar="OUT", help="a new or empty directory")
    export.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights (default: as the run keeps them)"
    )
    import_ = verbs.add_parser(
        "import",
        help="such a directory to a workdir, to train on from",
        description="Writes step 0 of a new workdir: the weights of the directory, a fresh optimizer, the first batch. "
        "`python -m jtrain.launch --workdir OUT_WORKDIR` with the same --config, --with and --set trains on from it. "
        "`--set data.tokenizer=HF_DIR` keeps its tokenizer.",
        allow_abbrev=False,
    )
    import_.add_argument("folder", type=Path, metavar="HF_DIR", help="with config.json and safetensors")
    import_.add_argument("workdir", type=Path, metavar="OUT_WORKDIR", help="a new or empty directory")
    import_.add_argument("--config", required=True, metavar="NAME", help="as of launch; its model must be theirs")
    import_.add_argument("--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER", help="as of launch")
    import_.add_argument("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="as of launch")
    return parser


def export(args: argparse.Namespace) -> int:
    """Writes a model directory; returns the exit code."""
    _start_jax()

    import jax  # lazy, here and below: over a second that --help need not pay
    import numpy as np

    from jtrain import config
    from jtrain.checkpoint import Checkpoints, CheckpointSpec
    from jtrain.data import make_tokenizer
    from jtrain.hf.directory import check_empty, write_directory
    from jtrain.hf.model_config import config_from_model
    from jtrain.model.param import map_params

    check_empty(args.out)
    with Checkpoints(args.workdir, CheckpointSpec()) as checkpoints:
        step = checkpoints.latest_step() if args.step is None else args.step
        if step is None:
            raise FileNotFoundError(f"No checkpoint in {checkpoints.folder}. Give the WORKDIR of another run.")
        run = config.build(config.read(checkpoints.config_text(step)))
        dtype = args.dtype or run.layout.param_dtype
        tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
        their_config = config_from_model(
            run.model, dtype=dtype, max_seq_len=run.data.seq_len, begin_id=tokenizer.begin_id, end_id=tokenizer.end_id
        )
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        # Read in the dtype to be written: rounding later would hold the weights in both.
        like = map_params(
            lambda info: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding), run.model.param_infos()
        )
        params = checkpoints.restore_part(step, {"params": like})["params"]
    files = write_directory(
        args.out,
        jax.tree.map(np.asarray, params),  # on a CPU the same memory
        run.model,
        their_config,
        dtype=dtype,
        tokenizer_folder=_tokenizer_folder(run.data.tokenizer),
    )
    print(f"step {step} of {args.workdir}, {_size(run.model.param_infos())} parameters, {dtype} -> {args.out}:")
    print(f"  {', '.join(files)}")
    return 0


def import_(args: argparse.Namespace) -> int:
    """Writes a workdir whose step 0 is a model directory; returns the exit code."""
    _start_jax()

    import jax.numpy as jnp

    from jtrain import config, leaves, optim
    from jtrain.checkpoint import Checkpoints
    from jtrain.data import open_dataset
    from jtrain.hf.directory import check_empty, open_tensors, read_config
    from jtrain.hf.mapping import from_hf
    from jtrain.hf.model_config import model_differences, model_from_config
    from jtrain.model.param import map_params
    from jtrain.model.scaling import first_scaling
    from jtrain.step import TrainState

    check_empty(args.workdir)
    theirs = model_from_config(read_config(args.folder))
    run_config = config.load(args.config, args.fiddlers, args.sets)
    run = config.build(run_config)
    if lines := model_differences(theirs, run.model):
        listed = "".join(f"\n  {line}" for line in lines)
        raise ValueError(f"{args.folder} is another model than --config={args.config}:{listed}\nSet these by --set.")
    dataset = open_dataset(run.data, seed=run.seed)
    config.check_vocabulary(run.model, dataset.vocab_size)
    with open_tensors(args.folder) as tensors:
        arrays = from_hf(tensors, run.model, dtype=run.layout.param_dtype)
    params = _onto_device(arrays)
    infos = map_params(lambda info: info, run.model.param_infos())
    optimizer = optim.build(run.optimizer, num_steps=run.num_steps, params=infos)
    delayed = run.layout.matmul_dtype == "fp8_delayed"
    scaling = first_scaling(run.model.param_infos(), params) if delayed else {}
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), scaling)
    config_text = leaves.flat(run_config)
    args.workdir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(args.workdir, run.checkpoint) as checkpoints:
        checkpoints.save(0, state, dataset.first_state(), config_text)
    # Last: a config.txt without a checkpoint would let a run begin from random weights.
    (args.workdir / "config.txt").write_text(config_text)
    print(f"{args.folder}, {_size(run.model.param_infos())} parameters -> step 0 of {args.workdir}. Train on from it:")
    options = [f"--config={args.config}", *(part for name in args.fiddlers for part in ("--with", name))]
    options += [*(part for text in args.sets for part in ("--set", text)), "--workdir", str(args.workdir)]
    print(f"  python -m jtrain.launch {shlex.join(options)}")
    return 0


def _start_jax() -> None:
    """On the host alone: nothing is computed, and its memory is what holds a whole model."""
    verb.start_jax(os.environ, emulate_devices=1)


def _tokenizer_folder(tokenizer: str) -> Path | None:
    """Where a tokenizer's files lie; None for bytes, which has none."""
    if tokenizer == "bytes":
        return None
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def _onto_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same tree as jax arrays; empties `arrays` on the way, so that the weights are never there twice."""
    import jax.numpy as jnp

    out: dict[str, Any] = {}
    for key in list(arrays):
        value = arrays.pop(key)
        out[key] = _onto_device(value) if isinstance(value, dict) else jnp.asarray(value)
    return out


def _size(infos: Any) -> str:
    """How many parameters."""
    return f"{sum(info.size for info in infos):,}"


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {"export": export, "import": import_}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return verb.run(lambda: VERBS[args.verb](args))


if __name__ == "__main__":
    sys.exit(main())
