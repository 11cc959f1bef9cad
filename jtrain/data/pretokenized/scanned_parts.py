"""Scan of token files of other projects, in parallel: parts of files in order, with what an index needs."""

import collections
import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt

from jtrain.data.pretokenized.foreign.foreign_file import PART_BYTES, ForeignLayout
from jtrain.data.pretokenized.index_format import digest
from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class ScannedPart:
    """Scanned part of file number `file`: documents, counts and hash; `ids` only where they are copied."""

    file: int
    last: bool
    tokens: int
    ends: Int64[np.ndarray, " documents"]
    offsets: Int64[np.ndarray, " documents"] | None
    hash: str
    ids: UInt[np.ndarray, " tokens"] | None
    ignored: Int[np.ndarray, "runs 2"]


@dataclasses.dataclass(frozen=True)
class PartScanner:
    """Scanner of the files of one layout.

    vocab_size: ids from here on are refused.
    tokenizer: name of the tokenizer, for messages.
    id_dtype: dtype of the ids in the index, of which the hashes are made.
    """

    layout: ForeignLayout
    vocab_size: int
    tokenizer: str
    id_dtype: np.dtype

    def scan(self, files: range) -> Iterator[ScannedPart]:
        """Yields the parts in order, while threads scan a few ahead."""
        # A generator: a data set may have millions of parts, of which a few are under way.
        parts = ((file, part) for file in files for part in range(self.layout.files[file].num_parts()))
        with concurrent.futures.ThreadPoolExecutor(count_threads()) as pool:
            futures = collections.deque[concurrent.futures.Future[ScannedPart]]()
            try:
                while True:
                    # Twice the threads under way, so that none waits while the first result is appended.
                    for file, part in itertools.islice(parts, 2 * count_threads() - len(futures)):
                        futures.append(pool.submit(self._scan_part, file, part))
                    if not futures:
                        return
                    yield futures.popleft().result()
            finally:
                for future in futures:
                    future.cancel()

    def _scan_part(self, file: int, part: int) -> ScannedPart:
        foreign_file = self.layout.files[file]
        part_content = foreign_file.scan(part)
        if len(part_content.ids) and int(part_content.ids.max()) >= self.vocab_size:
            raise self._beyond_vocabulary(foreign_file.path, part, part_content.ids)
        ids = part_content.ids.astype(self.id_dtype, copy=False)
        is_last = part == foreign_file.num_parts() - 1
        # Only then: a part that waits for earlier ones would hold its ids in memory.
        copied_ids = ids if self.layout.copies else None
        return ScannedPart(
            file,
            is_last,
            len(ids),
            part_content.ends.astype(np.int64),
            part_content.offsets,
            digest(ids),
            copied_ids,
            part_content.ignored,
        )

    def _beyond_vocabulary(self, path: Path, part: int, ids: UInt[np.ndarray, " n"]) -> UserError:
        largest = ids.max()
        # Ids are read as unsigned, so -1 shows as the largest number; the message gives both.
        signed = int(np.asarray(largest).view(ids.dtype.str.replace("u", "i")))
        as_signed = f" ({signed:,} as a signed number)" if signed < 0 and ids.itemsize > 2 else ""
        or_dtype = f", or --dtype if they are not {ids.dtype.name}" if self.layout.dtype_is_assumed else ""
        position = f"row group {part}"
        if not self.layout.copies:
            position = f"token {int(np.argmax(ids)) + part * (PART_BYTES // ids.itemsize):,}"
        return UserError(
            f"{path}: id {int(largest):,}{as_signed}, {position}, is not below the vocabulary of --tokenizer "
            f"{self.tokenizer}, {self.vocab_size:,}. Set --tokenizer to the one that made these "
            f"ids{or_dtype}."
        )


def count_threads() -> int:
    """Returns how many threads read files."""
    # Cores that this process may use, not all of the machine's.
    return len(os.sched_getaffinity(0))
