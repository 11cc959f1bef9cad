"""A reference that was stored beforehand: the losses of the adapter switched off, and refused for other records."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.data.references import StoredReferences, spread
from jtrain.errors import FileError, UserError
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.reference import write_reference
from tests.train.test_preference_run import run_of, write_pairs

LAYOUT = ("mesh.data=4", "mesh.context=2", "layout.zero_stage=1")


def losses(pairs: Path, workdir: Path, *sets: str) -> list[float]:
    """Losses of the steps, and those on held-out pairs."""
    config, run = run_of(pairs, "optimizer.peak_lr=1e-2", *LAYOUT, *sets)
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config)) == 0
    lines = metrics.read(workdir / metrics.FILE)
    return [line[name] for name in ("loss_nats", "eval_loss_nats") for line in lines if name in line]


@pytest.mark.slow
def test_a_stored_reference_is_the_adapter_switched_off(tmp_path: Path) -> None:
    """On rows that `context` splits in zig-zag order; with an adapter, and in the first step without one."""
    pairs, out = write_pairs(tmp_path), tmp_path / "reference.npz"
    _, run = run_of(pairs, *LAYOUT)
    assert write_reference(run, workdir=tmp_path / "new", out=out, devices=jax.devices()) == 120
    stored = ("objective.reference=stored", f"objective.stored={out}")
    want = losses(pairs, tmp_path / "off")
    np.testing.assert_allclose(losses(pairs, tmp_path / "stored", *stored), want, rtol=2e-6)
    assert min(want) < math.log(2) - 1e-3
    # All weights are trained, and begin as the base of the adapter does.
    first, *_ = losses(pairs, tmp_path / "whole", *stored, "adapter=None")
    assert abs(first - math.log(2)) < 1e-6


def test_a_reference_for_other_records_is_refused(tmp_path: Path) -> None:
    pairs, out = write_pairs(tmp_path), tmp_path / "reference.npz"
    StoredReferences({b"0123456789abcdef": 1.5}, name="").write(out)
    assert StoredReferences.read(str(out)).nats == {b"0123456789abcdef": 1.5}
    with pytest.raises(UserError, match=r"is of other records: of its 1 samples none has the hash"):
        losses(pairs, tmp_path / "run", "objective.reference=stored", f"objective.stored={out}")
    out.write_bytes(b"no such file")
    with pytest.raises(FileError, match=r"objective\.stored='.*' cannot be read"):
        StoredReferences.read(str(out))


def test_the_nats_of_a_text_are_spread_over_its_targets_without_loss() -> None:
    """Whatever their number; a mean that is added up in float32 would lose a thousand times as much."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 100, 4000):
        total = float(rng.uniform(0, 10 * count))
        parts = spread(total, count)
        assert abs(float(np.sum(parts, dtype=np.float32)) - total) < 1e-6 * max(total, 1)
        assert len(parts) == count
    assert len(spread(0.0, 0)) == 0


def test_a_run_without_pairs_has_no_reference(tmp_path: Path) -> None:
    run = build_run(load_config("tiny", ["debug"], ()))
    with pytest.raises(
        UserError, match=r"for preference pairs or for a distillation, and the run has neither"
    ):
        write_reference(run, workdir=tmp_path, out=tmp_path / "out", devices=jax.devices())
