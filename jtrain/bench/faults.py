"""Faults that a training survives: kills, damaged files and disks, bad numbers, stopped processes.

    python -m jtrain.bench faults --trials 40 --seed 0
    python -m jtrain.bench faults --trials 40 --seed 0 --processes 2 --only kill-save,kill-commit
    python -m jtrain.bench faults --trials 3 --seed 7 --config my_config.py --workdir /scratch/faults
    python -m jtrain.bench faults --hours 8 --seed 0
    python -m jtrain.bench faults --sequence kill-purge:17,clock-jump:3,sigterm:40

Each trial starts a real training, injects one fault, starts the same command again as a user would, until it
is done, and compares with an unbroken run of the same config: loss and batch of every step, every array of
the final state, the checkpoints, the processes that stayed. Trial i has the seed S + i: its printed command
repeats it alone. With --hours, each trial is a drawn sequence of faults in one workdir; one that fails is
shortened to the fewest faults that fail, and printed as a command. Exit code 1 if anything was lost. Without
--config the model is small and runs on emulated CPU devices; docs/faults.md lists the kinds.
"""

import glob
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jtrain.bench import Options, Row, option
from jtrain.errors import UserError

PRINTS = True
"""This benchmark prints a table of its own."""
MUST_MEET = True
"""Exit code 1 if a row misses its bar."""


OPTIONS = (
    option(
        "--trials", type=int, metavar="N", help="faults, or sequences of --hours, to inject (default: 20)"
    ),
    option("--hours", type=float, metavar="H", help="sequences of faults, until the time is over"),
    option("--sequence", metavar="KIND:NUMBER,...", help="this sequence of faults alone"),
    option("--seed", type=int, default=0, help="of the first trial (default: %(default)s)"),
    option("--processes", type=int, default=1, choices=(1, 2, 4), help="of one training, on this machine"),
    option("--only", metavar="KIND,...", help="these kinds of faults; `list` lists them"),
    option("--config", metavar="NAME", help="train this config instead of a small one (16 steps of it)"),
    option("--workdir", type=Path, metavar="DIR", help="where the trials live (default: a temporary one)"),
)


def run(args: Options) -> Iterator[Row]:
    """Runs the trials one after another; prints a line for each, then a table; yields rows for `--json`."""
    from jtrain.bench.fault_trials import processes, recipe, sequences, table  # lazy: they import jax
    from jtrain.bench.fault_trials.kinds import FaultResult, register_all
    from jtrain.bench.fault_trials.lab import FaultLab
    from jtrain.bench.fault_trials.trial import inject_and_compare
    from jtrain.runtime.platform import ACCELERATOR_FILES

    kinds = register_all()
    if args.only == "list":
        print("\n".join(f"{name:18} {kind.description}" for name, kind in kinds.items()))
        return
    for option_name in ("trials", "hours"):
        value = getattr(args, option_name)
        if value is not None and not value > 0:
            raise UserError(f"--{option_name} {value} must be above 0.")
    in_sequences = args.hours is not None or args.sequence is not None
    counts = {name: kind.processes for name, kind in kinds.items() if kind.chains or not in_sequences}
    names = choose_kinds(args.only, counts, args.processes)
    if args.sequence is not None:
        drawn = iter([sequences.parse(args.sequence, {name: kinds[name] for name in names})])
    elif args.hours is not None:
        drawn = sequences.draw({name: kinds[name] for name in names}, args.seed)
    else:
        drawn = None
    folder = make_folder(args.workdir)
    # Looked up by device files: asking JAX would start its backend, and forks could not use it.
    accelerator = any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)
    recipe_of_run = recipe.of_config(args.config, args.processes, accelerator=accelerator)
    # Before the first fork, so that all trainings inherit it.
    recipe.set_environment(recipe_of_run)
    # Processes of a killed training become children of this one, and can be counted and ended.
    processes.adopt_orphans()
    results: list[FaultResult] = []
    try:
        lab = FaultLab(folder, recipe_of_run)
        unbroken = lab.reference(recipe_of_run)
        print(f"unbroken: {recipe_of_run.command(folder / 'workdir')}: {unbroken.end_s:.1f} s", flush=True)
        if drawn is None:
            trials = draw_trials(names, 20 if args.trials is None else args.trials, args.seed)
            for seed, name in trials:
                results.append(inject_and_compare(kinds[name], lab, f"{name}-{seed}", seed))
                print(table.line(results[-1], of_config=args.config), flush=True)
        else:
            end_s = None if args.hours is None else time.monotonic() + 3600 * args.hours
            for number, sequence in enumerate(itertools.islice(drawn, args.trials)):
                if end_s is not None and time.monotonic() > end_s:
                    break
                results.append(sequences.try_and_shorten(sequence, number, lab, kinds))
                print(table.line(results[-1], of_config=args.config), flush=True)
    finally:
        # Also after Ctrl-C: no training may outlive the benchmark.
        processes.end_descendants()
        # Files of failed trials stay, for whoever looks for the reason.
        if args.workdir is None and not any(result.wrong for result in results):
            shutil.rmtree(folder, ignore_errors=True)
    print("", *table.lines(results, kinds, of_config=args.config), sep="\n")
    yield from table.rows(results)


def choose_kinds(only: str | None, kinds: dict[str, tuple[int, ...]], num_processes: int) -> list[str]:
    """Returns the kinds of `--only`, or all that make sense with this number of processes.

    Raises:
      UserError: an unknown kind, or one that needs another number of processes.
    """
    if only is None:
        return [name for name, counts in kinds.items() if num_processes in counts]
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in kinds:
            raise UserError(f"--only {name}: there is no such kind of fault. There are: {', '.join(kinds)}.")
        if num_processes not in kinds[name]:
            counts = " or ".join(map(str, kinds[name]))
            raise UserError(f"--only {name} needs --processes {counts}, not {num_processes}.")
    return names


def draw_trials(names: list[str], trials: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yields (seed, kind) of each trial: all kinds in a drawn order, then all again in another, and so on."""
    order: list[str] = []
    rng = random.Random(seed)
    for index in range(trials):
        # Every kind comes once before any comes twice.
        if not order:
            order = rng.sample(names, len(names))
        yield seed + index, order.pop()


def make_folder(workdir: Path | None) -> Path:
    """Returns a new folder for the trials.

    Raises:
      UserError: it cannot be made, or holds something.
    """
    if workdir is None:
        return Path(tempfile.mkdtemp(prefix="jtrain-faults-"))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # Tried with a file: permissions alone do not tell of full or read-only disks.
        probe = workdir / "writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--workdir {workdir} cannot be written to ({error.strerror}). Choose a folder on a disk with "
            "room."
        ) from error
    if any(workdir.iterdir()):
        raise UserError(
            f"--workdir {workdir} is not empty. Choose a new folder: the trials delete what they made there."
        )
    return workdir.absolute()
