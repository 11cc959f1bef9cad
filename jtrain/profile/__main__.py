"""Where a run's time went: `python -m jtrain.profile WORKDIR`, `... compare A B`, `... export WORKDIR --perfetto`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain import verb
from jtrain.durable import write_whole
from jtrain.profile.windows import FOLDER, other_parts

if TYPE_CHECKING:
    from jtrain.profile.records import Breakdown

TRACE = "perfetto.json"

_WORKDIR = "of a run, or one WORKDIR/profile/<step> of it, or the process-<n> in that"

_EPILOG = "Exit codes: 0 done; 2 there is no such profile, the message says what there is and the way out."


def parser() -> argparse.ArgumentParser:
    """The command line of a profile's own report."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile",
        usage="%(prog)s WORKDIR [--step N] [--json FILE]\n"
        "       %(prog)s compare A B [--json FILE]\n"
        "       %(prog)s export WORKDIR --perfetto [--step N] [--out FILE]",
        description="Says where a run's time went: of a step, how much was math, extra instructions, low utilisation, "
        "clocks, exposed communication, waits; which ops lose most, and what to try next. `compare` says what got "
        "slower between two profiles, and why; `export` writes a trace for ui.perfetto.dev.",
        epilog=f"{_EPILOG} A workdir that is called compare or export is given as ./compare.",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help=_WORKDIR)
    parser.add_argument("--step", type=int, metavar="N", help="the window that opened after step N (default: newest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write breakdown.json there; seconds and bytes")
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """The command line of `compare`."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile compare",
        description="Says what got slower from profile A to profile B, and why: by part of the step, by op (matched by "
        "name, phase and layer), by collective. Seconds are of one device in one step.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    for name in ("a", "b"):
        words = "workdir of a run (its newest window), or one WORKDIR/profile/<step> of it"
        parser.add_argument(name, type=Path, metavar=name.upper(), help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there, with every op")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """The command line of `export`."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.profile export",
        description="Writes the trace of a window with steps, phases, layers, ops, clocks, power and temperature in "
        "one file. XProf opens the xplane file beside it, which has the same tracks.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help=_WORKDIR)
    parser.add_argument("--step", type=int, metavar="N", help="the window that opened after step N (default: newest)")
    words = "for ui.perfetto.dev and chrome://tracing; the only format there is"
    parser.add_argument("--perfetto", action="store_true", required=True, help=words)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {TRACE} beside the trace")
    return parser


def find(workdir: Path, step: int | None) -> Path:
    """The folder of a window: `workdir` itself if it is one, else the newest or the one of `step` in it.

    Raises:
      ValueError: no such folder, no window in it, or none of that step.
    """
    if not workdir.is_dir():
        raise ValueError(f"{workdir} is no directory. Give the workdir of a run, such as runs/tiny.")
    if step is None and any((workdir / name).exists() for name in ("breakdown.json", "facts.json")):
        return workdir  # a window, wherever it was copied to
    windows = {int(p.name): p for p in (workdir / FOLDER).glob("*") if p.is_dir() and p.name.isdecimal()}
    if not windows:
        raise ValueError(
            f"{workdir} holds no profile: there is no {workdir / FOLDER}/<step>. Run with --set profile.steps=(20,25), "
            "or send SIGUSR1 to the running job."
        )
    if step is None:
        return windows[max(windows)]
    if step not in windows:
        there = ", ".join(map(str, sorted(windows)))
        raise ValueError(f"--step {step}: {workdir / FOLDER} has windows after the steps {there}. Give one of them.")
    return windows[step]


def load(folder: Path) -> "Breakdown":
    """The breakdown of a window; where a run was stopped before it was made, it and the page are made now.

    Raises:
      ValueError: breakdown.json is cut off, or there is neither one nor a trace to make it from.
    """
    from jtrain.profile.breakdown import read_json  # lazy: numpy
    from jtrain.profile.finish import finish

    file = folder / "breakdown.json"
    if not file.exists():
        finish(folder)
    return read_json(file)


def _of_process(process: int, part: Path) -> "Breakdown | None":
    """What one of the other processes found; if it left nothing that can be read, that is said."""
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
        from jtrain.profile.terminal import new_console, print_breakdown, print_processes  # lazy: rich

        console = new_console()
        print_breakdown(breakdown, console)
        parts = other_parts(folder)
        if others := [found for process, part in parts.items() if (found := _of_process(process, part)) is not None]:
            print_processes([breakdown, *others], console)
        if (page := folder / "report.html").exists():
            print(f"with pictures: {page}")
        if args.json is not None:
            write_whole(args.json, json.dumps(breakdown.to_dict(), indent=1) + "\n")
        return 0

    return verb.run(execute)


def compare(argv: Sequence[str]) -> int:
    """Prints what changed between two profiles; returns the exit code."""
    args = compare_parser().parse_args(argv)

    def execute() -> int:
        folders = find(args.a, None), find(args.b, None)
        from jtrain.profile import compare, terminal  # lazy: rich

        a, b = map(load, folders)
        found = compare.compare(a, b, a_name=str(folders[0]), b_name=str(folders[1]))
        compare.print_comparison(found, terminal.new_console())
        if args.json is not None:
            write_whole(args.json, json.dumps(found.to_dict(), indent=1) + "\n")
        return 0

    return verb.run(execute)


def export(argv: Sequence[str]) -> int:
    """Writes a window's trace for Perfetto; returns the exit code."""
    args = export_parser().parse_args(argv)

    def execute() -> int:
        folder = find(args.workdir, args.step)
        clocks = load(folder).clocks
        from jtrain.profile.breakdown import load as load_trace  # lazy: jax
        from jtrain.profile.export import perfetto

        trace, ops = load_trace(folder)
        file = args.out or folder / TRACE
        write_whole(file, json.dumps(perfetto(trace, ops, clocks)))
        print(f"{file}: open it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere")
        return 0

    return verb.run(execute)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbs = {"compare": compare, "export": export}
    if words and words[0] in verbs:
        return verbs[words[0]](words[1:])
    return show(words)


if __name__ == "__main__":
    sys.exit(main())
