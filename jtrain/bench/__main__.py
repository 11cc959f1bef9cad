"""`python -m jtrain.bench [NAME [--json FILE] [options of that benchmark]]`."""

import argparse
import ast
import datetime
import difflib
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.bench import Row, meets_bar, rehearsed
from jtrain.cli.run import run
from jtrain.errors import UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.platform import start_jax

FOLDER = Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def benchmarks() -> dict[str, str]:
    """Name -> first line of its docstring, without importing any."""
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for path in sorted(FOLDER.glob("*.py"))
        if not path.stem.startswith("_")
    }


def report(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What `--json` writes: the rows, and what one needs to know to measure them again."""
    from jtrain.runtime.run_files import git_commit, versions  # lazy: they import jax

    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "commit": git_commit(),
        "rows": list(rows),
    }


def device() -> str:
    """Accelerators by number and kind; a CPU by cores and model, since jax only calls it `cpu`."""
    import jax

    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor() or platform.machine()}"


def print_table(rows: Sequence[Row]) -> None:
    """The rows for a reader. Plain text: a machine with a GPU may have nothing but JAX."""
    lines = [("what", "value", "baseline", "ratio", "bar")]
    for row in rows:
        verdict = {None: "", True: " met", False: " MISSED"}[meets_bar(row)]
        value = "-" if row["value"] is None else f"{row['value']:,.4g} {row['unit']}"
        baseline = "" if row["baseline"] is None else f"{row['baseline']:,.4g} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append((row["what"], value, baseline, ratio, f"{row['bar'] or ''}{verdict}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for what, *numbers, bar in lines:
        right = (text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True))
        print("  ".join([what.ljust(widths[0]), *right, bar]).rstrip())


def measured(found: Iterable[Row], *, rehearse: bool, lines: Path | None) -> Iterator[Row]:
    """The rows of a benchmark one by one; each is appended to `lines` before the next is measured."""
    for one in found:
        marked = rehearsed(one) if rehearse else one
        if lines is not None:
            with open(lines, "a") as file:
                file.write(json.dumps(marked) + "\n")
        yield marked


def bench(argv: Sequence[str]) -> int:
    """Lists the benchmarks, or runs one; exit code 1 if one with MUST_MEET misses a bar."""
    found = benchmarks()
    listed = "\n".join(f"  {name:16} {line}" for name, line in found.items())
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.bench",
        description="Measures one published number; without a name, lists them.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    name = argv[0] if argv and not argv[0].startswith("-") else None
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the benchmarks below")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="append each row there once it is measured")
    if name is None:
        parser.parse_args(argv)
        print(listed)
        return 0
    if name not in found:
        near = difflib.get_close_matches(name, found)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"no benchmark {name}.{hint} There are: {', '.join(found)}.")
    module = importlib.import_module(f"jtrain.bench.{name}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    args = parser.parse_args(argv)
    start_jax(os.environ)
    rows = list(measured(module.run(args), rehearse=getattr(args, "rehearse", False), lines=args.lines))
    if args.json is not None:
        args.json.write_text(json.dumps(report(name, rows), indent=2) + "\n")
    if rows and not getattr(module, "PRINTS", False):
        print_table(rows)
    missed = any(meets_bar(row) is False for row in rows)
    return exit_codes.BUG if missed and getattr(module, "MUST_MEET", False) else exit_codes.DONE


if __name__ == "__main__":
    sys.exit(run(lambda: bench(sys.argv[1:])))
