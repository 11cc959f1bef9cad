"""Programs whose bits do not repeat: real noise in gradients and loss, with and without real corruption."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import files
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import HardwareFault
from jtrain.step import guard, train_step
from jtrain.telemetry.recompiles import count_programs
from jtrain.train import attempt, loop
from jtrain.train.bad_steps.bad_steps import BadSteps
from tests.train.test_bad_steps import SETS, actions, arrays, lines

ULP = 2.0**-23


class Noise:
    """Noise that every pass over a step draws anew, and faults in the gradients of steps.

    size: deviation of each gradient's factor and of the loss's, as a share.
    faults: step -> factor of its gradients, in every pass; `transient`: only until the run goes back.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(
        self,
        *,
        size: float = 0.0,
        faults: dict[int, float] | None = None,
        transient: dict[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.size, self.faults, self.transient = size, faults or {}, transient or {}
        self.went_back = False
        self.rng = np.random.default_rng(seed)
        self.fault_of: Callable[[int], float] = self.planted

    def planted(self, step: int) -> float:
        return (self.faults | ({} if self.went_back else self.transient)).get(step, 1.0)

    def factor(self, x: jax.Array) -> jax.Array:
        def draw(x: Any) -> np.ndarray:
            return np.asarray(1 + self.size * self.rng.standard_normal(np.shape(x)), np.float32)

        return jax.pure_callback(draw, jax.ShapeDtypeStruct(x.shape, np.float32), x)

    def fault_at(self, completed: jax.Array) -> jax.Array:
        def value(completed: Any) -> np.float32:
            return np.float32(self.fault_of(int(completed) + 1))

        return jax.pure_callback(value, jax.ShapeDtypeStruct((), np.float32), completed)


@pytest.fixture(scope="module")
def noise() -> Iterator[Noise]:
    """Plants noise and faults in the gradients themselves; one compiled step serves all runs of this file."""
    planted, gradients, make = Noise(), train_step.local_gradients, attempt.make_train_step
    go_back, steps = BadSteps.go_back, []

    def noisy(model: Any, layout: Any, params: Any, scaling: Any, batch: Any, step: Any, *others: Any) -> Any:
        grads, amax, values, share = gradients(model, layout, params, scaling, batch, step, *others)
        fault = planted.fault_at(step)
        grads = jax.tree.map(lambda g: g * planted.factor(g) * fault, grads)
        return grads, amax, values | {"loss_nats": values["loss_nats"] * planted.factor(jnp.ones(()))}, share

    def go_back_noted(self: BadSteps, *args: Any, **kwargs: Any) -> None:
        planted.went_back = True
        go_back(self, *args, **kwargs)

    def made_once(*args: Any, **named: Any) -> Any:
        if not steps:
            steps.append(make(*args, **named))
        return steps[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "MIN_HISTORY", 4)  # spikes are found in runs of a few steps
        patch.setattr(train_step, "local_gradients", noisy)
        patch.setattr(BadSteps, "go_back", go_back_noted)
        patch.setattr(attempt, "make_train_step", made_once)
        yield planted
    assert count_programs(steps[0]) == 1, "the first pass is the same program"


def train(workdir: Path, noise: Noise, *sets: str, **planted: Any) -> int:
    noise.reset(**planted)
    return run(workdir, *sets)


def run(workdir: Path, *sets: str) -> int:
    run_config = load_config("tiny", ["debug"], (*SETS, "mesh.data=1", "guard.on_bad=rollback", *sets))
    config_text = tree.flat(run_config)
    return attempt.train(
        build_run(run_config), workdir=workdir, config_text=config_text, devices=jax.devices()[:1]
    )


def measured(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "run.json").read_text())["first_step_twice"]


SIZES = [
    pytest.param(0.0, id="exact", marks=pytest.mark.slow),
    pytest.param(ULP, id="ulp", marks=pytest.mark.slow),
    pytest.param(1e-5, id="1e-5"),
]


@pytest.mark.parametrize("size", SIZES)
def test_a_bad_number_that_comes_again_accuses_nobody(
    noise: Noise, tmp_path: Path, size: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN at step 6 in both passes: its batch is left out, no checkpoint is set aside, whatever the noise."""
    assert train(tmp_path, noise, size=size, faults={6: math.nan}) == 0
    assert actions(tmp_path) == [("found", 6), ("went back", 6), ("repeats", 6)]
    assert not list((tmp_path / "checkpoints").glob("*.damaged"))
    said = capsys.readouterr().out
    assert said.count("step 1 ran twice from one state") == 1
    assert ("had the same bits" in said) == (size == 0) == measured(tmp_path)["repeats"]
    assert ("within this program's noise (2% of the loss, 50% of the norm)" in said) == (size > 0)
    if size > 1e-6:
        assert 1e-7 < measured(tmp_path)["loss_nats"] < 1e-3, "it moved, and by the noise"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_fault_that_does_not_come_again_is_hardware(noise: Noise, tmp_path: Path, size: float) -> None:
    """NaN in the first pass alone; and gradients of step 5 that are 100 times too large in it, seen when a
    NaN of step 6 has both run again: exit 76 for every noise.
    """
    reason = "Data and arithmetic repeat bit for bit" if size == 0 else "this is far beyond such noise"
    once = tmp_path / "once"
    with pytest.raises(HardwareFault, match=rf"step 6.*gave two results.*{reason}, so a device"):
        train(once, noise, size=size, transient={6: math.nan})
    assert actions(once)[-1] == ("differs", 6)
    assert max(files.steps(once / "checkpoints")) == 3
    with pytest.raises(HardwareFault, match=rf"step 5.*gave two results.*{reason}, so a device"):
        train(tmp_path / "large", noise, size=size, transient={5: 100.0}, faults={6: math.nan})


RUNS = 20
"""Runs of each kind of fault and each noise."""

KINDS = ("clean", "NaN", "spike", "flip")
"""A spike and a NaN come with the data, each time; a flip comes in the first pass alone."""


def planted_in(kind: str, seed: int) -> dict[str, dict[int, float]]:
    """Factors of the gradients of step 6: of a spike or a flip from 100, a bit of the exponent more each run."""
    spike = {6: 100.0 * 2**seed}
    return {"clean": {}, "NaN": {"faults": {6: math.nan}}, "spike": {"faults": spike}}.get(
        kind, {"transient": spike}
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, ULP, 1e-5], ids=["exact", "ulp", "1e-5"])
@pytest.mark.parametrize("kind", KINDS)
def test_hardware_is_accused_for_real_flips_alone(
    noise: Noise, tmp_path: Path, size: float, kind: str
) -> None:
    """RUNS runs, each with other noise: every flip ends with 76, nothing else does."""
    accused = []
    for seed in range(RUNS):
        workdir = tmp_path / str(seed)
        try:
            assert train(workdir, noise, size=size, seed=seed, **planted_in(kind, seed)) == 0
        except HardwareFault:
            accused.append(seed)
        found = [step for action, step in actions(workdir) if action == "found"]
        assert found == [] if kind == "clean" else found[:1] == [6]
        shutil.rmtree(workdir)
    print(f"{kind}, noise {size:.0e}: {len(accused)} of {RUNS} runs accused hardware")
    assert accused == (list(range(RUNS)) if kind == "flip" else [])


@pytest.mark.slow
def test_a_first_pass_that_alone_is_finite_is_hardware(noise: Noise, tmp_path: Path) -> None:
    """One of the two passes over step 1 is NaN: no order of sums explains it, and nothing is saved."""
    noise.reset()
    once = iter([math.nan])
    noise.fault_of = lambda step: next(once, 1.0)
    with pytest.raises(HardwareFault, match="step 1, run twice from the checkpoint of step 0"):
        run(tmp_path)
    assert not files.steps(tmp_path / "checkpoints")


@pytest.mark.slow
def test_the_first_pass_leaves_no_trace(
    noise: Noise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes at step 6, so that two of its steps ran twice, has the bits of one where none did."""
    assert train(tmp_path / "twice", noise) == 0
    shutil.rmtree(tmp_path / "twice" / "checkpoints" / "8")
    assert train(tmp_path / "twice", noise) == 0
    assert measured(tmp_path / "twice")["step"] == 7, "the attempt's own first step"
    monkeypatch.setattr(loop, "run_without_update", lambda _, state, *others: (state, None))
    assert train(tmp_path / "once", noise) == 0
    assert "first_step_twice" not in json.loads((tmp_path / "once" / "run.json").read_text())
    assert arrays(tmp_path / "twice") == arrays(tmp_path / "once")
    assert [line["loss_nats"] for line in lines(tmp_path / "twice").values()] == [
        line["loss_nats"] for line in lines(tmp_path / "once").values()
    ]
