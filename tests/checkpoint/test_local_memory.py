"""State kept in local memory: read back bit for bit, never half, and never another run's."""

import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.checkpoint import files
from jtrain.checkpoint.local_memory import LocalMemory
from jtrain.checkpoint.slots import SLOTS
from jtrain.errors import UserError
from tests.processes import program, run_together


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[..., LocalMemory]]:
    """Returns a function that opens the local memory of the run in `tmp_path`; all are closed at the end."""
    opened = []

    def make(
        like: Any,
        *,
        config: str = "",
        said: list[str] | None = None,
        checkpoint: int = 0,
        workdir: str = "run",
    ) -> LocalMemory:
        say = print if said is None else said.append
        one = LocalMemory(
            tmp_path / workdir, str(tmp_path), like, config, newest_checkpoint=lambda: checkpoint, say=say
        )
        opened.append(one)
        return one

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 2, "tensor": 2}], ids=str)
def test_a_state_comes_back_bit_for_bit(
    memory: Callable[..., LocalMemory],
    axes: dict[str, int],
    make_like: Callable[..., Any],
    fill: Callable[[Any, int], Any],
    bits_of: Callable[[Any], list[bytes]],
    tmp_path: Path,
) -> None:
    """The newest of three generations, with its shardings and data state; parts that devices share are kept
    once.
    """
    like = make_like(axes, zero_stage=3)
    first = memory(like)
    assert first.start(checkpoint=0) is None
    for step in (10, 20, 30):
        first.save(step, fill(like, step), {"next": step})
    first.close()

    second = memory(like)
    found = second.start(checkpoint=20)
    assert found is not None
    step, state, data_state = found
    assert (step, data_state) == (30, {"next": 30})
    assert bits_of(state) == bits_of(fill(like, 30))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))
    chunks = list((second.own_folder / "a" / "state").glob("*/c*"))
    assert sum(file.stat().st_size for file in chunks) == whole
    assert stat.S_IMODE(second.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in chunks} == {0o600}
    second.save(40, fill(like, 40), {"next": 40})
    second.remove()
    assert not second.folder.exists()


def small(rows: int = 8) -> dict[str, Any]:
    """Returns shapes of a small state on one device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"w": jax.ShapeDtypeStruct((rows, 16), np.float32, sharding=device)}


def filled(like: dict[str, Any], value: float) -> dict[str, Any]:
    return jax.tree.map(lambda x: jax.device_put(np.full(x.shape, value, x.dtype), x.sharding), like)


def kept(memory: Callable[..., LocalMemory], *steps: int, **fields: Any) -> LocalMemory:
    """Returns closed local memory in which these steps were kept."""
    one = memory(small(), **fields)
    for step in steps:
        one.save(step, filled(small(), step), {"next": step})
    one.close()
    return one


@pytest.mark.parametrize(
    ("fields", "checkpoint", "why"),
    [
        ({"config": "model.num_layers: int = 3"}, 0, "the config has changed"),
        ({"workdir": "other"}, 0, ""),
        ({}, 30, ""),
        ({}, 4, "it is from after checkpoint 5, which is no longer there"),
    ],
    ids=["config", "workdir", "older than the checkpoint", "checkpoints were moved away"],
)
def test_another_runs_state_is_left_alone(
    memory: Callable[..., LocalMemory], fields: dict[str, Any], checkpoint: int, why: str
) -> None:
    """What is not of this run, or of a time that it has gone back from, is not used; each case says why
    once.
    """
    kept(memory, 10, 20, checkpoint=5)
    said: list[str] = []
    assert memory(small(), said=said, **fields).start(checkpoint=checkpoint) is None
    assert [line for line in said if "20" in line] == (
        [f"The state of step 20 in local memory is not used: {why}."] if why else []
    )
    if not fields:  # what was not used is gone: the run takes those steps again, perhaps with another config
        assert memory(small()).start(checkpoint=5) is None


def test_a_new_run_in_the_same_folder_has_nothing(memory: Callable[..., LocalMemory], tmp_path: Path) -> None:
    kept(memory, 10)
    (tmp_path / "run" / "local_memory.id").unlink()
    said: list[str] = []
    assert memory(small(), said=said).start(checkpoint=0) is None
    assert said[0] == "The state of step 10 in local memory is not used: it is of another run."


def test_what_only_watches_a_run_may_change(memory: Callable[..., LocalMemory]) -> None:
    kept(memory, 10, config="seed: int = 0\ncheckpoint.keep_last: int = 2")
    found = memory(small(), config="seed: int = 0\ncheckpoint.keep_last: int = 3\n# a remark").start(
        checkpoint=0
    )
    assert found is not None
    assert found[0] == 10


def test_a_damaged_generation_gives_way_to_the_older_one(memory: Callable[..., LocalMemory]) -> None:
    one = kept(memory, 10, 20)
    newest = max((one.own_folder / name for name in SLOTS), key=lambda slot: files.read_manifest(slot).step)
    file = newest / "state" / "w" / "c.0.0"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    said: list[str] = []
    found = memory(small(), said=said).start(checkpoint=0)
    assert found is not None
    assert found[0] == 10
    np.testing.assert_array_equal(found[1]["w"], np.full((8, 16), 10))
    assert said == [
        "The state of step 20 in local memory cannot be used: CheckpointError: state/w/c.0.0 does not have "
        "the contents that were saved."
    ]


def test_going_back_forgets_later_steps(memory: Callable[..., LocalMemory]) -> None:
    one = memory(small())
    for step in (10, 20):
        one.save(step, filled(small(), step), {})
    one.forget_after(15)
    one.save(18, filled(small(), 18), {})
    one.close()
    assert memory(small()).newest(checkpoint=0) == [18, 10]


def test_too_little_room_is_refused_with_numbers(memory: Callable[..., LocalMemory], tmp_path: Path) -> None:
    like = small(rows=1 << 40)
    with pytest.raises(
        UserError,
        match=r"131072\.00 GiB in .*, which has \d+\.\d\d GiB free.*local_dir.*local_every_steps=None",
    ):
        memory(like)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"checkpoint\.local_dir: .*file/jtrain-run-.* cannot be written to \(Not a dir"
    ):
        LocalMemory(
            tmp_path / "run", str(tmp_path / "file"), small(), "", newest_checkpoint=lambda: 0, say=print
        )


def test_a_failure_ends_the_saves_and_not_the_run(
    memory: Callable[..., LocalMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that vanishes: one line, and later saves do nothing."""
    said: list[str] = []
    one = memory(small(), said=said)
    one.save(10, filled(small(), 10), {})
    while one.newest(checkpoint=0) != [10]:
        time.sleep(0.01)
    shutil.rmtree(one.own_folder)
    for step in (20, 30, 40):
        one.save(step, filled(small(), step), {})
    assert len(said) == 1
    assert said[0].startswith("No more states are kept in local memory in this attempt: FileNotFoundError")


def test_a_store_that_does_not_answer_does_not_end_the_saves(tmp_path: Path) -> None:
    """The newest checkpoint that the store has named last stands in the manifest, and that is said once."""
    answers = iter([5])
    said: list[str] = []
    run = (tmp_path / "run", str(tmp_path), small(), "")
    with LocalMemory(*run, newest_checkpoint=lambda: next(answers), say=said.append) as local:
        for step in (10, 20, 30):
            local.save(step, filled(small(), step), {})
    assert len(said) == 1
    assert said[0].startswith(
        "WARNING: the newest checkpoint is not told now (StopIteration): the state of step 20 in local "
        "memory names that of step 5, as the last answer."
    )
    with LocalMemory(*run, newest_checkpoint=lambda: 0, say=said.append) as local:
        assert local.start(checkpoint=4) is None
    assert "it is from after checkpoint 5, which is no longer there" in said[1]


@pytest.mark.parametrize(
    ("instant", "newest"),
    [("mid-write", 2), ("before-hash", 2), ("before-commit", 2), ("after-commit", 3)],
)
def test_a_kill_at_any_instant_leaves_a_whole_generation(
    memory: Callable[..., LocalMemory], instant: str, newest: int, tmp_path: Path
) -> None:
    """A process that is killed in its third save: the second state is there, or the third one whole; it goes
    on.
    """
    command = program(__file__, "be_killed_keeping", instant, tmp_path / "run", tmp_path)
    [died] = run_together([command], [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}])
    assert died.code == -signal.SIGKILL, died.errors
    like = {
        "w": jax.ShapeDtypeStruct(
            (1000, 100), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    }
    found = memory(like).start(checkpoint=0)
    assert found is not None
    step, state, data_state = found
    assert (step, data_state) == (newest, {"next": newest})
    np.testing.assert_array_equal(state["w"], np.full((1000, 100), newest))
