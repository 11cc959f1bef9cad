"""Resume = unbroken: a run that is stopped by a signal and started again, against one that is not."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

import jax
import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.small_run import STEPS
from jtrain.checkpoint.restoring import restore
from jtrain.config.run import Run, build_run_optimizer, run_layout
from jtrain.layout.mesh import make_mesh
from jtrain.runtime.exit_codes import DONE, STOPPED
from jtrain.step.state import abstract_state, without_base
from jtrain.telemetry.metrics import FILE
from jtrain.train.attempt import train
from jtrain.train.callbacks import Callback, DispatchedStep, RunContext

COMPARED = ("loss_nats", "grad_norm", "learning_rate", "tokens", "batch_hash")
"""Values of a step that must be the same bits."""


class StopAfter(Callback):
    """Asks the process to stop during the step after `step`, as a scheduler does.

    train_step: the compiled step, once there is one.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.train_step: Any = None

    @override
    def on_start(self, context: RunContext) -> None:
        self.train_step = context.train_step

    @override
    def on_step(self, dispatched: DispatchedStep) -> None:
        if dispatched.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def resume_is_unbroken(run: Run, config_text: str, scratch: Path) -> str:
    """Proves that a run of a few steps is the same with an interruption in its middle.

    Raises:
      Differs: names the first step whose values differ, or the tensor.
    """
    unbroken, broken = scratch / "unbroken", scratch / "broken"
    options: Any = dict(config_text=config_text, devices=jax.devices()[: run.mesh.size])
    # The step that runs when the signal comes is finished: the stop is after step STEPS // 2.
    stop = StopAfter(STEPS // 2 - 1)
    with _into(scratch / "output.txt"):
        codes = [
            train(run, workdir=broken, watchers=(stop,), **options),
            # What goes on makes a step of its own, as a new process does.
            train(run, workdir=broken, **options),
            # Two attempts that begin alike share a step, which compiles for longer than it computes.
            train(run, workdir=unbroken, train_step=stop.train_step, **options),
        ]
    if codes != (expected := [STOPPED, DONE, DONE]):
        raise Differs(f"exit codes {codes}, not {expected}: {(scratch / 'output.txt').read_text()[-400:]}")
    want, got = (_lines(folder) for folder in (unbroken, broken))
    for step in range(1, STEPS + 1):
        for name in COMPARED:
            if got.get(step, {}).get(name) != want[step][name]:
                raise Differs(
                    f"{name} of step {step}: {got.get(step, {}).get(name)} after a stop at step "
                    f"{STEPS // 2}, {want[step][name]} without"
                )
    layout, optimizer = run_layout(run), build_run_optimizer(run)
    mesh = make_mesh(run.mesh, jax.devices()[: run.mesh.size])
    # A checkpoint of an adapter holds the hash of its base, which is in the state, and not the base.
    like = without_base(layout, abstract_state(layout, optimizer, mesh))
    states = [
        restore(folder / "checkpoints", STEPS, like, order=layout.layer_order)[0]
        for folder in (unbroken, broken)
    ]
    leaves = [jax.tree_util.tree_leaves_with_path(jax.device_get(state)) for state in states]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        # By bytes: a nan equals itself, and -0 is not 0.
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise Differs(f"state of step {STEPS} differs in {jax.tree_util.keystr(path)}")
    return (
        f"{STEPS} steps, stopped after {STEPS // 2}: every value and all {len(leaves[0])} arrays of the "
        "state, bit for bit"
    )


@contextlib.contextmanager
def _into(file: Path) -> Iterator[None]:
    """Writes all output into a file, also that of handlers of signals, which write to the descriptors."""
    sys.stdout.flush()
    saved_outputs = os.dup(1), os.dup(2)
    with file.open("wb") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, descriptor in zip((1, 2), saved_outputs, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines of train steps by step."""
    lines = (json.loads(line) for line in (folder / FILE).read_text().splitlines())
    # Lines of evaluations have none.
    return {line["step"]: line for line in lines if "batch_hash" in line}
