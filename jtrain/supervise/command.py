"""`--supervise` of the training command: its arguments, and the command of the processes that it starts."""

import argparse
import re
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from jtrain.errors import UserError
from jtrain.supervise.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --supervise and --processes."""
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="start the training process from one that watches it: a crash or a hang is named, ended and restarted",
    )
    parser.add_argument(
        "-n", "--processes", type=int, metavar="N", help="with --supervise: start N processes on this host (default: 1)"
    )


def refuse_alone(args: argparse.Namespace) -> None:
    """Refuses --processes without --supervise.

    Raises:
      UserError: as said.
    """
    if args.processes is not None and not args.supervise:
        raise UserError(f"--processes {args.processes} starts processes from a supervisor. Add --supervise.")


def supervise(
    args: argparse.Namespace, argv: Sequence[str] | None, environ: MutableMapping[str, str], *, workdir: Path
) -> int:
    """Runs the same command without `--supervise` under a supervisor; returns the exit code."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(own)
    _, rest = own.parse_known_args(argv)
    local = None if re.match(r"\w+:/", str(workdir)) else workdir
    command = [sys.executable, "-m", "jtrain.launch", *rest]
    return Supervisor(command, environ, processes=args.processes or 1, workdir=local).run()
