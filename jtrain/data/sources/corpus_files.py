"""Files of a corpus by number, opened together at the start or one by one when they are read."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence

from jtrain.data.sources.file_parts import FileParts, evenly_spread
from jtrain.data.sources.formats import Records
from jtrain.data.sources.formats.record import LostFile
from jtrain.data.sources.opening import Opening
from jtrain.data.sources.retry import FileLost, retried
from jtrain.data.sources.storage import StoredFile

_OPENERS = 16
"""Files opened in parallel: remote ones wait for one or two round trips, others for the disk."""

CHECKED_FILES = 256
"""Files of a source whose content is checked against their format at the start, evenly spread over its
files."""


class CorpusFiles:
    """Files of a corpus, or parts of them, by number. Iterating over them opens those that are closed.

    Args:
      stored: the files or parts.
      open_records: opens one; see `formats.open_file`.
      is_lazy: True if files are opened when they are read; one that is gone by then is a bad record.
      opening: context in which files are opened.

    Attributes:
      sizes: bytes of each file or part as stored.
      checked: numbers of the files whose content is checked against their format.
      records: records of each file that is open, else None.
    """

    def __init__(
        self,
        stored: FileParts,
        open_records: Callable[..., Records],
        *,
        is_lazy: bool,
        opening: Opening,
    ) -> None:
        self.stored = stored
        self.sizes = stored.sizes()
        self.records: list[Records | None] = [None] * len(stored)
        # A lazily opened corpus checks its first file alone, since checking one opens it.
        self.checked = set(evenly_spread(len(stored), 1 if is_lazy else CHECKED_FILES))
        self._open_records = open_records
        self._is_lazy = is_lazy
        self._opening = opening
        if not is_lazy:
            self.open(range(len(stored)))

    @classmethod
    def of_dataset(cls, label: str, records: Records) -> "CorpusFiles":
        """Returns the only "file" of a source without files: a Grain dataset, which is open already."""
        dataset = StoredFile(label, label, 0, "", label)
        files = cls(FileParts([dataset], [0]), lambda file: records, is_lazy=True, opening=Opening())
        # Open already, so the function that opens a file is never called.
        files.records = [records]
        return files

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Records:
        """Returns the records of a file, which is opened if it is closed."""
        if number >= len(self):
            raise IndexError(number)
        if self.records[number] is None:
            self.open([number])
        records = self.records[number]
        assert records is not None
        return records

    def __iter__(self) -> Iterator[Records]:
        return (self[number] for number in range(len(self)))

    def label(self, number: int) -> str:
        """Returns the name of a file in messages."""
        return self.stored[number].label

    def open(self, numbers: Sequence[int]) -> None:
        """Opens files by number, several at a time; files that are open already cost nothing."""
        closed = [number for number in numbers if self.records[number] is None]
        if not closed:
            return
        with self._opening:
            self._opening.expect(len(closed), int(self.sizes[closed].sum()))
            self._open_all(closed)

    def forget(self, numbers: Sequence[int]) -> None:
        """Drops what is known of files, which are opened again when they are read."""
        for number in numbers:
            if (records := self.records[number]) is not None:
                records.close()
                self.records[number] = None

    def close(self) -> None:
        """Frees what open files keep between reads; they stay open."""
        for records in self.records:
            if records is not None:
                records.close()

    def _open_all(self, closed: list[int]) -> None:
        # All files of a source lie in one place, so the first one tells if they are remote.
        if len(closed) > 1 and (self.stored[closed[0]].is_remote or self._is_lazy):
            with concurrent.futures.ThreadPoolExecutor(min(_OPENERS, len(closed))) as pool:
                opened = list(pool.map(self._open_one, closed))
        else:
            opened = [self._open_one(number) for number in closed]
        # Only when all are open: after an error the next call begins anew.
        for number, records in zip(closed, opened, strict=True):
            self.records[number] = records

    def _open_one(self, number: int) -> Records:
        file, check = self.stored[number], number in self.checked
        report_bytes = functools.partial(self._opening.read, number)
        try:
            records = retried(
                file.label, lambda: self._open_records(file, check_content=check, report_bytes=report_bytes)
            )
        # A run that opens files lazily must not end for one that its user removed: `on_bad_record` decides.
        except FileLost as error:
            if not self._is_lazy:
                raise
            return LostFile(error)
        self._opening.opened(number, int(self.sizes[number]))
        return records
