"""Command line of plans: `python -m jtrain.plan --config=NAME --device h200 --count 8`, and its commands."""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain.cli.machine_options import (
    add_count,
    add_machine,
    machine_and_price,
    machine_words,
    start_without_devices,
)
from jtrain.cli.options import add_config, add_json, config_words, output_file, share
from jtrain.cli.plans import cost as plan_cost
from jtrain.cli.plans import ecmp, network, pipeline, walls
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.errors import UserError
from jtrain.runtime.platform import use_unified_memory

if TYPE_CHECKING:
    from rich.console import Console

    from jtrain.config.run import Run
    from jtrain.plan.report.plan_sheet import Sheet
    from jtrain.plan.search_task import Point, SearchTask

TOP = 3
"""Layouts of a search that are compiled."""


def add_options(parser: Parser) -> None:
    """Declares the options of a plan."""
    add_config(parser)
    add_machine(parser)
    add_count(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile the real step for that machine (minutes)"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="WORKDIR",
        help="show what a run measured beside its plan, and write what --measured reads into its workdir",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="WORKDIR",
        help="plan with the speed of a run on this chip, from --calibrate",
    )
    parser.add_argument(
        "--search", action="store_true", help="find the fastest mesh, ZeRO stage, offload and remat"
    )
    parser.add_argument("--top", type=int, metavar="K", help="layouts of a search to compile (default: 3)")
    plan_cost.add_tokens_and_price(parser)
    parser.add_argument(
        "--efficiency",
        type=share,
        metavar="SHARE",
        help="fraction of peak FLOP/s in matmuls (default: by chip and shape)",
    )
    parser.add_argument(
        "--goodput",
        type=share,
        metavar="SHARE",
        help="fraction of wall time that trains (default: from failures)",
    )
    add_json(parser)
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write the plan as a page of pictures to FILE"
    )


def print_tables(args: Args) -> int:
    """Prints the survey's tables; returns the exit code."""
    start_without_devices()
    from jtrain.plan.report import survey_tables  # imported here because it imports jax

    write_json(args, survey_tables.print_tables())
    return 0


def compile_point(run: "Run", point: "Point") -> Any:
    """Compiles the step of a layout with its machine's compiler.

    Raises:
      UserError: there is no compiler for that machine.
    """
    from jtrain.config.run import build_run_optimizer
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.compile.topology import topology_of
    from jtrain_kernels.compile_only.targets import TARGETS, TPUS

    machine = point.job.machine
    # A plan without a machine has no compiler to ask.
    assert machine is not None
    if machine.device.name not in (*TARGETS, *TPUS):
        raise UserError(
            f"--compile: no compiler for {machine.device.name} is known, only for "
            f"{', '.join((*TARGETS, *TPUS))}. Leave --compile out."
        )
    devices = topology_devices(topology_of(machine.device, machine.count))
    return compile_step(point.job, build_run_optimizer(run), devices=devices)


def sheet_of(
    args: Args,
    run: "Run",
    task: "SearchTask",
    point: "Point",
    compiled: Any,
    planned: dict[str, str],
    *,
    is_given: bool,
) -> "Sheet":
    """The sheet of one layout; of one that was given also what would be faster."""
    from jtrain.plan.economics.failures import Failures, save_seconds, uptime
    from jtrain.plan.estimate.step_time import cost
    from jtrain.plan.plan_check import largest_rows
    from jtrain.plan.report.measured import read_measurements
    from jtrain.plan.report.plan_sheet import Sheet
    from jtrain.plan.search_task import fits
    from jtrain.plan.single_changes import faster_changes
    from jtrain.step.layout_choices import changed_settings

    assert point.timed is not None
    # Tokens of the whole run, unless they are given.
    tokens = run.num_steps * point.job.tokens if args.tokens is None else int(args.tokens)
    if tokens < 1:
        raise UserError(f"--tokens {args.tokens} must be at least 1.")
    save_s = save_seconds(point.plan, task.machine, task.assume)
    steps = tokens // point.job.tokens
    up = uptime(Failures(), devices=task.machine.count, steps=steps, step_s=point.step_s, save_s=save_s)
    goodput = up.goodput if args.goodput is None else args.goodput
    return Sheet(
        args.config,
        point.job,
        point.plan,
        point.timed,
        cost(point.timed, task.machine, tokens=tokens, goodput=goodput, usd_per_hour=args.price),
        goodput,
        largest_rows(task, point),
        uptime=up if args.goodput is None else None,
        compiled=compiled,
        measured=None if args.calibrate is None else read_measurements(args.calibrate, planned, task.machine),
        # What does not fit is refused with settings that do.
        faster=tuple(
            (faster, changed_settings(point.settings, faster.settings, run.layout.microbatch_tokens))
            for faster in faster_changes(task, point)
        )
        if is_given and fits(task, point.plan)
        else None,
    )


def command(args: Args, values: dict[str, str], settings: dict[str, object]) -> str:
    """The launch command of a layout: the config as given, with every setting that the search decided
    otherwise.

    Args:
      values: path -> value as text, of the config.
      settings: path -> value that the search chose.
    """
    from jtrain.plan.smaller_settings import changed_options, shell_word

    # Otherwise the launch would decide again.
    settings = settings | {"layout.auto": False}
    words = " ".join(map(shell_word, ["jtrain", "launch", *config_words(args)]))
    # Only what differs from the config: the command stays short.
    return f"{words} {changed_options(settings, values)}".rstrip()


def confirm(
    args: Args, run: "Run", task: "SearchTask", points: list["Point"], console: "Console"
) -> tuple[dict[int, Any], int]:
    """Compiles the first layouts; returns the compiler's figures by index, and the index of the first good
    layout.

    Raises:
      UserError: the compiler confirms none of them.
    """
    from jtrain.plan.report.plan_sheet import TOLERANCE

    compiled_by_index: dict[int, Any] = {}
    fitting_indices: list[int] = []
    for index, point in enumerate(points[: args.top or TOP]):
        console.print(f"compiling {index + 1} of {min(args.top or TOP, len(points))} ...", highlight=False)
        compiled = compiled_by_index[index] = compile_point(run, point)
        # The formula's bytes against the compiler's: too far apart is a mistake of either.
        difference = abs(point.plan.total_bytes / compiled.peak_bytes - 1)
        if compiled.peak_bytes <= task.machine.hbm_bytes and difference <= TOLERANCE:
            fitting_indices.append(index)
    if not fitting_indices:
        sizes_text = ", ".join(f"{c.peak_bytes / 2**30:.1f}" for c in compiled_by_index.values())
        raise UserError(
            f"the compiler confirms none of the first {len(compiled_by_index)}: it says {sizes_text} GiB per "
            f"device of {task.machine.hbm_bytes / 2**30:.1f}, or more than {TOLERANCE:.0%} off the formula. "
            "Raise --top."
        )
    return compiled_by_index, fitting_indices[0]


def search_command(
    args: Args, run: "Run", task: "SearchTask", console: "Console", values: dict[str, str]
) -> "tuple[Point, Any]":
    """Prints the ranked table and the launch command; returns the chosen layout with the compiler's figures
    of it.

    Raises:
      UserError: nothing fits; the message has the layout that comes closest.
    """
    from jtrain.plan.nothing_fits import no_point
    from jtrain.plan.report.plan_sheet import search_table
    from jtrain.plan.search import meshes, search
    from jtrain.plan.single_changes import refine
    from jtrain.plan.staged_search import search_with_stages
    from jtrain.report.terminal import print_blocks

    # `layout.auto` alone keeps the config's mesh; --search chooses one too.
    meshes_of = meshes if args.search else lambda _: [run.mesh]
    # More than are compiled, so that the table has some to compare.
    points = search(task, meshes_of(task), keep=max(10, args.top or TOP))
    if args.search:
        staged = search_with_stages(task, points)
        # The first criterion is speed, memory decides between equals.
        points = sorted([*points, *staged], key=lambda point: (point.step_s, point.plan.total_bytes))
    # With what the search leaves out: overlaps, groups, schedules, axes that are seldom worth a look.
    if args.search and points and (refined := refine(task, points[0])) is not points[0]:
        points = [refined, *points]
    if not points:
        raise no_point(task, None if args.search else run.mesh)
    compiled_by_index, best_index = confirm(args, run, task, points, console) if args.compile else ({}, 0)
    print_blocks([search_table(task, points[: max(10, args.top or TOP)], compiled_by_index)], console)
    console.print(f"the fastest{' that the compiler confirms' if compiled_by_index else ''}:", style="bold")
    args.launch = command(args, values, points[best_index].settings)
    print(args.launch, flush=True)
    return points[best_index], compiled_by_index.get(best_index)


def execute(args: Args) -> int:
    """Runs the parsed command line; returns the exit code."""
    start_without_devices()

    # Imported here because they import jax and flax, which takes over a second.
    from jtrain.config import (
        tree,
    )
    from jtrain.config.load import for_devices, load_config, mesh_size, set_values
    from jtrain.config.run import build_run
    from jtrain.plan.auto_layout import choose_loss_chunk
    from jtrain.plan.calibration import calibrate, measured_computation
    from jtrain.plan.estimate.attention_kernel import explain_attention
    from jtrain.plan.estimate.step_time import Assumptions
    from jtrain.plan.from_run import search_task
    from jtrain.plan.plan_check import check_plan
    from jtrain.plan.report.plan_sheet import print_sheet, to_json
    from jtrain.plan.search import resolve_as_needed
    from jtrain.plan.search_task import SLACK, evaluate
    from jtrain.report.terminal import new_console

    # Options that would have no effect are refused, not ignored.
    if args.top is not None and not (args.search and args.compile):
        raise UserError(
            f"--top {args.top} is the number of layouts of a search to compile. Add --search --compile."
        )
    if args.top is not None and args.top < 1:
        raise UserError(f"--top {args.top} must be at least 1.")
    if args.calibrate is not None and args.search:
        raise UserError(
            "--calibrate is of the layout that a run had, and --search finds another. Leave one out."
        )
    if args.efficiency is not None and (args.calibrate is not None or args.measured is not None):
        raise UserError(
            "--efficiency with --calibrate or --measured: what a run measured is in units of each chip's "
            "own. Leave --efficiency out."
        )
    run_config = load_config(args.config, args.fiddlers, args.sets)
    # Before anything changes it: `command` prints what the search changes.
    values = tree.parse(tree.flat(run_config))
    machine, file_price = machine_and_price(args, args.count, of_config=mesh_size(run_config))
    args.price = file_price if args.price is None else args.price
    # The search finds the mesh: what the config says must not bind it.
    if args.search:
        axes = ("replica", "stage", "data", "expert", "context", "tensor")
        set_values(run_config, {f"mesh.{axis}": 1 for axis in axes} | {"layout.microbatches": 1})
        notes = []
    else:
        notes = for_devices(run_config, machine.count)
    # Before the run is built: the size of the loss's chunks depends on the chip.
    loss_lines = choose_loss_chunk(run_config, machine.device)
    run = build_run(run_config)
    if run.layout.offload.unified_memory:
        use_unified_memory(os.environ, topology=f"{machine.device.name}:{machine.count}")
    assume = Assumptions(matmul=args.efficiency)
    # Before the search, so that every layout is judged by it.
    if args.measured is not None:
        factor = measured_computation(
            args.measured, device=machine.device.name, matmul_dtype=run.precision.matmul_dtype
        )
        assume = dataclasses.replace(assume, computation=factor)
        loss_lines = [
            *loss_lines,
            f"computation takes {factor:.3g} times what is assumed, as measured in {args.measured}",
        ]
    task = search_task(
        run,
        machine,
        assume=assume,
        # A layout that the formula puts just above the limit may fit: with --compile the compiler decides.
        memory_share=1 + SLACK if args.search and args.compile else 1 - SLACK,
    )
    console = new_console()
    compiled = None
    is_given = not (args.search or run.layout.auto)
    if not is_given:
        point, compiled = search_command(args, run, task, console, values)
        # The search has its own notes about the mesh.
        notes = []
    else:
        point = evaluate(task, resolve_as_needed(task, run.mesh), run.mesh)
        compiled = compile_point(run, point) if args.compile else None
    if notes:
        notes = [f"for --count {machine.count}: {', '.join(notes)}"]
    # The run's config.txt has the mesh and layout as they were chosen, and the model as it was asked for.
    model_values = {path: text for path, text in values.items() if path.startswith("model.")}
    planned = tree.parse(tree.flat(run_config)) | model_values
    sheet = sheet_of(args, run, task, point, compiled, planned, is_given=is_given)
    assumptions_line = assume.of(
        machine.device, devices=machine.count, in_8_bits=run.precision.matmul_dtype != "compute"
    )
    print_sheet(sheet, console, [*notes, *loss_lines, assumptions_line, explain_attention(sheet.job)])
    # Only a run that stepped has a measured time.
    if args.calibrate is not None and sheet.measured is not None and sheet.measured.step_s is not None:
        file = calibrate(
            args.calibrate, sheet.job, sheet.plan, assume=assume, measured_s=sheet.measured.step_s
        )
        console.print(
            f"wrote {file}: give --measured {args.calibrate} to plans on this chip", highlight=False
        )
    write_json(args, to_json(sheet))
    if args.html is not None:
        from jtrain.plan.report.plan_page import write_page

        write_page(args.html, sheet, run)
    # Last: the tables come before the refusal that they explain.
    check_plan(sheet, values)
    return 0


def _next_command(args: Args) -> str:
    """Command to suggest after this one: the training as the search found; the search, for a plan of a given layout."""
    if args.search:
        return str(args.launch)
    return shlex.join(["jtrain", "plan", *config_words(args), *machine_words(args), "--search"])


VERB = Verb(
    "plan",
    Command(
        "plan a config on a machine that need not be here",
        execute,
        add_options,
        description="Plans a config on a machine that need not be here: bytes, seconds, money.",
        exits=(
            "Exit codes: 0 the plan fits; 2 it does not, or an option is wrong: the message says what to "
            "change."
        ),
        subject="config",
        next_command=_next_command,
    ),
    {
        "table": Command(
            "print the memory that each strategy saves, and the time that it costs",
            print_tables,
            add_json,
            next_command=lambda args: "jtrain plan llama8b --device h200 --count 8",
        ),
        "pipeline": pipeline.COMMAND,
        "network": network.COMMAND,
        "ecmp": ecmp.COMMAND,
        "cost": plan_cost.COMMAND,
        "walls": walls.COMMAND,
    },
)
main = VERB.main
