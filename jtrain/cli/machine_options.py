"""Options that plans share: the machine, which need not be here."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.options import number, size
from jtrain.cli.run import Args, Parser
from jtrain.errors import UserError
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.runtime.platform import start_jax

if TYPE_CHECKING:
    from jtrain.plan.estimate.machine import Machine  # it imports jax, which takes seconds


def add_device(parser: Parser) -> None:
    """Adds --device and --machine, which name a kind of machine."""
    parser.add_argument("--device", metavar="NAME", help="h200, h100, b200, gb200, v5p, ...")
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help=(
            "TOML file of chips, links, hosts and prices, instead of --device; other options replace what "
            "it says"
        ),
    )


def add_machine(parser: Parser) -> None:
    """Adds --device, --machine, --network and --host-memory."""
    add_device(parser)
    parser.add_argument("--network", type=number, metavar="GBIT", help="Gbit/s per device between hosts")
    parser.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="memory of each host, such as 128GiB; offload may pin 80 %% of it",
    )


def add_count(parser: Parser, what: str = "devices (default: those of the config's mesh)") -> None:
    """Adds --count."""
    parser.add_argument("--count", type=int, metavar="N", help=what)


def machine_words(args: Args, *, count: bool = True) -> list[str]:
    """The options of `add_device` and, with `count`, `add_count` as they were given."""
    values = {name: getattr(args, name) for name in ("device", "machine", *["count"] * count)}
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def start_without_devices() -> None:
    """Starts JAX for a plan: it is for another machine, so JAX must not look for devices of this one."""
    os.environ.update(AOT_ENVIRONMENT)
    start_jax(os.environ)


def machine_and_price(
    args: Args, count: int | None, *, of_config: int | None = None
) -> "tuple[Machine, float | None]":
    """The machine that --device or --machine names, and the file's price of a device per hour.

    Args:
      count: number of devices; None for that of the file, or of the config.
      of_config: number of devices in the config's mesh; None for one whole host.

    Raises:
      UserError: no machine or two are named, or a device or count is wrong.
    """
    from jtrain.plan.estimate.machine import make_machine
    from jtrain.plan.machine_file import load_machine
    from jtrain_kernels.device import DEVICES, from_name

    # Gbit/s to bytes per second, as the machine states it.
    network = None if args.network is None else args.network * 1e9 / 8
    if args.machine is not None and args.device is not None:
        raise UserError(
            f"--machine {args.machine} with --device {args.device}: both name a machine. Leave one out."
        )
    # The file is the whole machine; options change single fields of it.
    if args.machine is not None:
        machine, price = load_machine(args.machine, count=count)
        return machine.changed(host_memory_bytes=args.host_memory, network_bytes_per_s=network), price
    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops]
        raise UserError(f"no machine is named. Give --device, one of {', '.join(names)}, or --machine FILE.")
    if count is None:
        # Without a count, the config's; without either, one host, whose collectives need no network.
        count = of_config or from_name(args.device).host.devices
    return make_machine(
        args.device, count, host_memory_bytes=args.host_memory, network_bytes_per_s=network
    ), None
