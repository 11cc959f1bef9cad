"""Profile reports: `python -m jtrain.profile WORKDIR`, `... compare A B`, `... export WORKDIR --perfetto`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.errors import UserError
from jtrain.profile.trace_dir import FOLDER, other_parts
from jtrain.runtime import cli
from jtrain.runtime.atomic_io import write_whole

if TYPE_CHECKING:
    from jtrain.profile.analysis.records import Breakdown

TRACE = "perfetto.json"

_WORKDIR = "workdir of a run, or one WORKDIR/profile/<step>, or a process-<n> folder in it"

_EPILOG = "Exit codes: 0 success; 2 no such profile, with a message on what exists and what to do."


def parser() -> argparse.ArgumentParser:
    """Argument parser of the report."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile",
        usage="%(prog)s WORKDIR [--step N] [--json FILE]\n"
        "       %(prog)s compare A B [--json FILE]\n"
        "       %(prog)s export WORKDIR --perfetto [--step N] [--out FILE]",
        description="Shows where a run's time went: the parts of a step (math, extra instructions, low utilisation, "
        "clock loss, exposed communication, waits), the ops that lose most, and what to try next. `compare` shows what "
        "got slower between two profiles, and why; `export` writes a trace for ui.perfetto.dev.",
        epilog=f"{_EPILOG} Write a workdir named compare or export as ./compare or ./export.",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help=_WORKDIR)
    parser.add_argument("--step", type=int, metavar="N", help="the window that opened after step N (default: newest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write breakdown.json (seconds, bytes) to FILE")
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """Argument parser of `compare`."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile compare",
        description="Shows what got slower from profile A to profile B, and why: by part of the step, by op (matched "
        "by name, phase and layer) and by collective. Seconds are per device and step.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    for name in ("a", "b"):
        words = "workdir of a run (its newest window), or one WORKDIR/profile/<step>"
        parser.add_argument(name, type=Path, metavar=name.upper(), help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison, with every op, to FILE")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Argument parser of `export`."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile export",
        description="Writes the trace of a window with steps, phases, layers, ops, clocks, power and temperature to "
        "one file for Perfetto. XProf opens the xplane file in the same folder, which has the same clocks.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help=_WORKDIR)
    parser.add_argument("--step", type=int, metavar="N", help="the window that opened after step N (default: newest)")
    words = "for ui.perfetto.dev and chrome://tracing; the only format"
    parser.add_argument("--perfetto", action="store_true", required=True, help=words)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {TRACE} beside the trace")
    return parser


def find(workdir: Path, step: int | None) -> Path:
    """Folder of a window: `workdir` itself if it is one, else its window after `step`, or its newest one.

    Raises:
      UserError: the folder does not exist, or has no window, or none after that step.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir} is not a directory. Give the workdir of a run, such as runs/tiny.")
    if step is None and any((workdir / name).exists() for name in ("breakdown.json", "facts.json")):
        return workdir  # a window's own folder, possibly copied from its run
    windows = {int(p.name): p for p in (workdir / FOLDER).glob("*") if p.is_dir() and p.name.isdecimal()}
    if not windows:
        raise UserError(
            f"{workdir} holds no profile: there is no {workdir / FOLDER}/<step>. Run with --set profile.steps=(20,25), "
            "or send SIGUSR1 to the running job."
        )
    if step is None:
        return windows[max(windows)]
    if step not in windows:
        there = ", ".join(map(str, sorted(windows)))
        raise UserError(f"--step {step}: {workdir / FOLDER} has windows after the steps {there}. Give one of them.")
    return windows[step]


def load(folder: Path) -> "Breakdown":
    """Reads the breakdown of a window; writes it and the page first if the run was stopped before it could.

    Raises:
      UserError: breakdown.json is truncated, or missing together with the trace to make it from.
    """
    from jtrain.profile.analysis.breakdown import read_json  # lazy: numpy
    from jtrain.profile.postprocess import postprocess

    file = folder / "breakdown.json"
    if not file.exists():
        postprocess(folder)
    return read_json(file)


def _of_process(process: int, part: Path) -> "Breakdown | None":
    """Breakdown of another process; prints the reason and returns None if it cannot be read."""
    try:
        return load(part)
    except (ValueError, OSError) as error:
        print(f"process {process}: {error}", file=sys.stderr)
        return None


def show(argv: Sequence[str]) -> int:
    """Prints a profile; returns the exit code."""
    args = parser().parse_args(argv)

    def execute() -> int:
        folder = find(args.workdir, args.step)
        breakdown = load(folder)
        from jtrain.profile.report.terminal import new_console, print_breakdown, print_processes  # lazy: rich

        console = new_console()
        print_breakdown(breakdown, console)
        parts = other_parts(folder)
        if others := [found for process, part in parts.items() if (found := _of_process(process, part)) is not None]:
            print_processes([breakdown, *others], console)
        if (page := folder / "report.html").exists():
            print(f"HTML report with charts: {page}")
        if args.json is not None:
            write_whole(args.json, json.dumps(breakdown.to_dict(), indent=1) + "\n")
        return 0

    return cli.run(execute)


def compare(argv: Sequence[str]) -> int:
    """Prints what changed between two profiles; returns the exit code."""
    args = compare_parser().parse_args(argv)

    def execute() -> int:
        folders = find(args.a, None), find(args.b, None)
        from jtrain.profile.report import compare, terminal  # lazy: rich

        a, b = map(load, folders)
        found = compare.compare(a, b, a_name=str(folders[0]), b_name=str(folders[1]))
        compare.print_comparison(found, terminal.new_console())
        if args.json is not None:
            write_whole(args.json, json.dumps(found.to_dict(), indent=1) + "\n")
        return 0

    return cli.run(execute)


def export(argv: Sequence[str]) -> int:
    """Writes a window's trace for Perfetto; returns the exit code."""
    args = export_parser().parse_args(argv)

    def execute() -> int:
        folder = find(args.workdir, args.step)
        clocks = load(folder).clocks
        from jtrain.profile.analysis.breakdown import load as load_trace  # lazy: jax
        from jtrain.profile.report.perfetto import perfetto

        trace, ops = load_trace(folder)
        file = args.out or folder / TRACE
        write_whole(file, json.dumps(perfetto(trace, ops, clocks)))
        print(f"{file}: open it at https://ui.perfetto.dev, which reads it in the browser without uploading it")
        return 0

    return cli.run(execute)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbs = {"compare": compare, "export": export}
    if words and words[0] in verbs:
        return verbs[words[0]](words[1:])
    return show(words)
