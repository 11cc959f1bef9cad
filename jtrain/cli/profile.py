"""Profile reports: `python -m jtrain.profile --workdir DIR`, and its commands `compare` and `export`."""

import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.options import add_json, add_step, add_workdir, in_new_workdir
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.errors import UserError
from jtrain.profile.trace_dir import FOLDER, other_parts
from jtrain.runtime.atomic_io import write_whole
from jtrain.runtime.stores import run_folder, workdir_path

if TYPE_CHECKING:
    from jtrain.profile.analysis.records import Breakdown

TRACE = "perfetto.json"
WINDOW = (20, 25)
"""Window of the fiddler `profile`."""


def add_options(parser: Parser) -> None:
    """Declares what names a window."""
    add_workdir(parser, "folder of a run, or one DIR/profile/<step>, or a process-<n> folder in it")
    add_step(parser, "the window that opened after step N (default: newest)")


def add_report_options(parser: Parser) -> None:
    """Declares the options of the report."""
    add_options(parser)
    add_json(parser)


def add_compare_options(parser: Parser) -> None:
    """Declares the options of `compare`."""
    add_report_options(parser)
    parser.add_argument(
        "--against", required=True, metavar="DIR", help="what it was before: a run, or a window of one"
    )


def add_export_options(parser: Parser) -> None:
    """Declares the options of `export`."""
    add_options(parser)
    words = "for ui.perfetto.dev and chrome://tracing; the only format"
    parser.add_argument("--perfetto", action="store_true", required=True, help=words)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {TRACE} beside the trace")


def find(run_or_window: str, step: int | None, option: str = "--workdir") -> Path:
    """Folder of a window: `name` itself if it is one, else its window after `step`, or its newest one.

    Raises:
      UserError: the folder does not exist, or has no window, or none after that step.
    """
    workdir = run_folder(run_or_window, option)
    # A window's own folder: no step can be meant in it.
    if step is None and any(
        (workdir / run_or_window).exists() for run_or_window in ("breakdown.json", "facts.json")
    ):
        return workdir  # possibly copied from its run
    windows = {
        int(path.name): path
        for path in (workdir / FOLDER).glob("*")
        if path.is_dir() and path.name.isdecimal()
    }
    if not windows:
        raise UserError(
            f"{workdir} holds no profile: there is no {workdir / FOLDER}/<step>. Send SIGUSR1 to its job "
            f"while it runs, or trace a run of its own:\nnext: {_traced_command(run_or_window)}"
        )
    # The newest window, which is the one that a run has just written.
    if step is None:
        return windows[max(windows)]
    if step not in windows:
        windows_text = ", ".join(map(str, sorted(windows)))
        raise UserError(
            f"--step {step}: {workdir / FOLDER} has windows after the steps {windows_text}. Give one of them."
        )
    return windows[step]


def _traced_command(workdir: str) -> str:
    """The command of the run in `workdir`, with a window within the run and a workdir of its own."""
    words, num_steps = ["--config=tiny"], 300
    with contextlib.suppress(
        OSError, ValueError, LookupError, TypeError
    ):  # no run, or not one of this version
        command = json.loads((workdir_path(workdir) / "run.json").read_text())["command"]
        match = re.search(
            r"^num_steps: int = (\d+)", (workdir_path(workdir) / "config.txt").read_text(), re.M
        )
        verb = next((i for i, word in enumerate(command) if word.endswith("launch")), None)
        # A run that a script started has no options which a command could repeat.
        if verb is not None:
            words, num_steps = command[verb + 1 :], num_steps if match is None else int(match[1])
    last = WINDOW[1] if num_steps == 1 else min(num_steps, WINDOW[1])
    window = ("--with", "profile")
    if last < WINDOW[1] or "profile" in words:
        window = ("--set", f"profile.steps=({max(1, last - 5)},{last})")
    longer = ("--set", f"num_steps={last}") if last > num_steps else ()
    return in_new_workdir([*words, *longer, *window], f"{workdir}-profile")


def load(folder: Path) -> "Breakdown":
    """Reads the breakdown of a window; writes it and the page first if the run was stopped before it could.

    Raises:
      UserError: breakdown.json is truncated, or missing together with the trace to make it from.
    """
    from jtrain.profile.analysis.breakdown_json import read_breakdown  # lazy: numpy
    from jtrain.profile.postprocess import postprocess

    file = folder / "breakdown.json"
    # A run that was stopped wrote its trace, but not its breakdown.
    if not file.exists():
        postprocess(folder)
    return read_breakdown(file)


def _of_process(process: int, part: Path) -> "Breakdown | None":
    """Breakdown of another process; prints the reason and returns None if it cannot be read."""
    try:
        return load(part)
    except (ValueError, OSError) as error:
        print(f"process {process}: {error}", file=sys.stderr)
        return None


def show(args: Args) -> int:
    """Prints a profile; returns the exit code."""
    folder = find(args.workdir, args.step)
    breakdown = load(folder)
    from jtrain.profile.report.profile_page import print_breakdown, processes_table  # lazy: rich
    from jtrain.report.terminal import new_console, print_blocks

    console = new_console()
    print_breakdown(breakdown, console)
    parts = other_parts(folder)
    # Traces of other processes are beside this one's, and may be missing.
    if other_breakdowns := [
        other_breakdown
        for process, part_folder in parts.items()
        if (other_breakdown := _of_process(process, part_folder)) is not None
    ]:
        print_blocks([processes_table([breakdown, *other_breakdowns])], console)
    if (page := folder / "report.html").exists():
        print(f"HTML report with charts: {page}")
    write_json(args, breakdown.to_dict())
    return 0


def compare(args: Args) -> int:
    """Prints what changed between two profiles; returns the exit code."""
    before_folder, after_folder = find(args.against, None, "--against"), find(args.workdir, args.step)
    from jtrain.profile.report import compare  # lazy: rich
    from jtrain.report.terminal import new_console

    # Both may be of one run: then its newest window is compared with the one that --step names.
    comparison = compare.compare(
        load(before_folder), load(after_folder), a_name=str(before_folder), b_name=str(after_folder)
    )
    compare.print_comparison(comparison, new_console())
    write_json(args, comparison.to_dict())
    return 0


def export(args: Args) -> int:
    """Writes a window's trace for Perfetto; returns the exit code."""
    folder = find(args.workdir, args.step)
    clocks = load(folder).clocks
    from jtrain.profile.analysis.breakdown import load as load_trace  # lazy: jax
    from jtrain.profile.report.perfetto import perfetto

    trace, ops, _ = load_trace(folder)
    file = args.out or folder / TRACE
    write_whole(file, json.dumps(perfetto(trace, ops, clocks)))
    print(f"{file}: open it at https://ui.perfetto.dev, which reads it in the browser without uploading it")
    return 0


def _export_command(args: Args) -> str:
    return shlex.join(["jtrain", "profile", "export", "--workdir", args.workdir, "--perfetto"])


VERB = Verb(
    "profile",
    Command(
        "show where a run's time went",
        show,
        add_report_options,
        description=(
            "Shows where a run's time went: the parts of a step (math, extra instructions, low "
            "utilisation, clock loss, exposed communication, waits), the ops that lose most, and what to try "
            "next."
        ),
        subject="workdir",
        next_command=_export_command,
    ),
    {
        "compare": Command(
            "show what got slower between two profiles, and why",
            compare,
            add_compare_options,
            description=(
                "Shows what got slower from the profile --against to that of --workdir, and why: by part of "
                "the step, by op (matched by name, phase and layer) and by collective. Seconds are per "
                "device and step."
            ),
            subject="workdir",
            next_command=_export_command,
        ),
        "export": Command(
            "write a trace for ui.perfetto.dev",
            export,
            add_export_options,
            description=(
                "Writes the trace of a window with steps, phases, layers, ops, clocks, power and temperature "
                "to one file for Perfetto. XProf opens the xplane file in the same folder, which has the "
                "same clocks."
            ),
            subject="workdir",
            next_command=lambda args: shlex.join(["jtrain", "profile", "--workdir", args.workdir]),
        ),
    },
)
main = VERB.main
