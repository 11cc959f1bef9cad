"""Options that several verbs share, and types of values: numbers as people write them, sizes, files to
write.
"""

import itertools
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.run import STDOUT, Args, Parser, WrongValue
from jtrain.runtime.accelerators import DEVICES
from jtrain.runtime.stores import workdir_path

_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
# 1024 in KiB, MiB, and in K, M without a unit, as nccl-tests counts; 1000 in KB, MB.
_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}
_UNITS |= {p + end: 1024**k for k, p in enumerate("KMGT", 1) for end in ("iB", "")}


def add_config(parser: Parser, *, required: bool = True) -> None:
    """Adds --config, --with and --set, which name a run's settings."""
    parser.add_argument(
        "--config",
        required=required,
        metavar="NAME",
        help="a file of configs/ (tiny, llama8b, ...), path/to/file.py[:function] or module:function",
    )
    parser.add_argument(
        "--with",
        dest="fiddlers",
        action="append",
        default=[],
        metavar="FIDDLER",
        help="apply a fiddler of that file",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="set one field, after fiddlers",
    )


def config_words(args: Args) -> list[str]:
    """The options of `add_config` as they were given, for a command about the same config."""
    options = [("--with", name) for name in args.fiddlers] + [("--set", text) for text in args.sets]
    return [f"--config={args.config}", *itertools.chain.from_iterable(options)]


def add_workdir(
    parser: Parser,
    what: str = "folder, gs:// or s3:// URL of the run",
    *,
    required: bool = True,
    several: bool = False,
) -> None:
    """Adds --workdir, which names a run's files, or those of several runs."""
    parser.add_argument(
        "--workdir", required=required, nargs="+" if several else None, metavar="DIR", help=what
    )


def in_new_workdir(words: Sequence[str], workdir: str) -> str:
    """The command that trains as `words` say in `workdir`, numbered if it is there already."""
    number = 2
    name = workdir
    while workdir_path(name).exists():
        name, number = f"{workdir}-{number}", number + 1
    return shlex.join(["jtrain", "launch", *without(words, "--workdir"), "--workdir", name])


def without(words: Sequence[str], *options: str) -> list[str]:
    """The words of a training command without some options, their values, and what only prints."""
    parser = Parser("", description="", epilog="")
    for option in options:
        parser.add_argument(option)
    for flag in ("--dry-run", "--print-config"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(words)[1]


def add_step(parser: Parser, what: str = "step of the checkpoint (default: the newest)") -> None:
    """Adds --step."""
    parser.add_argument("--step", type=int, metavar="N", help=what)


def add_json(parser: Parser) -> None:
    """Adds --json, which every verb that prints a table has."""
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the same to FILE as JSON; - prints it"
    )


def add_local_devices(parser: Parser) -> None:
    """Adds --device and --emulate-devices: what of this machine a process computes on."""
    parser.add_argument(
        "--device", choices=DEVICES, help="run on this kind of device (default: the fastest here)"
    )
    parser.add_argument("--emulate-devices", type=int, metavar="N", help="run on N CPU devices")


def output_file(text: str) -> Path:
    """Path of a file to write, in a folder that exists; `-` is standard output. It is refused before work
    begins.
    """
    path = Path(text)
    # Refused before work begins: a plan may take minutes.
    if path != STDOUT and not path.absolute().parent.is_dir():
        raise WrongValue(f"{text}: there is no folder {path.absolute().parent}. Make it first")
    return path


def number(text: str) -> float:
    """A number above 0 such as `15T`, `300B`, `4M` or `1e9`."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([KMBGT]?)", text.strip())
    try:
        value = float(match[1]) * _SUFFIXES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    # 0 and infinity are no numbers of tokens or dollars.
    if not 0 < value < math.inf:
        raise WrongValue(f"{text} must be a number above 0, such as 2.5, 1e9, 300B or 15T")
    return value


def share(text: str) -> float:
    """A fraction above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise WrongValue(f"{text} must be a share above 0 and at most 1")
    return value


def size(text: str) -> int:
    """Bytes of a size such as `128GiB`, `2TB`, `1000000`, or `1G`, which is 1 GiB as for nccl-tests."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT](?:i?B)?|B)?", text.strip())
    if match is None or not float(match[1]):
        raise WrongValue(f"{text}: expected a size such as 128GiB or 2TB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
