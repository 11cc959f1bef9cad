"""Conversion of workdirs to Hugging Face model directories and back.

python -m jtrain.hf export --workdir runs/tiny --out out/tiny --dtype bfloat16
python -m jtrain.hf import --from models/Llama-3.1-8B --workdir runs/llama8b --config=llama8b
"""

import os
from pathlib import Path

from jtrain.cli.options import add_config, add_step, add_workdir
from jtrain.cli.run import Args, Command, Parser, Verb
from jtrain.runtime.platform import start_jax


def add_export_options(parser: Parser) -> None:
    """Declares the options of `export`."""
    add_workdir(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    add_step(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights (default: the run's precision.param_dtype)",
    )


def add_import_options(parser: Parser) -> None:
    """Declares the options of `import`."""
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="with config.json and safetensors",
    )
    add_workdir(parser, "a new or empty directory")
    add_config(parser)


def export(args: Args) -> int:
    """Writes a model directory; returns the exit code."""
    _start_jax()
    from jtrain.hf import workdirs

    workdirs.export(args.workdir, args.out, step=args.step, dtype=args.dtype)
    return 0


def import_(args: Args) -> int:
    """Writes a workdir; returns the exit code."""
    _start_jax()
    from jtrain.hf import workdirs

    workdirs.import_directory(
        args.folder, args.workdir, config=args.config, fiddlers=args.fiddlers, sets=args.sets
    )
    return 0


def _start_jax() -> None:
    """Starts jax on the CPU: conversion computes nothing, and host memory has room for a whole model."""
    start_jax(os.environ, emulate_devices=1)


VERB = Verb(
    "hf",
    summary="convert checkpoints to Hugging Face Llama, Qwen3 and Qwen3-MoE directories, and back",
    commands={
        "export": Command(
            "write a checkpoint as a directory that transformers loads",
            export,
            add_export_options,
            "Writes the weights of a checkpoint as config.json and safetensors, with the tokenizer's files.",
            subject="workdir",
        ),
        "import": Command(
            "write a workdir whose step 0 has the weights of such a directory",
            import_,
            add_import_options,
            "Writes step 0 of a new workdir: the weights of the directory, a fresh optimizer, the first "
            "batch. `python -m jtrain.launch` with the same --workdir, --config, --with and --set continues "
            "from it. --config must describe the model of --from; `--set data.tokenizer=DIR` keeps its "
            "tokenizer.",
        ),
    },
)
main = VERB.main
