"""Restores checkpoints: the newest whole one at the start of a run, or one that the user names.

A checkpoint is damaged if its files are not those that its manifest lists, or cannot be read although other
checkpoints can. A disk or store that does not answer is no damage: then nothing is renamed, and the run does
not start.

All processes make the same calls and get the same results: each hashes its share of the files, and they
exchange what they found.
"""

import contextlib
import dataclasses
import errno
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files, removal
from jtrain.checkpoint.files import CheckpointError, Manifest, ManifestLeaf
from jtrain.errors import first_few
from jtrain.runtime import multihost
from jtrain.runtime.stores import error_line

MAX_NAMED_LEAVES = 10

_DAMAGE = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP}
"""Errors that tell of a damaged file, folder or disk block; all others tell of a disk or store that does not
answer."""

_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory|Out of memory")


@dataclasses.dataclass(frozen=True)
class Restored:
    """Checkpoint that a run goes on from; without any, the step is 0, and the two states are None.

    messages: one line for each checkpoint that was passed over, for the user to read.
    """

    step: int = 0
    state: Any = None
    data_state: dict[str, Any] | None = None
    messages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Skipped:
    """Checkpoint that is not restored: step, reasons, and True if its files differ from what was saved (False
    where all hashes match, but the state could not be read).
    """

    step: int
    reasons: tuple[str, ...]
    damaged: bool


def restore_newest(
    folder: Path, like: Any, *, from_scratch: bool = False, order: tuple[int, ...] | None = None
) -> Restored:
    """Reads the newest whole checkpoint in `folder`, or none if there is no checkpoint at all.

    Newer ones that are damaged are renamed to `<step>.damaged`, once a whole one was read: they are never
    deleted, and never read again.

    Args:
      like: as in `restore`.
      from_scratch: if no checkpoint is whole, renames them all and reads none.
      order: as `Checkpoints.layer_order`.

    Raises:
      CheckpointError: no checkpoint is whole; the newest whole one is of another model or optimizer; or the
        disk or store cannot be read.
    """
    skipped: list[_Skipped] = []
    # First: such a folder is not among `files.steps`, but the user should hear that it is passed over.
    lost = _list_steps(folder, removal.lost_manifests)
    skipped += [_Skipped(step, (f"{files.MANIFEST} is missing",), damaged=True) for step in lost]
    for step in reversed(_list_steps(folder, files.steps)):
        manifest, damage_lines = _check_files(folder / str(step), verify=True)
        if damage_lines or manifest is None:
            skipped.append(_Skipped(step, damage_lines, damaged=True))
            continue
        _check_same(folder / str(step), manifest.leaves, like, order)
        state, read_errors = _read(folder / str(step), like, order=order)
        # Damaged since the check, or away for a moment? Damage sets it aside; a bad moment is tried again.
        if read_errors:
            _, damage_lines = _check_files(folder / str(step), verify=True)
            state, read_errors = (
                (None, damage_lines) if damage_lines else _read(folder / str(step), like, order=order)
            )
        if read_errors:
            skipped.append(_Skipped(step, read_errors, damaged=bool(damage_lines)))
            continue
        # Renamed only now, when an older one was really read: before that, nothing could replace them.
        warnings = [
            *_move_away(
                folder,
                [checkpoint for checkpoint in skipped if checkpoint.step > step],
                then=f"going on from step {step}",
            )
        ]
        warnings += [_lost_line(folder, checkpoint) for checkpoint in skipped if checkpoint.step < step]
        warnings += _missing_newest(folder, step, skipped)
        return Restored(step, state, read_data_state(folder, step), tuple(warnings))
    if not skipped:
        return Restored()
    if from_scratch:
        return Restored(messages=tuple(_move_away(folder, skipped, then="beginning at step 0")))
    raise _none_whole_error(folder, skipped)


def restore(
    folder: Path, step: int, like: Any, *, verify: bool = True, order: tuple[int, ...] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Reads the state and data state of a checkpoint; the state gets the shapes, dtypes and shardings of
    `like`.

    Any layout can restore a checkpoint of any other; each device reads and holds only its own part. A leaf
    saved in another floating-point dtype is rounded to nearest even.

    Args:
      step: one of `files.steps(folder)`.
      like: pytree of `jax.ShapeDtypeStruct` with shardings, of the same structure as the saved state.
      verify: hash every file first, divided among the processes: about 1 s per GB and thread, with 8 threads.
        Otherwise only missing files and wrong sizes are found before reading.
      order: as `Checkpoints.layer_order`.

    Raises:
      CheckpointError: there is no such checkpoint; it is of another model or optimizer (the message lists the
        leaves that differ); or it is damaged (the message says how to go back to an older one).
    """
    path, manifest = open_step(folder, step, verify=verify)
    _check_same(path, manifest.leaves, like, order)
    state, read_errors = _read(path, like, order=order)
    if read_errors:
        raise _damaged_error(folder, step, read_errors)
    return state, read_data_state(folder, step)


def restore_part(
    folder: Path,
    step: int,
    like: dict[str, Any],
    *,
    verify: bool = True,
    whole: bool = True,
    order: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Reads some branches of the state, such as `{"params": ...}`, and no others; only the leaves that `like`
    has of them unless `whole`. See `restore`.
    """
    path, manifest = open_step(folder, step, verify=verify)
    branches = tuple(f"{name}." for name in like)
    saved = {name: leaf for name, leaf in manifest.leaves.items() if f"{name}.".startswith(branches)}
    _check_same(path, saved, like, order, whole=whole)
    state, read_errors = _read(path, like, only_some=True, order=order)
    if read_errors:
        raise _damaged_error(folder, step, read_errors)
    return state


def open_step(folder: Path, step: int, *, verify: bool) -> tuple[Path, Manifest]:
    """Returns the folder and the manifest of a checkpoint after checking its files.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    complete_steps = files.steps(folder)
    if step not in complete_steps:
        steps_text = f"steps {', '.join(map(str, complete_steps))}" if complete_steps else "none"
        raise CheckpointError(f"No complete checkpoint of step {step} in {folder}, which has {steps_text}.")
    manifest, damage_lines = _check_files(folder / str(step), verify=verify)
    if damage_lines or manifest is None:
        raise _damaged_error(folder, step, damage_lines)
    return folder / str(step), manifest


def read_data_state(folder: Path, step: int) -> dict[str, Any]:
    """Returns the data state that was saved with `step`."""
    return json.loads(in_process_zero(lambda: (folder / str(step) / files.DATA).read_text(), folder))


def _list_steps(folder: Path, listing: Callable[[Path], Iterable[int]]) -> list[int]:
    """Returns the steps that `listing` finds in process 0."""
    steps_text = in_process_zero(lambda: ",".join(map(str, listing(folder))), folder)
    return [int(step) for step in steps_text.split(",") if step]


def in_process_zero(action: Callable[[], str], folder: Path) -> str:
    """Returns in every process what `action` returns in process 0.

    Raises:
      CheckpointError: `action` failed there.
    """
    text, failed = "", False
    if multihost.process_index() == 0:
        try:
            text = action()
        except Exception as error:  # clients of stores raise many types
            text, failed = error_line(error), True
    # Both exchanges in every process and in this order, also after a failure: each is a collective call.
    text = multihost.gather_texts(text)[0]
    if multihost.agree(failed)[0]:
        raise CheckpointError(
            f"{folder} cannot be used now ({text}). No checkpoint was deleted: check the disk, the network "
            "or the credentials, and run the same command again."
        )
    return text


def _check_files(path: Path, *, verify: bool) -> tuple[Manifest | None, tuple[str, ...]]:
    """Returns the manifest of a checkpoint, and one line for each damaged file that any process found.

    Raises:
      CheckpointError: some process cannot read the disk or store, or sees other files than the others do.
    """
    manifest, damage_lines, unreadable = None, [], ""
    share = (multihost.process_index(), multihost.process_count())
    try:
        manifest = files.read_manifest(path)
        # Sizes in every process, which also compares their views of the folder; hashes of one share only.
        damage_lines = files.find_damage(path, manifest, hashes=False)
        if verify and not damage_lines:
            damage_lines = files.find_damage(path, manifest, share=share)
    except files.OtherVersionError:
        raise  # in all processes
    except CheckpointError as error:
        damage_lines = [str(error)]
    except Exception as error:  # clients of stores raise many types
        if _is_damage(error):
            damage_lines = [error_line(error)]
        else:
            unreadable = error_line(error)
    # Before the damage is judged: a process that cannot reach the store says nothing about the files.
    if away := [text for text in multihost.gather_texts(unreadable) if text]:
        raise CheckpointError(
            f"{path} cannot be read now ({away[0]}). Nothing was renamed, since this says nothing about the "
            "files: check the disk, the network or the credentials, and run the same command again."
        )
    lines_of_processes = multihost.gather_texts("\n".join(damage_lines))
    # Once per line: all processes find a missing file.
    return manifest, tuple(dict.fromkeys(line for text in lines_of_processes for line in text.splitlines()))


def _is_damage(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _DAMAGE


def _read(
    path: Path, like: Any, *, only_some: bool = False, order: tuple[int, ...] | None = None
) -> tuple[Any, tuple[str, ...]]:
    """Returns the state, and no line; or None, and one line for each process that could not read its part.

    Raises:
      CheckpointError: another process has no memory left. In that process its own error is raised.
    """
    from jtrain.checkpoint import orbax_io

    state, failure, exhaustion = None, "", None
    try:
        state = orbax_io.restore(path / files.STATE, like, only_some=only_some, order=order)
    except Exception as error:  # Orbax and TensorStore raise many types
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            exhaustion = error
        else:
            failure = error_line(error)
    # Also after a failure: the gathers need all processes.
    exhausted = multihost.gather_texts("" if exhaustion is None else error_line(exhaustion))
    failures = tuple(dict.fromkeys(text for text in multihost.gather_texts(failure) if text))
    # Out of memory is not the checkpoint's fault: setting it aside would lose it.
    if exhaustion is not None:
        raise exhaustion
    for process, text in enumerate(exhausted):
        if text:
            raise CheckpointError(
                f"process {process} had no memory left when it read {path} ({text}): see its own message. "
                "Nothing was renamed."
            )
    return (None, failures) if failures else (state, ())


def _move_away(folder: Path, skipped: list[_Skipped], *, then: str) -> list[str]:
    """Renames checkpoints that are passed over; returns one line for each."""

    def move() -> str:
        lines: list[str] = []
        for checkpoint in skipped:
            name = removal.set_aside(folder, checkpoint.step)
            state_text = (
                "is damaged" if checkpoint.damaged else "cannot be read, although all its hashes match"
            )
            lines.append(
                f"WARNING: the checkpoint of step {checkpoint.step} {state_text} "
                f"({_join_some(checkpoint.reasons, '; ')}): it was set aside as {folder / name}, {then}."
            )
        return "\n".join(lines)

    return in_process_zero(move, folder).splitlines()


def _lost_line(folder: Path, checkpoint: _Skipped) -> str:
    return (
        f"WARNING: {folder / str(checkpoint.step)} holds arrays but no {files.MANIFEST}: it is no "
        "checkpoint, and not read."
    )


def _missing_newest(folder: Path, step: int, skipped: list[_Skipped]) -> list[str]:
    """Returns a warning if a newer checkpoint than any that is here was committed, with no trace of it left.

    Args:
      step: step that was restored.
      skipped: checkpoints that were not restored; each has a warning of its own.
    """
    # Process 0 alone reads the folder, and `_list_steps` gives its list to all: here a list of one step, 0 if
    # nothing was ever committed.
    [last] = _list_steps(folder, lambda folder: [files.last_commit(folder) or 0])
    if last <= step or any(checkpoint.step >= last for checkpoint in skipped):
        return []
    return [
        f"WARNING: this run committed a checkpoint of step {last}, which is no longer in {folder}: going on "
        f"from step {step}."
    ]


def _none_whole_error(folder: Path, skipped: list[_Skipped]) -> CheckpointError:
    lines = "\n".join(
        f"  step {checkpoint.step}: {_join_some(checkpoint.reasons, '; ')}"
        for checkpoint in sorted(skipped, key=lambda checkpoint: checkpoint.step)
    )
    return CheckpointError(
        f"No checkpoint in {folder} is whole:\n{lines}\nNothing was changed. Restore the files from a copy "
        "and run the same command again, or add --from-scratch to set these aside and begin at step 0."
    )


def _join_some(lines: tuple[str, ...], between: str) -> str:
    return first_few(lines, MAX_NAMED_LEAVES, between)


def _damaged_error(folder: Path, step: int, damage_lines: tuple[str, ...]) -> CheckpointError:
    """Returns the error for a damaged checkpoint; hashes older ones until it finds an intact one to name."""
    path = folder / str(step)
    # Newest first: the intact one closest to the damaged step loses the least work.
    for older in reversed([older_step for older_step in files.steps(folder) if older_step < step]):
        older_path = folder / str(older)
        with contextlib.suppress(CheckpointError):
            if not files.find_damage(older_path, files.read_manifest(older_path)):
                way_out = (
                    f"The checkpoint of step {older} is intact (all hashes match). To use it, name it with "
                    f"--step, or move the damaged one away: mv {path} {path}.damaged"
                )
                break
    else:
        way_out = (
            f"No older checkpoint in {folder} is intact: restore the files from a copy, or start a new run."
        )
    return CheckpointError(
        f"The checkpoint {path} is damaged:\n  {_join_some(damage_lines, '\n  ')}\n{way_out}"
    )


def _check_same(
    path: Path,
    saved: dict[str, ManifestLeaf],
    like: Any,
    order: tuple[int, ...] | None = None,
    *,
    whole: bool = True,
) -> None:
    from jtrain.checkpoint import array_files, layer_order

    expected_leaves = array_files.leaves(layer_order.checkpoint_shapes(like, order))
    lines = tuple(
        # Expected leaves first, in the model's order; then those of the checkpoint alone, if there may be any.
        f"{name}: {saved.get(name, 'nothing')} in the checkpoint, {expected_leaves.get(name, 'nothing')} in this run"
        for name in dict.fromkeys([*expected_leaves, *(saved if whole else ())])
        if name not in saved or name not in expected_leaves or not saved[name].fits(expected_leaves[name])
    )
    if not lines:
        return
    kinds = {"opt_state": "optimizer", "scaling": "precision.matmul_dtype"}
    differing_kinds = {kinds.get(line.partition(".")[0], "model") for line in lines}
    # Two kinds at once mean another model: its optimizer state then differs as well.
    kind = differing_kinds.pop() if len(differing_kinds) == 1 else "model"
    field = kind if "." in kind else f"{kind}.*"
    raise CheckpointError(
        f"The checkpoint {path} is of another {kind}: {len(lines)} of {len(expected_leaves)} leaves "
        f"differ.\n  {_join_some(lines, '\n  ')}\nSet {field} as in {path / files.CONFIG}, or choose another "
        "--workdir."
    )
