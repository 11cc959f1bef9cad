"""Commit of checkpoints, and retention."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, files, removal
from jtrain.step.state import TrainState

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]


def test_the_next_step_may_donate_the_state_while_it_is_written(
    tmp_path: Path, make_like: MakeLike, fill: Fill, bits_of: BitsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save() returns before the commit, and the committed state is the state at the call."""
    commit = threading.Event()
    seal = files.seal

    def late(path: Path, **kw: Any) -> None:
        assert commit.wait(60)
        seal(path, **kw)

    monkeypatch.setattr(files, "seal", late)
    like = make_like({"data": 8}, zero_stage=3)
    state = fill(like, 1)
    want = bits_of(state)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        state = jax.block_until_ready(spoil(state))
        assert checkpoints.latest_step() is None, "not committed yet"
        commit.set()
        checkpoints.wait()
        assert checkpoints.latest_step() == 1
        got, _ = checkpoints.restore(1, like)
        assert bits_of(got) == want
        assert bits_of(state) != want, "the donated state must have changed, or this proves nothing"


def test_a_saved_config_is_for_the_owner_alone(tmp_path: Path, make_like: MakeLike, fill: Fill) -> None:
    """As the workdir's: it may hold a secret that nothing marks as one."""
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, fill(make_like({}), 1), {}, "seed: int = 0\n")
        checkpoints.wait()
        assert checkpoints.config_text(1) == "seed: int = 0\n"
    assert (tmp_path / "checkpoints" / "1" / files.CONFIG).stat().st_mode & 0o777 == 0o600


@pytest.mark.smoke
def test_the_newest_and_the_multiples_are_kept(tmp_path: Path, make_like: MakeLike, fill: Fill) -> None:
    """keep_last counts only complete checkpoints; keep_every_steps keeps its multiples for ever."""
    state = fill(make_like({}), 1)
    folder = tmp_path / "checkpoints"
    # An interrupted copy by a user: it has a step's name, but is no checkpoint.
    (folder / "25").mkdir(parents=True)
    with Checkpoints(tmp_path, CheckpointSpec(keep_last=2, keep_every_steps=30)) as checkpoints:
        seen = []
        for step in (10, 20, 30, 40, 50, 60, 70):
            checkpoints.save(step, state, {}, "")
            checkpoints.wait()
            seen.append(checkpoints.steps())
    assert seen[:3] == [(10,), (10, 20), (20, 30)]
    assert seen[-1] == (30, 60, 70)
    assert sorted(path.name for path in folder.iterdir()) == ["25", "30", "60", "70"]


def test_a_step_that_is_already_there_stays_as_it_is(tmp_path: Path, make_like: MakeLike, fill: Fill) -> None:
    """After a crash between a commit and the next step, the rerun saves the same step again."""
    like = make_like({})
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        assert checkpoints.save(5, fill(like, 5), {"next": 5}, "a") is True
        checkpoints.wait()
        before = (checkpoints.folder / "5" / files.MANIFEST).read_bytes()
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        assert checkpoints.save(5, fill(like, 6), {"next": 6}, "b") is False
        checkpoints.wait()
        assert (checkpoints.folder / "5" / files.MANIFEST).read_bytes() == before
        assert checkpoints.data_state(5) == {"next": 5}
        assert checkpoints.config_text(5) == "a"
        # A directory without a manifest is no checkpoint, so its name is free.
        (checkpoints.folder / "6").mkdir()
        (checkpoints.folder / "6" / "half").write_text("copied")
        assert checkpoints.save(6, fill(like, 6), {}, "") is True
        checkpoints.wait()
        assert checkpoints.steps() == (5, 6)
        assert not (checkpoints.folder / "6" / "half").exists()


def test_a_save_that_fails_leaves_the_earlier_ones_and_no_remains(
    tmp_path: Path, make_like: MakeLike, fill: Fill, bits_of: BitsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keep_last=1, the only good checkpoint survives, the error says so, and the next save works."""
    like = make_like({})
    seal = files.seal

    def fails(path: Path, **kw: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with Checkpoints(tmp_path, CheckpointSpec(keep_last=1)) as checkpoints:
        checkpoints.save(1, fill(like, 1), {}, "")
        checkpoints.wait()
        monkeypatch.setattr(files, "seal", fails)
        checkpoints.save(2, fill(like, 2), {}, "")
        with pytest.raises(
            CheckpointError, match=r"checkpoint of step 2 .*No space left.*GiB are free.*untouched: steps 1\."
        ):
            checkpoints.wait()
        assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]
        checkpoints.check(2)  # each error is raised once
        monkeypatch.setattr(files, "seal", seal)
        got, _ = checkpoints.restore(1, like)
        assert bits_of(got) == bits_of(fill(like, 1))
        checkpoints.save(3, fill(like, 3), {}, "")
        checkpoints.wait()
        assert checkpoints.steps() == (3,)


def test_remains_of_killed_saves_are_swept_and_never_counted(
    tmp_path: Path, make_like: MakeLike, fill: Fill
) -> None:
    """Orbax's partial directories and half-deleted checkpoints are removed; everything else in the folder
    stays.
    """
    folder = tmp_path / "checkpoints"
    for name in ("9.orbax-checkpoint-tmp", "8.deleted", "notes", "007"):
        (folder / name).mkdir(parents=True)
        (folder / name / files.MANIFEST).write_text("{}")
    checkpoints = Checkpoints(tmp_path, CheckpointSpec(keep_last=1))
    assert checkpoints.latest_step() is None
    assert removal.unread_names(folder) == ("007", "8.deleted", "9.orbax-checkpoint-tmp")
    checkpoints.prepare()
    assert sorted(path.name for path in folder.iterdir()) == ["007", "notes"]
    checkpoints.close()


def test_data_state_that_is_no_json_is_refused_before_anything_is_written(
    tmp_path: Path, make_like: MakeLike, fill: Fill
) -> None:
    """It would otherwise fail in the background, after the arrays."""
    checkpoints = Checkpoints(tmp_path, CheckpointSpec())
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, fill(make_like({}), 1), {"cursor": object()}, "")
    assert not checkpoints.folder.exists()


@pytest.mark.smoke
def test_the_manifest_lists_every_leaf_and_every_file(
    tmp_path: Path, make_like: MakeLike, fill: Fill
) -> None:
    """Every file that a restore reads is hashed."""
    like = make_like({})
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, fill(like, 1), {}, "text")
        checkpoints.wait()
    path = checkpoints.folder / "1"
    manifest = files.read_manifest(path)
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert there - set(manifest.files) == {"manifest.json"}
    assert set(manifest.files) < there
    assert len(manifest.leaves) == len(jax.tree.leaves(like))
    assert str(manifest.leaves["params.layers.attention.q_DNH"]) == "float32[2,64,4,16]"
    assert manifest.state_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    assert files.find_damage(path, manifest) == []
    assert json.loads((path / files.MANIFEST).read_text())["step"] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every_steps": 0}, r"checkpoint\.every_steps=0 must be at least 1 or None to save only at the end"),
        (
            {"keep_last": 0},
            r"checkpoint\.keep_last=0 must be at least 1: the newest checkpoint is never deleted",
        ),
        (
            {"max_failures": 0},
            r"checkpoint\.max_failures=0 must be at least 1: 1 ends the run at the first save",
        ),
        ({"keep_every_steps": -5}, r"checkpoint\.keep_every_steps=-5 must be at least 1 or None"),
    ],
)
def test_a_spec_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    """Each message names its field and the way out."""
    with pytest.raises(ValueError, match=message):
        CheckpointSpec(**fields)


@pytest.mark.parametrize("saves", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_saves_keep_no_host_memory(tmp_path: Path, saves: int) -> None:
    """A state of 64 MiB leaves less than 0.3 of itself behind, after one save as after the last."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5, tree), donate_argnums=0)
    state = {"params": {f"w{i}": jax.numpy.full((2048, 1024), i, "float32") for i in range(8)}}
    state = jax.block_until_ready(step(state))
    rss_mib: list[float] = []
    with Checkpoints(tmp_path, CheckpointSpec(keep_last=1)) as checkpoints:
        checkpoints.save(1, state, {}, "")  # imports, threads and their memory
        checkpoints.wait()
        for saved in range(2, saves + 2):
            checkpoints.save(saved, state, {}, "")
            state = jax.block_until_ready(step(state))
            checkpoints.wait()
            rss_mib.append(psutil.Process().memory_info().rss / 2**20)
        assert checkpoints.steps() == (saves + 1,)
    assert max(rss_mib) - rss_mib[0] < 0.3 * 64, rss_mib


def test_a_save_does_not_make_the_next_step_copy_the_state(tmp_path: Path) -> None:
    """XLA copies a donated array that someone else still reads; after a save, the step reuses the same
    memory.
    """
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = jax.block_until_ready(step({"w": jax.numpy.zeros((512, 1024))}))
    address = state["w"].unsafe_buffer_pointer()
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        state = jax.block_until_ready(step(state))
        assert state["w"].unsafe_buffer_pointer() == address
        kept = jax.numpy.asarray(state["w"]).addressable_data(0).__array__()
        state = jax.block_until_ready(step(state))
        assert state["w"].unsafe_buffer_pointer() != address, (
            "a reader must cause a copy, or this proves nothing"
        )
        assert kept[0, 0] == 2


@pytest.mark.smoke
def test_orbax_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    """Without jtrain and without being told shapes: any dtype, scalars, and shards of several chunks."""
    import orbax.checkpoint as ocp

    state = {
        "step": jax.numpy.int32(7),
        "params": {
            "bf16": jax.numpy.arange(6, dtype="bfloat16").reshape(2, 3),
            "fp8": jax.numpy.ones((4,), "float8_e4m3fn"),
            "long": jax.numpy.arange(3 << 20, dtype="float32").reshape(3, -1),
        },
    }
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        checkpoints.wait()
    with ocp.StandardCheckpointer() as reader:
        got = reader.restore(checkpoints.folder / "1" / files.STATE)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    for here, there in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert here.dtype == there.dtype
        assert np.asarray(here).tobytes() == np.asarray(there).tobytes()
