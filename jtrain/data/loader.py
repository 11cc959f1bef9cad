"""The source stage: documents in a seeded, endless order, read and tokenised by number."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from jtrain.data.formats import BadRecord
from jtrain.data.order import shuffled
from jtrain.data.packing import LANES, PackerState, Piece, RowPacker
from jtrain.data.source import Corpus
from jtrain.data.tokenizer import ByteTokenizer, HFTokenizer, make_tokenizer
from jtrain.dims import Batch

_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedText:
    """Text files, tokenised and packed into rows.

    path: a file, a folder, a glob (`**` for any depth), or `stdlib`, the Python standard library's own source text.
      `.jsonl` holds a document per line and `.parquet` one per row, in `text_field`; any other file is one document.
    seq_len: tokens per row.
    global_batch: rows per step, over all devices.
    tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`.
    end_token: the token that ends a document, where the tokenizer's files do not say.
    text_piece_bytes: a text file longer than this is read as several documents, so that one big file can be
      shuffled too. Raise it for contexts that long.
    eval_fraction: documents held out of training, chosen by a hash of file name and number; 0 for none.
    eval_batches: batches of an evaluation, at most.
    on_bad_record: what to do with one that is not UTF-8, or no JSON, or without the field: stop, or skip and count.
    """

    path: str
    seq_len: int
    global_batch: int
    tokenizer: str = "bytes"
    end_token: str | None = None
    text_field: str = "text"
    text_piece_bytes: int = 1 << 16
    eval_fraction: float = 0.01
    eval_batches: int = 8
    on_bad_record: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        for field, least in (("seq_len", 2), ("global_batch", 1), ("text_piece_bytes", 16), ("eval_batches", 1)):
            if (value := getattr(self, field)) < least:
                raise ValueError(f"data.{field}={value} must be at least {least}. Set data.{field}.")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(
                f"data.eval_fraction={self.eval_fraction} must be at least 0 (nothing held out) and below 1. "
                "Set data.eval_fraction."
            )
        if self.on_bad_record not in ("fail", "skip"):
            raise ValueError(f"data.on_bad_record={self.on_bad_record!r} must be 'fail' or 'skip'.")


def open_dataset(spec: PackedText, *, seed: int) -> "TextDataset":
    """Finds the files, splits their documents into train and held-out, and checks that either gives a row.

    Reads no more of the text than that check needs, except that JSON lines files are searched for line ends (1 GB/s).

    Raises:
      FileNotFoundError, ValueError: nothing to read, or not enough; the message names the field and the numbers.
    """
    return TextDataset(spec, seed=seed)


class TextDataset:
    """Documents of a corpus, in train and held-out batches of packed rows.

    Which tokens batch k holds is a pure function of the spec, the seed and k: no thread, process or clock has a say.
    With several processes every one of them builds the same global batch, and `put_batch` keeps its own rows; the
    work is repeated per process, in exchange for no communication at all.

    Attributes:
      tokenizer: for its ids and vocabulary.
      corpus: the records, by number.
      train_records: their numbers on the training side of the split, ascending.
      eval_records: the same on the held-out side, in the order of evaluation.
    """

    def __init__(self, spec: PackedText, *, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self.tokenizer: ByteTokenizer | HFTokenizer = make_tokenizer(spec.tokenizer, end_token=spec.end_token)
        self.corpus = Corpus(spec.path, text_field=spec.text_field, text_piece_bytes=spec.text_piece_bytes)
        self._skipped: set[int] = set()
        position = self.corpus.split_positions()
        held_out = position < spec.eval_fraction
        self.train_records = np.flatnonzero(~held_out)
        # By position, a hash: the first batches of a large held-out split must not be those of one file.
        eval_records = np.flatnonzero(held_out)
        self.eval_records = eval_records[np.argsort(position[eval_records], kind="stable")]
        self._check_size("training", self.train_records)
        if spec.eval_fraction:
            self._check_size("evaluation", self.eval_records)

    @property
    def skipped(self) -> int:
        """Bad records met and left out so far, each counted once; always 0 unless on_bad_record is `skip`."""
        return len(self._skipped)

    def describe(self) -> str:
        """One line for the plan."""
        return (
            f"{self.spec.path}: {len(self.corpus):,} documents in {len(self.corpus.names):,} files, "
            f"{self.corpus.size_bytes / 2**20:,.1f} MiB; {len(self.train_records):,} to train on, "
            f"{len(self.eval_records):,} held out; vocabulary {self.tokenizer.vocab_size:,}"
        )

    def train_batches(self, start_state: dict[str, Any] | None = None) -> "BatchIterator":
        """Endless batches of `global_batch` rows, from the first one or from a saved state.

        Raises:
          ValueError: the state is of another seed, corpus or tokenizer, so the run would not be the same run.
        """
        packer = RowPacker(
            self._train_ids,
            seq_len=self.spec.seq_len,
            lanes=min(LANES, len(self.train_records)),  # more would read one document several times side by side
            epoch_documents=len(self.train_records),
        )
        identity = {"version": _STATE_VERSION, "seed": self.seed, "corpus": self._fingerprint()}
        if start_state is not None:
            for key, here in identity.items():
                if (saved := start_state.get(key)) != here:
                    raise ValueError(
                        f"the data state was saved with {key}={saved!r}, but here it is {here!r}: the batches that "
                        "follow would not be those of the unbroken run. Put back the files of data.path, "
                        "data.tokenizer, data.eval_fraction and seed as they were, or start in a new --workdir."
                    )
            packer.restore(
                PackerState(
                    row=start_state["row"], next_document=start_state["next_document"], lanes=start_state["lanes"]
                )
            )
        return BatchIterator(packer, self.spec.global_batch, identity)

    def eval_batches(self) -> Iterator[Batch]:
        """The held-out batches: the same list each time, at most `eval_batches`, the last one padded, none repeated.

        Raises:
          ValueError: nothing is held out.
        """
        if not self.spec.eval_fraction:
            raise ValueError("data.eval_fraction=0 holds nothing out to evaluate on. Set data.eval_fraction.")
        count = len(self.eval_records)
        packer = RowPacker(
            lambda n: self._ids(int(self.eval_records[n])),
            seq_len=self.spec.seq_len,
            lanes=min(LANES, count),
            count=count,
            epoch_documents=count,
        )
        return self._take_eval(packer)

    def _take_eval(self, packer: RowPacker) -> Iterator[Batch]:
        for _ in range(self.spec.eval_batches):
            if packer.exhausted:
                return
            yield packer.take(self.spec.global_batch)

    def _train_ids(self, document: int) -> Int[np.ndarray, " tokens"]:
        """Ids of a document by its number in the endless training order."""
        return self._train_documents[document]

    def train_document_identity(self, document: int) -> str:
        """`file:number` of a document by its number in the endless training order."""
        return self.corpus.identity_of(self._train_order[document])

    @functools.cached_property
    def _train_order(self) -> Any:
        """Record numbers as a Grain dataset. Made at first use, so on the prefetch thread: the import takes 0.9 s."""
        order_seed = int.from_bytes(hashlib.blake2b(f"{self.seed}/order".encode(), digest_size=4).digest())
        return shuffled(self.train_records, self.corpus, seed=order_seed)

    @functools.cached_property
    def _train_documents(self) -> Any:
        """The whole source stage: the same records, read and tokenised."""
        return self._train_order.map(self._ids)

    def _ids(self, record: int) -> Int[np.ndarray, " tokens"]:
        """A record as a document's ids; none for an empty or a skipped one."""
        try:
            return self.tokenizer.encode_document(self.corpus[record])
        except BadRecord:
            if self.spec.on_bad_record == "fail":
                raise
            self._skipped.add(record)
            return np.empty(0, np.int32)

    def _check_size(self, purpose: str, records: Int[np.ndarray, " records"]) -> None:
        """Refuses a split that does not fill one row. Reads only as many documents as that takes."""
        tokens = 0
        for record in records:
            tokens += len(self._ids(int(record)))
            if tokens >= self.spec.seq_len:
                return
        spec, skipped = self.spec, f" ({self.skipped} bad ones skipped)" if self.skipped else ""
        raise ValueError(
            f"data.path={spec.path!r} is too small: of its {len(self.corpus)} documents{skipped}, "
            f"data.eval_fraction={spec.eval_fraction} leaves {len(records)} for {purpose}, with {tokens} tokens, and "
            f"one row takes data.seq_len={spec.seq_len}. Add text, lower data.seq_len, "
            + ("or lower data.eval_fraction." if purpose == "training" else "raise data.eval_fraction, or set it to 0.")
        )

    def _fingerprint(self) -> str:
        """Changes whenever the same document number could stand for other tokens."""
        spec = self.spec
        parts = [self.corpus.fingerprint(), self.tokenizer.identity, spec.eval_fraction, spec.text_field]
        return hashlib.blake2b(json.dumps([*parts, spec.text_piece_bytes]).encode(), digest_size=8).hexdigest()


class BatchIterator:
    """Endless global batches, numpy int32 of shape [global_batch, seq_len]."""

    def __init__(self, packer: RowPacker, global_batch: int, identity: dict[str, Any]) -> None:
        self._packer = packer
        self._global_batch = global_batch
        self._identity = identity

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        return self._packer.take(self._global_batch)

    @property
    def pieces(self) -> list[Piece]:
        """Which document each segment of the last batch came from, by its number in the training order."""
        return self._packer.pieces

    def state(self) -> dict[str, Any]:
        """The next batch, the one not yet returned, as a few hundred bytes of JSON; `train_batches` goes on from it."""
        return {**self._identity, **self._packer.state()}
