"""Shards of a pretokenised index, and the worker processes that write them: one file per range of records.

A shard file holds ids, lengths, a JSON object with counts and hashes, and a footer, and appears under its
name in one rename. Its contents depend on the records alone.
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

from jtrain.data.loss_mask import encode_parts, split_chunk, unlearned
from jtrain.data.pretokenized.index_format import digest
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.sources.source import Source
from jtrain.data.tokenizer import Tokenizer, encode_documents, make_tokenizer, whole_document
from jtrain.errors import FileError

# Sizes of ids, lengths and summary, and the magic, which comes last: a file that was cut short lacks it.
_FOOTER = struct.Struct("<QQQ8s")
_MAGIC = b"jtrainU1"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a process needs to build the index of one source; sent to workers by pickle.

    name: name of the source in `data.sources`.
    tokenizer, end_token: arguments of `make_tokenizer`.
    on_bad_record: fail stops at a bad record; skip leaves it out and records why.
    cache_dir: cache folder of the corpus.
    """

    name: str
    source: Source
    tokenizer: str
    end_token: str | None = None
    on_bad_record: Literal["fail", "skip"] = "fail"
    cache_dir: Path

    def open_corpus(self) -> Corpus:
        """Opens the corpus. It keeps one decoded row group at most, because the records are read in order."""
        return Corpus(
            self.source, name=self.name, cache_dir=self.cache_dir, decoded_cache_bytes=1, mask=self.mask
        )

    @property
    def mask(self) -> MaskFields | None:
        return self.source.mask_with(self.tokenizer, self.end_token, name=self.name)

    def open_tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.tokenizer, end_token=self.end_token)

    def made_of(self, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, str | int]:
        """Returns everything that decides which ids a record has, for `PreparedIndex.made_of`."""
        fields = {name: getattr(self.source, name) for name in ("format", "text_field", "text_piece_bytes")}
        if (mask := self.mask) is not None:
            fields["mask"] = str(mask)
        return {"corpus": corpus.fingerprint(), "tokenizer": tokenizer.identity, **fields}


@dataclasses.dataclass(frozen=True)
class Task:
    """One shard to write: records first to end - 1 of recipe number `source`, into `path`.

    made_of: value of `Recipe.made_of` that the corpus and tokenizer of the worker must have.
    host: name of the process that makes the shard, part of the name of the unfinished file.
    """

    source: int
    shard: int
    first: int
    end: int
    made_of: dict[str, str | int]
    path: Path
    host: str


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """Counts and hashes in a shard file, and [record, identity, reason] of each bad record that was left out.

    ignored: start and end, one after another, of each run of the shard's tokens that is not learned.
    """

    records: int
    tokens: int
    empty: int
    ids: str
    lengths: str
    skipped: list[list[Any]]
    ignored: list[int]


def write_shard(
    task: Task,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    on_bad_record: Literal["fail", "skip"],
    report: Callable[[int, int], None],
) -> None:
    """Tokenises one shard and writes its file, holding a few MB of text at a time.

    Args:
      report: called with the records and tokens done since its last call.

    Raises:
      BadRecord: a record is bad, or cannot be read, and `on_bad_record` is fail.
      OSError: writing failed; the partial file is removed.
    """
    # Not `atomic_io.replacing`: a worker of a killed build may still be writing this shard when the next
    # build's worker begins it, so each build needs a temporary file of its own.
    unfinished_path = task.path.with_name(f"{task.path.name}.{task.host}.tmp")
    ids_hash = hashlib.blake2b(digest_size=16)
    lengths = array.array("I")
    skipped: list[list[Any]] = []
    ignored: list[int] = []
    empty = tokens = 0
    texts: list[str] = []
    try:
        with open(unfinished_path, "wb") as file:

            def encode() -> None:
                nonlocal tokens
                # With a loss mask each document is encoded from border to border of its spans, one by one.
                if corpus.source.mask is None:
                    counts, ids = encode_documents(tokenizer, texts)
                else:
                    parts = [split_chunk(whole_document(tokenizer, text), 0, text) for text in texts]
                    (counts, ids), runs = encode_parts(tokenizer, parts)
                    # Runs count from the start of the batch, `tokens` is where it starts in the shard.
                    ignored.extend((unlearned(runs).astype(np.int64) + tokens).ravel().tolist())
                content = ids.astype(tokenizer.id_dtype, copy=False).data
                file.write(content)
                ids_hash.update(content)
                lengths.frombytes(counts.astype(np.uint32).tobytes())
                tokens += len(ids)
                report(len(texts), len(ids))
                # Last: the list is filled again for the next batch.
                texts.clear()

            characters = 0
            records = np.arange(task.first, task.end, dtype=np.int64)
            for record, text in zip(records.tolist(), corpus.read(records), strict=True):
                if isinstance(text, BadRecord):
                    if on_bad_record == "fail":
                        raise text
                    skipped.append([record, corpus.identity_of(record), str(text)])
                    # A record that is left out keeps its number, with 0 tokens.
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
            summary = ShardSummary(
                len(records), tokens, empty, ids_hash.hexdigest(), digest(content), skipped, ignored
            )
            summary_json = json.dumps(dataclasses.asdict(summary)).encode()
            # The ids are written; what follows is found from the footer at the end.
            ids_bytes = file.tell()
            file.write(content.data)
            file.write(summary_json)
            file.write(_FOOTER.pack(ids_bytes, content.nbytes, len(summary_json), _MAGIC))
        unfinished_path.rename(task.path)
    except BaseException:
        unfinished_path.unlink(missing_ok=True)
        raise


def read_shard(path: Path) -> tuple[ShardSummary, int, bytes] | None:
    """Returns a shard file's summary, the bytes of its ids, and its lengths; None if it is incomplete."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size < _FOOTER.size:
            return None
        file.seek(size - _FOOTER.size)
        ids_bytes, lengths_bytes, summary_bytes, magic = _FOOTER.unpack(file.read())
        # The sizes must add up: a file that was cut short may end with bytes that look like a footer.
        if magic != _MAGIC or ids_bytes + lengths_bytes + summary_bytes + _FOOTER.size != size:
            return None
        file.seek(ids_bytes)
        lengths, summary_json = file.read(lengths_bytes), file.read(summary_bytes)
    with contextlib.suppress(ValueError, TypeError):
        summary = ShardSummary(**json.loads(summary_json))
        # The ids are hashed while they are copied into the index, since they may be large.
        return (summary, ids_bytes, lengths) if digest(lengths) == summary.lengths else None
    return None


def serve(descriptor: int) -> NoReturn:
    """Main loop of a worker: receives tasks over the socket and sends results, until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    connection = Connection(descriptor)
    # Sent once: a task names its recipe by number.
    recipes: list[Recipe] = connection.recv()
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    open_source: tuple[int, Corpus, Tokenizer] | None = None
    while True:
        task = tasks.get()
        recipe = recipes[task.source]
        try:
            if open_source is None or open_source[0] != task.source:
                if open_source is not None:
                    open_source[1].close()
                # Forgotten before the next one opens, so that two corpora are never in memory at a time.
                open_source = None
                corpus, tokenizer = recipe.open_corpus(), recipe.open_tokenizer()
                # A shard of changed files would not fit those that were made before.
                if recipe.made_of(corpus, tokenizer) != task.made_of:
                    raise FileError(
                        "its files changed while they were being prepared. Run the same command again."
                    )
                open_source = task.source, corpus, tokenizer
            write_shard(
                task,
                open_source[1],
                open_source[2],
                on_bad_record=recipe.on_bad_record,
                report=lambda records, tokens: connection.send(("progress", records, tokens)),
            )
            answer = ("done",)
        # The parent words each kind of failure differently.
        except BadRecord as error:
            answer = ("bad record", str(error))
        except OSError as error:
            answer = ("error", error.errno, str(error))
        except BaseException:
            answer = ("bug", traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            # The parent is gone or has closed the connection: nobody is left to tell.
            os._exit(0)


def _receive(connection: Connection, tasks: "queue.SimpleQueue[Task]") -> NoReturn:
    """Queues incoming tasks; ends the process as soon as the parent is gone, even amid a shard."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
