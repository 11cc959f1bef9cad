"""Command line of pipeline plans: `python -m jtrain.plan pipeline --schedule zbv --stages 8 --microbatches
32`.
"""

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.machine_options import (
    add_count,
    add_machine,
    machine_and_price,
    machine_words,
    start_without_devices,
)
from jtrain.cli.options import add_config, add_json, config_words, output_file
from jtrain.cli.run import Args, Command, Parser, WrongValue, write_json
from jtrain.errors import UserError
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.schedule import PipelineSchedule

if TYPE_CHECKING:
    from jtrain.plan.pipeline_choice import PipelinePlan
    from jtrain.plan.report.pipeline_sheet import ScheduleView


MOST_PASSES = 16_384
"""Forward passes of all stages up to which a schedule is shown: it takes about 10 s, and a picture has 110
columns."""


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_config(parser, required=False)
    add_machine(parser)
    add_count(parser)
    parser.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(PUBLISHED_SCHEDULES)}")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="a schedule of your own: cells such as 0F0, 2I0, 2W0"
    )
    parser.add_argument(
        "--stages", type=int, metavar="P", help="pipeline stages (default: the config's mesh.stage)"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="(default: the config's layout.microbatches)"
    )
    parser.add_argument("--chunks", type=int, metavar="V", help="virtual stages per worker, for interleaved")
    parser.add_argument(
        "--costs", type=_times, metavar="F,I,W", help="times of a chunk's three passes (default: 1,1,1)"
    )
    for option, words in (
        ("--svg", "write the picture to FILE"),
        ("--html", "write the picture, figures and instructions to FILE"),
        ("--write-csv", "write the schedule to FILE, to be changed"),
    ):
        parser.add_argument(option, type=output_file, metavar="FILE", help=words)
    add_json(parser)


def _times(text: str) -> tuple[float, float, float]:
    """The numbers of --costs."""
    # Three numbers, in the order of the three passes of a chunk.
    try:
        forward, by_input, by_weight = (float(part) for part in text.split(","))
    except ValueError:
        raise WrongValue(f"{text}: expected the times of F, I and W, three numbers such as 1,2,1") from None
    if not all(0 < time < float("inf") for time in (forward, by_input, by_weight)):
        raise WrongValue(f"{text}: each time must be a number above 0")
    return forward, by_input, by_weight


def _check_options(args: Args) -> None:
    """Refuses options that would have no effect, or folders that are missing.

    Raises:
      UserError: names the first of them.
    """
    if args.schedule is not None and args.csv is not None:
        raise UserError(
            f"--schedule {args.schedule} --csv {args.csv}: both name a schedule. Leave one of them out."
        )
    if args.csv is not None and args.chunks is not None:
        raise UserError(
            f"--chunks {args.chunks}: the rows of --csv {args.csv} say the chunks. Leave --chunks out."
        )
    # One schedule has one picture; a comparison has none.
    names_one = args.schedule is not None or args.csv is not None
    for name in ("svg", "html", "write_csv"):
        path, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if path is not None and not names_one:
            raise UserError(
                f"{option} {path} shows one schedule. Add --schedule, one of {', '.join(PUBLISHED_SCHEDULES)}."
            )
    if args.chunks is not None and args.schedule is None:
        raise UserError(f"--chunks {args.chunks} is of one schedule. Add --schedule interleaved.")
    # Without a config there are no times to plan.
    if args.config is None:
        for option in ("device", "machine", "count", "network", "host_memory"):
            if getattr(args, option) is not None:
                name = f"--{option.replace('_', '-')}"
                raise UserError(f"{name} is for a config's times. Give --config, or leave {name} out.")
        for option, values in (("with", args.fiddlers), ("set", args.sets)):
            if values:
                raise UserError(
                    f"--{option} {values[0]} changes a config. Give --config, or leave --{option} out."
                )
    elif args.csv is not None and args.csv.suffix != ".csv":
        raise UserError(
            f"--csv {args.csv}: a run takes a schedule from a file whose name ends in .csv. Rename it."
        )
    # A config's times come from its plan; fixed ones would contradict it.
    elif args.costs is not None:
        raise UserError(f"--costs: the times of {args.config} are the plan's. Leave --costs out.")


def schedules(args: Args, stages: int | None, microbatches: int | None) -> list[PipelineSchedule]:
    """The schedules that the command line asks for: one, or all that exist for these numbers.

    Raises:
      UserError: a number is missing or wrong, or the schedule does not exist for them.
    """
    if args.csv is not None:
        from jtrain.pipeline.cells import read_csv  # lazy, as below: numpy

        return [read_csv(args.csv, stages=stages, microbatches=microbatches)]
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value is None:
            raise UserError(f"a pipeline needs a number of {name}. Give --{name}, or --config with --device.")
    assert stages is not None
    assert microbatches is not None
    # Only if the stages fit: otherwise their number is what is wrong.
    if stages * microbatches > MOST_PASSES >= stages > 0:
        raise UserError(
            f"--microbatches {microbatches} over {stages} stages: schedules are simulated and drawn pass by "
            f"pass, up to {MOST_PASSES:,}. Give --microbatches {MOST_PASSES // stages} or fewer: from 2 per "
            "stage on only the middle of the schedule grows, and the bubble shrinks in proportion. `jtrain "
            "plan` has no limit."
        )
    if args.schedule is not None:
        return [make_schedule(args.schedule, stages, microbatches, args.chunks)]
    make_schedule("gpipe", stages, microbatches)  # it exists for all numbers that are at least 1
    # Those that exist for these numbers; the reasons of the others go to stderr.
    return list(
        _make_existing(
            functools.partial(make_schedule, name, stages, microbatches) for name in PUBLISHED_SCHEDULES
        )
    )


def _make_existing[T](makers: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yields what can be made; says why on the error stream where it cannot."""
    for make in makers:
        try:
            yield make()
        except UserError as error:
            print(f"not compared: {error}", file=sys.stderr)


def _show(schedule: PipelineSchedule, args: Args, planned: "PipelinePlan | None") -> "ScheduleView":
    """The schedule with the costs of the plan, or of the command line."""
    from jtrain.plan.report.pipeline_sheet import show, show_planned

    return (
        show(schedule, args.costs or (1.0, 1.0, 1.0)) if planned is None else show_planned(schedule, planned)
    )


def _plan_stages(args: Args) -> "PipelinePlan | None":
    """The plan of the config's stages; None without a config."""
    if args.config is None:
        return None
    start_without_devices()
    from jtrain.config.load import load_config, mesh_size  # imported here because they import jax
    from jtrain.plan.pipeline_choice import plan_stages

    stages, microbatches = args.stages, args.microbatches
    if args.csv is not None:
        from jtrain.pipeline.cells import read_csv

        # The CSV decides both numbers, and the plan is of the config's layers over them.
        mine = read_csv(args.csv, stages=stages, microbatches=microbatches)
        stages, microbatches = mine.stages, mine.microbatches
    load = functools.partial(load_config, args.config, args.fiddlers, args.sets)
    # Loaded here for its mesh alone; `plan_stages` loads its own.
    machine, _ = machine_and_price(args, args.count, of_config=mesh_size(load()))
    return plan_stages(
        args.config, load, machine, stages=stages, microbatches=microbatches, sets=args.sets, csv=args.csv
    )


def _write_files(args: Args, shown: "ScheduleView") -> None:
    """Writes what --svg, --html and --write-csv ask for."""
    from jtrain.pipeline.cells import to_csv
    from jtrain.pipeline.picture import svg
    from jtrain.plan.report.pipeline_sheet import page_of
    from jtrain.report.page import html

    schedule, flow = shown.schedule, shown.flow
    if args.write_csv is not None:
        args.write_csv.write_text(to_csv(schedule))
    if args.svg is None and args.html is None:
        return
    buffer_bytes = None
    if shown.point is not None:
        from jtrain.plan.estimate.peak_memory import slot_bytes  # imported here because it imports jax

        # In bytes only with a plan: a schedule alone knows slots.
        buffer_bytes = slot_bytes(shown.point.job)
    title = f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
    of_picture = f"{title}, bubble {flow.bubble:.1%}"
    picture = svg(flow, stages=schedule.stages, title=of_picture, buffer_bytes=buffer_bytes)
    if args.svg is not None:
        args.svg.write_text(picture)
    if args.html is not None:
        args.html.write_text(html(page_of(shown, title, picture)))


def execute(args: Args) -> int:
    """Runs the parsed command line; returns the exit code."""
    from jtrain.plan.report.pipeline_sheet import print_comparison, print_one, to_json
    from jtrain.report.terminal import new_console

    _check_options(args)
    planned = _plan_stages(args)
    stages, microbatches = args.stages, args.microbatches
    if planned is not None:
        stages, microbatches = planned.stages, planned.microbatches
    shows_one = args.schedule is not None or args.csv is not None
    # As makers, so that a schedule that cannot be shown is left out of the comparison.
    makers = [
        functools.partial(_show, schedule, args, planned)
        for schedule in schedules(args, stages, microbatches)
    ]
    shown_schedules = [makers[0]()] if shows_one else list(_make_existing(makers))
    if shows_one:
        _write_files(args, shown_schedules[0])
    # One schedule is one object, several are named.
    write_json(
        args,
        to_json(shown_schedules[0])
        if shows_one
        else {schedule.schedule.name: to_json(schedule) for schedule in shown_schedules},
    )
    console = new_console()
    if shows_one:
        print_one(shown_schedules[0], console)
    else:
        print_comparison(shown_schedules, planned, console)
    return 0


def _next_command(args: Args) -> str:
    """Command to suggest after this one: the same with one schedule; after that, with its page; after that the
    plan of the config's step, or without a config the table of strategies
    that save memory.
    """
    words = ["jtrain", "plan", "pipeline", *args.words]
    if args.schedule is None and args.csv is None:
        return shlex.join([*words, "--schedule", "1f1b"])
    if args.html is None:
        return shlex.join([*words, "--html", "schedule.html"])
    if args.config is not None:
        return shlex.join(["jtrain", "plan", *config_words(args), *machine_words(args)])
    return "jtrain plan table"


COMMAND = Command(
    "show who computes what when in a pipeline, or compare schedules",
    execute,
    add_options,
    description="Shows who computes what when in a pipeline, its bubbles and its memory; without --schedule, "
    "compares all schedules. With --config and --device, in seconds and bytes of that machine.",
    subject="config",
    next_command=_next_command,
)
