"""At a start, the newest whole checkpoint is read, damaged ones are set aside, and lost ones are never passed
over.
"""

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, files, folders, removal
from jtrain.checkpoint.lost_history import check_history

LIKE = {
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "params": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
}


def state(step: int) -> dict[str, Any]:
    weights = np.random.default_rng(step).standard_normal((64, 64), np.float32)
    return {"step": jnp.int32(step), "params": {"w": jnp.asarray(weights)}}


def like() -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), LIKE)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workdir with checkpoints of steps 10, 20 and 30."""
    workdir = tmp_path_factory.mktemp("template")
    with Checkpoints(workdir, CheckpointSpec(keep_last=3)) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(step), {"next": step}, f"seed: int = {step}\n")
    return workdir


@pytest.fixture
def workdir(template: Path, tmp_path: Path) -> Path:
    """Copy of the template."""
    return shutil.copytree(template, tmp_path / "run")


def start(workdir: Path, *, from_scratch: bool = False) -> Any:
    return Checkpoints(workdir, CheckpointSpec()).start(like(), from_scratch=from_scratch)


def reseal(path: Path, step: int) -> None:
    """Writes a manifest for the files as they are now."""
    leaves = files.read_manifest(path).leaves
    hashes = {name: folders.hash_of(path / name) for name in folders.sizes(path) if name.startswith("state/")}
    files.seal(path, step=step, leaves=leaves, data='{"next": 30}', config="seed: int = 30\n", hashes=hashes)


def largest(path: Path) -> Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


FILES: dict[str, Callable[[Path], Path]] = {
    "arrays": largest,
    "list of leaves": lambda path: path / "state" / "_METADATA",
    "data state": lambda path: path / files.DATA,
    "config": lambda path: path / files.CONFIG,
    "manifest": lambda path: path / files.MANIFEST,
}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "cut short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "one bit flipped": flip,
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a folder instead": folder_instead,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_is_found_and_survived(workdir: Path, file: str, damage: str) -> None:
    """The two newest are damaged: both are set aside and said, and the third is read."""
    folder = workdir / "checkpoints"
    for step in (20, 30):
        DAMAGE[damage](FILES[file](folder / str(step)))
    found = start(workdir)
    assert found.step == 10
    assert found.data_state == {"next": 10}
    assert np.asarray(found.state["params"]["w"]).tobytes() == np.asarray(state(10)["params"]["w"]).tobytes()
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20.damaged", "30.damaged"]
    assert len(found.messages) == 2
    for step in (20, 30):
        [line] = (line for line in found.messages if f"the checkpoint of step {step} is damaged" in line)
        assert line.startswith("WARNING: ")
        assert f"set aside as {folder / f'{step}.damaged'}, going on from step 10" in line
    assert start(workdir).messages == (), "said once"


def test_a_damaged_one_is_kept_beside_an_earlier_one_of_its_step(workdir: Path) -> None:
    """The run may come to the same step again, and be damaged again."""
    folder = workdir / "checkpoints"
    (folder / "30.damaged").mkdir()
    FILES["arrays"](folder / "30").unlink()
    assert start(workdir).step == 20
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "30.damaged", "30.damaged-2"]
    assert removal.unread_names(folder) == ("30.damaged", "30.damaged-2")
    removal.sweep(folder)
    assert (folder / "30.damaged-2" / files.MANIFEST).exists(), "damaged ones are never deleted"


def test_a_folder_copied_to_another_number_is_named_with_both(workdir: Path) -> None:
    """It holds a whole checkpoint, but of another step: the run goes on from the true one."""
    folder = workdir / "checkpoints"
    shutil.copytree(folder / "20", folder / "1000")
    with pytest.raises(CheckpointError, match=r"1000 holds the checkpoint of step 20: .*from 20 to 1000"):
        Checkpoints(workdir, CheckpointSpec()).restore(1000, like())
    found = start(workdir)
    assert found.step == 30
    assert "checkpoints/1000 holds the checkpoint of step 20" in found.messages[0]
    assert (folder / "1000.damaged").is_dir()


def test_a_manifest_without_the_files_of_a_process_is_no_checkpoint(workdir: Path) -> None:
    """All listed files are there with their hashes, yet the bytes of the arrays are not: verify finds it."""
    path = workdir / "checkpoints" / "30"
    manifest = files.read_manifest(path)
    assert manifest.processes == 1
    [most] = (name for name in manifest.files if path / name == largest(path))
    (path / most).unlink()
    with pytest.raises(
        CheckpointError, match=r"not whole in .*w has 0 bytes, but .* All processes must write to one"
    ):
        reseal(path, 30)
    body = json.loads((path / files.MANIFEST).read_text())
    del body["files"][most], body["digest"]
    body["digest"] = files.manifest_digest(body)
    (path / files.MANIFEST).write_text(json.dumps(body))
    there = files.read_manifest(path)
    assert files.find_damage(path, there) == ["state/params.w has 0 bytes, but the array has 16384"]
    assert start(workdir).step == 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("dropped_tasks")
def test_an_unreadable_one_is_set_aside_only_if_another_can_be_read(workdir: Path) -> None:
    """Its hashes match, so the fault may be elsewhere: without another that can be read, nothing is
    renamed.
    """
    folder = workdir / "checkpoints"
    for step in (10, 20):
        shutil.rmtree(folder / str(step))
    (folder / "30" / "state" / "_METADATA").write_text("{}")
    reseal(folder / "30", 30)
    with pytest.raises(
        CheckpointError, match=r"(?s)is whole:\n  step 30: .*Nothing was changed.*--from-scratch"
    ):
        start(workdir)
    assert [path.name for path in folder.iterdir()] == ["30"]
    with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        checkpoints.save(25, state(25), {"next": 25}, "")
    found = start(workdir)
    assert found.step == 25
    assert "step 30 cannot be read, although all its hashes match" in found.messages[0]
    assert (folder / "30.damaged").is_dir()


def test_none_whole_is_refused_unless_from_scratch_is_said(workdir: Path) -> None:
    """Then all are set aside, and the history is kept in a folder of its own."""
    folder = workdir / "checkpoints"
    (workdir / "metrics.jsonl").write_text('{"step": 30}\n')
    for step in (10, 20, 30):
        FILES["arrays"](folder / str(step)).unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)No checkpoint in .* is whole:\n  step 10: .*\n  step 30: .* missing"
    ):
        start(workdir)
    assert files.steps(folder) == (10, 20, 30), "nothing was changed"
    found = start(workdir, from_scratch=True)
    assert found.state is None
    assert len(found.messages) == 3
    assert files.steps(folder) == ()
    assert (workdir / "history-1" / "metrics.jsonl").exists()
    assert not (workdir / "metrics.jsonl").exists()
    assert check_history(workdir, folder, from_scratch=False) == [], (
        "killed before its first save, it begins again"
    )


def test_a_step_without_manifest_below_the_newest_is_said(workdir: Path) -> None:
    """It is left where it is: the run does not need it."""
    folder = workdir / "checkpoints"
    (folder / "10" / files.MANIFEST).unlink()
    found = start(workdir)
    assert found.step == 30
    assert "checkpoints/10 holds arrays but no manifest.json" in found.messages[0]
    assert (folder / "10").is_dir()


def test_a_newest_one_that_is_gone_without_a_trace_is_said(workdir: Path) -> None:
    """Somebody moved it away, or restored an older copy of the folder."""
    shutil.rmtree(workdir / "checkpoints" / "30")
    assert "committed a checkpoint of step 30, which is no longer in" in start(workdir).messages[0]
    assert start(workdir).messages == (), "once"


@pytest.mark.parametrize("left", ["an empty folder", "no folder", "only damaged ones"])
def test_a_history_without_checkpoints_is_refused(workdir: Path, left: str) -> None:
    """For example an unmounted disk; a silent step 0 would write over the history."""
    folder = workdir / "checkpoints"
    shutil.rmtree(folder)
    if left != "no folder":
        folder.mkdir()
    if left == "only damaged ones":
        (folder / "30.damaged").mkdir()
    (workdir / "config.txt").write_text("seed: int = 0\n")
    message = (
        r"holds no checkpoint, although .*last_checkpoint\.json says that the one of step 30 was committed"
    )
    with pytest.raises(CheckpointError, match=message + r".*not be mounted.*--from-scratch"):
        check_history(workdir, folder, from_scratch=False)
    [line] = check_history(workdir, folder, from_scratch=True)
    assert f"the earlier history is in {workdir / 'history-1'}" in line
    assert sorted(os.listdir(workdir / "history-1")) == ["config.txt", files.LAST]
    assert check_history(workdir, folder, from_scratch=True) == [], (
        "a restart script has the option in each attempt"
    )


def test_a_run_of_another_version_is_refused_and_left_as_it_is(workdir: Path) -> None:
    """Its checkpoints are not damaged: nothing is set aside, even if step 0 is meant."""
    folder = workdir / "checkpoints"
    body = json.loads((folder / "30" / files.MANIFEST).read_text())
    del body["digest"]
    body["format"] = 1
    (folder / "30" / files.MANIFEST).write_text(json.dumps(body | {"digest": files.manifest_digest(body)}))
    before = folders.sizes(workdir)
    message = (
        r"30/manifest\.json has format 1: another version of jtrain wrote it, and this one reads format 2\."
    )
    for from_scratch in (False, True):
        with pytest.raises(CheckpointError, match=message):
            check_history(workdir, folder, from_scratch=from_scratch)
        with pytest.raises(CheckpointError, match=message):
            start(workdir, from_scratch=from_scratch)
    assert folders.sizes(workdir) == before


@pytest.fixture
def dropped_tasks() -> Iterator[None]:
    """Collects the tasks that Orbax never begins after an error, within the test that allows the warnings."""
    yield
    gc.collect()


class Trap:
    """Object whose unpickling would create a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("dropped_tasks")
def test_reading_a_checkpoint_runs_no_code(workdir: Path, tmp_path: Path) -> None:
    """Every file in turn holds a pickle, with a manifest that vouches for it: none is unpickled."""
    import pickle

    trap = tmp_path / "trapped"
    pickle.loads(pickle.dumps(Trap(trap)))
    trap.unlink()  # the guard: it works
    path = workdir / "checkpoints" / "30"
    names = sorted(name for name in files.read_manifest(path).files if name.startswith("state/"))
    for name in names:
        before = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Trap(trap)) + bytes(len(before)))
        reseal(path, 30)
        with contextlib.suppress(CheckpointError):  # Orbax does not read all of its files
            Checkpoints(workdir, CheckpointSpec()).restore(30, like())
        (path / name).write_bytes(before)
    assert not trap.exists()
