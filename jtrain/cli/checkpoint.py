"""Lists, shows and verifies the checkpoints of a run.

python -m jtrain.checkpoint list WORKDIR      step, date and size of each
python -m jtrain.checkpoint show WORKDIR      leaves, data state and config of the newest one, or of --step
python -m jtrain.checkpoint verify WORKDIR    reads every file and compares its hash; exits 2 if one is damaged

WORKDIR is a folder, gs://bucket/run or s3://bucket/run.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files
from jtrain.checkpoint.files import CheckpointError
from jtrain.runtime import cli
from jtrain.runtime.store_paths import in_store, store_errors, workdir_path


def run(argv: Sequence[str] | None) -> int:
    """Parses `argv` and runs the verb; imports neither jax nor orbax."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("list", "show", "verify"))
    parser.add_argument("workdir", metavar="WORKDIR", help="the run's directory or URL, which holds checkpoints/")
    parser.add_argument("--step", type=int, help="one checkpoint (default: the newest for show, else all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE as JSON")
    args = parser.parse_args(argv)
    folder = workdir_path(args.workdir) / "checkpoints"
    verbs = {"list": _list, "show": _show, "verify": _verify}
    with store_errors(args.workdir) if in_store(folder) else contextlib.nullcontext():
        if not in_store(folder) and not folder.is_dir():
            raise CheckpointError(f"There is no directory {folder}. Give the --workdir of a run.")
        found, code = verbs[args.verb](folder, args.step)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
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
        killed, away = "left by an interrupted save, deletion or copy", "found damaged at a start, and set aside"
        rows += [
            _row(name, None, None, None, away if files.is_set_aside(name) else killed) for name in files.partial(folder)
        ]
    print(f"{'step':>10}  {'saved at (UTC)':<19}  {'size':>13}  complete")
    for row in rows:
        size = "-" if row["bytes"] is None else _size(row["bytes"])
        why = "yes" if row["complete"] else f"no: {row['why']}"
        print(f"{row['name']:>10}  {(row['saved_at'] or '-')[:19]:<19}  {size:>13}  {why}")
    return rows, 0


def _row(name: str, step: int | None, saved_at: str | None, size: int | None, why: str | None) -> dict[str, Any]:
    return {"name": name, "step": step, "saved_at": saved_at, "bytes": size, "complete": why is None, "why": why}


def _show(folder: Path, step: int | None) -> tuple[Any, int]:
    (found,) = _chosen(folder, step, default=files.steps(folder)[-1:])
    path = folder / str(found)
    manifest = files.read_manifest(path)
    data = json.loads((path / files.DATA).read_text())
    config = (path / files.CONFIG).read_text()
    width = max(map(len, manifest.leaves), default=0)
    for name, leaf in manifest.leaves.items():
        print(f"{name:<{width}}  {list(leaf.shape)!s:<24}  {leaf.dtype:<9}  {_size(leaf.bytes):>11}")
    print(f"\n{len(manifest.leaves)} leaves, {_size(manifest.state_bytes)}; step {found}, saved {manifest.saved_at}")
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
    for lost in files.lost_manifests(folder) if step is None else ():
        rows.append({"step": lost, "damage": [f"{files.MANIFEST} is missing"]})
        print(f"step {lost}: DAMAGED ({files.MANIFEST} is missing)")
    if any(row["damage"] for row in rows):
        whole = [row["step"] for row in rows if not row["damage"]]
        print(
            f"error: damaged checkpoints. Intact steps: {whole or 'none'}. Move the damaged ones out of {folder}.",
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
            f"--step {step}: no complete checkpoint in {folder}, which has steps {', '.join(map(str, there))}."
        )
    return (step,)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.run(lambda: run(argv))
