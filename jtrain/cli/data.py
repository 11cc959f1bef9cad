"""Prepares and inspects the data of a run: `python -m jtrain.data prepare | adopt | verify | inspect |
...`.
"""

import dataclasses
import functools
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.data_inspect import add_inspect_options, inspect
from jtrain.cli.data_reference import add_reference_options, reference
from jtrain.cli.data_reference import next_command as train_with_reference
from jtrain.cli.options import add_config, add_json, config_words
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.errors import FileError, UserError
from jtrain.layout.constants import BATCH_AXES
from jtrain.report.table import Table, numbers, words
from jtrain.runtime.platform import start_jax

if TYPE_CHECKING:
    from jtrain.config.run import Run
    from jtrain.data.dataset import TextDataset


_DTYPE_HELP = (
    "of ids in files that do not tell it (default: uint16 or uint32 by the vocabulary; MDS bytes: int64)"
)


def add_run(parser: Parser) -> None:
    """Declares what names the data of a run."""
    add_config(parser)
    add_json(parser)


def add_prepare_options(parser: Parser) -> None:
    """Declares the options of `prepare`."""
    add_run(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write the indexes to"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")


def add_adopt_options(parser: Parser) -> None:
    """Declares the options of `adopt`."""
    parser.add_argument(
        "--from", dest="path", required=True, metavar="PATH", help="file, folder, glob, Megatron prefix"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the data.prepared of runs")
    parser.add_argument(
        "--tokenizer", required=True, metavar="T", help="made the ids; as data.tokenizer of runs"
    )
    parser.add_argument(
        "--end-token", metavar="TOKEN", help="ends a document, where the tokenizer's files do not say it"
    )
    parser.add_argument(
        "--name", default="data", metavar="NAME", help="name in data.sources (default: that of data.path)"
    )
    parser.add_argument("--dtype", choices=("uint8", "uint16", "uint32", "int32", "int64"), help=_DTYPE_HELP)
    parser.add_argument("--column", metavar="NAME", help="column of the ids in MDS or Parquet")
    add_json(parser)


def add_bench_options(parser: Parser) -> None:
    """Declares the options of `bench`."""
    add_run(parser)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="batches to read (default: 200)")


def add_verify_options(parser: Parser) -> None:
    """Declares the options of `verify`."""
    parser.add_argument(
        "--from",
        dest="folder",
        required=True,
        metavar="DIR",
        help="the --out of `prepare` or `adopt`, or one source's folder in it, or its URL",
    )
    add_json(parser)


def add_sample_options(parser: Parser) -> None:
    """Declares the options of `sample`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write them to")


def plan(args: Args, run: "Run", dataset: "TextDataset") -> int:
    """Prints the estimated resources of one host; returns the exit code."""
    from jtrain.data.inspect.resource_estimate import budget

    # All rows of the batch, as if one host read them.
    estimate = budget(dataset, rows=run.data.global_batch)
    print(dataset.describe())
    print(f"data.engine={run.data.engine}, for each host:")
    fields = ("processes", "threads", "descriptors", "memory_mib")
    table = Table("resources", words("role") + numbers("processes", "threads", "descriptors", "about MiB"))
    for role in estimate.roles:
        table.add(role.role, *(f"{getattr(role, field):,}" for field in fields))
    table.add("all", *(f"{estimate.total(field):,}" for field in fields))
    print("\n".join(table.lines()))
    totals = {field: estimate.total(field) for field in fields}
    write_json(args, {"roles": [dataclasses.asdict(role) for role in estimate.roles], **totals})
    return 0


def bench(args: Args, run: "Run", dataset: "TextDataset") -> int:
    """Reads batches and prints throughput, memory and balance; returns the exit code."""
    if args.steps < 2:
        raise UserError(
            f"--steps {args.steps} must be at least 2, because the first batch is timed separately."
        )
    # The ranks over which a batch is balanced; with `data=auto` the fewest.
    ranks = math.prod(run.mesh.resolve_data(1).shape[axis] for axis in BATCH_AXES)
    from jtrain.data.inspect.throughput import measure_throughput

    figures, lines = measure_throughput(dataset, args.steps, ranks=ranks)
    print(dataset.describe())
    for line in lines:
        print(line)
    for name, value in figures.items():
        value_text = f"{value:,.4g}" if isinstance(value, float) else value
        if isinstance(value, dict):
            value_text = ", ".join(f"{key} {number:,.4g}" for key, number in value.items())
        print(f"{name:>18}  {value_text}")
    write_json(args, figures)
    return 0


def prepare(args: Args) -> int:
    """Builds the indexes; returns the exit code."""
    run = _run(args)
    from jtrain.data.pretokenized.build import prepare_command

    rows = prepare_command(
        run.data.named_sources,
        args.out,
        tokenizer=run.data.tokenizer,
        end_token=run.data.end_token,
        on_bad_record=run.data.on_bad_record,
        cache_dir=Path(run.data.cache_dir).expanduser(),
        workers=args.workers,
        # The words as they were typed, so that the file that is written can repeat the command.
        command=shlex.join(["python", "-m", "jtrain.data", "prepare", *args.words]),
    )
    write_json(args, {"sources": [dataclasses.asdict(row) for row in rows]})
    return 0


def adopt_files(args: Args) -> int:
    """Adopts token files; returns the exit code."""
    from jtrain.data.pretokenized import reader
    from jtrain.data.pretokenized.adopt import adopt  # lazy: numpy

    row = adopt(
        args.path,
        args.out,
        name=args.name,
        tokenizer=args.tokenizer,
        end_token=args.end_token,
        dtype=args.dtype,
        column=args.column,
        command=shlex.join(["python", "-m", "jtrain.data", "adopt", *args.words]),
        stream=sys.stderr,
    )
    index = reader.PreparedIndex(args.out / args.name)
    files = "files copied" if index.made_of["adopted"] == "parquet" else "files read in place"
    print(
        f"{args.name}: {row.records:,} documents, {row.tokens:,} tokens, {index.num_files:,} {files} "
        f"({index.made_of['adopted']}), index of {row.bytes / 2**20:,.1f} MiB in {args.out / args.name} "
        f"({row.state})"
    )
    write_json(args, dataclasses.asdict(row))
    return 0


def verify(args: Args) -> int:
    """Prints for each index if it is intact or damaged; returns the exit code."""
    from jtrain.data.pretokenized.index_format import INDEX
    from jtrain.data.pretokenized.reader import PreparedIndex, command  # lazy: numpy

    root = Path(args.folder)
    # A URL cannot be listed for folders: it is taken as one source's index.
    prepared = args.folder
    if "://" in args.folder or (root / INDEX).exists():
        folders = [args.folder]
        prepared = args.folder.rstrip("/").rpartition("/")[0] or "."
    else:
        entries = root.iterdir() if root.is_dir() else ()
        folders = sorted(str(path) for path in entries if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise FileError(f"{args.folder} has no prepared index. Make one: {command(str(root / 'NAME'))}")
    rows, commands = [], {}
    for folder in folders:
        try:
            index = PreparedIndex(folder)
            # Kept before the check: the command to repeat is known even if the index is damaged.
            commands[folder] = index.command
            damage = index.verify()
            size_text = f"{index.num_records:,} records, {index.num_tokens:,} tokens"
        except (ValueError, OSError) as error:  # wrong sizes, or an unreadable index.json
            damage, size_text = [str(error)], "its index"
        name = folder.rstrip("/").rpartition("/")[2]
        rows.append({"name": name, "damage": damage})
        print(f"{name}: {'DAMAGED' if damage else 'intact'} ({size_text})", flush=True)
        for line in damage:
            print(f"  {folder}: {line.removeprefix(f'{folder}: ')}", file=sys.stderr)
    write_json(args, {"sources": rows})
    # Both lists are in the order of `folders`.
    damaged = [folder for folder, row in zip(folders, rows, strict=True) if row["damage"]]
    if not damaged:
        # Folders that several commands filled have no single config.
        args.training = _training(prepared, *set(commands.values()))
        return 0
    # The index itself says how it was made; without it, the folder's name gives the command.
    rebuild_command = commands.get(damaged[0]) or command(damaged[0])
    way_out = f"Make them again: rm -r {shlex.join(damaged)} && {rebuild_command}"
    if "://" in damaged[0]:
        way_out = f"Copy it there again, or make it again: {rebuild_command}"
    print(f"error: {len(damaged)} of {len(rows)} indexes are damaged. {way_out}", file=sys.stderr)
    return 2


def sample(args: Args) -> int:
    """Writes sample sources; returns the exit code."""
    from jtrain.data.sources.sample import FILES, write_sample  # lazy: numpy

    for name, documents in write_sample(args.out).items():
        print(f"{args.out / FILES[name]}: {documents:,} documents")
    return 0


def _run(args: Args) -> "Run":
    # Before the config: it imports jax, whose platform must be chosen first.
    start_jax(os.environ)

    from jtrain.config.load import load_config  # lazy: imports jax and flax, which takes over a second
    from jtrain.config.run import build_run

    return build_run(load_config(args.config, args.fiddlers, args.sets))


def _with_dataset(show: Callable[[Args, "Run", "TextDataset"], int], args: Args) -> int:
    """Opens the sources of a run for a command that reads them; returns its exit code."""
    run = _run(args)
    from jtrain.data.dataset import open_dataset

    # Messages of the sources go to stderr, so that the table can be piped.
    dataset = open_dataset(run.data, seed=run.seed, say=lambda line: print(line, file=sys.stderr, flush=True))
    return show(args, run, dataset)


def _command_of_run(command: str, args: Args) -> str:
    """A command about the run that the options name."""
    return shlex.join(["jtrain", *command.split(), *config_words(args)])


def _verify_command(args: Args) -> str:
    return shlex.join(["jtrain", "data", "verify", "--from", str(args.out)])


def _training(prepared: str, *commands: str) -> str:
    """Command that trains with the indexes that one `prepare` wrote; "" for all others.

    Adopted files have no config: a model whose vocabulary is that of their tokenizer is the user's choice.

    Args:
      prepared: folder of the indexes.
      commands: those that made them.
    """
    start = "python -m jtrain.data prepare "
    if len(commands) != 1 or not commands[0].startswith(start):
        return ""
    try:
        args = VERB.commands["prepare"].parser("").parse(shlex.split(commands[0].removeprefix(start)))
    except ValueError:  # of a version with other options, or changed by hand
        return ""
    # The general form, of indexes without the file that has the command.
    if args.config == "NAME":
        return ""
    return shlex.join(["jtrain", "launch", *config_words(args), "--set", f"data.prepared={prepared}"])


def _inspect_command(args: Args) -> str:
    """`--config=mixture` reads the samples where the docs put them; another folder is a source by itself."""
    from jtrain.data.sources.sample import FILES

    path = args.out / next(iter(FILES.values()))
    return shlex.join(["jtrain", "data", "inspect", "--config=tiny", "--set", f"data.path={path}"])


VERB = Verb(
    "data",
    summary="prepare and inspect the data of a run",
    commands={
        "prepare": Command(
            "tokenise every source once, into indexes that runs read with data.prepared=DIR",
            prepare,
            add_prepare_options,
            "Tokenises in parallel, on any number of hosts: run the same command on each, with --out on a "
            "disk that they share. If one is killed, the others or the same command continue; the final "
            "bytes are the same.",
            subject="config",
            next_command=_verify_command,
        ),
        "adopt": Command(
            "make an index of token files that another project prepared, which stay where they are",
            adopt_files,
            add_adopt_options,
            "Reads each file once, for the documents, the largest id and a hash, and writes an index of 4.5 "
            "bytes per document; runs then read the ids from the files themselves. Parquet is the exception: "
            "its ids are copied. Layouts: Megatron .bin/.idx, nanoGPT and llm.c .bin, OLMo .npy, MosaicML "
            "MDS, Parquet with input_ids.",
            subject="from",
            next_command=_verify_command,
        ),
        "verify": Command(
            "check the indexes that `prepare` and `adopt` wrote against their hashes",
            verify,
            add_verify_options,
            "Reads the indexes that `prepare` and `adopt` wrote, and the files that were adopted, at about 1 "
            "GB/s, and checks their hashes. Exits 2 if a file is damaged.",
            subject="from",
            next_command=lambda args: args.training,
        ),
        "inspect": Command(
            "print the documents of one step: their sources, places in the batch and text; or the order of "
            "many",
            functools.partial(_with_dataset, inspect),
            add_inspect_options,
            "Prints the documents of one step. Plans and reads every step before it too: about a second per "
            "50 million bytes, longer with a tokenizer other than bytes.",
            subject="config",
            next_command=functools.partial(_command_of_run, "data plan"),
        ),
        "plan": Command(
            "print the resources that the data plane of a run needs: processes, threads, descriptors, memory",
            functools.partial(_with_dataset, plan),
            add_run,
            "Opens the sources, but starts no process.",
            subject="config",
            next_command=functools.partial(_command_of_run, "data bench"),
        ),
        "bench": Command(
            "read batches as fast as possible, and print throughput, memory and balance",
            functools.partial(_with_dataset, bench),
            add_bench_options,
            "Runs the data plane of a config without a trainer.",
            subject="config",
            next_command=functools.partial(_command_of_run, "launch"),
        ),
        "reference": Command(
            "write what another model says of a run's samples, for objective.stored",
            reference,
            add_reference_options,
            "objective=DPO: reads every pair of the sources and of eval.sets once, and writes the "
            "log-probabilities of its texts by the weights before the first step, without an adapter, in "
            "the layout of the run. objective=Distillation: reads every sample of the sources once, and "
            "writes the most probable tokens after each one that is learned, by the newest weights of the "
            "teacher's workdir, in its layout; killed, it goes on where it ended.",
            subject="config",
            next_command=train_with_reference,
        ),
        "sample": Command(
            "write six small sources in six formats, from text on this machine, for --config=mixture",
            sample,
            add_sample_options,
            next_command=_inspect_command,
        ),
    },
)
main = VERB.main
