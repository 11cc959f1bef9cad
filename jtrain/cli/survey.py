"""Command line of the survey's claims: `python -m jtrain.survey`, and what this machine can measure."""

import contextlib
import datetime
import fcntl
import io
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli import plan
from jtrain.cli.options import add_json, output_file
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.errors import UserError, did_you_mean
from jtrain.plan.survey.claims import CLAIMS, CLAIMS_BY_SUBJECT
from jtrain.plan.survey.evidence import Claim, Figure, Lookup
from jtrain.runtime.atomic_io import write_whole

CHECKOUT = Path(__file__).parents[2]
OUT = Path("survey")


def add_options(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="ROW",
        help="measure and compile the figures of these rows (default: all) that --out lacks; seconds to an "
        "hour each",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder of what this machine measured (default: {OUT})"
    )
    add_json(parser)
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write the page to FILE")


def execute(args: Args) -> int:
    """Prints the claims with their figures and verdicts; returns the exit code."""
    from jtrain.plan.survey.sheet import page_of, to_json
    from jtrain.report.page import html
    from jtrain.report.terminal import new_console, print_page

    if args.measure is None and args.out is not None and not args.out.is_dir():
        raise UserError(f"--out {args.out} is no folder, and --measure alone makes one. Leave --out out.")
    out = args.out or OUT
    reasons = {} if args.measure is None else measure(commands_of(args.measure), out)
    predictions = {
        command: predict(command)
        for command in dict.fromkeys(claim.predicted.command for claim in CLAIMS if claim.predicted)
    }

    def figure_of(claim: Claim, lookup: Lookup) -> Figure:
        if lookup is not claim.predicted:
            return find_figure(lookup, out, reasons.get(lookup.command) or f"needs {claim.needs}")
        content, message = predictions[lookup.command]
        value, source = (None, "") if content is None else (lookup.read(content), "this call")
        return Figure(f"jtrain {lookup.command}", value, source, message)

    figures = {
        claim.name: {kind: figure_of(claim, lookup) for kind, lookup in claim.lookups.items()}
        for claim in CLAIMS
    }
    content = to_json(CLAIMS_BY_SUBJECT, figures)
    page = page_of(content)
    print_page(page, new_console())
    write_json(args, content)
    if args.html is not None:
        write_whole(args.html, html(page))
    return 0


def commands_of(names: Sequence[str]) -> list[str]:
    """The commands that measure and compile the figures of these rows; of all rows without names.

    Raises:
      UserError: there is no such row, or nothing of it can be measured.
    """
    commands = {
        claim.name: [
            lookup.command for lookup in (claim.compiled, claim.measured) if lookup and lookup.command
        ]
        for claim in CLAIMS
    }
    measurable = [name for name in commands if commands[name]]
    for name in names:
        if name not in measurable:
            reason = "is only predicted. " if name in commands else "is no row. "
            nearest = "" if name in commands else did_you_mean(name, measurable)
            raise UserError(f"--measure {name} {reason}{nearest}Rows to measure: {', '.join(measurable)}.")
    return list(dict.fromkeys(command for name in names or measurable for command in commands[name]))


def predict(command: str) -> tuple[Any, str]:
    """The JSON of a plan that is computed in this process; None and its message where it exits with 2."""
    output, errors = io.StringIO(), io.StringIO()
    # All plans share this process: most of the time of each is for importing JAX.
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = plan.main([*shlex.split(command)[1:], "--json", "-"])
    return (None, errors.getvalue().strip()) if code else (json.loads(output.getvalue()), "")


def find_figure(lookup: Lookup, out: Path, missing: str) -> Figure:
    """The figure that this machine measured, else the committed one.

    Args:
      missing: the reason if there is neither.
    """
    command = f"jtrain {lookup.command}" if lookup.command else "bench/NOTES.md"
    # A row without a number, such as one of clocks without NVML, leaves the committed one.
    with contextlib.suppress(LookupError):
        if (record := read_record(lookup.command, out)) is not None:
            source = f"{record_file(lookup.command, out)}, {_origin(record)}"
            return Figure(command, lookup.read(record["content"]), source)
    file = CHECKOUT / "bench" / "results" / f"{lookup.published}.json"
    if lookup.published and file.is_file():
        content = json.loads(file.read_text())
        source = f"{file.relative_to(CHECKOUT)}, {_origin({'content': content})}"
        return Figure(command, lookup.read(content), source)
    if lookup.noted is not None and (CHECKOUT / lookup.noted.page).is_file():
        return Figure(command, lookup.noted.value, lookup.noted.page)
    # A wheel has neither results nor pages.
    return Figure(command, missing="needs a checkout" if lookup.published or lookup.noted else missing)


def _origin(record: dict[str, Any]) -> str:
    """Date, machine and commit of a measurement; a compilation by a plan names no machine."""
    facts = record | (record["content"] if "rows" in record["content"] else {})
    date, machine, commit = (facts.get(name) or "" for name in ("date", "device", "commit"))
    return ", ".join(filter(None, (date[:10], machine, commit and f"commit {commit[:8]}")))


def record_file(command: str, out: Path) -> Path:
    """The file of a command's JSON in the folder of measurements."""
    # Names have at most 255 bytes; the record has the whole command.
    return out / f"{re.sub(r'[^a-zA-Z0-9_]+', '-', command)[:80]}.json"


def read_record(command: str, out: Path) -> dict[str, Any] | None:
    """Record that this machine wrote for a command; None if it did not, or for one that begins alike.

    Raises:
      UserError: the file is damaged.
    """
    file = record_file(command, out)
    if not command or not file.is_file():
        return None
    try:
        record = json.loads(file.read_text())
        return record if record["command"] == command and record["content"] else None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} is not what --measure writes. Remove it, and run `jtrain survey --measure` again."
        ) from None


def measure(commands: Sequence[str], out: Path) -> dict[str, str]:
    """Runs the commands whose JSON is not in `out` yet, one after the other.

    Returns:
      Command -> the last line of what it printed, for each that exited with an error.
    """
    from jtrain.runtime.run_files import git_commit  # lazy: it imports jax

    reasons: dict[str, str] = {}
    with _locked(out) as lock:
        for number, command in enumerate(commands, start=1):
            file = record_file(command, out)
            print(f"{number} of {len(commands)}: jtrain {command}", file=sys.stderr, flush=True)
            if read_record(command, out) is not None:
                print(f"  measured before: {file}", file=sys.stderr)
                continue
            started_s, date = time.monotonic(), datetime.datetime.now(datetime.UTC)
            content, reason = _run(command, out, lock)
            print(f"  {reason or file} after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
            if content is None:
                reasons[command] = reason
                continue
            record = {"command": command, "date": date.isoformat(timespec="seconds"), "commit": git_commit()}
            # Whole or not at all: a call that is killed before leaves the row to the next call.
            write_whole(file, json.dumps(record | {"content": content}, indent=1) + "\n")
    return reasons


def _run(command: str, out: Path, lock: int) -> tuple[Any, str]:
    """The JSON that a command writes in a process of its own; None and its last line if it fails."""
    verb, *words = shlex.split(command)
    output, log = out / "output.json", out / "log.txt"
    with open(log, "w") as file:
        code = subprocess.run(
            [sys.executable, "-m", f"jtrain.{verb}", *words, "--json", str(output)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
            # It keeps the lock if this process is killed: a second call would disturb what still measures.
            pass_fds=(lock,),
        ).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return None, f"exit code {code}: {lines[-1] if lines else 'it printed nothing'}"
    return json.loads(output.read_text()), ""


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Holds the folder's lock, which ends with the last process that has it; yields its file descriptor."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another call measures into {out}, or what a killed one started still runs. Wait for it, or "
                "give this one another --out."
            ) from None
        yield lock.fileno()


def _next_command(args: Args) -> str:
    """Command to suggest after this one: the measurements, then the page, then the benchmarks."""
    words = ["jtrain", "survey", *(["--out", str(args.out)] if args.out else [])]
    if args.measure is None:
        return shlex.join([*words, "--measure"])
    return "jtrain bench" if args.html else shlex.join([*words, "--html", "survey.html"])


VERB = Verb(
    "survey",
    Command(
        "print the survey's claims with predictions, compilations, measurements and verdicts",
        execute,
        add_options,
        description="Prints each claim of the survey (arXiv:2603.26823) beside what jtrain predicts now, "
        "what compilers say and what was measured, with verdicts. --measure goes on where a killed call "
        "stopped.",
        next_command=_next_command,
    ),
)
main = VERB.main
