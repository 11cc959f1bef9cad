"""`jtrain data reference`: log-probabilities of preference pairs, for `objective.reference=stored`."""

import os
import shlex
from pathlib import Path

from jtrain.cli.options import add_config, add_workdir, config_words
from jtrain.cli.run import Args, Parser
from jtrain.runtime.platform import start_jax


def add_reference_options(parser: Parser) -> None:
    """Declares the options of `reference`."""
    add_config(parser)
    add_workdir(parser, "folder of the run, with the imported model if there is one")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")


def reference(args: Args) -> int:
    """Writes the log-probabilities of all pairs of a run by its first weights; returns the exit code."""
    # Before jax is imported, whose platform must be chosen first.
    start_jax(os.environ)
    import jax

    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.train.reference import write_reference

    run = build_run(load_config(args.config, args.fiddlers, args.sets))
    write_reference(run, workdir=Path(args.workdir), out=args.out, devices=jax.devices())
    return 0


def then(args: Args) -> str:
    """The command that trains with the file."""
    sets = ("--set", "objective.reference=stored", "--set", f"objective.stored={args.out}")
    return shlex.join(["jtrain", "launch", *config_words(args), *sets, "--workdir", args.workdir])
