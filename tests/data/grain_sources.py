"""Grain datasets that tests name as sources, `tests.data.grain_sources:NAME`; loaders import this file."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import grain


def good() -> Any:
    """The texts 0 to 9."""
    return grain.MapDataset.range(10).map(str)


def filtered() -> Any:
    """The texts without 3."""
    return good().filter(lambda text: text != "3")


def broken() -> Any:
    """The texts, of which 2 cannot be read."""
    return good().map(lambda text: 1 // (int(text) - 2) and text)


def numbers() -> Any:
    """No texts."""
    return grain.MapDataset.range(10)


def endless() -> Any:
    """A dataset without an end."""
    return good().repeat()


def iterated() -> Any:
    """A dataset that is read in one order only."""
    return good().to_iter_dataset()


def surroundings() -> Any:
    """One text: the module jax of the process that reads it, and its threads for tokenising."""
    return grain.MapDataset.source([f"{sys.modules.get('jax')} {os.environ['RAYON_NUM_THREADS']}"])


class Traps:
    """Documents of which number 77 does something to its reader, while the file that TRAP names is there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> str:
        if number == 77 and os.path.exists(os.environ["TRAP"]):
            self.act()
        return f"document {number} " + "y" * 40

    def __repr__(self) -> str:
        return "records"


def hanging() -> Any:
    """Documents of which one hangs its reader."""
    records: Any = Traps(lambda: time.sleep(3600))
    return grain.MapDataset.source(records)


def killing() -> Any:
    """Documents of which one kills its reader."""
    records: Any = Traps(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return grain.MapDataset.source(records)
