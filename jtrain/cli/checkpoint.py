"""Lists, shows and verifies the checkpoints of a run: `python -m jtrain.checkpoint list --workdir
runs/tiny`.
"""

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files, removal
from jtrain.checkpoint.files import CheckpointError
from jtrain.cli.options import add_json, add_step, add_workdir
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.report.table import Table, numbers, words
from jtrain.runtime.stores import in_store, run_folder, store_errors


def add_options(parser: Parser) -> None:
    """Declares the options of all commands."""
    add_workdir(parser)
    add_step(parser, "one checkpoint (default: the newest for show, else all)")
    add_json(parser)


def execute(show: Callable[[Path, int | None], tuple[Any, int]], args: Args) -> int:
    """Runs a command on the folder of checkpoints; returns the exit code. Imports neither jax nor orbax."""
    folder = run_folder(args.workdir) / "checkpoints"
    # Only in a store: errors of a disk name their file, those of store clients need a way out.
    with store_errors(args.workdir) if in_store(folder) else contextlib.nullcontext():
        if not in_store(folder) and not folder.is_dir():
            raise CheckpointError(
                f"--workdir {args.workdir} holds no checkpoints. Give the --workdir of a run."
            )
        content, code = show(folder, args.step)
    write_json(args, content)
    return code


def _list(folder: Path, step: int | None) -> tuple[Any, int]:
    rows: list[dict[str, Any]] = []
    for step_found in _choose_steps(folder, step, default=files.steps(folder)):
        try:
            manifest = files.read_manifest(folder / str(step_found))
            rows.append(_row(str(step_found), step_found, manifest.saved_at, manifest.file_bytes, None))
        # A damaged manifest is a row of the table, not the end of it.
        except CheckpointError as error:
            rows.append(_row(str(step_found), step_found, None, None, f"damaged: {error}"))
    # Everything else in the folder, unless one step is asked for.
    if step is None:
        interrupted_text, set_aside_text = (
            "left by an interrupted save, deletion or copy",
            "found damaged at a start, and set aside",
        )
        rows += [
            _row(name, None, None, None, set_aside_text if removal.is_set_aside(name) else interrupted_text)
            for name in removal.unread_names(folder)
        ]
    table = Table(
        "checkpoints", numbers("step") + words("saved at (UTC)") + numbers("size") + words("complete")
    )
    for row in rows:
        size = "-" if row["bytes"] is None else _size(row["bytes"])
        complete_text = "yes" if row["complete"] else f"no: {row['why']}"
        table.add(row["name"], (row["saved_at"] or "-")[:19], size, complete_text)
    print("\n".join(table.lines()))
    return rows, 0


def _row(
    name: str, step: int | None, saved_at: str | None, size: int | None, reason: str | None
) -> dict[str, Any]:
    return {
        "name": name,
        "step": step,
        "saved_at": saved_at,
        "bytes": size,
        "complete": reason is None,
        "why": reason,
    }


def _show(folder: Path, step: int | None) -> tuple[Any, int]:
    # The newest, since `show` prints one checkpoint.
    (shown_step,) = _choose_steps(folder, step, default=files.steps(folder)[-1:])
    path = folder / str(shown_step)
    manifest = files.read_manifest(path)
    data = json.loads((path / files.DATA).read_text())
    config = (path / files.CONFIG).read_text()
    table = Table("leaves", words("leaf", "shape", "dtype") + numbers("size"))
    for name, leaf in manifest.leaves.items():
        table.add(name, str(list(leaf.shape)), leaf.dtype, _size(leaf.bytes))
    print("\n".join(table.lines()))
    print(
        f"\n{len(manifest.leaves)} leaves, {_size(manifest.state_bytes)}; step {shown_step}, saved "
        f"{manifest.saved_at}"
    )
    print(f"\ndata state: {json.dumps(data, indent=1)}\n\nconfig:\n{config}", end="")
    leaves = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype, "bytes": leaf.bytes}
        for name, leaf in manifest.leaves.items()
    }
    return {
        "step": shown_step,
        "saved_at": manifest.saved_at,
        "leaves": leaves,
        "data": data,
        "config": config,
    }, 0


def _verify(folder: Path, step: int | None) -> tuple[Any, int]:
    rows: list[dict[str, Any]] = []
    for checked_step in _choose_steps(folder, step, default=files.steps(folder)):
        try:
            manifest = files.read_manifest(folder / str(checked_step))
            # All files: at a restart each process hashes a share, here there is one process.
            damaged_files = files.find_damage(folder / str(checked_step), manifest)
            what_checked = f"{len(manifest.files)} files, {_size(manifest.file_bytes)}"
        except CheckpointError as error:
            damaged_files, what_checked = [str(error)], "manifest"
        rows.append({"step": checked_step, "damage": damaged_files})
        print(f"step {checked_step}: {'DAMAGED' if damaged_files else 'intact'} ({what_checked})")
        for line in damaged_files:
            print(f"  {line}", file=sys.stderr)
    # Arrays without a manifest, which `files.steps` leaves out.
    for unsealed_step in removal.lost_manifests(folder) if step is None else ():
        rows.append({"step": unsealed_step, "damage": [f"{files.MANIFEST} is missing"]})
        print(f"step {unsealed_step}: DAMAGED ({files.MANIFEST} is missing)")
    if any(row["damage"] for row in rows):
        intact_steps = [row["step"] for row in rows if not row["damage"]]
        print(
            f"error: damaged checkpoints. Intact steps: {intact_steps or 'none'}. Move the damaged ones out "
            f"of {folder}.",
            file=sys.stderr,
        )
        return rows, 2
    return rows, 0


def _choose_steps(folder: Path, step: int | None, *, default: tuple[int, ...]) -> tuple[int, ...]:
    complete_steps = files.steps(folder)
    if not complete_steps:
        raise CheckpointError(f"No complete checkpoint in {folder}.")
    if step is None:
        return default
    if step not in complete_steps:
        raise CheckpointError(
            f"--step {step}: no complete checkpoint in {folder}, which has steps "
            f"{', '.join(map(str, complete_steps))}."
        )
    return (step,)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _command(summary: str, show: Callable[[Path, int | None], tuple[Any, int]], following: str) -> Command:
    """Makes a command about the checkpoints of a run; `following` begins the command to suggest after it."""
    return Command(
        summary,
        functools.partial(execute, show),
        add_options,
        subject="workdir",
        next_command=lambda args: f"jtrain {following} --workdir {shlex.quote(args.workdir)}",
    )


_LIST = _command("print step, date and size of each checkpoint", _list, "checkpoint verify")

VERB = Verb(
    "checkpoint",
    # `jtrain checkpoint runs/tiny` lists: a folder alone asks what is in it.
    _LIST,
    commands={
        "list": _LIST,
        "show": _command(
            "print leaves, data state and config of the newest checkpoint, or of --step", _show, "generate"
        ),
        "verify": _command(
            "read every file and compare its hash; exits 2 if one is damaged", _verify, "checkpoint show"
        ),
    },
)
main = VERB.main
