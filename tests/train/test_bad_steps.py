"""Bad numbers in real runs: real NaNs in the step's program, put there by a callback into this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.checkpoint import files, orbax_io
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.optim import Optimizer
from jtrain.train import bad_steps, loop
from jtrain.train.bad_steps import BadSteps

NUM_STEPS = 10
SETS = (
    f"num_steps={NUM_STEPS}",
    "mesh.data=8",
    "layout.zero_stage=1",
    "metrics.log_every_steps=1",
    "metrics.tensorboard=False",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=4",
    "eval.every_steps=None",
)


def train(workdir: Path, *sets: str) -> int:
    run_config = load_config("tiny", ["debug"], (*SETS, *sets))
    return loop.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config))


class Faults:
    """Numbers that the step's program adds: {(kind, step): value}, kind `norm` or `param`; steps count from 1.

    passes: on which passes over a step they happen: `every`, or only the first `once`.
    """

    def __init__(self) -> None:
        self.planted: dict[tuple[str, int], float] = {}
        self.transient = False
        self.rewound = False

    def value(self, kind: str, step: Any) -> np.float32:
        if self.transient and self.rewound:
            return np.float32(0)
        return np.float32(self.planted.get((kind, int(step) + 1), 0.0))

    def traced(self, kind: str, step: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(lambda at: self.value(kind, at), shape, step)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    planted = Faults()
    begin, go_back = Optimizer.begin, BadSteps._go_back

    def begin_with_faults(self: Optimizer, grads: Any, step: Any) -> Any:
        import dataclasses

        update = begin(self, grads, step)
        norm = update.grad_norm + planted.traced("norm", update.step)
        return dataclasses.replace(
            update, grad_norm=norm, learning_rate=update.learning_rate + planted.traced("param", update.step)
        )

    def go_back_noted(self: BadSteps, *args: Any, **kwargs: Any) -> None:
        planted.rewound = True
        go_back(self, *args, **kwargs)

    monkeypatch.setattr(Optimizer, "begin", begin_with_faults)
    monkeypatch.setattr(BadSteps, "_go_back", go_back_noted)
    yield planted


def params(workdir: Path, step: int = NUM_STEPS) -> list[np.ndarray]:
    """All arrays of a checkpoint but the guard's own."""
    found = orbax_io.restore_numpy(workdir / "checkpoints" / str(step) / files.STATE)
    return found


def events(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / bad_steps.FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
