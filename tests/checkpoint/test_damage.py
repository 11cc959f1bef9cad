"""A damaged checkpoint is one clear error, and the way back to an older one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, arrays, files
from jtrain.step import TrainState

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]


def largest(path: Path) -> Path:
    """The file that holds most of the arrays."""
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> None:
    """As a copy that was broken off."""
    file = largest(path)
    os.truncate(file, file.stat().st_size // 2)


def remove(path: Path) -> None:
    """As a copy that left one out."""
    largest(path).unlink()


def flip(path: Path) -> None:
    """One bit, in the middle of the arrays."""
    file = largest(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_manifest(path: Path) -> None:
    """A shape in the manifest itself."""
    file = path / files.MANIFEST
    file.write_text(file.read_text().replace("256", "257", 1))


def empty_manifest(path: Path) -> None:
    """A manifest that was never written out."""
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
        (truncate, r"has \d+ bytes, \d+ were saved"),
        (remove, r"is missing"),
        (flip, r"has other contents than were saved"),
        (flip_manifest, r"does not match its own digest"),
        (empty_manifest, r"cannot be read"),
    ],
)
def test_damage_is_named_with_the_older_one_that_is_whole(
    three: tuple[Checkpoints, TrainState],
    fill: Fill,
    bits_of: BitsOf,
    spoil: Callable[[Path], None],
    said: str,
) -> None:
    """The newest is damaged, the one before too: the error leads to the third, and following it works."""
    checkpoints, like = three
    spoil(checkpoints.folder / "3")
    spoil(checkpoints.folder / "2")
    newest = checkpoints.folder / "3"
    with pytest.raises(
        CheckpointError, match=rf"(?s)checkpoints/3 is damaged:.*{said}.*step 1 is whole.*mv {newest} {newest}\.damaged"
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


def test_without_a_whole_one_the_error_says_so(three: tuple[Checkpoints, TrainState]) -> None:
    """No false hope."""
    checkpoints, like = three
    for step in (1, 2, 3):
        truncate(checkpoints.folder / str(step))
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/3 is damaged.*No older checkpoint in .* is whole"):
        checkpoints.restore(3, like)


@pytest.mark.parametrize("spoil", [truncate, remove])
def test_sizes_are_compared_even_without_verification(
    three: tuple[Checkpoints, TrainState], spoil: Callable[[Path], None]
) -> None:
    """verify=False leaves out the hashes, nothing else."""
    checkpoints, like = three
    spoil(checkpoints.folder / "3")
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/3 is damaged.*step 2 is whole"):
        checkpoints.restore(3, like, verify=False)


def test_an_error_of_the_reading_library_names_the_checkpoint_as_well(
    three: tuple[Checkpoints, TrainState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file goes away between the check and the read."""
    checkpoints, like = three

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("DATA_LOSS: something about a kvstore")

    monkeypatch.setattr(arrays, "restore", fails)
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/3 is damaged:\n  RuntimeError: DATA_LOSS.*2 is whole"):
        checkpoints.restore(3, like)


def test_a_flipped_bit_passes_only_without_verification(
    three: tuple[Checkpoints, TrainState], fill: Fill, bits_of: BitsOf
) -> None:
    """Why restore hashes by default: the array format does not notice."""
    checkpoints, like = three
    flip(checkpoints.folder / "3")
    got, _ = checkpoints.restore(3, like, verify=False)
    assert bits_of(got) != bits_of(fill(like, 3))
