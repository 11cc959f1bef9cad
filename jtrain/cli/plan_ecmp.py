"""Command line of hash collisions: `python -m jtrain.plan ecmp --flows 64 --links 16`, or of a machine's spine."""

import argparse
import json
from collections.abc import Sequence

from jtrain.cli.plan_network import add_fabric_arguments, fabric_of
from jtrain.errors import UserError
from jtrain.plan.sizes import parse_bytes
from jtrain.runtime import cli

MOST = 1 << 16
"""Largest number of flows or links."""


def parser() -> argparse.ArgumentParser:
    """The command-line parser; it needs no jax, so --help answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.plan ecmp",
        description="Loads of links when switches hash flows over them (ECMP), by queue pairs per connection: drawn at "
        "random and exact. With a machine, what an all-reduce gains, and NCCL's variables.",
        epilog="Exit codes: 0; 2 the machine or an option is wrong: the message says what to change.",
        allow_abbrev=False,
    )
    add_fabric_arguments(parser)
    parser.add_argument("--flows", type=int, metavar="F", help="connections, instead of a machine")
    parser.add_argument("--links", type=int, metavar="L", help="links of equal cost that they are hashed over")
    parser.add_argument("--trials", type=int, default=4000, metavar="N", help="random draws (default: 4000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default: 0)")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuses numbers out of range, and options that would have no effect.

    Raises:
      UserError: names the first of them.
    """
    cli.check_output_files(args, "shell", "json")
    for name, most in (("flows", MOST), ("links", MOST), ("trials", 1_000_000)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{name} {value} must be from 1 to {most:,}.")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} must be 0 or more.")
    numbers = args.flows is not None or args.links is not None
    if numbers and (args.flows is None or args.links is None):
        raise UserError("--flows and --links belong together. Give both, or a machine instead.")
    if numbers and (args.device is not None or args.machine is not None):
        raise UserError("--flows and --links are instead of a machine. Leave --device and --machine out.")
    if numbers and args.shell is not None:
        raise UserError(f"--shell {args.shell}: the variables are of a machine. Give --machine, or leave --shell out.")


def execute(args: argparse.Namespace) -> int:
    """Runs the parsed command line; returns the exit code."""
    from jtrain.plan.report.ecmp_sheet import EcmpSheet, print_ecmp, to_json, topology_of
    from jtrain.plan.report.network_sheet import shell_text, time_collective

    _check(args)
    if args.flows is not None:
        sheet = EcmpSheet(topology_of(args.flows, args.links), None, args.trials, args.seed)
    else:
        size = parse_bytes("--bytes", args.bytes)
        timed = time_collective(fabric_of(args), "all-reduce", size, scattered=not args.ordered)
        if not timed.traffic.hashed:
            raise UserError(
                f"{timed.fabric}: its switches spread flows by load, so no hashes collide. Set network.routing to "
                '"hashed" in a file for --machine, or give --flows and --links.'
            )
        if not timed.traffic.flows:
            raise UserError(
                f"{timed.fabric}: all {timed.fabric.hosts} hosts are under one leaf, so nothing crosses the spine. "
                "Raise --count, lower network.hosts_per_leaf, or give --flows and --links."
            )
        sheet = EcmpSheet(timed.traffic, timed, args.trials, args.seed)
    print_ecmp(sheet)
    if args.shell is not None and sheet.timed is not None:
        args.shell.write_text(shell_text(sheet.timed))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(sheet), indent=1) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command line after `jtrain.plan ecmp`; returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: execute(args))
