"""Options that plans share: the machine, and numbers as people write them."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.errors import UserError
from jtrain.plan.sizes import parse_bytes

if TYPE_CHECKING:
    from jtrain.plan.estimate.machine import Machine  # it imports jax, which takes seconds

_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --machine, --network and --host-memory."""
    parser.add_argument("--device", metavar="NAME", help="h200, h100, b200, gb200, v5p, ...")
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="TOML file of chips, links, hosts and prices, instead of --device; other options replace what it says",
    )
    parser.add_argument("--network", metavar="GBIT", help="Gbit/s per device between hosts")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory of each host, such as 128GiB; offload may pin 80 %% of it"
    )


def machine_and_price(
    args: argparse.Namespace, count: int | None, *, of_config: int | None = None
) -> "tuple[Machine, float | None]":
    """The machine that --device or --machine names, and the file's price of a device per hour.

    Args:
      count: number of devices; None for that of the file, or of the config.
      of_config: number of devices in the config's mesh; None for one whole host.

    Raises:
      UserError: no machine or two are named, or a device, count or number is wrong.
    """
    from jtrain.plan.estimate.machine import make_machine
    from jtrain.plan.machine_file import load_machine
    from jtrain_kernels.device import DEVICES, from_name

    network = None if args.network is None else number("--network", args.network) * 1e9 / 8
    host_memory = None if args.host_memory is None else parse_bytes("--host-memory", args.host_memory)
    if args.machine is not None and args.device is not None:
        raise UserError(f"--machine {args.machine} with --device {args.device}: both name a machine. Leave one out.")
    if args.machine is not None:
        machine, price = load_machine(args.machine, count=count)
        return machine.changed(host_memory_bytes=host_memory, network_bytes_per_s=network), price
    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops]
        raise UserError(f"no machine is named. Give --device, one of {', '.join(names)}, or --machine FILE.")
    if count is None:
        count = of_config or from_name(args.device).host.devices
    return make_machine(args.device, count, host_memory_bytes=host_memory, network_bytes_per_s=network), None


def number(option: str, text: str) -> float:
    """The number above 0 of an option, such as `15T`, `300B`, `4M` or `1e9`.

    Raises:
      UserError: it is none.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([KMBGT]?)", text.strip())
    try:
        value = float(found[1]) * _SUFFIXES[found[2]] if found else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{option} {text} must be a number above 0, such as 2.5, 1e9, 300B or 15T.")
    return value
