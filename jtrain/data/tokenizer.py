"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`.

A document is encoded with its borders marked, `[begin] text [end]`. The begin id makes the first token of the
text a target as well and lets sampling start from an empty prompt; the end id teaches the model to stop. A
prompt is encoded without either.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer, UInt

from jtrain.data.end_token import find_end_id
from jtrain.data.tokenizer_files import BYTES, BYTES_CHAT, folder_of
from jtrain.errors import FileError, UserError

type Ids = Int[np.ndarray, " tokens"]
"""Ids of the tokens of a text."""

type EncodedDocuments = tuple[Int[np.ndarray, " documents"], UInt[np.ndarray, " tokens"]]
"""Tokens of each document (int32), and the ids of all documents, end to end, in the `id_dtype`."""


type MarkedIds = tuple[Ids, list[int]]
"""Ids of a text, and the number of ids before each of its borders."""


class TextChunk(NamedTuple):
    """Part of a document: UTF-8 bytes of its text, and whether its begin and end ids belong to this part."""

    content: bytes
    begins: bool
    ends: bool


def smallest_id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest unsigned dtype that holds every id: 1, 2 or 4 bytes, on disk and on the way."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers for the data pipeline and sampling. Ids are int32 in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Dtype of the ids that `encode_chunks` returns: the smallest unsigned one that holds all of them."""
        ...

    @property
    def begin_id(self) -> int | None:
        """Id that starts a document; None if the tokenizer has none."""
        ...

    @property
    def end_id(self) -> int:
        """Id that ends a document, at which sampling stops."""
        ...

    @property
    def identity(self) -> str:
        """Text that changes whenever the same text could give other ids; stored in the state of the data."""
        ...

    def encode(self, text: str) -> Ids:
        """Returns the ids of `text` without begin and end, as for a prompt."""
        ...

    def encode_chunks(self, chunks: Sequence[TextChunk]) -> EncodedDocuments:
        """Returns the tokens of each chunk and the ids of all, with the border ids that belong to them.

        RAYON_NUM_THREADS sets the number of threads of a Hugging Face tokenizer.
        """
        ...

    def encode_marked(self, texts: Sequence[str], borders: Sequence[Sequence[int]]) -> list[MarkedIds]:
        """Returns the ids of texts in which special tokens are spelled, each with the number of ids before
        each of its borders, in characters.

        No token lies on both sides of a border: a text in which one would is cut there.
        """
        ...

    def spell(self, token_id: int) -> str:
        """Returns a token as its vocabulary spells it, special tokens included."""
        ...

    def text_bytes(self, ids: Integer[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"] | None:
        """Returns the UTF-8 bytes of text of each id, 0 for begin and end; None if ids do not tell.

        The bytes of a chunk's ids add up to those of its text, as the tokenizer normalises it (Unicode NFC,
        say).
        """
        ...

    def decode(self, ids: Sequence[int] | Ids, *, specials: bool = False) -> str:
        """Returns the text, with special tokens as they are spelled if `specials`."""
        ...


class ByteTokenizer:
    """Tokenizer with one id per UTF-8 byte; byte 0 both begins and ends a document.

    Byte 0 costs no extra id, so the vocabulary stays 256: a power of two, one uint8 per id on disk, and a
    head that splits over any mesh. Text files hold no NUL: its presence is how tools recognise binary files.
    If a text does hold one, `decode` returns it unchanged, and to the model it looks like the border of a
    document.
    """

    vocab_size = 256
    begin_id = 0
    end_id = 0
    identity = "bytes"
    id_dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_chunks(self, chunks: Sequence[TextChunk]) -> EncodedDocuments:
        parts: list[bytes] = []
        lengths: list[int] = []
        for content, begins, ends in chunks:
            if begins:
                parts.append(b"\0")
            parts.append(content)
            if ends:
                parts.append(b"\0")
            lengths.append(len(content) + begins + ends)
        return np.asarray(lengths, np.int32), np.frombuffer(b"".join(parts), np.uint8)

    def encode_marked(self, texts: Sequence[str], borders: Sequence[Sequence[int]]) -> list[MarkedIds]:
        return [
            # Borders are in characters, and ids are bytes.
            (self.encode(text), [len(text[:border].encode("utf-8")) for border in borders_of_text])
            for text, borders_of_text in zip(texts, borders, strict=True)
        ]

    def spell(self, token_id: int) -> str:
        return chr(token_id) if token_id < 128 else f"\\x{token_id:02x}"

    def text_bytes(self, ids: Integer[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"] | None:
        """Returns 1 for each id but 0, which counts as a border also where a text holds a NUL."""
        return (ids != 0).astype(np.int32)

    def decode(self, ids: Sequence[int] | Ids, *, specials: bool = False) -> str:
        """Returns the text; bytes that are not UTF-8 become U+FFFD, as sampling may stop in a character."""
        return np.asarray(ids, np.int64).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


_FALLBACK_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Spelling of a single byte in vocabularies in the style of SentencePiece."""

_PROBE = "The  cat's\n\tna\u00efve Caf\u00e9: \u4f60\u597d, 1234 \U0001f642 (end)."
"""Text with two spaces, capitals, line ends and characters of two, three and four bytes."""


class HFTokenizer:
    """Tokenizer of a `tokenizer.json`, through the package Hugging Face `tokenizers`.

    The begin id is the one that the file's own template puts first (Llama 3 has one, Qwen3 none). The end id
    is the first of these that exists: `end_token`; `eos_token` of the `tokenizer_config.json` beside the
    file; the only well-known end token in the vocabulary. Text that spells a special token such as
    `<|endoftext|>` is encoded as plain characters, because a corpus must not be able to end its own
    documents.

    Args:
      path: the file, or the folder that holds it.
      end_token: token that ends a document, as the vocabulary spells it.

    Raises:
      FileError: the file does not exist.
      UserError: the file is not a tokenizer, or its end token is unknown or ambiguous.
    """

    def __init__(self, path: str | Path, *, end_token: str | None = None) -> None:
        from tokenizers import Tokenizer as RustTokenizer  # lazy: the byte tokenizer needs none of it

        file = Path(path).expanduser()
        if file.is_dir():
            # Folders as Hugging Face writes them hold more than this file.
            file /= "tokenizer.json"
        if not file.is_file():
            raise FileError(
                f"data.tokenizer={str(path)!r}: no such file; looked for {file.absolute()}. "
                "Set data.tokenizer to a tokenizer.json, or to 'bytes'."
            )
        content = file.read_bytes()
        try:
            self._rust: Any = RustTokenizer.from_buffer(content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust raises plain Exception, ValueError for some files, and panics
            raise UserError(
                f"data.tokenizer={str(path)!r} is not a tokenizer.json that the tokenizers package can read: "
                f"{error}"
            ) from error
        # Text that spells a special token is encoded as plain characters; see the class.
        self._rust.encode_special_tokens = True
        vocabulary: dict[str, int] = self._rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """Largest id + 1; ids may have gaps."""
        # A token takes more than one byte of the file, so only a damaged file has larger ids. Refused, as
        # tables have a row per id.
        if not 0 < self.vocab_size <= len(content):
            raise UserError(
                f"data.tokenizer={str(path)!r}: a file of {len(content):,} bytes with {len(vocabulary):,} "
                f"tokens, the largest id {self.vocab_size - 1:,}. Export the tokenizer again, or set "
                "data.tokenizer to another."
            )
        self.id_dtype = smallest_id_dtype(self.vocab_size)
        self.end_id = find_end_id(str(path), file.parent / "tokenizer_config.json", vocabulary, end_token)
        ids_with_template, plain_ids = self._rust.encode("a").ids, self.encode("a").tolist()
        # An id that the file's template puts first and a plain text does not begin with.
        self.begin_id = (
            ids_with_template[0] if ids_with_template and ids_with_template[:1] != plain_ids[:1] else None
        )
        # With the end id, which another `end_token` changes for the same file.
        self.identity = f"{hashlib.blake2b(content, digest_size=8).hexdigest()}/{self.end_id}"

    def encode(self, text: str) -> Ids:
        # `encode` holds the GIL: on another thread it would stop the training loop for 2.5 s per MB of text,
        # this call for 30 ms (tokenizers 0.23). The ids are the same; `fast` leaves out offsets and is 1.2x
        # faster.
        return np.asarray(self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def encode_chunks(self, chunks: Sequence[TextChunk]) -> EncodedDocuments:
        # An empty array first: without chunks np.concatenate would refuse the empty list.
        parts = [np.empty(0, self.id_dtype)]
        lengths = np.zeros(len(chunks), np.int32)
        encoded = self._rust.encode_batch_fast(
            [c.content.decode("utf-8") for c in chunks], add_special_tokens=False
        )
        for i, (chunk, encoding) in enumerate(zip(chunks, encoded, strict=True)):
            begin = [self.begin_id] if chunk.begins and self.begin_id is not None else []
            parts.append(np.asarray([*begin, *encoding.ids, *[self.end_id] * chunk.ends], self.id_dtype))
            lengths[i] = len(parts[-1])
        return lengths, np.concatenate(parts)

    def encode_marked(self, texts: Sequence[str], borders: Sequence[Sequence[int]]) -> list[MarkedIds]:
        # A property of the tokenizer and no argument; one thread encodes at a time.
        self._rust.encode_special_tokens = False
        try:
            encodings = self._rust.encode_batch(list(texts), add_special_tokens=False)
            return [
                self._cut_at(text, encoding, list(borders_of_text))
                for text, encoding, borders_of_text in zip(texts, encodings, borders, strict=True)
            ]
        finally:
            self._rust.encode_special_tokens = True

    def _cut_at(self, text: str, encoding: Any, borders: list[int]) -> MarkedIds:
        """Returns the ids of an encoded text, encoded anew where a token lies on both sides of a border."""
        spans = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        cuts = [b for b in borders if ((spans[:, 0] < b) & (spans[:, 1] > b)).any()]
        if not cuts:
            # Tokens that stand for parts of one character all have the character's span.
            positions = [int((spans[:, 0] < border).sum()) for border in borders]
            return np.asarray(encoding.ids, np.int32), positions
        ids, positions = [np.empty(0, np.int32)], []
        edges = [0, *cuts, len(text)]
        for start, end in itertools.pairwise(edges):
            part = self._rust.encode(text[start:end], add_special_tokens=False)
            first, inner = sum(map(len, ids)), np.asarray(part.offsets, np.int64).reshape(-1, 2)[:, 0]
            # A border at the end of this part is the first of the next one, or of the text's end.
            inner_borders = [b for b in borders if start <= b < end or b == end == len(text)]
            positions += [first + int((inner < border - start).sum()) for border in inner_borders]
            ids.append(np.asarray(part.ids, np.int32))
        return np.concatenate(ids), positions

    def spell(self, token_id: int) -> str:
        text = self._rust.decode([token_id], skip_special_tokens=False)
        # A token may be a part of a character.
        return text if text and "\ufffd" not in text else self._rust.id_to_token(token_id) or ""

    def text_bytes(self, ids: Integer[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"] | None:
        """Returns bytes from a table by id; None if a text that has the difficult cases does not add up.

        Tokenizers that lower-case text, drop spaces or know no rare characters do not add up. A space that
        the tokenizer itself puts before a document is not counted.
        """
        if self._bytes_of_id is None:
            return None
        # A copy of the table's entries, so it may be changed below.
        sizes = self._bytes_of_id[ids]
        if self.begin_id is not None:
            # The text after a begin id starts with the tokenizer's own space, which is not the user's.
            sizes[1:][ids[:-1] == self.begin_id] -= self._added_bytes
        return sizes

    @functools.cached_property
    def _added_bytes(self) -> int:
        """Bytes of the space that the tokenizer puts before a text, 0 or 1."""
        # Less the letter itself.
        return int(self._table[self.encode("a")].sum()) - 1

    @functools.cached_property
    def _bytes_of_id(self) -> Int[np.ndarray, " vocabulary"] | None:
        # The probe has the cases in which spellings and text differ: if it adds up, other texts do.
        counted = int(self._table[self.encode(_PROBE)].sum()) - self._added_bytes
        return self._table if counted == len(_PROBE.encode("utf-8")) else None

    @functools.cached_property
    def _table(self) -> Int[np.ndarray, " vocabulary"]:
        """Bytes of each id, by the spelling of its token and the tokenizer's decoder."""
        from tokenizers import pre_tokenizers

        decoder = json.dumps(json.loads(self._rust.to_str())["decoder"])
        byte_level = set(pre_tokenizers.ByteLevel.alphabet()) if '"ByteLevel"' in decoder else None
        special = {i for i, token in self._rust.get_added_tokens_decoder().items() if token.special}
        table = np.zeros(self.vocab_size, np.int32)
        for token, i in self._rust.get_vocab(with_added_tokens=True).items():
            if i in special or i in (self.begin_id, self.end_id):
                continue
            if byte_level is not None and byte_level.issuperset(token):
                table[i] = len(token)  # one character stands for one byte
            elif '"ByteFallback"' in decoder and _FALLBACK_BYTE.fullmatch(token):
                table[i] = 1
            else:
                # SentencePiece spells a space as U+2581, of three bytes.
                table[i] = len(token.replace("\u2581", " ").encode("utf-8"))
        return table

    def decode(self, ids: Sequence[int] | Ids, *, specials: bool = False) -> str:
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=not specials)


def whole_document(tokenizer: Tokenizer, text: str) -> TextChunk:
    """Returns a document as one chunk, with its border ids; no ids for an empty document."""
    return TextChunk(
        text.encode("utf-8"), begins=bool(text) and tokenizer.begin_id is not None, ends=bool(text)
    )


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> EncodedDocuments:
    """Returns the tokens of each document and the ids of all, with their border ids."""
    return tokenizer.encode_chunks([whole_document(tokenizer, text) for text in texts])


def make_tokenizer(name: str, *, end_token: str | None = None) -> ByteTokenizer | HFTokenizer:
    """Returns the tokenizer called `name`: `bytes`, `bytes_chat` (bytes with marks of chats), or the path of
    a `tokenizer.json` or of its folder.

    Raises:
      UserError: as of `HFTokenizer`, or `end_token` is set for bytes.
    """
    if name != BYTES:
        path = folder_of(name) if name == BYTES_CHAT else name
        return HFTokenizer(path or name, end_token=end_token)
    if end_token is not None:
        raise UserError(
            f"data.end_token={end_token!r} has no meaning for data.tokenizer='bytes', where byte 0 ends a "
            "document. Remove data.end_token."
        )
    return ByteTokenizer()
