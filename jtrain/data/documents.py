"""One source as the endless numbered stream of documents that planner and loaders speak of."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int, Integer

from jtrain.data.formats import BadRecord
from jtrain.data.order import Order, order_seed
from jtrain.data.prepared import Prepared
from jtrain.data.source import Corpus, Source
from jtrain.data.tokenizer import make_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSetup:
    """All that a process must know to open a source; plain values, so it can be sent to one.

    name: in `data.sources`.
    source: with every default filled in.
    seed: of the run.
    window_bytes: see `Order`.
    decoded_cache_bytes: Parquet text kept decoded by a process, over all its sources.
    prepared: the folder that `python -m jtrain.data prepare` wrote, or None to read and tokenise now.
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
    """What the trainer has found there; another process that finds something else refuses it. None: not yet known."""


@dataclasses.dataclass(frozen=True)
class Read:
    """What became of some documents, in the order they were asked for.

    lengths: tokens of each; 0 for one that is empty, held out for evaluation, or skipped.
    ids: of all of them, one after another.
    skipped: (number, why) of the bad ones.
    """

    lengths: Int[np.ndarray, " n"]
    ids: Integer[np.ndarray, " tokens"]
    skipped: tuple[tuple[int, str], ...] = ()


class Documents:
    """Document n of a source, for n = 0, 1, 2, ... without end: another permutation of its records each epoch.

    A pure function of the setup: any process may read any documents at any time, so it does not matter to the stream
    which one does.

    Raises:
      FileNotFoundError, ValueError, OSError: the source, its tokenizer or its prepared index cannot be opened.
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
        self.prepared = None if setup.prepared is None else Prepared(Path(setup.prepared) / setup.name)
        if self.prepared is not None:
            fields = {name: getattr(setup.source, name) for name in ("format", "text_field", "text_piece_bytes")}
            made_of = {"corpus": self.corpus.fingerprint(), "tokenizer": self.tokenizer.identity, **fields}
            self.prepared.check(on_bad_record=setup.on_bad_record, **made_of)
        if setup.fingerprint is not None and (found := self.fingerprint()) != setup.fingerprint:
            raise ValueError(
                f"what lies there has changed since the run opened it (fingerprint {setup.fingerprint} then, {found} "
                "now): files were added, removed or rewritten, or this host sees others. Put them back, and run again."
            )
        self.order = Order(
            len(self.corpus),
            seed=order_seed(setup.seed, setup.name),
            group_starts=self.corpus.group_starts,
            group_bytes=self.corpus.group_bytes,  # also if prepared: the stream is the same either way
            window_bytes=setup.window_bytes,
        )

    def __len__(self) -> int:
        """Documents of an epoch, held-out and bad ones counted."""
        return len(self.corpus)

    def held_out(self, records: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which records are for evaluation: by a hash of file name and number, so it never changes."""
        if not self.setup.eval_fraction:
            return np.zeros(len(records), np.bool_)
        return self.corpus.split_positions(records) < self.setup.eval_fraction

    def lengths(self, numbers: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Tokens of each document, without reading it, and which record it is; of a prepared source."""
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
        """Reads and tokenises.

        Args:
          numbers: of the documents.
          records: which records they are, where that is known.
          skip: numbers to leave out, as bad ones.
          watch: told each document's number and record before it is read.

        Raises:
          BadRecord: one is bad, or its file is gone or cannot be read, and `data.on_bad_record` is fail.
          OSError: the prepared index cannot be read.
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
        """`file:number` of a record."""
        return self.corpus.identity_of(record)

    def eval_records(self) -> Int[np.ndarray, " records"]:
        """Held-out records, in an order that no file rules: by their hash. Looks at each record's name, in blocks."""
        found, positions = [], []
        for start in range(0, len(self.corpus), 1 << 20):
            records = np.arange(start, min(start + (1 << 20), len(self.corpus)), dtype=np.int64)
            position = self.corpus.split_positions(records)
            held_out = position < self.setup.eval_fraction
            found.append(records[held_out])
            positions.append(position[held_out])
        return np.concatenate(found)[np.argsort(np.concatenate(positions), kind="stable")]

    def read_records(self, records: Int[np.ndarray, " n"]) -> Read:
        """The same as `read`, of records whatever their order or split; for evaluation."""
        texts = []
        for item in self.corpus.read(records):
            if isinstance(item, BadRecord) and self.setup.on_bad_record == "fail":
                raise item
            texts.append("" if isinstance(item, BadRecord) else item)
        return Read(*self.tokenizer.encode_documents(texts))

    def fingerprint(self) -> str:
        """Changes whenever the same document number could stand for other tokens."""
        setup = self.setup
        parts = [self.corpus.fingerprint(), self.tokenizer.identity, setup.eval_fraction, setup.source.text_field]
        parts += [setup.source.text_piece_bytes]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Lets go of files and memory."""
        self.corpus.close()
