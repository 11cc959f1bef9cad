"""What every format gives: documents by number, and what may be wrong with one."""

import abc
import json

import numpy as np
from jaxtyping import Int

SKIP = "or set data.on_bad_record='skip'."


class BadRecord(ValueError):
    """A record that is no UTF-8 text, or not what its format asks for; the message names file and place."""

    __module__ = "jtrain.data.formats"  # where users import it from


class Records(abc.ABC):
    """The documents of one file, by number. Reading opens the file anew: thousands of files cost no descriptors."""

    __slots__ = ()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, records: list[int]) -> list[str | BadRecord]:
        """Their texts, in the order asked; a bad one in its place. Raises OSError where the file itself fails."""

    def __getitem__(self, record: int) -> str:
        """One text. Raises BadRecord; OSError where the file is gone."""
        [text] = self.read([record])
        if isinstance(text, BadRecord):
            raise text
        return text

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        """First record of each group that is decoded as a whole, and the number of records at the end."""
        return np.asarray([0, len(self)], np.int64)

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """What reading any record of the group brings into memory; 0 where records are read one by one."""
        return np.zeros(1, np.int64)

    def close(self) -> None:  # noqa: B027 (most formats keep nothing)
        """Lets go of anything kept between reads."""


def text_of_json(line: bytes, *, text_field: str, what: str, field: str, way_out: str, place: str = "") -> str:
    """The text in `text_field` of a JSON object.

    Args:
      line: the object, as UTF-8.
      text_field: its key.
      what: where it lies, for messages.
      field: of the source, for messages.
      way_out: how to mend it, for messages.
      place: what follows `at byte N` when it is no UTF-8.

    Raises:
      BadRecord: no JSON, no object, no such field, or no text in it.
    """

    def bad(why: str) -> BadRecord:
        return BadRecord(f"{what}: {why}. {way_out}, {SKIP}")

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8 at byte {error.start}{place} ({error.reason})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise bad(f"no JSON: {error}") from error
    if not isinstance(record, dict):
        raise bad(f"a JSON {type(record).__name__}, not an object with a field {text_field!r}")
    if not isinstance(text := record.get(text_field), str):
        if text_field in record:
            raise bad(f"field {text_field!r} is {type(text).__name__}, not text")
        fields = ", ".join(map(repr, record)) or "none"
        raise bad(f"no field {text_field!r}; its fields: {fields}. Set {field}.text_field")
    if b"\\ud" in line.lower():  # an escape may spell half a character, which no encoder takes
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise bad(f"field {text_field!r} holds half a surrogate pair ({error.reason})") from error
    return text
