"""A damaged checkpoint gives one clear error, which names the way back to an older one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, files, orbax_io
from jtrain.step.state import TrainState

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]


def largest(path: Path) -> Path:
    """Returns the largest file, which holds most of the arrays."""
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> None:
    """Cuts the largest file short, like an interrupted copy."""
    file = largest(path)
    os.truncate(file, file.stat().st_size // 2)


def remove(path: Path) -> None:
    """Removes the largest file, like an incomplete copy."""
    largest(path).unlink()


def flip(path: Path) -> None:
    """Flips one bit in the middle of the arrays."""
    file = largest(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_manifest(path: Path) -> None:
    """Changes a shape in the manifest."""
    file = path / files.MANIFEST
    file.write_text(file.read_text().replace("256", "257", 1))


def empty_manifest(path: Path) -> None:
    """Empties the manifest, as if it was never synced to the disk."""
    (path / files.MANIFEST).write_text("")


@pytest.fixture
def three(tmp_path: Path, make_like: MakeLike, fill: Fill) -> tuple[Checkpoints, TrainState]:
    """Checkpoints of steps 1, 2 and 3."""
    like = make_like({})
    checkpoints = Checkpoints(tmp_path, CheckpointSpec(keep_last=3))
    for step in (1, 2, 3):
        checkpoints.save(step, fill(like, step), {"next": step}, "")
    checkpoints.wait()
    return checkpoints, like


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (truncate, r"has \d+ bytes, but \d+ were saved"),
        (remove, r"is missing"),
        (flip, r"does not have the contents that were saved"),
        (flip_manifest, r"does not match its own digest"),
        (empty_manifest, r"cannot be read"),
    ],
)
def test_damage_is_named_with_the_older_one_that_is_intact(
    three: tuple[Checkpoints, TrainState],
    fill: Fill,
    bits_of: BitsOf,
    spoil: Callable[[Path], None],
    said: str,
) -> None:
    """The two newest are damaged: the error names the third, and its instructions work."""
    checkpoints, like = three
    spoil(checkpoints.folder / "3")
    spoil(checkpoints.folder / "2")
    newest = checkpoints.folder / "3"
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)checkpoints/3 is damaged:.*{said}.*step 1 is intact.*mv {newest} {newest}\.damaged",
    ):
        checkpoints.restore(3, like)
    for step in (3, 2):
        path = checkpoints.folder / str(step)
        path.rename(f"{path}.damaged")
    step = checkpoints.latest_step()
    assert step == 1
    got, data_state = checkpoints.restore(step, like)
    assert bits_of(got) == bits_of(fill(like, 1))
    assert data_state == {"next": 1}


def test_without_an_intact_one_the_error_says_so(three: tuple[Checkpoints, TrainState]) -> None:
    """The message names no older checkpoint if all are damaged."""
    checkpoints, like = three
    for step in (1, 2, 3):
        truncate(checkpoints.folder / str(step))
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints/3 is damaged.*No older checkpoint in .* is intact"
    ):
        checkpoints.restore(3, like)


@pytest.mark.parametrize("spoil", [truncate, remove])
def test_sizes_are_compared_even_without_verification(
    three: tuple[Checkpoints, TrainState], spoil: Callable[[Path], None]
) -> None:
    """verify=False skips the hashes and nothing else."""
    checkpoints, like = three
    spoil(checkpoints.folder / "3")
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/3 is damaged.*step 2 is intact"):
        checkpoints.restore(3, like, verify=False)


def test_an_error_of_the_reading_library_names_the_checkpoint_as_well(
    three: tuple[Checkpoints, TrainState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a file disappears between the check and the read."""
    checkpoints, like = three

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("DATA_LOSS: something about a kvstore")

    monkeypatch.setattr(orbax_io, "restore", fails)
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints/3 is damaged:\n  RuntimeError: DATA_LOSS.*2 is intact"
    ):
        checkpoints.restore(3, like)


def test_a_flipped_bit_passes_only_without_verification(
    three: tuple[Checkpoints, TrainState], fill: Fill, bits_of: BitsOf
) -> None:
    """This is why restore hashes by default: the array format does not detect a flipped bit."""
    checkpoints, like = three
    flip(checkpoints.folder / "3")
    got, _ = checkpoints.restore(3, like, verify=False)
    assert bits_of(got) != bits_of(fill(like, 3))
