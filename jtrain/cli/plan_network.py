"""Command line of the network: `python -m jtrain.plan network --device h100 --count 64 --collective all-reduce`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jtrain.errors import UserError
from jtrain.plan.fabric.fabric import Fabric, make_fabric
from jtrain.plan.fabric.spine import CollectiveKind
from jtrain.plan.machine_file import load_fabric
from jtrain.plan.sizes import parse_bytes
from jtrain.runtime import cli
from jtrain_kernels.device import DEVICES, from_name

COLLECTIVES: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def add_fabric_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a fabric, what is sent over it, and where results go."""
    parser.add_argument("--device", metavar="NAME", help="h100, h200, b200, gb200, v5p, ...: its maker's network")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="TOML file of chips, links, hosts and network")
    parser.add_argument("--count", type=int, metavar="N", help="devices (default: the file's)")
    parser.add_argument("--bytes", default="1G", metavar="SIZE", help="the whole array, such as 1G (default) or 4MB")
    parser.add_argument(
        "--ordered", action="store_true", help="the job's hosts come leaf by leaf (default: in any order)"
    )
    parser.add_argument("--shell", type=Path, metavar="FILE", help="write NCCL's variables to FILE, to be sourced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def parser() -> argparse.ArgumentParser:
    """The command-line parser; it needs no jax, so --help answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.plan network",
        description="Times one collective over the network of a machine that need not be here: by NCCL's own model, "
        "which says what NCCL will choose, and level by level for any library, with what the spine leaves.",
        epilog="Exit codes: 0; 2 the machine or an option is wrong: the message says what to change.",
        allow_abbrev=False,
    )
    add_fabric_arguments(parser)
    parser.add_argument("--collective", default="all-reduce", metavar="KIND", help=f"one of {', '.join(COLLECTIVES)}")
    return parser


def fabric_of(args: argparse.Namespace) -> Fabric:
    """The fabric that the command line names.

    Raises:
      UserError: no machine is named, or two, or it has no such network.
    """
    if args.machine is not None:
        if args.device is not None:
            raise UserError(f"--machine {args.machine} with --device: the file says it. Leave --device out.")
        return load_fabric(args.machine, count=args.count)
    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.linked > 1]
        raise UserError(f"a network needs a machine. Give --device, one of {', '.join(names)}, or --machine FILE.")
    if args.count is None:
        raise UserError(f"--device {args.device}: how many? Give --count.")
    return make_fabric(from_name(args.device), args.count)


def execute(args: argparse.Namespace) -> int:
    """Runs the parsed command line; returns the exit code."""
    from jtrain.plan.report.network_sheet import print_sheet, shell_text, time_collective, to_json

    cli.check_output_files(args, "shell", "json")
    if args.collective not in COLLECTIVES:
        raise UserError(f"--collective {args.collective} is unknown. Give one of {', '.join(COLLECTIVES)}.")
    sheet = time_collective(
        fabric_of(args), args.collective, parse_bytes("--bytes", args.bytes), scattered=not args.ordered
    )
    print_sheet(sheet)
    if args.shell is not None:
        args.shell.write_text(shell_text(sheet))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(sheet), indent=1) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command line after `jtrain.plan network`; returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: execute(args))
