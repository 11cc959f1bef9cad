"""ArrayRecord, the format of Grain and TensorFlow Datasets: records of bytes with an index."""

import collections
import contextlib
from typing import Any

from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import SKIP, BadRecord, Records, text_of_json
from jtrain.data.sources.retry import TransientError, names_transient_error
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

MANY_RECORDS = 16384
"""Records above which a reader stays open between reads, because opening takes 0.04 ms plus up to 40 ns per
record."""

OPEN_READERS = 64
"""Most open readers per process, each with a descriptor and its index in memory; least recently used closed
first."""

open_readers: collections.OrderedDict[str, Any] = collections.OrderedDict()

# No read-ahead and no parallelism: reads are random. The library still starts 64 idle threads at its first
# use.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,footer_prefetch_bytes:16K"
_BUFFER_BYTES = 1 << 15


class ArrayRecordFile(Records):
    """ArrayRecord file with one document per record: the record, or its text field if it is a JSON object.

    Raises:
      UserError: the file is not an ArrayRecord file, or is cut short.
    """

    __slots__ = ("_count", "_fields", "_file")

    def __init__(self, file: StoredFile, fields: TextFields) -> None:
        self._file = file
        self._fields = fields
        self._count = 0
        if file.size_bytes:
            reader = self._open()
            self._count = reader.num_records()
            self._close(reader)

    def __len__(self) -> int:
        return self._count

    def read(self, records: list[int]) -> list[str | BadRecord]:
        self._file.open().close()  # raises a clear error if the file is gone or cut short
        # Taken out while it reads, so that an error leaves no broken reader behind.
        reader = open_readers.pop(self._file.key, None) or self._open()
        texts = []
        for record in records:
            try:
                reader.seek(record)
                content = reader.read()
            except RuntimeError as error:
                # The reader cannot be used after an error.
                _close_quietly(reader)
                if names_transient_error(str(error)):
                    raise TransientError(f"{self._file.label}: {error}") from error
                reader = self._open()
                texts.append(self._bad_record(record, f"corrupt ({error}). Replace the file"))
            else:
                texts.append(self._text(record, content))
        self._close(reader)
        return texts

    def close(self) -> None:
        if reader := open_readers.pop(self._file.key, None):
            _close_quietly(reader)

    def _open(self) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        reader = ArrayRecordReader(self._file.location, _OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
        # The constructor reports no error; reading a record raises it with its text.
        if not reader.ok():
            # No error at all where the file was cut between two of its blocks of 64 KiB.
            reason, cause = "its footer is missing", None
            try:
                reader.read([0])
            except RuntimeError as error:
                if names_transient_error(str(error)):
                    raise TransientError(f"{self._file.label}: {error}") from error
                reason, cause = str(error), error
            raise UserError(
                f"{self._file.label}: not a whole ArrayRecord file ({reason}). Replace it, or leave it "
                f"out of {self._fields.config_path}.path."
            ) from cause
        return reader

    def _close(self, reader: Any) -> None:
        if self._count <= MANY_RECORDS:
            return _close_quietly(reader)
        # At the end of the dict, as the one used last; the first one goes when there are too many.
        open_readers[self._file.key] = reader
        while len(open_readers) > OPEN_READERS:
            _close_quietly(open_readers.popitem(last=False)[1])
        return None

    def _text(self, record: int, content: bytes) -> str | BadRecord:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            return self._bad_record(record, f"not UTF-8 at byte {error.start} of the record ({error.reason})")
        if self._fields.mask is None and not (self._fields.text and content.startswith(b"{")):
            return text
        way_out = (
            f"Mend it, or, where records are text as a whole, set {self._fields.config_path}.text_field=''"
        )
        parsed = text_of_json(
            content, self._fields, label=f"{self._file.label}, record {record}", way_out=way_out
        )
        # Text that happens to begin with a brace is a document, not a bad record.
        is_plain = isinstance(parsed, BadRecord) and ": no JSON" in str(parsed)
        return text if is_plain and self._fields.mask is None else parsed

    def _bad_record(self, record: int, reason: str) -> BadRecord:
        return BadRecord(f"{self._file.label}, record {record}: {reason}, {SKIP}")


def _close_quietly(reader: Any) -> None:
    with contextlib.suppress(RuntimeError):  # closing raises the error of reading again
        reader.close()
