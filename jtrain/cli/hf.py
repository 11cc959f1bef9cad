"""Conversion of workdirs to Hugging Face model directories and back.

python -m jtrain.hf export --workdir runs/tiny --out out/tiny --dtype bfloat16
python -m jtrain.hf import --from models/Llama-3.1-8B --workdir runs/llama8b --config=llama8b
python -m jtrain.hf config --from models/Llama-3.1-8B --base sft_llama1b --out mine.py
python -m jtrain.hf inspect models/Llama-3.1-8B --device h100 --count 8
python -m jtrain.hf prove models/Llama-3.1-8B --torch-python T/bin/python
"""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

from jtrain.cli import hf_inspect
from jtrain.cli.options import add_config, add_json, add_step, add_workdir, config_words
from jtrain.cli.run import Args, Command, Parser, Verb, WrongValue, write_json
from jtrain.errors import FileError, UserError
from jtrain.report.table import Table, numbers, words
from jtrain.runtime import exit_codes
from jtrain.runtime.atomic_io import write_whole
from jtrain.runtime.platform import start_jax
from jtrain.runtime.stores import run_folder


def add_export_options(parser: Parser) -> None:
    """Declares the options of `export`."""
    add_workdir(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    add_step(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights (default: of the imported model, or the run's precision.param_dtype)",
    )
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="names of tensors: a model_type, or path/to/file.py:function of your own (default: the model's)",
    )
    _add_adapter(parser)


def _add_adapter(parser: Parser) -> None:
    parser.add_argument(
        "--merge-losses",
        action="store_true",
        help="also print the losses of the adapter and of both merges on a batch, held out if one is",
    )
    parser.add_argument(
        "--merge-onto",
        choices=("trained", "base"),
        default="trained",
        help="weights that an adapter is merged into: the frozen ones as they were trained with, in blocks of "
        "adapter.base_dtype, or those of adapter.base before they were in blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the run's adapter as a folder of peft (default: the model with the adapter merged)",
    )


def add_import_options(parser: Parser) -> None:
    """Declares the options of `import`."""
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="with config.json and safetensors: a folder, hf://OWNER/NAME, or the URL of a store",
    )
    add_workdir(parser, "a new or empty directory")
    add_config(parser)
    hf_inspect.add_family(parser)
    parser.add_argument(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="I/N",
        help="write part I, from 0, of N: one process for each, on one disk; the last one completes the workdir",
    )


def _share(text: str) -> tuple[int, int]:
    """Number of a process and of all, of `I/N`."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise WrongValue(f"{text} must be I/N with I from 0 to N - 1, such as 0/4")
    return int(number), int(count)


def export(args: Args) -> int:
    """Writes a model directory; returns the exit code."""
    run_folder(args.workdir)
    _start_jax()
    from jtrain.hf import workdirs

    workdirs.export(
        args.workdir,
        args.out,
        step=args.step,
        dtype=args.dtype,
        family_name=args.family,
        only_adapter=args.adapter,
        onto=args.merge_onto,
        with_losses=args.merge_losses,
    )
    return 0


def import_(args: Args) -> int:
    """Writes a workdir; returns the exit code."""
    _start_jax()
    from jtrain.hf import workdirs

    options: Any = {"config": args.config, "fiddlers": args.fiddlers, "sets": args.sets}
    choice: Any = {"family_name": args.family, "part": args.part, "share": args.share}
    workdirs.import_directory(args.source, args.workdir, **options, **choice)
    return 0


def add_config_options(parser: Parser) -> None:
    """Declares the options of `config`."""
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="a config.json, a folder with one, or hf://OWNER/NAME",
    )
    parser.add_argument(
        "--base", required=True, metavar="NAME", help="config that all but the model is taken from"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a new Python file")
    hf_inspect.add_family(parser)


def write_config(args: Args) -> int:
    """Writes a config file; returns the exit code."""
    _start_jax()
    from jtrain.config.load import load_config
    from jtrain.hf.config_file import config_source
    from jtrain.hf.model_config import model_from_config
    from jtrain.hf.model_files import read_config
    from jtrain.hf.selection import select

    load_config(args.base)
    model = model_from_config(select(read_config(args.source), family_name=args.family, part=args.part))
    source = config_source(model, base=args.base, model_from=args.source)
    if args.out.exists():
        raise UserError(f"--out {args.out} is there already. Give a new file.")
    try:
        write_whole(args.out, source)
    except OSError as error:
        raise FileError(
            f"--out {args.out} cannot be written ({error.strerror}). Give a file in a folder that is there."
        ) from error
    print(f"{args.source} -> {args.out}: the model, and all else of --config={args.base}")
    return 0


def add_prove_options(parser: Parser) -> None:
    """Declares the options of `prove`."""
    parser.add_argument(
        "--source",
        required=True,
        metavar="MODEL",
        help="a config.json, a folder with one, or a model_type of transformers (its default config)",
    )
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("PEER_TORCH_PYTHON"),
        metavar="PYTHON",
        help="interpreter that has torch and transformers; or $PEER_TORCH_PYTHON",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="FIELD=JSON",
        help="set one field of config.json, like attention_bias=true",
    )
    hf_inspect.add_family(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    add_json(parser)


def prove(args: Args) -> int:
    """Prints the comparisons; returns the exit code, 1 if anything differs."""
    # An option of XLA that must be set before jax starts, so jax is imported below.
    start_jax(os.environ, emulate_devices=8)
    import jax

    from jtrain.hf import prove as proofs

    # The steps compile for longer than they compute.
    jax.config.update("jax_disable_most_optimizations", True)
    sets = [*args.sets, *([] if args.family is None else [f'model_type="{args.family}"'])]
    proof = proofs.prove(args.source, args.torch_python, sets=sets, seed=args.seed)
    facts = proof.facts
    table = Table(
        f"{facts['class']} of transformers {facts['transformers']}, torch {facts['torch']}: "
        f"{proof.config['model_type']}, {facts['parameters']:,} parameters",
        words("compared with", "of") + numbers("largest difference", "allowed") + words("", "where"),
    )
    for check in proof.checks:
        if check.difference is None:
            table.add(check.compared, check.quantity, "", "", "refused", check.where)
        else:
            verdict = "equal" if check.is_equal else "UNEQUAL"
            figures = f"{check.difference:.1e}", f"{check.bound:.0e}"
            table.add(check.compared, check.quantity, *figures, verdict, check.where)
    print(table.title, *table.lines(), sep="\n")
    unequal = sum(not check.is_equal for check in proof.checks)
    print(f"{unequal} of {len(proof.checks)} comparisons are unequal" if unequal else "everything is equal")
    rows = [dataclasses.asdict(check) | {"is_equal": check.is_equal} for check in proof.checks]
    write_json(args, {"is_equal": proof.is_equal, "facts": facts, "config": proof.config, "checks": rows})
    return exit_codes.DONE if proof.is_equal else exit_codes.BUG


def _start_jax() -> None:
    """Starts jax on the CPU: conversion computes nothing, and host memory has room for a whole model."""
    start_jax(os.environ, emulate_devices=1)


VERB = Verb(
    "hf",
    summary="convert checkpoints to Hugging Face directories and back, and inspect and prove what is in them",
    commands={
        "export": Command(
            "write a checkpoint as a directory that transformers loads",
            export,
            add_export_options,
            "Writes the weights of a checkpoint as config.json and safetensors, with the tokenizer's files.",
            subject="workdir",
            next_command=lambda args: shlex.join(["jtrain", "hf", "inspect", str(args.out)]),
        ),
        "import": Command(
            "write a workdir whose step 0 has the weights of such a directory",
            import_,
            add_import_options,
            "Writes step 0 of a new workdir: the weights of the directory, a fresh optimizer, the first "
            "batch. `python -m jtrain.launch` with the same --workdir, --config, --with and --set continues "
            "from it. --config must describe the model of --from; `--set data.tokenizer=DIR` keeps its "
            "tokenizer.",
            subject="from",
            next_command=lambda args: shlex.join(
                ["jtrain", "launch", *config_words(args), "--workdir", args.workdir]
            ),
        ),
        "config": Command(
            "write the config file of a model directory",
            write_config,
            add_config_options,
            "Writes Python: the config of --base with the model that config.json describes, to be read, "
            "changed, and given to every verb as --config=FILE:run.",
            subject="from",
            next_command=lambda args: shlex.join(
                [
                    "jtrain",
                    "hf",
                    "import",
                    "--from",
                    args.source,
                    f"--config={args.out}:run",
                    "--workdir",
                    f"runs/{args.out.stem}",
                ]
            ),
        ),
        "inspect": hf_inspect.COMMAND,
        "prove": Command(
            "compare a model with transformers and with itself on every layout",
            prove,
            add_prove_options,
            "Builds a small model of the config with drawn weights in float32, two to eight layers, and "
            "compares logits, loss and the gradient of every parameter with transformers' own class, rows of "
            "one document and rows of several, then the first step of each layout with one device. Weights "
            "of a folder are not read.",
            exits="Exit codes: 0 all is equal; 1 something differs; 2 an error that you can fix, as printed.",
            subject="source",
            next_command=lambda args: shlex.join(
                ["jtrain", "hf", "config", args.source, "--base", "sft_llama1b", "--out", "model.py"]
            ),
        ),
    },
)
main = VERB.main
