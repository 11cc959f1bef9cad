"""Numbered, endless stream of the documents of one source, which planner and loaders share."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int, Integer

from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.shuffle import ShuffleOrder, order_seed
from jtrain.data.sources.source import Corpus, Source
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSetup:
    """Everything that a process needs to open a source, as plain values that can be sent to it.

    name: name of the source in `data.sources`.
    source: the source, with every default filled in.
    seed: seed of the run.
    window_bytes: argument of `ShuffleOrder`.
    decoded_cache_bytes: decoded Parquet text that a process keeps, over all its sources.
    prepared: folder that `python -m jtrain.data prepare` wrote; None to read and tokenise documents during the run.
    """

    name: str
    source: Source
    tokenizer: str
    end_token: str | None
    seed: int
    eval_fraction: float
    on_bad_record: Literal["fail", "skip"]
    window_bytes: int
    decoded_cache_bytes: int
    cache_dir: str
    prepared: str | None
    fingerprint: str | None = None
    """Fingerprint that the trainer found; a process that finds another one refuses the source. None: not known yet."""


@dataclasses.dataclass(frozen=True)
class Read:
    """Result of reading some documents, in the order of the request.

    lengths: tokens of each document; 0 if it is empty, held out for evaluation, or skipped.
    ids: token ids of all documents, one after another.
    skipped: (number, reason) of each bad document that was left out.
    """

    lengths: Int[np.ndarray, " n"]
    ids: Integer[np.ndarray, " tokens"]
    skipped: tuple[tuple[int, str], ...] = ()


class DocumentStream:
    """Stream of the documents of one source, numbered 0, 1, 2, ... without end; each epoch is a new permutation.

    The stream is a pure function of the setup: any process may read any documents at any time and finds the same.

    Raises:
      UserError: the source, its tokenizer or its prepared index cannot be opened.
    """

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup
        self.tokenizer = make_tokenizer(setup.tokenizer, end_token=setup.end_token)
        self.corpus = Corpus(
            setup.source,
            name=setup.name,
            cache_dir=Path(setup.cache_dir),
            decoded_cache_bytes=setup.decoded_cache_bytes,
        )
        self.prepared = None if setup.prepared is None else PreparedIndex(Path(setup.prepared) / setup.name)
        if self.prepared is not None:
            fields = {name: getattr(setup.source, name) for name in ("format", "text_field", "text_piece_bytes")}
            made_of = {"corpus": self.corpus.fingerprint(), "tokenizer": self.tokenizer.identity, **fields}
            self.prepared.check(on_bad_record=setup.on_bad_record, **made_of)
        if setup.fingerprint is not None and (found := self.fingerprint()) != setup.fingerprint:
            raise UserError(
                f"its files changed since the run opened them (fingerprint {setup.fingerprint} then, {found} "
                "now): files were added, removed or rewritten, or this host sees others. Restore them and run again."
            )
        self.order = ShuffleOrder(
            len(self.corpus),
            seed=order_seed(setup.seed, setup.name),
            group_starts=self.corpus.group_starts,
            group_bytes=self.corpus.group_bytes,  # for prepared sources too, so that their stream is the same
            window_bytes=setup.window_bytes,
        )

    def __len__(self) -> int:
        """Number of documents in an epoch, including held-out and bad ones."""
        return len(self.corpus)

    def held_out(self, records: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """True for records held out for evaluation, chosen for ever by a hash of file name and number."""
        if not self.setup.eval_fraction:
            return np.zeros(len(records), np.bool_)
        return self.corpus.split_positions(records) < self.setup.eval_fraction

    def lengths(self, numbers: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Returns the tokens of each document, without reading it, and its record; for prepared sources only."""
        assert self.prepared is not None
        records = self.order.records(numbers)
        return np.where(self.held_out(records), 0, self.prepared.lengths(records)).astype(np.int32), records

    def read(
        self,
        numbers: Int[np.ndarray, " n"],
        *,
        records: Int[np.ndarray, " n"] | None = None,
        skip: Collection[int] = (),
        watch: Callable[[int, int], Any] = lambda number, record: None,
    ) -> Read:
        """Reads and tokenises documents.

        Args:
          numbers: numbers of the documents.
          records: their records, if the caller knows them.
          skip: document numbers to leave out, like bad ones.
          watch: called with the number and record of each document before it is read.

        Raises:
          BadRecord: a record is bad, or its file is gone or cannot be read, and `data.on_bad_record` is fail.
          FileError: the prepared index cannot be read.
        """
        if records is None:
            records = self.order.records(numbers)
        wanted = ~self.held_out(records)
        skipped = [(number, "its loader did not survive it") for number in numbers.tolist() if number in skip]
        if skip:
            wanted &= ~np.isin(numbers, list(skip))
        lengths = np.zeros(len(numbers), np.int32)
        if self.prepared is not None:
            if len(numbers):
                watch(int(numbers[0]), int(records[0]))
            lengths[wanted], ids = self.prepared.read(records[wanted])
            if self.prepared.num_skipped:
                bad = self.prepared.skipped
                pairs = zip(numbers[wanted].tolist(), records[wanted].tolist(), strict=True)
                skipped += [(number, bad[record]) for number, record in pairs if record in bad]
            return Read(lengths, ids, tuple(skipped))
        places = np.flatnonzero(wanted)
        texts: list[str] = []
        reading = self.corpus.read(records[places])
        for place in places.tolist():
            watch(int(numbers[place]), int(records[place]))
            item = next(reading)
            if isinstance(item, BadRecord):
                if self.setup.on_bad_record == "fail":
                    raise item
                skipped.append((int(numbers[place]), str(item)))
                item = ""
            texts.append(item)
        lengths[places], ids = self.tokenizer.encode_documents(texts)
        return Read(lengths, ids, tuple(skipped))

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record."""
        return self.corpus.identity_of(record)

    def eval_records(self) -> Int[np.ndarray, " records"]:
        """Returns the held-out records, ordered by their hash so that files are mixed; hashes every record's name."""
        found, positions = [], []
        for start in range(0, len(self.corpus), 1 << 20):
            records = np.arange(start, min(start + (1 << 20), len(self.corpus)), dtype=np.int64)
            position = self.corpus.split_positions(records)
            held_out = position < self.setup.eval_fraction
            found.append(records[held_out])
            positions.append(position[held_out])
        return np.concatenate(found)[np.argsort(np.concatenate(positions), kind="stable")]

    def read_records(self, records: Int[np.ndarray, " n"]) -> Read:
        """Reads and tokenises records, held out or not, in the given order; for evaluation."""
        texts = []
        for item in self.corpus.read(records):
            if isinstance(item, BadRecord) and self.setup.on_bad_record == "fail":
                raise item
            texts.append("" if isinstance(item, BadRecord) else item)
        return Read(*self.tokenizer.encode_documents(texts))

    def fingerprint(self) -> str:
        """Returns a hash that changes whenever a document number could stand for other tokens."""
        setup = self.setup
        parts = [self.corpus.fingerprint(), self.tokenizer.identity, setup.eval_fraction, setup.source.text_field]
        parts += [setup.source.text_piece_bytes]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Closes files and frees memory."""
        self.corpus.close()
