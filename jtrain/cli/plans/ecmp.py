"""Command line of hash collisions: `python -m jtrain.plan ecmp --flows 64 --links 16`, or of a machine's
spine.
"""

import shlex

from jtrain.cli.machine_options import machine_words
from jtrain.cli.plans.network import add_fabric_options, fabric_of
from jtrain.cli.run import Args, Command, Parser, write_json
from jtrain.errors import UserError

MOST = 1 << 16
"""Largest number of flows or links."""


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_fabric_options(parser)
    parser.add_argument("--flows", type=int, metavar="F", help="connections, instead of a machine")
    parser.add_argument(
        "--links", type=int, metavar="L", help="links of equal cost that they are hashed over"
    )
    parser.add_argument("--trials", type=int, default=4000, metavar="N", help="random draws (default: 4000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default: 0)")


def _check(args: Args) -> None:
    """Refuses numbers out of range, and options that would have no effect.

    Raises:
      UserError: names the first of them.
    """
    for name, largest in (("flows", MOST), ("links", MOST), ("trials", 1_000_000)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= largest:
            raise UserError(f"--{name} {value} must be from 1 to {largest:,}.")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} must be 0 or more.")
    # Either both numbers or a machine: a machine has its own links.
    numbers = args.flows is not None or args.links is not None
    if numbers and (args.flows is None or args.links is None):
        raise UserError("--flows and --links belong together. Give both, or a machine instead.")
    if numbers and (args.device is not None or args.machine is not None):
        raise UserError("--flows and --links are instead of a machine. Leave --device and --machine out.")
    if numbers and args.shell is not None:
        raise UserError(
            f"--shell {args.shell}: the variables are of a machine. Give --machine, or leave --shell out."
        )


def execute(args: Args) -> int:
    """Runs the parsed command line; returns the exit code."""
    from jtrain.plan.report.ecmp_sheet import EcmpSheet, print_ecmp, to_json, topology_of
    from jtrain.plan.report.network_sheet import shell_text, time_collective

    _check(args)
    if args.flows is not None:
        sheet = EcmpSheet(topology_of(args.flows, args.links), None, args.trials, args.seed)
    else:
        timed = time_collective(fabric_of(args), "all-reduce", args.bytes, scattered=not args.ordered)
        # A switch that spreads by load has no collisions to count.
        if not timed.traffic.hashed:
            raise UserError(
                f"{timed.fabric}: its switches spread flows by load, so no hashes collide. Set "
                "network.routing to "
                '"hashed" in a file for --machine, or give --flows and --links.'
            )
        # Under one leaf no flow crosses the spine.
        if not timed.traffic.flows:
            raise UserError(
                f"{timed.fabric}: all {timed.fabric.hosts} hosts are under one leaf, so nothing crosses the "
                "spine. Raise --count, lower network.hosts_per_leaf, or give --flows and --links."
            )
        sheet = EcmpSheet(timed.traffic, timed, args.trials, args.seed)
    print_ecmp(sheet)
    if args.shell is not None and sheet.timed is not None:
        args.shell.write_text(shell_text(sheet.timed))
    write_json(args, to_json(sheet))
    return 0


COMMAND = Command(
    "show how hashing loads links, by queue pairs per connection",
    execute,
    add_options,
    description=(
        "Loads of links when switches hash flows over them (ECMP), by queue pairs per connection: "
        "drawn at random and exact. With a machine, what an all-reduce gains, and NCCL's variables."
    ),
    next_command=lambda args: shlex.join(
        ["jtrain", "plan", "network", *(machine_words(args) or ["--device", "h100", "--count", "64"])]
    ),
)
