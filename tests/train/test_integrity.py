"""A run whose memory or arithmetic is wrong ends with exit code 76, names the device and saves nothing of
it.
"""

import contextlib
import itertools
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.config import tree
from jtrain.config.integrity_spec import IntegritySpec
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import HardwareFault, UserError
from jtrain.model.transformer import Transformer
from jtrain.step import train_step
from jtrain.telemetry.recompiles import count_programs
from jtrain.train import attempt, integrity

BASE = (
    "num_steps=4",
    "mesh.data=4",
    "mesh.tensor=2",
    "layout.zero_stage=3",
    "checkpoint.every_steps=2",
    "eval.every_steps=None",
)


def train(
    workdir: Path,
    *sets: str,
    monkeypatch: pytest.MonkeyPatch | None = None,
    home: Path | None = None,
    **flip: Any,
) -> int:
    if monkeypatch is not None:
        monkeypatch.setenv("JTRAIN_TEST_FLIP", json.dumps(dict(byte=777, bit=6) | flip))
        sets = (*sets, "callbacks=('tests.train.flipper:Flipper',)")
    run_config = load_config("tiny", ["debug"], [*BASE, "data.engine=inline", *sets])
    return attempt.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config), home=home)


def saved(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


_made: list[Any] = []


@contextlib.contextmanager
def one_step() -> Iterator[None]:
    """Compiles one step for all runs of `BASE` alone, whatever they save and check."""

    def make_once(*args: Any, **named: Any) -> Any:
        if not _made:
            _made.append(train_step.make_train_step(*args, **named))
        return _made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "make_train_step", make_once)
        yield
    assert count_programs(_made[0]) == 1


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every check passed at every step."""
    workdir = tmp_path_factory.mktemp("healthy")
    with one_step():
        assert train(workdir, "integrity.recompute_every_steps=1") == 0
    return workdir


def test_a_flipped_bit_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment on one device, between steps 3 and 4: step 4 is not saved, and the checkpoint of step 2
    stays.
    """
    where = (
        rf"step 4: device 5 \(cpu, process 0 on {socket.gethostname()}\) gave other bits of "
        r"opt_state.mu.embed_VD "
    )
    with (
        one_step(),
        pytest.raises(
            HardwareFault, match=where + r"than step 3 had written.*from the checkpoint of step 2, on other"
        ),
    ):
        train(tmp_path, monkeypatch=monkeypatch, step=4, array="opt_state.mu.embed_VD", device=5)
    assert saved(tmp_path) == [2]


def test_a_healthy_run_raises_no_alarm(healthy: Path) -> None:
    """Every check ran: sums of both saved states lie in the workdir, and the recomputations agreed."""
    kept = json.loads((healthy / integrity.FILE).read_text())
    assert list(kept) == ["2", "4"]
    assert kept["4"]["step"] == ["int32", 4]


def test_a_state_without_a_checkpoint_is_no_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that were only copied to local memory are not used after a fault, and not named."""
    sets = ("checkpoint.every_steps=None", "checkpoint.local_every_steps=1")
    nothing = r"step 4: .* Nothing was saved\. Take the device"
    with one_step(), pytest.raises(HardwareFault, match=nothing):
        train(
            tmp_path / "run",
            *(*sets, f"checkpoint.local_dir={str(tmp_path)!r}"),
            monkeypatch=monkeypatch,
            step=4,
            array="opt_state.mu.embed_VD",
            device=5,
        )
    assert not list(tmp_path.glob("jtrain-run-*/*/*/manifest.json"))


@pytest.mark.slow
def test_sums_of_states_that_are_never_read_are_dropped(tmp_path: Path) -> None:
    """States in local memory have sums until the next checkpoint; the run's identity lies beside those."""
    workdir, home = tmp_path / "local", tmp_path / "store"
    sets = ("checkpoint.local_every_steps=1", f"checkpoint.local_dir={str(tmp_path)!r}")
    assert train(workdir, *sets, "num_steps=6", home=home) == 0
    assert saved(home) == [4, 6]
    steps = {*json.loads((workdir / integrity.FILE).read_text())}
    # At step 6 the save of step 4 may be in flight: then step 3 is after the newest checkpoint.
    assert {"4", "5", "6"} <= steps <= {"2", "3", "4", "5", "6"}
    assert (home / "local_memory.id").exists()
    assert not (workdir / "local_memory.id").exists()


@pytest.mark.slow
def test_a_checkpoint_that_holds_other_bits_is_refused(healthy: Path, tmp_path: Path) -> None:
    """Bits that change between the step and the disk show on any layout in the first step after a restore."""
    shutil.copytree(healthy, tmp_path / "run")
    (tmp_path / "run/checkpoints/4").rename(tmp_path / "gone")
    layout = ("mesh.data=8", "mesh.tensor=1", "layout.zero_stage=1")
    file = tmp_path / "run" / integrity.FILE
    kept = json.loads(file.read_text())
    kept["2"]["params.embed_VD"][1] ^= 1 << 9
    file.write_text(json.dumps(kept))
    with pytest.raises(
        UserError, match=r"checkpoints/2 has other bits in params.embed_VD .*than step 2 computed.*older"
    ):
        train(tmp_path / "run", *layout)
    kept["2"]["params.embed_VD"][1] ^= 1 << 9
    file.write_text(json.dumps(kept))
    assert train(tmp_path / "run", *layout) == 0, "the same state in another layout has the same sums"


@pytest.mark.slow
def test_a_copy_that_differs_is_outvoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is wrong on one device after its reduction: replicas diverge in that step, which is not
    saved.
    """
    reduced = train_step.finish_gradient

    def wrong_on_device_3(*args: Any) -> Any:
        grad = reduced(*args)
        return jnp.where(jax.lax.axis_index("data") == 3, grad * (1 + 2**-10), grad)

    monkeypatch.setattr(train_step, "finish_gradient", wrong_on_device_3)
    with pytest.raises(
        HardwareFault, match=r"step 1: device 3 \(cpu, .*\) computed another .* differs from most.*again"
    ):
        train(tmp_path, "mesh.data=8", "mesh.tensor=1", "layout.zero_stage=0", "checkpoint.every_steps=1")
    assert saved(tmp_path) == []


@pytest.mark.slow
def test_a_device_that_computes_wrongly_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 has no copies, so only the recomputation sees it; the message says since when it may have been
    wrong.
    """
    loss = Transformer.cross_entropy

    def wrong_on_device_2(self: Transformer, params: Any, x_BLD: Any, *rest: Any) -> Any:
        here = jax.lax.axis_index("data") == 2
        return loss(self, params, jnp.where(here, x_BLD * (1 + 2**-7), x_BLD), *rest)

    monkeypatch.setattr(Transformer, "cross_entropy", wrong_on_device_2)
    with pytest.raises(
        HardwareFault, match=r"step 3: device 2 \(.*another loss and gradient.*passed at step 0.* step 2,"
    ):
        train(tmp_path, "mesh.data=8", "mesh.tensor=1", "integrity.recompute_every_steps=3")
    assert saved(tmp_path) == [2]


@pytest.mark.slow
def test_checkpoints_elsewhere_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with its checkpoints in a store: after a resume a fault names the checkpoint; its sums are
    kept.
    """
    workdir, home = tmp_path / "local", tmp_path / "store"
    for _ in range(2):
        with pytest.raises(
            HardwareFault, match=r"step 4: .* goes on from the checkpoint of step 2, on other"
        ):
            train(
                workdir, monkeypatch=monkeypatch, home=home, step=4, array="opt_state.mu.embed_VD", device=5
            )
    assert train(workdir, home=home) == 0
    assert not (workdir / "checkpoints").exists()
    assert sorted(json.loads((workdir / integrity.FILE).read_text())) == ["2", "4"]


@pytest.mark.slow
def test_a_program_without_an_order_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the first recomputation differs on most devices, the log says so, and the attempt goes on
    without.
    """
    loss, calls = Transformer.cross_entropy, itertools.count()

    def another_each_time(self: Transformer, params: Any, x_BLD: Any, *rest: Any) -> Any:
        factor = jax.pure_callback(
            lambda: np.float32(1 + 0.01 * next(calls)),
            jax.ShapeDtypeStruct((), np.float32),
            vmap_method="sequential",
        )
        return loss(self, params, x_BLD * factor.astype(x_BLD.dtype), *rest)

    monkeypatch.setattr(Transformer, "cross_entropy", another_each_time)
    sets = ("mesh.data=8", "mesh.tensor=1", "integrity.recompute_every_steps=1", "guard.sigmas=None")
    assert train(tmp_path, *sets) == 0
    assert capsys.readouterr().out.count("this attempt goes on without integrity.recompute_every_steps") == 1


@pytest.mark.slow
def test_2000_healthy_steps_raise_no_alarm(tmp_path: Path) -> None:
    """Sums every step, a recomputation every 50."""
    assert (
        train(
            tmp_path,
            "num_steps=2000",
            "checkpoint.every_steps=500",
            "integrity.recompute_every_steps=50",
            "metrics.log_every_steps=500",
        )
        == 0
    )


def test_an_interval_of_zero_is_refused() -> None:
    """With the way out."""
    with pytest.raises(UserError, match=r"integrity.recompute_every_steps=0 must be at least 1, or None"):
        IntegritySpec(recompute_every_steps=0)
