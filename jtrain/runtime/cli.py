"""Exit codes shared by all commands, `python -m jtrain.*`.

Imports no jax, so that a command can parse its arguments first and `--help` answers at once.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.output import keep_going_without_readers
from jtrain.runtime.secrets import without_secrets


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config, --with and --set, which name a run."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="NAME",
        help="a file of configs/ (tiny, llama8b, ...), path/to/file.py[:function] or module:function",
    )
    parser.add_argument(
        "--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER", help="apply a fiddler of that file"
    )
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="set one field, after fiddlers"
    )


def check_output_files(args: argparse.Namespace, *names: str) -> None:
    """Refuses files in folders that do not exist, before anything is computed; `-` is standard output.

    Args:
      names: options' names in `args`; their values are paths or None.

    Raises:
      UserError: names option and folder.
    """
    for name in names:
        path = getattr(args, name)
        if path is not None and path != Path("-") and not path.absolute().parent.is_dir():
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {path}: there is no folder {path.absolute().parent}. Make it first.")


def run(main: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    A `UserError`, or an OSError that names a file, is printed as a message and gives exit code 2, a `HardwareFault` 76.
    Every other exception is a bug and keeps its traceback.
    """
    keep_going_without_readers()
    try:
        return main()
    except KeyboardInterrupt:
        return 130  # shells report SIGINT as 130; during training the loop catches it, saves, and returns 75
    except (UserError, HardwareFault, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, UserError) and error.filename is None:
            raise
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        return exit_codes.FAULTY_HARDWARE if isinstance(error, HardwareFault) else exit_codes.REFUSED
