"""Sets of weights in a folder: `latest` names a whole one, and what is not the run's stays."""

from pathlib import Path

import pytest

from jtrain.hf.weight_folder import LATEST, OWNER, write_step


def write_model(path: Path) -> None:
    path.mkdir()
    (path / "model").write_text(path.name)


def fail(path: Path) -> None:
    raise OSError("no room")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_step_is_whole_before_the_name_of_the_newest_changes(tmp_path: Path) -> None:
    """What a killed write left, and steps that the run has gone back from, are removed; `latest` always names a
    step that is there.
    """
    for step in (10, 20, 30):
        write_step(tmp_path, step, write_model, keep_last=3, workdir=tmp_path)
    (tmp_path / "step-00000040.tmp").mkdir()
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 40, fail, keep_last=3, workdir=tmp_path)
    assert (tmp_path / LATEST).read_text() == "step-00000030\n"
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 25, fail, keep_last=3, workdir=tmp_path)
    assert names(tmp_path) == [LATEST, OWNER, "step-00000010", "step-00000020"]
    assert (tmp_path / LATEST).read_text() == "step-00000020\n"
    # Fewer are kept now: the others make room first, also for a write that fails.
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 30, fail, keep_last=1, workdir=tmp_path)
    assert names(tmp_path) == [LATEST, OWNER, "step-00000020"]
    write_step(tmp_path, 25, write_model, keep_last=2, workdir=tmp_path)
    assert names(tmp_path) == [LATEST, OWNER, "step-00000020", "step-00000025"]
    assert (tmp_path / LATEST).read_text() == "step-00000025\n"
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 5, fail, keep_last=2, workdir=tmp_path)
    assert names(tmp_path) == [OWNER]


def test_what_the_run_has_not_written_stays(tmp_path: Path) -> None:
    """Names that look alike, and a link to a directory of the user."""
    others = ["step-00001000.mine", "step-5000", "step-000000001", "step-keep"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "step-keep")
    for step in (2, 4, 6):
        write_step(tmp_path, step, write_model, keep_last=1, workdir=tmp_path)
    assert names(tmp_path) == sorted([LATEST, OWNER, "step-00000001", "step-00000006", *others])
