"""Lists, shows and verifies the checkpoints of a run: `python -m jtrain.checkpoint list --workdir
runs/tiny`.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files, removal
from jtrain.checkpoint.files import CheckpointError
from jtrain.cli.options import add_json, add_step, add_workdir
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.report.table import Table, numbers, words
from jtrain.runtime.store_paths import in_store, store_errors, workdir_path


def add_options(parser: Parser) -> None:
    """Declares the options of all commands."""
    add_workdir(parser)
    add_step(parser, "one checkpoint (default: the newest for show, else all)")
    add_json(parser)


def execute(show: Callable[[Path, int | None], tuple[Any, int]], args: Args) -> int:
    """Runs a command on the folder of checkpoints; returns the exit code. Imports neither jax nor orbax."""
    folder = workdir_path(args.workdir) / "checkpoints"
    with store_errors(args.workdir) if in_store(folder) else contextlib.nullcontext():
        if not in_store(folder) and not folder.is_dir():
            raise CheckpointError(f"There is no directory {folder}. Give the --workdir of a run.")
        content, code = show(folder, args.step)
    write_json(args, content)
    return code


def _list(folder: Path, step: int | None) -> tuple[Any, int]:
    rows: list[dict[str, Any]] = []
    for found in _chosen(folder, step, default=files.steps(folder)):
        try:
            manifest = files.read_manifest(folder / str(found))
            rows.append(_row(str(found), found, manifest.saved_at, manifest.file_bytes, None))
        except CheckpointError as error:
            rows.append(_row(str(found), found, None, None, f"damaged: {error}"))
    if step is None:
        killed, away = (
            "left by an interrupted save, deletion or copy",
            "found damaged at a start, and set aside",
        )
        rows += [
            _row(name, None, None, None, away if removal.is_set_aside(name) else killed)
            for name in removal.partial(folder)
        ]
    table = Table(
        "checkpoints", numbers("step") + words("saved at (UTC)") + numbers("size") + words("complete")
    )
    for row in rows:
        size = "-" if row["bytes"] is None else _size(row["bytes"])
        why = "yes" if row["complete"] else f"no: {row['why']}"
        table.add(row["name"], (row["saved_at"] or "-")[:19], size, why)
    print("\n".join(table.lines()))
    return rows, 0


def _row(
    name: str, step: int | None, saved_at: str | None, size: int | None, why: str | None
) -> dict[str, Any]:
    return {
        "name": name,
        "step": step,
        "saved_at": saved_at,
        "bytes": size,
        "complete": why is None,
        "why": why,
    }


def _show(folder: Path, step: int | None) -> tuple[Any, int]:
    (found,) = _chosen(folder, step, default=files.steps(folder)[-1:])
    path = folder / str(found)
    manifest = files.read_manifest(path)
    data = json.loads((path / files.DATA).read_text())
    config = (path / files.CONFIG).read_text()
    table = Table("leaves", words("leaf", "shape", "dtype") + numbers("size"))
    for name, leaf in manifest.leaves.items():
        table.add(name, str(list(leaf.shape)), leaf.dtype, _size(leaf.bytes))
    print("\n".join(table.lines()))
    print(
        f"\n{len(manifest.leaves)} leaves, {_size(manifest.state_bytes)}; step {found}, saved "
        f"{manifest.saved_at}"
    )
    print(f"\ndata state: {json.dumps(data, indent=1)}\n\nconfig:\n{config}", end="")
    leaves = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype, "bytes": leaf.bytes}
        for name, leaf in manifest.leaves.items()
    }
    return {"step": found, "saved_at": manifest.saved_at, "leaves": leaves, "data": data, "config": config}, 0


def _verify(folder: Path, step: int | None) -> tuple[Any, int]:
    rows: list[dict[str, Any]] = []
    for found in _chosen(folder, step, default=files.steps(folder)):
        try:
            manifest = files.read_manifest(folder / str(found))
            wrong = files.damage(folder / str(found), manifest)
            checked = f"{len(manifest.files)} files, {_size(manifest.file_bytes)}"
        except CheckpointError as error:
            wrong, checked = [str(error)], "manifest"
        rows.append({"step": found, "damage": wrong})
        print(f"step {found}: {'DAMAGED' if wrong else 'intact'} ({checked})")
        for line in wrong:
            print(f"  {line}", file=sys.stderr)
    for lost in removal.lost_manifests(folder) if step is None else ():
        rows.append({"step": lost, "damage": [f"{files.MANIFEST} is missing"]})
        print(f"step {lost}: DAMAGED ({files.MANIFEST} is missing)")
    if any(row["damage"] for row in rows):
        whole = [row["step"] for row in rows if not row["damage"]]
        print(
            f"error: damaged checkpoints. Intact steps: {whole or 'none'}. Move the damaged ones out of "
            f"{folder}.",
            file=sys.stderr,
        )
        return rows, 2
    return rows, 0


def _chosen(folder: Path, step: int | None, *, default: tuple[int, ...]) -> tuple[int, ...]:
    there = files.steps(folder)
    if not there:
        raise CheckpointError(f"No complete checkpoint in {folder}.")
    if step is None:
        return default
    if step not in there:
        raise CheckpointError(
            f"--step {step}: no complete checkpoint in {folder}, which has steps "
            f"{', '.join(map(str, there))}."
        )
    return (step,)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _command(summary: str, show: Callable[[Path, int | None], tuple[Any, int]]) -> Command:
    return Command(summary, functools.partial(execute, show), add_options, subject="workdir")


VERB = Verb(
    "checkpoint",
    summary="list, show and verify the checkpoints of a run",
    commands={
        "list": _command("print step, date and size of each checkpoint", _list),
        "show": _command("print leaves, data state and config of the newest checkpoint, or of --step", _show),
        "verify": _command("read every file and compare its hash; exits 2 if one is damaged", _verify),
    },
)
main = VERB.main
