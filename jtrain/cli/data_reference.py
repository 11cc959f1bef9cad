"""`jtrain data reference`: what another model says of a run's samples, for `objective.stored`."""

import os
import shlex
from pathlib import Path

from jtrain.cli.options import add_config, add_workdir, config_words
from jtrain.cli.run import Args, Parser
from jtrain.runtime.platform import start_jax


def add_reference_options(parser: Parser) -> None:
    """Declares the options of `reference`."""
    add_config(parser)
    add_workdir(
        parser,
        "of preference pairs the folder of the run, with the imported model if there is one; for a "
        "distillation that of the teacher",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="file to write, or the folder for a distillation",
    )


def reference(args: Args) -> int:
    """Writes what the objective of a run wants to know of its samples; returns the exit code."""
    # Before jax is imported, whose platform must be chosen first.
    start_jax(os.environ)
    import jax

    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.train.reference import write_reference

    run = build_run(load_config(args.config, args.fiddlers, args.sets))
    write_reference(run, workdir=Path(args.workdir), out=args.out, devices=jax.devices())
    return 0


def next_command(args: Args) -> str:
    """Command to suggest after this one: the training with what was written."""
    sets = ["--set", f"objective.stored={args.out}"]
    # A folder holds what a teacher said of each token (Distillation), a file the sums of preference pairs (DPO).
    if args.out.is_dir():
        # In a workdir of its own: that of the command is the teacher's.
        return shlex.join(["jtrain", "launch", *config_words(args), *sets])
    sets += ["--set", "objective.reference=stored", "--workdir", args.workdir]
    return shlex.join(["jtrain", "launch", *config_words(args), *sets])
