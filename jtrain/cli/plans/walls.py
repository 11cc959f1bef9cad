"""Command line of walls: `python -m jtrain.plan walls --device h100 --days 90 --batch-tokens 16M`.

A wall is the FLOP of the largest run that can end in time: with devices that are still well used (the
data-movement wall), or with any number of devices (the latency wall). See `plan/economics/walls.py`.
"""

import dataclasses
import shlex

from jtrain.cli.machine_options import (
    add_count,
    add_machine,
    machine_and_price,
    machine_words,
    start_without_devices,
)
from jtrain.cli.options import add_json, number
from jtrain.cli.run import Args, Command, Parser, write_json
from jtrain.errors import UserError

DAYS = "90"
BATCH_TOKENS = "16M"  # Llama 3 405B, arXiv:2407.21783, section 3.4.1


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_machine(parser)
    add_count(parser, "devices of your cluster: says how far it gets")
    parser.add_argument(
        "--days",
        type=number,
        default=DAYS,
        metavar="N",
        help=f"time in which a run has to end (default: {DAYS})",
    )
    parser.add_argument(
        "--batch-tokens",
        type=number,
        default=BATCH_TOKENS,
        metavar="N",
        help=f"tokens of a step (default: {BATCH_TOKENS})",
    )
    parser.add_argument(
        "--latency-us",
        type=number,
        metavar="US",
        help=(
            "microseconds of a matmul with its collective on no data (default: an all-reduce of two linked "
            "devices)"
        ),
    )
    add_json(parser)


def execute(args: Args) -> int:
    """Prints both walls, how they move with batch and latency, and how far `--count` devices get.

    Returns:
      The exit code.
    """
    start_without_devices()

    from jtrain.plan.economics.walls import (
        PUBLISHED_FLOP,
        Cluster,
        collective_latency_s,
        data_wall,
        largest_run,
        latency_wall,
    )
    from jtrain.plan.estimate.step_time import SECONDS_PER_DAY
    from jtrain.plan.report.walls_table import print_walls, walls_by_factor

    machine, _ = machine_and_price(args, args.count)
    days, batch = args.days, args.batch_tokens
    # Microseconds on the command line, since an all-reduce takes some of them.
    latency_s = collective_latency_s(machine.device) if args.latency_us is None else args.latency_us / 1e6
    cluster = Cluster(machine.device, days * SECONDS_PER_DAY, batch, latency_s)
    wall = data_wall(cluster)
    # None: not even the smallest run uses its devices well.
    if wall is None:
        raise UserError(
            f"no run of {days:g} days with {batch:,.0f} tokens a step scales on {machine.device.name}: raise "
            "--days or --batch-tokens, or lower --latency-us."
        )
    # A file of a machine says how many devices it has; the name of a device does not.
    count = args.count or (machine.count if args.machine is not None else None)
    own_run = None if count is None else largest_run(cluster, count)
    if count is not None and own_run is None:
        raise UserError(
            f"--count {count}: no run of {days:g} days is possible with {batch:,.0f} tokens a step. Raise "
            "--days or --batch-tokens."
        )
    latency_shape, table = latency_wall(cluster), walls_by_factor(cluster)
    print_walls(cluster, wall, latency_shape, table, user_run=own_run, count=count)
    write_json(
        args,
        {
            "device": machine.device.name,
            "days": days,
            "batch_tokens": batch,
            "latency_s": latency_s,
            "data_wall_flop": wall.shape.flop,
            "latency_wall_flop": latency_shape.flop,
            "published_flop": PUBLISHED_FLOP,
            "data_wall": dataclasses.asdict(wall)
            | {"devices": wall.devices, "parameters": wall.shape.parameters},
            "moved": [dataclasses.asdict(row) for row in table],
            "own": None
            if own_run is None
            else {"count": count, "flop": own_run.shape.flop, "share": own_run.share},
        },
    )
    return 0


COMMAND = Command(
    "say how large a run can be, and what stops a larger one",
    execute,
    add_options,
    description=(
        "How large a run of so many days can be: up to where it scales linearly (the data-movement "
        "wall), and where no number of devices helps (the latency wall), with what binds and how both move."
    ),
    next_command=lambda args: shlex.join(
        ["jtrain", "plan", "cost", "llama8b", *machine_words(args, count=False), "--tokens", "15T"]
    ),
)
