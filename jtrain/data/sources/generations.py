"""Generations of a source's files: those that a run began with, and those that joined it at each resume.

A source that has gained files goes on in the running epoch: the chunks that were not read yet and those of
the new files are shuffled together, so that each chunk is read once; later epochs shuffle all of them. The
files of a generation follow those of the earlier ones in the order of their names, so that no number of a
file or record changes, and a few integers per generation say which chunk any number stands for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.shuffle import epoch_key, order_seed


class Generation(NamedTuple):
    """Files of a source that joined a run together; the first generation has those that it began with.

    epoch: the epoch in which they joined.
    slots_read: slots of that epoch that were read before; 0 for an order whose slots are not counted
      (`GrowingChunks`).
    window: the first window of that epoch that may hold them; 0 for an order without windows.
    files: number of files from then on, those of earlier generations included.
    """

    epoch: int
    slots_read: int
    window: int
    files: int


def join_key(seed: int, generation: int, epoch: int) -> np.uint64:
    """Returns the key of the permutation with which a generation joins an epoch of a source's order."""
    return epoch_key(order_seed(seed, f"generation {generation}"), epoch)


def members(generations: Sequence[Generation], epoch: int) -> tuple[int, range]:
    """Returns the generation whose files an epoch began with, and those that joined the epoch later."""
    # default=0: the first generation has epoch 0 itself, and is also the base of that epoch.
    base = max((i for i, generation in enumerate(generations) if generation.epoch < epoch), default=0)
    joined = [i for i, generation in enumerate(generations) if i > base and generation.epoch == epoch]
    return base, range(base + 1, base + 1 + len(joined))


class EpochNumbers:
    """Numbers of a source's slots, counted over all epochs; epochs get longer as files join.

    Args:
      generations: all generations, in order.
      slots: slots of an epoch with the files of each generation.
    """

    def __init__(self, generations: Sequence[Generation], slots: Sequence[int]) -> None:
        assert len(generations) == len(slots) > 0, (generations, slots)
        self._epoch = np.asarray([generation.epoch for generation in generations], np.int64)
        self._slots = np.asarray(slots, np.int64)
        # A generation counts from the epoch it joined up to the epoch of the next one, in slots of its own.
        num_slots = np.diff(self._epoch) * self._slots[:-1]
        # Number of the first slot of the epoch in which each generation joined.
        self._begin = np.concatenate([[0], np.cumsum(num_slots)])

    def split(
        self, numbers: Int[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the epoch of each number, and its slot in the epoch."""
        generation = np.searchsorted(self._begin, numbers, side="right") - 1
        # At least 1, to avoid a division by 0; the numbers of a source without slots mean nothing.
        epochs, slots = np.divmod(numbers - self._begin[generation], np.maximum(self._slots[generation], 1))
        return epochs + self._epoch[generation], slots

    def first_of(self, epoch: int) -> int:
        """Returns the number of the first slot of an epoch, which is the number of slots before it."""
        generation = int(np.searchsorted(self._epoch, epoch, side="right")) - 1
        return int(self._begin[generation] + (epoch - self._epoch[generation]) * self._slots[generation])
