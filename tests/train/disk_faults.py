"""Callbacks of runs whose disk becomes full, or read-only."""

import subprocess

from jtrain.train.callbacks import Callback, RunContext, StepResults
from tests.small_disk import fill


class FullDisk(Callback):
    """Fills the disk of the workdir after step `fill_at`, and makes room again after `free_at`."""

    def __init__(self, fill_at: int, free_at: int) -> None:
        self.fill_at, self.free_at = fill_at, free_at

    def on_start(self, context: RunContext) -> None:
        self.disk = context.workdir.parent

    def on_results(self, results: StepResults) -> None:
        if results.step == self.fill_at:
            fill(self.disk)
        if results.step == self.free_at:
            (self.disk / "filler").unlink()


def full_from_1_to_7() -> FullDisk:
    """Full for six steps."""
    return FullDisk(1, 7)


def full_from_2_to_8() -> FullDisk:
    """Full for six steps, one step later."""
    return FullDisk(2, 8)


def full_from_3() -> FullDisk:
    """Full for good."""
    return FullDisk(3, 99)


class ReadOnlyAtARewind(Callback):
    """Makes the checkpoints read-only when the run has gone back."""

    def on_start(self, context: RunContext) -> None:
        self.folder = str(context.workdir / "checkpoints")

    def on_rewind(self, step: int) -> None:
        for how in ("bind", "remount,bind,ro"):
            subprocess.run(["mount", "-o", how, self.folder, self.folder], check=True)
