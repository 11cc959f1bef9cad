"""A run whose memory or arithmetic is wrong ends with exit code 76, names the device and saves nothing of it."""

import json
import socket
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.config import tree
from jtrain.config.integrity import IntegritySpec
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import HardwareFault, UserError
from jtrain.train import integrity, loop

BASE = ("num_steps=4", "mesh.data=4", "mesh.tensor=2", "layout.zero_stage=3", "checkpoint.every_steps=2", "eval.every_steps=None")


def train(workdir: Path, *sets: str, monkeypatch: pytest.MonkeyPatch | None = None, **flip: Any) -> int:
    if monkeypatch is not None:
        monkeypatch.setenv("JTRAIN_TEST_FLIP", json.dumps(dict(byte=777, bit=6) | flip))
        sets = (*sets, "callbacks=('tests.train.flipper:Flipper',)")
    run_config = load_config("tiny", ["debug"], [*BASE, "data.engine=inline", *sets])
    return loop.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config))


def saved(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every check passed at every step."""
    workdir = tmp_path_factory.mktemp("healthy")
    assert train(workdir, "integrity.recompute_every_steps=1") == 0
    return workdir


def test_a_flipped_bit_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment on one device, between steps 3 and 4: step 4 is not saved, and the checkpoint of step 2 stays."""
    where = rf"step 4: device 5 \(cpu, process 0 on {socket.gethostname()}\) gave other bits of opt_state.mu.embed_VD "
    with pytest.raises(HardwareFault, match=where + r"than step 3 had written.*from the checkpoint of step 2, on other"):
        train(tmp_path, monkeypatch=monkeypatch, step=4, array="opt_state.mu.embed_VD", device=5)
    assert saved(tmp_path) == [2]
