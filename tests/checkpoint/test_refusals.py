"""Restores and saves that are refused, and their messages."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec
from jtrain.optim import AdamW, Muon
from jtrain.step.state import TrainState
from tests.processes import program, run_together

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]


@pytest.fixture
def saved(tmp_path: Path, make_like: MakeLike, fill: Fill) -> Iterator[Checkpoints]:
    """A checkpoint of step 3."""
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(3, fill(make_like({}), 3), {}, "")
        checkpoints.wait()
        yield checkpoints


def test_another_model_is_refused_with_its_leaves(saved: Checkpoints, make_like: MakeLike) -> None:
    """The message lists ten leaves with path, saved shape and wanted shape, and the number of the others."""
    with pytest.raises(CheckpointError) as error:
        saved.restore(3, make_like({}, d_ff=192, vocab_size=512))
    text = str(error.value)
    num_leaves = len(jax.tree.leaves(make_like({})))
    assert f"checkpoints/3 is of another model: 15 of {num_leaves} leaves differ" in text
    assert "\n  params.embed_VD: float32[256,64] in the checkpoint, float32[512,64] in this run" in text
    assert (
        "\n  params.layers.mlp.gate_DF: float32[2,64,128] in the checkpoint, float32[2,64,192] in this run"
        in text
    )
    assert text.count(" in the checkpoint, ") == 10
    assert "\n  and 5 more" in text
    assert "config.txt, or choose another --workdir" in text


def test_leaves_of_one_side_only_are_named(saved: Checkpoints, make_like: MakeLike) -> None:
    """QK-norm adds scales; tied embeddings remove the unembedding."""
    like = make_like({})
    params = dict(like.params)
    params["extra"] = params.pop("unembed_DV")
    with pytest.raises(
        CheckpointError, match=r"(?s)params\.extra: nothing in the checkpoint, float32.* in this run"
    ) as error:
        saved.restore(3, TrainState(like.step, params, like.opt_state))
    assert "params.unembed_DV: float32[64,256] in the checkpoint, nothing in this run" in str(error.value)


def test_another_optimizer_is_refused(saved: Checkpoints, make_like: MakeLike) -> None:
    """The parameters match, the moments do not."""
    like = make_like({}, optimizer=Muon(peak_lr=1e-3, warmup_steps=2))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)is of another optimizer: .*opt_state\.nu.* nothing in this run.*optimizer\.\*",
    ):
        saved.restore(3, like)


def test_moments_in_another_dtype_are_no_other_optimizer(saved: Checkpoints, make_like: MakeLike) -> None:
    """A restore may change a floating-point dtype, but not turn a float into an integer."""
    like = make_like({}, optimizer=AdamW(peak_lr=1e-3, warmup_steps=2, b2=0.95, moment_dtype="bfloat16"))
    got, _ = saved.restore(3, like)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got.opt_state)} == {"bfloat16"}
    step = jax.ShapeDtypeStruct((), "float32", sharding=like.step.sharding)
    with pytest.raises(CheckpointError, match=r"step: int32\[\] in the checkpoint, float32\[\] in this run"):
        saved.restore(3, TrainState(step, like.params, like.opt_state))


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    saved: Checkpoints, make_like: MakeLike
) -> None:
    """The message says so if there is none at all."""
    with pytest.raises(CheckpointError, match=r"No complete checkpoint of step 4 in .*, which has steps 3\."):
        saved.restore(4, make_like({}))
    shutil.rmtree(saved.folder)
    with pytest.raises(CheckpointError, match=r"No complete checkpoint of step 3 in .*, which has none\."):
        saved.restore(3, make_like({}))


def test_a_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    """prepare() detects it; a file in the way replaces missing permissions, because root has all of them."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=r"checkpoints cannot be written to \(FileExistsError: .*GiB are free"
    ):
        Checkpoints(tmp_path, CheckpointSpec()).prepare()


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    """The test uses a kernel file system, where even root cannot create files."""
    with pytest.raises(
        CheckpointError, match=r"/proc/.*checkpoints cannot be written to .*No checkpoint was written"
    ):
        Checkpoints(Path("/proc/self"), CheckpointSpec()).prepare()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """Disk of 8 MiB; None if this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    size = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if mount is None or subprocess.run([mount, *size], capture_output=True, check=False).returncode:
        yield None
        return
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("full", ["disk", "quota"])
def test_a_full_disk_is_one_clear_error_and_costs_no_checkpoint(
    tmp_path: Path, small_disk: Path | None, full: str
) -> None:
    """The background write fails half-way, twice; then a smaller one works.

    If no disk can be mounted, a limit of 1 MiB per file replaces it in both cases.
    """
    on_disk = small_disk if full == "disk" else None
    limit = -1 if on_disk else 1 << 20
    [ended] = run_together([program(__file__, "save_on_a_full_disk", on_disk or tmp_path, limit)], [{}])
    assert ended.code == 0, ended.errors
    assert ended.errors == "", "no tracebacks of the writing library"
    lines = ended.output.splitlines()
    assert len(lines) == 3, ended.output
    for step, line in zip((2, 3), lines, strict=False):
        assert f"cannot take the checkpoint of step {step} (" in line
        assert ("No space left on device" if on_disk else "File too large") in line
        assert "The state has 0.02 GiB" in line
        assert "choose another --workdir" in line
        assert line.endswith(
            "Earlier checkpoints are untouched: steps 1. The same command goes on from step 1."
        )
    assert lines[2] == "['4']"
