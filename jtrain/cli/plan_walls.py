"""Command line of walls: `python -m jtrain.plan walls --device h100 --days 90 --batch-tokens 16M`."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.machine_options import add_machine_options, machine_and_price, number
from jtrain.errors import UserError
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.runtime import cli
from jtrain.runtime.platform import start_jax

DAYS = "90"
BATCH_TOKENS = "16M"  # Llama 3 405B, arXiv:2407.21783, section 3.4.1


def parser() -> argparse.ArgumentParser:
    """The command-line parser; it needs no jax, so --help answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.plan walls",
        description="How large a run of so many days can be: up to where it scales linearly (the data-movement wall), "
        "and where no number of devices helps (the latency wall), with what binds and how both move.",
        epilog="Exit codes: 0; 2 an option is wrong: the message says what to change.",
        allow_abbrev=False,
    )
    add_machine_options(parser)
    parser.add_argument("--count", type=int, metavar="N", help="devices of your cluster: says how far it gets")
    parser.add_argument("--days", default=DAYS, metavar="N", help=f"time in which a run has to end (default: {DAYS})")
    parser.add_argument(
        "--batch-tokens", default=BATCH_TOKENS, metavar="N", help=f"tokens of a step (default: {BATCH_TOKENS})"
    )
    parser.add_argument(
        "--latency-us",
        metavar="US",
        help="microseconds of a matmul with its collective on no data (default: an all-reduce of two linked devices)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the walls to FILE")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Runs the parsed command line; returns the exit code."""
    cli.check_output_files(args, "json")
    os.environ.update(AOT_ENVIRONMENT)  # a plan is for another machine, as in `jtrain.cli.plan`
    start_jax(os.environ)

    from jtrain.plan.economics.walls import (
        PUBLISHED_FLOP,
        Cluster,
        collective_latency_s,
        data_wall,
        largest_run,
        latency_wall,
    )
    from jtrain.plan.estimate.step_time import SECONDS_PER_DAY
    from jtrain.plan.report.walls_table import moved, print_walls

    machine, _ = machine_and_price(args, args.count)
    days, batch = number("--days", args.days), number("--batch-tokens", args.batch_tokens)
    if args.latency_us is None:
        latency_s = collective_latency_s(machine.device)
    else:
        latency_s = number("--latency-us", args.latency_us) / 1e6
    cluster = Cluster(machine.device, days * SECONDS_PER_DAY, batch, latency_s)
    wall = data_wall(cluster)
    if wall is None:
        raise UserError(
            f"no run of {days:g} days with {batch:,.0f} tokens a step scales on {machine.device.name}: raise --days "
            "or --batch-tokens, or lower --latency-us."
        )
    count = args.count or (machine.count if args.machine is not None else None)
    own = None if count is None else largest_run(cluster, count)
    if count is not None and own is None:
        raise UserError(
            f"--count {count}: no run of {days:g} days is possible with {batch:,.0f} tokens a step. Raise --days or "
            "--batch-tokens."
        )
    last, table = latency_wall(cluster), moved(cluster)
    print_walls(cluster, wall, last, table, own=own, count=count)
    if args.json is not None:
        found: dict[str, Any] = {
            "device": machine.device.name,
            "days": days,
            "batch_tokens": batch,
            "latency_s": latency_s,
            "data_wall_flop": wall.shape.flop,
            "latency_wall_flop": last.flop,
            "published_flop": PUBLISHED_FLOP,
            "data_wall": dataclasses.asdict(wall) | {"devices": wall.devices, "parameters": wall.shape.parameters},
            "moved": [dataclasses.asdict(row) for row in table],
            "own": None if own is None else {"count": count, "flop": own.shape.flop, "share": own.share},
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command line after `jtrain.plan walls`; returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: execute(args))
