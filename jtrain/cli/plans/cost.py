"""Command line of costs: `python -m jtrain.plan cost --config=llama8b --device h100 --count 64,128 --tokens
15T`.
"""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jtrain.cli.machine_options import add_machine, machine_and_price, machine_words, start_without_devices
from jtrain.cli.options import add_config, add_json, config_words, number
from jtrain.cli.run import Args, Command, Parser, WrongValue, write_json
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain.config.run import Run
    from jtrain.plan.economics.cost_curve import CostRow
    from jtrain.plan.economics.failures import Failures
    from jtrain.plan.estimate.machine import Machine

_DOUBLINGS = 7


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_config(parser)
    add_machine(parser)
    parser.add_argument(
        "--count",
        type=_counts,
        metavar="N,N,...",
        help="numbers of devices (default: doubled from those of the config's mesh)",
    )
    add_tokens_and_price(parser)
    parser.add_argument(
        "--against",
        type=_against,
        metavar="DEVICE=RATIO",
        help="compare with another chip at this many times the price, such as gb200=1.6",
    )
    for option, metavar, words in (
        ("--mtbf", "HOURS", "mean time between failures of one device (default: 50700, of Llama 3 405B)"),
        ("--restart", "S", "seconds from a failure to the next step (default: 600)"),
        ("--save", "S", "seconds a save stops training (default: its copy to the host)"),
        ("--carbon", "G", "g of CO2 per kWh (default: 473, the world's mean of 2024)"),
    ):
        parser.add_argument(option, type=number, metavar=metavar, help=words)
    add_json(parser)


def add_tokens_and_price(parser: Parser) -> None:
    """Declares --tokens and --price."""
    parser.add_argument(
        "--tokens",
        type=number,
        metavar="N",
        help="tokens to train on, such as 15T (default: the config's steps)",
    )
    parser.add_argument("--price", type=number, metavar="USD", help="price of one device per hour")


def _counts(text: str) -> list[int]:
    """The numbers of --count."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    # Ascending, so that the curve can be read from left to right.
    if not counts or min(counts) < 1 or counts != sorted(set(counts)):
        raise WrongValue(f"{text}: expected ascending whole numbers above 0, such as 64,128,256")
    return counts


def _against(text: str) -> tuple[str, float]:
    """Device and price ratio of --against."""
    name, separator, ratio = text.partition("=")
    if not (name and separator):
        raise WrongValue(f"{text}: expected a device and how many times as much it costs, such as gb200=1.6")
    return name, number(ratio)


def failures_of(args: Args) -> "Failures":
    """The failures that --mtbf, --restart and --save describe."""
    from jtrain.plan.economics.failures import Failures  # imported here because it imports jax

    names = {"mtbf": "mtbf_hours", "restart": "restart_s", "save": "save_s"}
    # Only what was given: the defaults are Failures' own.
    failures = {field: value for name, field in names.items() if (value := getattr(args, name)) is not None}
    return Failures(**failures)


def _check_energy(args: Args, machine: "Machine") -> None:
    """Refuses --carbon for a device whose power nobody publishes."""
    if args.carbon is not None and machine.device.power_w is None:
        raise UserError(
            f"--carbon {args.carbon:g}: the power of a {machine.device.name} is not published, so neither "
            "energy nor CO2 is known. Leave --carbon out, or set chip.power_w in a --machine FILE."
        )


def execute(args: Args) -> int:
    """Runs the parsed command line; returns the exit code."""
    start_without_devices()

    from jtrain.config.load import load_config, mesh_size, set_values
    from jtrain.config.run import build_run
    from jtrain.layout.mesh import AXES
    from jtrain.plan.auto_layout import choose_loss_chunk
    from jtrain.plan.economics.cost_curve import CARBON_G_PER_KWH, compare, cost_row
    from jtrain.plan.estimate.machine import make_machine
    from jtrain.plan.report.cost_tables import print_comparison, print_curve

    config = load_config(args.config, args.fiddlers, args.sets)
    # Without --count, doublings of the config's own number.
    counts = args.count or [mesh_size(config) * 2**k for k in range(_DOUBLINGS)]
    machines = [machine_and_price(args, count) for count in counts]
    # The first machine's price stands for all: a file has one price per hour.
    first, of_file = machines[0]
    _check_energy(args, first)
    price = of_file if args.price is None else args.price
    failures = failures_of(args)
    carbon = CARBON_G_PER_KWH if args.carbon is None else args.carbon
    other_machines = (
        [] if args.against is None else [make_machine(args.against[0], count) for count in counts]
    )

    # The search chooses the mesh and the microbatches for each count.
    set_values(config, {f"mesh.{axis}": 1 for axis in AXES} | {"layout.microbatches": 1})
    choose_loss_chunk(config, first.device)
    run = build_run(config)
    tokens = run.num_steps * run.data.global_batch * run.data.seq_len
    tokens = tokens if args.tokens is None else int(args.tokens)

    def curve(chosen_machines: Sequence["Machine"], usd_per_hour: float | None) -> "list[CostRow]":
        return [
            cost_row(run, machine, tokens=tokens, failures=failures, usd_per_hour=usd_per_hour)
            for machine in chosen_machines
        ]

    rows = curve([machine for machine, _ in machines], price)
    # After the rows: one size that works is enough.
    _check_any(run, rows, [machine for machine, _ in machines])
    title = f"{args.config} on {first.device.name}: {tokens:,} tokens"
    print_curve(title, rows, first.device, failures=failures, carbon_g_per_kwh=carbon)
    report: dict[str, Any] = {
        "config": args.config,
        "device": first.device.name,
        "tokens": tokens,
        "usd_per_hour": price,
        "carbon_g_per_kwh": carbon,
        "mtbf_hours": failures.mtbf_hours,
        "restart_s": failures.restart_s,
        "rows": [row.to_json(carbon) for row in rows],
    }
    if args.against is not None:
        name, ratio = args.against
        # The same sizes on the other machine, so that rows can be compared.
        other_rows = curve(other_machines, None if price is None else price * ratio)
        compared = compare(rows, other_rows, price_ratio=ratio)
        print_comparison(first.device.name, name, compared, other_rows, price_ratio=ratio)
        report["against"] = {
            "device": name,
            "price_ratio": ratio,
            "rows": [row.to_json(carbon) for row in other_rows],
            "ratios": [vars(ratios_row) for ratios_row in compared],
        }
    write_json(args, report)
    return 0


def _check_any(run: "Run", rows: "Sequence[CostRow]", machines: Sequence["Machine"]) -> None:
    """Refuses a curve without a point.

    Raises:
      UserError: no layout fits on any number of devices, or failures come too often for any to finish.
    """
    from jtrain.plan.from_run import search_task
    from jtrain.plan.nothing_fits import no_point

    # A size without a layout has no cost; one is enough for a curve.
    if any(row.cost is not None for row in rows):
        return
    for row in rows:
        if row.uptime is not None:
            raise UserError(
                f"on {row.count} devices a failure comes every {row.uptime.mtbf_s:.3g} s, and a restart "
                f"takes {row.uptime.restart_s:g} s: hardly any interval between saves ends. Raise --mtbf, or "
                "lower --restart and --save."
            )
    raise no_point(search_task(run, machines[-1]))


COMMAND = Command(
    "compare sizes of the cluster: days, money, energy and CO2",
    execute,
    add_options,
    description=(
        "Days, money, energy and CO2 of a run over the number of its devices, with failures: each "
        "size has the fastest layout that fits, and the checkpoint interval that loses the least."
    ),
    subject="config",
    next_command=lambda args: shlex.join(
        [
            *("jtrain", "plan", *config_words(args), *machine_words(args, count=False)),
            *(["--count", str(args.count[0])] if args.count else []),
            "--search",
        ]
    ),
)
