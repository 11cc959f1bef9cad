"""Checkpoints in object stores: moto's S3 and a server that speaks Google's API, both on the loopback
interface.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointSpec,
    files,
    folders,
    host_copy,
    removal,
)
from jtrain.checkpoint.local_memory import LocalMemory
from jtrain.cli import checkpoint as verb
from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import stores
from jtrain.runtime.stores import workdir_path
from jtrain.runtime.workdir_lock import check_shared
from jtrain.train.store_mirror import StoreMirror
from tests.data.sources.object_store import Store, gs_store, s3_store


def state(step: int) -> dict[str, Any]:
    weights = np.random.default_rng(step).standard_normal((64, 64), np.float32)
    return {"step": jnp.int32(step), "params": {"w": jnp.asarray(weights)}}


def like() -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state(1))


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    serve = {"gs": gs_store, "s3": s3_store}[request.param]
    with pytest.MonkeyPatch.context() as monkeypatch, serve(monkeypatch) as store:
        yield store


@pytest.fixture
def workdir(store: Store, request: pytest.FixtureRequest) -> Path:
    """Empty folder in the store."""
    return workdir_path(f"{store.url}/{request.node.originalname}")


def save(workdir: Path, *steps: int) -> None:
    with Checkpoints(workdir, CheckpointSpec(keep_last=2)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"next": step}, f"seed: int = {step}\n")


def test_a_store_holds_checkpoints_as_a_disk_does(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved, pruned, found damaged, set aside, resumed from; the verbs take the URL."""
    check_shared(workdir)
    save(workdir, 10, 20, 30)
    folder = workdir / "checkpoints"
    assert folders.names(folder) == ["20", "30"]
    found = Checkpoints(workdir, CheckpointSpec()).start(like())
    assert (found.step, found.data_state, found.messages) == (30, {"next": 30}, ())
    assert np.asarray(found.state["params"]["w"]).tobytes() == np.asarray(state(30)["params"]["w"]).tobytes()
    assert verb.main(["verify", "--workdir", str(workdir)]) == 0
    assert capsys.readouterr().out.count(": intact (") == 2
    assert verb.main(["show", "--workdir", str(workdir)]) == 0
    assert "seed: int = 30" in capsys.readouterr().out

    arrays = max(folders.sizes(folder / "30").items(), key=lambda item: item[1])[0]
    flipped = bytearray((folder / "30" / arrays).read_bytes())
    flipped[100] ^= 1
    (folder / "30" / arrays).write_bytes(bytes(flipped))
    assert verb.main(["verify", "--workdir", str(workdir)]) == 2
    found = Checkpoints(workdir, CheckpointSpec()).start(like())
    assert found.step == 20
    assert f"set aside as {folder / '30.damaged'}, going on from step 20" in found.messages[0]
    assert folders.names(folder) == ["20", "30.damaged"]
    capsys.readouterr()
    assert verb.main(["list", "--workdir", str(workdir)]) == 0
    assert "found damaged at a start, and set aside" in capsys.readouterr().out
    save(workdir, 30)
    assert Checkpoints(workdir, CheckpointSpec()).start(like()).step == 30


@pytest.mark.slow
def test_the_remains_of_a_killed_save_are_no_checkpoint_and_a_lost_manifest_is_said(workdir: Path) -> None:
    """Both are folders without a manifest; the note of the last commit tells them apart."""
    save(workdir, 10, 20)
    folder = workdir / "checkpoints"
    for name in ("30/state/params.w/c.0.0", "30/state/step/c"):
        (folder / name).write_text("half")
    found = Checkpoints(workdir, CheckpointSpec()).start(like())
    assert (found.step, found.messages) == (20, ())
    save(workdir, 30)
    assert Checkpoints(workdir, CheckpointSpec()).start(like()).step == 30
    (folder / "30" / files.MANIFEST).unlink()
    found = Checkpoints(workdir, CheckpointSpec()).start(like())
    assert found.step == 20
    assert "step 30 is damaged (manifest.json is missing)" in found.messages[0]


def test_the_remains_of_a_killed_deletion_go_at_the_next_start(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left when the manifest is gone, the mark that says why is left too."""
    save(workdir, 1, 2)
    folder = workdir / "checkpoints"
    fs = folders.store_of(folder)

    rm_file = fs.rm_file

    def rm_two(path: str) -> None:
        """Removes the manifest and the mark; then the store no longer answers."""
        if not path.endswith((files.MANIFEST, removal.DELETED)):
            raise ConnectionError("killed")
        rm_file(path)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "rm_file", rm_two)
        with pytest.raises(ConnectionError):
            removal.delete(folder, 1)
    assert not folders.has_file(folder / "1", files.MANIFEST)
    assert removal.lost_manifests(folder) == ()
    removal.sweep(folder)
    assert folders.sizes(folder / "1") == {}


def test_small_files_are_fetched_and_copied_when_they_change(workdir: Path, tmp_path: Path) -> None:
    """What is removed on the disk is removed in the store; checkpoints and others' files are left alone."""
    (workdir / "metrics.jsonl").write_text("1\n")
    (workdir / "checkpoints" / "1" / "data.json").write_text("{}")
    mirror = StoreMirror(workdir, tmp_path / "local")
    mirror.fetch()
    assert [path.name for path in mirror.local.iterdir()] == ["metrics.jsonl"]
    with mirror:
        (mirror.local / "metrics.jsonl").write_text("1\n2\n")
        (mirror.local / "profile").mkdir()
        (mirror.local / "profile" / "facts.json").write_text("{}")
    assert (workdir / "metrics.jsonl").read_text() == "1\n2\n"
    assert (workdir / "profile" / "facts.json").read_text() == "{}"
    (mirror.local / "metrics.jsonl").unlink()
    mirror.copy()
    assert sorted(folders.sizes(workdir)) == ["checkpoints/1/data.json", "profile/facts.json"]


def test_a_store_that_refuses_is_no_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit 2 with what to do; nothing is renamed, and no run begins at step 0."""
    with gs_store(monkeypatch) as store:
        workdir = workdir_path(f"{store.url}/run")
        save(workdir, 10, 20)
        before = dict(store.files)
        store.refuse = 403
        with pytest.raises(
            CheckpointError, match=r"cannot be used now .*No checkpoint was deleted.*credentials"
        ):
            Checkpoints(workdir, CheckpointSpec()).start(like())
        with pytest.raises(
            UserError, match=r"--workdir gs://corpus/run cannot be written to .*403|Forbidden"
        ):
            check_shared(workdir)
        with pytest.raises(UserError, match=r"--workdir gs://corpus/run cannot be used .*credentials"):
            StoreMirror(workdir, tmp_path / "local").fetch()
        assert verb.main(["list", "--workdir", str(workdir)]) == 2
        store.refuse = None
        assert store.files == before
        assert Checkpoints(workdir, CheckpointSpec()).start(like()).step == 20


def test_a_store_that_never_answers_is_a_failed_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, counted and tried again; the last of `max_failures` ends the run; what was saved before is
    there.
    """
    with gs_store(monkeypatch) as store:
        workdir: Any = workdir_path(f"{store.url}/silent")
        client = workdir._backend.fs(workdir)
        assert client.requests_timeout > 0, "or it would wait for ever"
        said: list[str] = []
        checkpoints = Checkpoints(workdir, CheckpointSpec(every_steps=10, max_failures=2))
        checkpoints.say = said.append
        checkpoints.save(10, state(10), {}, "")
        checkpoints.wait_for_save()
        store.answering.clear()
        with monkeypatch.context() as impatient:  # only while it is silent: a busy machine answers late
            impatient.setattr(client, "requests_timeout", 0.2)
            impatient.setattr(stores, "ANSWER_S", 0.2)
            checkpoints.save(20, state(20), {}, "")
            checkpoints.wait_for_save()
            [line] = said
            assert (
                "cannot take the checkpoint of step 20 (TimeoutError: gs://corpus did not take silent/"
                in line
            )
            assert "within 0.2 s)" in line
            assert (
                "untouched, but cannot be listed now. Training goes on, and the next try is after step 21"
                in line
            )
            assert "this was failure 1, and checkpoint.max_failures=2 in a row end the run" in line
            checkpoints.save(21, state(21), {}, "")
            with pytest.raises(
                CheckpointError, match=r"step 21 .*max_failures=2.*goes on from its newest checkpoint"
            ):
                checkpoints.save(22, state(22), {}, "")
        store.answering.set()
        checkpoints.save(40, state(40), {}, "")
        checkpoints.close()
        assert checkpoints.steps() == (10, 40)


def test_training_does_not_wait_for_a_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns while the store has not taken anything yet."""
    monkeypatch.setattr(host_copy, "SMALL_BYTES", -1)  # as if the state were large
    with gs_store(monkeypatch) as store:
        workdir: Any = workdir_path(f"{store.url}/slow")
        monkeypatch.setattr(workdir._backend.fs(workdir), "requests_timeout", 0.2)
        monkeypatch.setattr(stores, "ANSWER_S", 120.0)
        checkpoints = Checkpoints(workdir, CheckpointSpec(every_steps=10))
        checkpoints.prepare()
        store.answering.clear()
        checkpoints.save(10, state(10), {}, "")
        assert checkpoints.task is not None
        assert not checkpoints.task.ended
        store.answering.set()
        checkpoints.close()
        assert checkpoints.steps() == (10,)


def test_a_bucket_that_is_not_there_is_refused_at_the_start(store: Store) -> None:
    """Before anything is computed."""
    scheme = store.url.partition("://")[0]
    with pytest.raises(UserError, match=r"--workdir .*missing/run cannot be written to .*Create the bucket"):
        check_shared(workdir_path(f"{scheme}://missing/run"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gss://bucket/run", r"Did you mean gs\? A run can live .* gs:// and s3://, but not behind gss://"),
        ("ftp://host/run", r"gs:// and s3://, but not behind ftp://"),
        ("gs:/bucket/run", r"Write gs://bucket/run"),
        ("s3://", r"names no bucket .*Write s3://bucket/run"),
    ],
)
def test_other_urls_are_refused(text: str, message: str) -> None:
    """None of them becomes a folder of that name."""
    with pytest.raises(UserError, match=message):
        workdir_path(text)
    assert workdir_path("runs/tiny") == Path("runs/tiny")


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("gs://b/r", "gcsfs", "gs"), ("s3://b/r", "s3fs", "s3")]
)
def test_a_client_that_is_not_installed_is_named(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the extra that installs it."""
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"of {extra}:// is not installed .*pip install 'jtrain\[{extra}\]'"):
        workdir_path(url)


def test_the_identity_of_local_memory_is_in_the_store(workdir: Path, tmp_path: Path) -> None:
    """From the start, so that a run goes on from there on any machine; a hardware fault removes it."""
    run = (workdir, str(tmp_path), like(), "")
    identity = workdir / "local_memory.id"
    with LocalMemory(*run, newest_checkpoint=lambda: 0, say=print) as local:
        assert len(identity.read_text()) == 16
        local.save(10, state(10), {"next": 10})
    with StoreMirror(workdir, tmp_path / "cache") as mirror:
        mirror.fetch()
    assert identity.exists()
    assert not (tmp_path / "cache" / identity.name).exists()
    local = LocalMemory(*run, newest_checkpoint=lambda: 0, say=print)
    restored = local.start(checkpoint=0)
    assert restored is not None
    assert restored[0] == 10
    local.__exit__(HardwareFault, HardwareFault("a device"), None)
    assert not identity.exists()
