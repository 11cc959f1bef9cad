"""Chats of which some are one record a turn, since their template rewrites earlier turns."""

import itertools
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.cache import NumberTable
from jtrain.data.sources.formats.masked_text import MaskedText, MaskFields
from jtrain.data.sources.formats.record import BadRecord, Records
from jtrain.data.sources.storage import StoredFile

_RUN_RECORDS = 256
"""Chats that are read at a time to count their turns."""


class TurnRecords(Records):
    """Records of a file of chats: each turn of a chat that is split is a record of its own.

    Opening it reads and renders every chat, to learn how many records it is; the counts are kept in the cache
    folder, like the starts of lines.

    Example: of three chats the second is split into three turns. Records 0 to 4 are chat 0, the three turns
    of chat 1, and chat 2.

    Args:
      chats: the chats of the file.
    """

    __slots__ = ("_chats", "_turns")

    def __init__(self, chats: Records, file: StoredFile, mask: MaskFields, *, cache_dir: Path) -> None:
        self._chats = chats
        self._turns = NumberTable(
            file, f"turns-{mask.digest}", self._index, cache_dir, in_memory=file.span is not None
        )

    def __len__(self) -> int:
        return len(self._turns)

    def read(self, records: list[int]) -> list[str | BadRecord]:
        rows = self._turns.rows(records)
        # A chat is read and rendered once, however many of its turns are asked for.
        chats = list(dict.fromkeys(chat for chat, _ in rows))
        text_of = dict(zip(chats, self._chats.read(chats), strict=True))
        return [_turns_of(text_of[chat])[turn] for chat, turn in rows]

    @property
    def sizes_need_reading(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if the sizes of the chats do."""
        return self._chats.sizes_need_reading

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the sizes of whole chats, of which turns are the beginning."""
        if first == end:
            return np.empty(0, np.int64)
        chats = self._turns.span(first, end)[:, 0]
        return self._chats.sizes(int(chats[0]), int(chats[-1]) + 1)[chats - chats[0]]

    def count_before(self, offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return self._first_records(self._chats.count_before(offsets))

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        return self._first_records(self._chats.group_starts)

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        return self._chats.group_bytes

    def hold(self, record: int) -> object:
        [(chat, _)] = self._turns.rows([record])
        return self._chats.hold(chat)

    def close(self) -> None:
        self._chats.close()

    def _first_records(self, chats: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the first record of each of these chats; the number of records behind the last chat."""
        # Chats ascend in the table, and each has at least one record, a bad one too.
        return np.searchsorted(self._turns.span(0, len(self))[:, 0], chats)

    def _index(self) -> Int[np.ndarray, "records 2"]:
        """Returns chat and turn of each record."""
        rows = []
        for first in range(0, len(self._chats), _RUN_RECORDS):
            numbers = range(first, min(first + _RUN_RECORDS, len(self._chats)))
            for chat, text in zip(numbers, self._chats.read(list(numbers)), strict=True):
                rows += itertools.product([chat], range(len(_turns_of(text))))
        return np.asarray(rows, np.int64).reshape(-1, 2)


def _turns_of(text: str | BadRecord) -> tuple[str | BadRecord, ...]:
    """Returns the records of a chat; a bad one is one."""
    return text.turns if isinstance(text, MaskedText) and text.turns else (text,)
