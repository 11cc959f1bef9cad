"""Saves for ever, once per line of stdin, in a process that dies at the instant that the line names.

A line is WORKDIR INSTANT. Importing costs seconds, so it is done once; each saver is a fork from before jax
has started anything.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files, folders
from jtrain.runtime import atomic_io


def die() -> NoReturn:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the kernel ends it first")


def save_for_ever(workdir: str, instant: str) -> NoReturn:
    """Saves steps until the instant at which it dies, or until it is killed."""
    checkpoints = Checkpoints(Path(workdir), CheckpointSpec(keep_last=2))
    seal, sync, delete = files.seal, atomic_io.sync_directory, folders.shutil.rmtree

    def seal_and_die(path: Path, **named: Any) -> None:
        seal(path, **named)
        if named["step"] == 3:
            die()

    def delete_and_die(path: Any, **named: Any) -> None:
        if 3 in checkpoints.steps():
            die()
        delete(path, **named)

    if instant == "before-hashing":
        files.seal = lambda path, **named: die() if named["step"] == 3 else seal(path, **named)
    elif instant == "after-the-manifest":
        files.seal = seal_and_die
    elif instant == "after-the-rename":
        atomic_io.sync_directory = lambda path: die() if 3 in checkpoints.steps() else sync(path)
    elif instant == "within-a-deletion":
        folders.shutil.rmtree = delete_and_die
    step = checkpoints.latest_step() or 0
    while True:
        step += 1
        rng = np.random.default_rng(step)
        weights = {f"w{i}": jax.numpy.asarray(rng.standard_normal((256, 256), np.float32)) for i in range(8)}
        print("saving", step, flush=True)
        checkpoints.save(
            step, {"step": jax.numpy.int32(step), "params": weights}, {"next": step}, f"config {step}"
        )
        if step % 2:
            checkpoints.wait()
            print("durable", step, flush=True)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print("pid", os.getpid(), flush=True)
        save_for_ever(*line.split())
    _, status = os.waitpid(child, 0)
    print("died", os.waitstatus_to_exitcode(status), flush=True)
