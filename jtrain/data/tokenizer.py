"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`.

A document is encoded with its borders marked, `[begin] text [end]`: the begin id lets the first token be predicted and
sampling start from nothing, the end id teaches the model where to stop. A prompt is encoded without either.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt

type Ids = Int[np.ndarray, " tokens"]
type Documents = tuple[Int[np.ndarray, " documents"], UInt[np.ndarray, " tokens"]]
"""Tokens of each document, int32, and the ids of all of them one after another, in the tokenizer's `id_dtype`."""


def smallest_id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The unsigned type that holds every id: 1, 2 or 4 bytes for each, on disk and between processes."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline and sampling need. Ids are int32 in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Of the ids that `encode_documents` gives: the smallest unsigned type that holds `vocab_size`."""
        ...

    @property
    def begin_id(self) -> int | None:
        """Starts a document; None where the tokenizer has no such id."""
        ...

    @property
    def end_id(self) -> int:
        """Ends a document: where sampling stops."""
        ...

    @property
    def identity(self) -> str:
        """Differs whenever the same text could give other ids; stored with the data state."""
        ...

    def encode(self, text: str) -> Ids:
        """Ids of `text` alone, as for a prompt."""
        ...

    def encode_document(self, text: str) -> Ids:
        """Ids of a whole document with its borders; no ids at all for an empty one."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Documents:
        """The same ids for many documents at once: quicker, and smaller."""
        ...

    def decode(self, ids: Sequence[int] | Ids) -> str: ...


class ByteTokenizer:
    """One id per UTF-8 byte; byte 0 is the border on both sides of a document.

    Byte 0 costs no extra id, so the vocabulary stays 256: a power of two, one uint8 per id on disk, and a head that
    splits over any mesh. Nothing is lost by it: no text file holds a NUL (its presence is how tools tell that a file
    is binary). A NUL that is in a text all the same comes back from `decode` as it was, and looks like a border to the
    model.
    """

    vocab_size = 256
    begin_id = 0
    end_id = 0
    identity = "bytes"
    id_dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_document(self, text: str) -> Ids:
        if not text:
            return np.empty(0, np.int32)
        return np.frombuffer(b"\0" + text.encode("utf-8") + b"\0", np.uint8).astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> Documents:
        """As `encode_document` for each, over 1 GB/s: two copies, since byte 0 parts the documents already."""
        # Each by itself: joined as text, one character beyond ASCII would widen all of them to 4 bytes.
        encoded = [text.encode("utf-8") for text in texts]
        lengths = [len(content) + 2 if content else 0 for content in encoded]
        full = [content for content in encoded if content]
        joined = b"".join((b"\0", b"\0\0".join(full), b"\0")) if full else b""
        return np.asarray(lengths, np.int32), np.frombuffer(joined, np.uint8)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text; bytes that are no UTF-8 (sampling may stop inside a character) become U+FFFD."""
        return np.asarray(ids, np.int64).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


_KNOWN_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


class HFTokenizer:
    """A `tokenizer.json` of Hugging Face `tokenizers`.

    The begin id is the one that the file's own template puts first (Llama 3 has one, Qwen3 none). The end id is, in
    this order: `end_token`; `eos_token` of the `tokenizer_config.json` beside the file; the one well-known name in the
    vocabulary. Text that spells a special token, `<|endoftext|>`, is encoded as the plain characters it is: a corpus
    must not be able to end its own documents.

    Args:
      path: the file, or the folder that holds it.
      end_token: the token that ends a document, as it is written in the vocabulary.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no tokenizer in it, or its end token is unknown or ambiguous.
    """

    def __init__(self, path: str | Path, *, end_token: str | None = None) -> None:
        from tokenizers import Tokenizer as RustTokenizer  # lazy: the byte tokenizer needs none of it

        file = Path(path).expanduser()
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"data.tokenizer={str(path)!r}: no such file; looked for {file.absolute()}. "
                "Set data.tokenizer to a tokenizer.json, or to 'bytes'."
            )
        content = file.read_bytes()
        try:
            self._rust: Any = RustTokenizer.from_buffer(content)
        except Exception as error:  # the Rust side raises plain Exception, and ValueError for some files
            raise ValueError(
                f"data.tokenizer={str(path)!r} is no tokenizer.json that the tokenizers package reads: {error}"
            ) from error
        self._rust.encode_special_tokens = True
        vocabulary: dict[str, int] = self._rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """Largest id + 1; ids may have gaps."""
        self.id_dtype = smallest_id_dtype(self.vocab_size)
        self.end_id = _end_id(str(path), file.parent / "tokenizer_config.json", vocabulary, end_token)
        marked, plain = self._rust.encode("a").ids, self.encode("a").tolist()
        self.begin_id = marked[0] if marked and marked[:1] != plain[:1] else None
        self.identity = f"{hashlib.blake2b(content, digest_size=8).hexdigest()}/{self.end_id}"

    def encode(self, text: str) -> Ids:
        # Not `encode`, which holds the GIL: a thread that tokenised would stop the training loop, 2.5 s for 1 MB of
        # text where this one stops it 30 ms (tokenizers 0.23). The same ids; `fast` leaves out offsets, 1.2x quicker.
        return np.asarray(self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def encode_document(self, text: str) -> Ids:
        if not text:
            return np.empty(0, np.int32)
        begin = [] if self.begin_id is None else [self.begin_id]
        return np.concatenate([begin, self.encode(text), [self.end_id]], dtype=np.int32, casting="unsafe")

    def encode_documents(self, texts: Sequence[str]) -> Documents:
        """As `encode_document` for each. Takes as many threads as the tokenizers package may (RAYON_NUM_THREADS)."""
        begin = [] if self.begin_id is None else [self.begin_id]
        parts = [np.empty(0, self.id_dtype)]
        lengths = np.zeros(len(texts), np.int32)
        full = [i for i, text in enumerate(texts) if text]
        encoded = self._rust.encode_batch_fast([texts[i] for i in full], add_special_tokens=False)
        for i, one in zip(full, encoded, strict=True):
            parts.append(np.asarray([*begin, *one.ids, self.end_id], self.id_dtype))
            lengths[i] = len(parts[-1])
        return lengths, np.concatenate(parts)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text, without special tokens."""
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=True)


def _end_id(path: str, config: Path, vocabulary: dict[str, int], end_token: str | None) -> int:
    """The id that ends a document. Raises ValueError where it is unknown or ambiguous."""
    where = "data.end_token"
    if end_token is None and config.is_file():
        where = f"eos_token of {config}"
        try:
            declared = json.loads(config.read_text()).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{config} is no JSON object ({error}). Mend or remove it.") from error
        end_token = declared.get("content") if isinstance(declared, dict) else declared
    if end_token is not None:
        if end_token not in vocabulary:
            raise ValueError(
                f"{where}={end_token!r} is not one of the {len(vocabulary)} tokens of data.tokenizer={path!r}. "
                "Set data.end_token to the token that ends a document."
            )
        return vocabulary[end_token]
    known = [token for token in _KNOWN_END_TOKENS if token in vocabulary]
    if len(known) != 1:
        found = f"several that could be it: {', '.join(known)}" if known else f"none of {', '.join(_KNOWN_END_TOKENS)}"
        raise ValueError(
            f"data.tokenizer={path!r} does not say which token ends a document: there is no eos_token in a "
            f"tokenizer_config.json beside it, and it has {found}. Set data.end_token."
        )
    return vocabulary[known[0]]


def make_tokenizer(name: str, *, end_token: str | None = None) -> ByteTokenizer | HFTokenizer:
    """`bytes`, or the path of a `tokenizer.json` or of the folder that holds it.

    Raises:
      ValueError, FileNotFoundError: as `HFTokenizer`; or an end token given for bytes.
    """
    if name != "bytes":
        return HFTokenizer(name, end_token=end_token)
    if end_token is not None:
        raise ValueError(
            f"data.end_token={end_token!r} has no meaning for data.tokenizer='bytes', where byte 0 ends a document. "
            "Remove data.end_token."
        )
    return ByteTokenizer()
