"""Arrow streams, as Hugging Face datasets lays them on disk (`save_to_disk`): record batches, mapped into memory."""

import json
from typing import Any

import numpy as np

from jtrain.data.formats.parquet import check_column, read_grouped
from jtrain.data.formats.record import BadRecord, Records
from jtrain.data.storage import StoredFile

_FILE_MAGIC = b"ARROW1\0\0"
"""Arrow's file format is a stream behind these 8 bytes, and an index behind it that is not needed here."""

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowFile(Records):
    """One document per row of column `text_field`. A row is read from the mapped file; its neighbours are not.

    Raises:
      ValueError: no Arrow file, cut short, compressed, or no text column of that name.
    """

    __slots__ = ("_batch_at", "_file", "_first_row", "_text_field")

    def __init__(self, file: StoredFile, *, text_field: str, field: str) -> None:
        import pyarrow as pa

        self._file = file
        self._text_field = text_field
        first_row, batch_at = [0], []
        with self._map() as mapped:
            try:
                if mapped.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC:
                    mapped.seek(len(_FILE_MAGIC))
                schema = pa.ipc.read_schema(pa.ipc.read_message(mapped))
                check_column(schema, text_field, called=file.called, field=field)
                while mapped.read_at(8, position := mapped.tell()) != _END_OF_STREAM:
                    message = pa.ipc.read_message(mapped)
                    if message.type != "record batch":
                        raise ValueError(
                            f"{file.called}: holds a {message.type}, and only record batches are read. Save the "
                            "dataset without dictionary columns."
                        )
                    batch = pa.ipc.read_record_batch(message, schema)
                    if batch.num_rows and not _lies_in(batch.column(text_field), message.body):
                        raise ValueError(
                            f"{file.called}: its batches are compressed, and a row could be read only with its whole "
                            "batch. Save it uncompressed, as `save_to_disk` does, or as Parquet."
                        )
                    batch_at.append(position)
                    first_row.append(first_row[-1] + batch.num_rows)
            except (pa.ArrowException, OSError, EOFError) as error:
                raise ValueError(
                    f"{file.called}: no whole Arrow stream ({error or 'it ends early'}): cut short, or something else. "
                    f"Save it again, or leave it out of {field}.path."
                ) from error
        self._first_row = np.asarray(first_row, np.int64)
        self._batch_at = np.asarray(batch_at, np.int64)

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def read(self, records: list[int]) -> list[str | BadRecord]:
        import pyarrow as pa

        with self._map() as mapped:
            try:
                mapped.seek(len(_FILE_MAGIC) if mapped.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC else 0)
                schema = pa.ipc.read_schema(pa.ipc.read_message(mapped))

                def column_of(batch: int) -> Any:
                    mapped.seek(int(self._batch_at[batch]))
                    return pa.ipc.read_record_batch(pa.ipc.read_message(mapped), schema).column(self._text_field)

                return read_grouped(records, self._first_row, column_of, self._text_field, self._file.called)
            except (pa.ArrowException, OSError, EOFError) as error:
                raise OSError(f"{self._file.called}: cannot be read ({error}). Save the dataset again.") from error

    def _map(self) -> Any:
        import pyarrow as pa

        self._file.open().close()  # says what is wrong if it is gone or cut short
        return pa.memory_map(self._file.location)


def _lies_in(column: Any, body: Any) -> bool:
    """Whether the column's texts are where the file has them, and were not decompressed to elsewhere."""
    texts = column.buffers()[-1]
    return texts is None or texts.size == 0 or body.address <= texts.address < body.address + body.size


def saved_dataset_files(files: list[StoredFile], *, field: str) -> list[StoredFile] | None:
    """Of all files below a folder that `save_to_disk` wrote, those that hold its rows; None for any other folder.

    The folder may hold caches of earlier transforms besides, in the same format.

    Raises:
      ValueError: a folder of several splits.
      FileNotFoundError: a file of the dataset is missing.
    """
    by_name = {file.name: file for file in files}
    if "dataset_dict.json" in by_name:
        with by_name["dataset_dict.json"].open() as opened:
            splits = json.loads(opened.read())["splits"]
        raise ValueError(
            f"{field}: a dataset of several splits ({', '.join(splits)}), which would be mixed. Set it to one of them: "
            f"the folder {splits[0]!r} in there."
        )
    if not {"state.json", "dataset_info.json"} <= by_name.keys():
        return None
    with by_name["state.json"].open() as opened:
        names = [entry["filename"] for entry in json.loads(opened.read())["_data_files"]]
    if missing := [name for name in names if name not in by_name]:
        raise FileNotFoundError(f"{field}: {missing[0]} is named by state.json and not there. Save the dataset again.")
    return [by_name[name] for name in names]
