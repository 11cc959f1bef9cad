"""Tokenises one unit of a source, a run of records, into one file; and the life of the processes that do so.

A unit's file appears under its name in one rename: ids, lengths, a JSON object with counts and hashes, and a footer.
What it holds depends on nothing but the records.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from jtrain.data.formats import BadRecord
from jtrain.data.prepared import digest
from jtrain.data.source import Corpus, Source
from jtrain.data.tokenizer import Tokenizer, make_tokenizer

_FOOTER = struct.Struct("<QQQ8s")
_MAGIC = b"jtrainU1"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to make one source's index from. Goes to other processes by pickle.

    tokenizer, end_token: as of `make_tokenizer`.
    on_bad_record: stop, or leave it out and note it.
    cache_dir: of the corpus.
    """

    name: str
    source: Source
    tokenizer: str
    end_token: str | None = None
    on_bad_record: Literal["fail", "skip"] = "fail"
    cache_dir: Path

    def open_corpus(self) -> Corpus:
        """The records; read from first to last, so no more than one row group is kept."""
        return Corpus(self.source, name=self.name, cache_dir=self.cache_dir, decoded_cache_bytes=1)

    def open_tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.tokenizer, end_token=self.end_token)

    def made_of(self, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, str | int]:
        """What decides which ids a record has."""
        fields = {name: getattr(self.source, name) for name in ("format", "text_field", "text_piece_bytes")}
        return {"corpus": corpus.fingerprint(), "tokenizer": tokenizer.identity, **fields}


@dataclasses.dataclass(frozen=True)
class Task:
    """One unit: records first to end - 1 of recipe `source`, into `path`; `made_of` says of what, as of a Recipe."""

    source: int
    unit: int
    first: int
    end: int
    made_of: dict[str, str | int]
    path: Path


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a unit's file says of itself: counts, hashes, and [record, identity, why] of each bad record left out."""

    records: int
    tokens: int
    empty: int
    ids: str
    lengths: str
    skipped: list[list[Any]]


def write_unit(
    task: Task,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    on_bad_record: Literal["fail", "skip"],
    report: Callable[[int, int], None],
) -> None:
    """Makes the file of a unit; holds a few MB of its text at a time.

    Args:
      report: called with records and tokens done since the last call.

    Raises:
      BadRecord: by policy; a record of a file that cannot be read is one.
      OSError: writing failed; what was written is removed.
    """
    away = task.path.with_name(f"{task.path.name}.{os.getpid()}.tmp")
    hashed = hashlib.blake2b(digest_size=16)
    lengths = array.array("I")
    skipped: list[list[Any]] = []
    empty = tokens = 0
    texts: list[str] = []
    try:
        with open(away, "wb") as file:

            def encode() -> None:
                nonlocal tokens
                counts, ids = tokenizer.encode_documents(texts)
                content = ids.astype(tokenizer.id_dtype, copy=False).data
                file.write(content)
                hashed.update(content)
                lengths.frombytes(counts.astype(np.uint32).tobytes())
                tokens += len(ids)
                report(len(texts), len(ids))
                texts.clear()

            characters = 0
            records = np.arange(task.first, task.end, dtype=np.int64)
            for record, text in zip(records.tolist(), corpus.read(records), strict=True):
                if isinstance(text, BadRecord):
                    if on_bad_record == "fail":
                        raise text
                    skipped.append([record, corpus.identity_of(record), str(text)])
                    text = ""
                elif not text:
                    empty += 1
                texts.append(text)
                characters += len(text)
                if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
                    encode()
                    characters = 0
            encode()
            content = np.frombuffer(lengths, np.uint32)
            unit = Unit(len(records), tokens, empty, hashed.hexdigest(), digest(content), skipped)
            said = json.dumps(dataclasses.asdict(unit)).encode()
            ids_bytes = file.tell()
            file.write(content.data)
            file.write(said)
            file.write(_FOOTER.pack(ids_bytes, content.nbytes, len(said), _MAGIC))
        away.rename(task.path)
    except BaseException:
        away.unlink(missing_ok=True)
        raise


def read_unit(path: Path) -> tuple[Unit, int, bytes] | None:
    """What a unit's file says, the bytes of its ids, and its lengths; None if it is not whole."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size < _FOOTER.size:
            return None
        file.seek(size - _FOOTER.size)
        ids_bytes, lengths_bytes, said_bytes, magic = _FOOTER.unpack(file.read())
        if magic != _MAGIC or ids_bytes + lengths_bytes + said_bytes + _FOOTER.size != size:
            return None
        file.seek(ids_bytes)
        lengths, said = file.read(lengths_bytes), file.read(said_bytes)
    with contextlib.suppress(ValueError, TypeError):
        unit = Unit(**json.loads(said))
        return (unit, ids_bytes, lengths) if digest(lengths) == unit.lengths else None
    return None


def serve(descriptor: int) -> NoReturn:
    """A worker's life: tasks come in over the socket, what became of them goes out; its end is the worker's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    connection = Connection(descriptor)
    recipes: list[Recipe] = connection.recv()
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    opened: tuple[int, Corpus, Tokenizer] | None = None
    while True:
        task = tasks.get()
        recipe = recipes[task.source]
        try:
            if opened is None or opened[0] != task.source:
                if opened is not None:
                    opened[1].close()
                opened = None
                corpus, tokenizer = recipe.open_corpus(), recipe.open_tokenizer()
                if recipe.made_of(corpus, tokenizer) != task.made_of:
                    raise OSError("its files changed while they were prepared. Run the same command again.")
                opened = task.source, corpus, tokenizer
            write_unit(
                task,
                opened[1],
                opened[2],
                on_bad_record=recipe.on_bad_record,
                report=lambda records, tokens: connection.send(("progress", records, tokens)),
            )
            answer = ("done",)
        except BadRecord as error:
            answer = ("bad record", str(error))
        except OSError as error:
            answer = ("error", error.errno, str(error))
        except BaseException:
            answer = ("bug", traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)


def _receive(connection: Connection, tasks: "queue.SimpleQueue[Task]") -> NoReturn:
    """Also in the middle of a unit, a parent that is gone takes the worker along."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
