"""Command line of the network: `python -m jtrain.plan network --device h100 --count 64 --collective
all-reduce`.
"""

import shlex
from typing import TYPE_CHECKING

from jtrain.cli.machine_options import add_count, add_device, machine_words
from jtrain.cli.options import add_json, output_file, size
from jtrain.cli.run import Args, Command, Parser, write_json
from jtrain.errors import UserError

if TYPE_CHECKING:  # full names below; they import numpy
    import jtrain.plan.fabric.fabric
    import jtrain.plan.fabric.spine

COLLECTIVES: "tuple[jtrain.plan.fabric.spine.CollectiveKind, ...]" = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
)


def add_fabric_options(parser: Parser) -> None:
    """Declares what names a fabric, what is sent over it, and where results go."""
    add_device(parser)
    add_count(parser, "devices (default: the file's)")
    parser.add_argument(
        "--bytes",
        type=size,
        default="1G",
        metavar="SIZE",
        help="the whole array, such as 1G (default) or 4MB",
    )
    parser.add_argument(
        "--ordered", action="store_true", help="the job's hosts come leaf by leaf (default: in any order)"
    )
    parser.add_argument(
        "--shell", type=output_file, metavar="FILE", help="write NCCL's variables to FILE, to be sourced"
    )
    add_json(parser)


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_fabric_options(parser)
    parser.add_argument(
        "--collective", default="all-reduce", metavar="KIND", help=f"one of {', '.join(COLLECTIVES)}"
    )


def fabric_of(args: Args) -> "jtrain.plan.fabric.fabric.Fabric":
    """The fabric that the command line names.

    Raises:
      UserError: no machine is named, or two, or it has no such network.
    """
    from jtrain.plan.fabric.fabric import make_fabric  # lazy: numpy
    from jtrain.plan.machine_file import load_fabric
    from jtrain_kernels.device import DEVICES, from_name

    # A file is the whole fabric, its own devices included.
    if args.machine is not None:
        if args.device is not None:
            raise UserError(f"--machine {args.machine} with --device: the file says it. Leave --device out.")
        return load_fabric(args.machine, count=args.count)
    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.linked > 1]
        raise UserError(
            f"a network needs a machine. Give --device, one of {', '.join(names)}, or --machine FILE."
        )
    # A device alone is no network.
    if args.count is None:
        raise UserError(f"--device {args.device}: how many? Give --count.")
    return make_fabric(from_name(args.device), args.count)


def execute(args: Args) -> int:
    """Runs the parsed command line; returns the exit code."""
    from jtrain.plan.report.network_sheet import print_sheet, shell_text, time_collective, to_json

    if args.collective not in COLLECTIVES:
        raise UserError(f"--collective {args.collective} is unknown. Give one of {', '.join(COLLECTIVES)}.")
    # In any order of hosts, as a scheduler leaves them, unless --ordered.
    sheet = time_collective(fabric_of(args), args.collective, args.bytes, scattered=not args.ordered)
    print_sheet(sheet)
    if args.shell is not None:
        args.shell.write_text(shell_text(sheet))
    write_json(args, to_json(sheet))
    return 0


COMMAND = Command(
    "time a collective, level by level, and choose NCCL's settings",
    execute,
    add_options,
    description=(
        "Times one collective over the network of a machine that need not be here: by NCCL's own "
        "model, which says what NCCL will choose, and level by level for any library, with what the spine "
        "leaves."
    ),
    next_command=lambda args: shlex.join(["jtrain", "plan", "walls", *machine_words(args)]),
)
