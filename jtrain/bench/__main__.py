"""`python -m jtrain.bench [NAME [--json FILE] [options of that benchmark]]`."""

import argparse
import ast
import datetime
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.bench import Option, Options, Row, meets_bar, rehearsed
from jtrain.cli.run import run
from jtrain.errors import UserError, did_you_mean
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.report.table import Table, numbers, words
from jtrain.runtime import exit_codes
from jtrain.runtime.platform import start_jax

CHECKOUT = Path(__file__).parents[2]
FOLDERS = {"jtrain.bench": Path(__file__).parent, "bench": CHECKOUT / "bench"}
"""Package -> its folder: what a user measures, and the published figures, which only a checkout has."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def in_checkout() -> bool:
    """True if the folder bench/ beside this package is jtrain's: an installed one has none."""
    # A wheel has no pyproject.toml beside the package.
    return (CHECKOUT / "pyproject.toml").is_file()


def benchmarks() -> dict[str, Path]:
    """Name of each benchmark that is here -> its file."""
    folders = FOLDERS.values() if in_checkout() else [FOLDERS["jtrain.bench"]]
    # Modules that start with an underscore are shared code, not benchmarks.
    files = (file for folder in folders for file in folder.glob("[!_]*.py"))
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def first_line(file: Path) -> str:
    """First line of a module's docstring, without importing it: some need packages of their own."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def is_for_absent_chips(file: Path, argv: Sequence[str]) -> bool:
    """True if a module's ABSENT_CHIPS is True or names an option in `argv`; does not import the module."""
    # Read from the syntax tree: importing the module would import JAX, which then looks for chips.
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABSENT_CHIPS":
            options = ast.literal_eval(node.value)
            # `--device=h200` is one word; the option's name is the part before the sign.
            return options is True or any(word.partition("=")[0] in options for word in argv)
    return False


def report(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Contents of the `--json` file: the rows, and the facts that are needed to measure them again."""
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
    # One line per core; without any (other systems), the platform's own name has to do.
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    # sched_getaffinity: cores that this process may use, not those of the machine.
    return (
        f"{len(os.sched_getaffinity(0))} x "
        f"{models[0] if models else platform.processor() or platform.machine()}"
    )


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows as plain text: a machine with a GPU may have nothing but JAX."""
    table = Table("figures", words("what") + numbers("value", "baseline", "ratio") + words("bar"))
    for row in rows:
        verdict = {None: "", True: " met", False: " MISSED"}[meets_bar(row)]
        value = "-" if row["value"] is None else f"{row['value']:,.4g} {row['unit']}"
        baseline = "" if row["baseline"] is None else f"{row['baseline']:,.4g} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.add(row["what"], value, baseline, ratio, f"{row['bar'] or ''}{verdict}")
    print("\n".join(table.lines()))


def measure_rows(rows: Iterable[Row], *, rehearse: bool, lines: Path | None) -> Iterator[Row]:
    """The rows of a benchmark one by one; each is appended to `lines` before the next is measured."""
    for measured_row in rows:
        marked = rehearsed(measured_row) if rehearse else measured_row
        if lines is not None:
            # Opened for each row, so that a benchmark that is killed leaves the rows that it has measured.
            with open(lines, "a") as file:
                file.write(json.dumps(marked) + "\n")
        yield marked


def parse(options: Sequence[Option], argv: Sequence[str], listing: str = "") -> Options:
    """Options of a benchmark, and those of all, by the words behind `python -m jtrain.bench`."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.bench",
        description="Measures one published number; without a name, lists them.",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the benchmarks below")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--lines", type=Path, metavar="FILE", help="append each row there once it is measured"
    )
    for benchmark_option in options:
        parser.add_argument(*benchmark_option.flags, **benchmark_option.settings)
    return parser.parse_args(argv, namespace=Options())


def bench(argv: Sequence[str]) -> int:
    """Lists the benchmarks, or runs one; exit code 1 if one with MUST_MEET misses a bar."""
    files = benchmarks()
    listing = "\n".join(f"  {name:24} {first_line(file)}" for name, file in files.items())
    # Options before a name belong to nobody, so the name must come first.
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if name is None:
        parse((), argv, listing)
        print(listing)
        print("next: jtrain bench tiny", file=sys.stderr)
        return exit_codes.DONE
    if name not in files:
        message = f"no benchmark {name}. {did_you_mean(name, files)}There are: {', '.join(files)}."
        if not in_checkout():
            message += " Those of published figures are in the folder bench/ of a checkout of jtrain: run them there."
        raise UserError(message)
    # The files came from the folders, so exactly one package has it.
    (package,) = (package for package, folder in FOLDERS.items() if folder == files[name].parent)
    if is_for_absent_chips(files[name], argv):
        os.environ.update(AOT_ENVIRONMENT)  # before the benchmark's module imports jax
    module = importlib.import_module(f"{package}.{name}")
    args = parse(getattr(module, "OPTIONS", ()), argv, listing)
    # After the benchmark's import: it may set flags that JAX reads when it starts.
    start_jax(os.environ)
    rows = list(measure_rows(module.run(args), rehearse=getattr(args, "rehearse", False), lines=args.lines))
    if args.json is not None:
        args.json.write_text(json.dumps(report(name, rows), indent=2) + "\n")
    if rows and not getattr(module, "PRINTS", False):
        print_table(rows)
    print("next: jtrain bench", file=sys.stderr)
    missed = any(meets_bar(row) is False for row in rows)
    # A missed bar is a failure only for benchmarks whose bars are claims of correctness.
    return exit_codes.BUG if missed and getattr(module, "MUST_MEET", False) else exit_codes.DONE


if __name__ == "__main__":
    sys.exit(run(lambda: bench(sys.argv[1:])))
