"""Adopts token files of other projects (`python -m jtrain.data adopt`): an index reads their ids in place.

Each file is scanned once, in parallel, for the ends of its documents, its largest id and its hash; what is
written is 4.5 bytes per document. An interrupted call goes on with the file where it stopped.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.adopted import edges_of_path
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.data.pretokenized.foreign.find import find_layout
from jtrain.data.pretokenized.foreign.foreign_file import ForeignLayout
from jtrain.data.pretokenized.index_format import digest
from jtrain.data.pretokenized.partial_folder import (
    STATE,
    begin,
    drop_damaged_states,
    latest_state,
    publish,
    write_lengths,
    write_places,
)
from jtrain.data.pretokenized.progress import ProgressOutput
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.pretokenized.scanned_parts import PartScanner, ScannedPart, count_threads
from jtrain.data.pretokenized.writer import IndexSummary, summary_of
from jtrain.data.tokenizer import Tokenizer, make_tokenizer, smallest_id_dtype
from jtrain.errors import UserError
from jtrain.runtime.atomic_io import write_whole

_RUNS = "runs"
_APPENDED = (index_format.LENGTHS, index_format.SHARDS, _RUNS)
SAVE_S = 10.0


def adopt(
    path: str,
    out: Path,
    *,
    name: str,
    tokenizer: str,
    end_token: str | None,
    dtype: str | None,
    column: str | None,
    command: str,
    stream: ProgressOutput,
) -> IndexSummary:
    """Writes the index OUT/NAME of token files that stay where they are; Parquet's ids are copied into it.

    Args:
      path, dtype, column: arguments of `find_layout`.
      tokenizer, end_token: arguments of `make_tokenizer`; a run with another tokenizer is refused.
      command: command line that repeats this call; kept in the index for messages.
      stream: progress output, a line every 10 s.

    Raises:
      FileError: nothing is there, or a file is cut short.
      UserError: an id is beyond the vocabulary, no end id is found, or the files are of no known layout.
    """
    encoder = _tokenizer(tokenizer, end_token)
    layout = find_layout(
        path, end_id=encoder.end_id, vocab_size=encoder.vocab_size, dtype=dtype, column=column
    )
    out.mkdir(parents=True, exist_ok=True)
    # One process at a time adopts under this name; another one waits, and then finds the index.
    with BuildProcess(out) as host, host.changing_folders(name):
        adoption = _Adoption(layout, out, name, encoder, command, stream)
        if adoption.is_indexed():
            return summary_of(PreparedIndex(out / name), name, "there")
        adoption.resume(host)
        adoption.scan(tokenizer)
        adoption.finish()
    return summary_of(PreparedIndex(out / name), name, "made")


def _tokenizer(name: str, end_token: str | None) -> Tokenizer:
    """Returns the tokenizer; its messages name the options of this command instead of fields of a config."""
    try:
        return make_tokenizer(name, end_token=end_token)
    except UserError as error:
        raise UserError(
            str(error).replace("data.tokenizer", "--tokenizer").replace("data.end_token", "--end-token")
        ) from error


class _Adoption:
    """Adoption of the files of one layout into OUT/NAME."""

    def __init__(
        self,
        layout: ForeignLayout,
        out: Path,
        name: str,
        tokenizer: Tokenizer,
        command: str,
        stream: ProgressOutput,
    ) -> None:
        self._layout = layout
        self._folder = out / name
        self._partial = out / f".{name}.partial"
        self._tokenizer = tokenizer
        self._command = command
        self._stream = stream
        with concurrent.futures.ThreadPoolExecutor(count_threads()) as pool:
            sizes_and_edges = list(pool.map(edges_of_path, [layout.root / n for n in layout.names]))
        self._sizes = [size for size, _ in sizes_and_edges]
        self._edges = [edges for _, edges in sizes_and_edges]
        # Names below the root, sizes and edges: files whose folder moved are the same corpus.
        corpus = hashlib.blake2b(json.dumps([layout.names, self._sizes, self._edges]).encode(), digest_size=8)
        self._made_of: dict[str, str | int] = {
            "corpus": corpus.hexdigest(),
            "tokenizer": tokenizer.identity,
            "adopted": layout.kind,
            **layout.decided_by,
        }
        # Ids of 8 bytes are read as 4: the scan checks that they are below the vocabulary.
        stored = layout.files[0].dtype
        self._dtype = (
            smallest_id_dtype(tokenizer.vocab_size)
            if layout.copies
            else np.dtype(f"u{min(4, stored.itemsize)}")
        )
        self._appended = (*_APPENDED, *((index_format.IDS,) if layout.copies else ()))
        # Before an index without the masks passes for this one.
        first_file = layout.files[0]
        if other := next((f for f in layout.files if f.has_labels != first_file.has_labels), None):
            paths = (first_file.path, other.path) if first_file.has_labels else (other.path, first_file.path)
            raise UserError(
                f"--from: {paths[0]} has a column of labels, and {paths[1]} has none. Adopt them on their "
                "own."
            )
        if first_file.has_labels:
            self._appended = (*self._appended, index_format.MASKS)
            self._made_of["labels"] = "not learned where they are -100"
        self._state: dict[str, Any] = {}

    def is_indexed(self) -> bool:
        """True if the index exists already; if its files moved, it is made to refer to where they are now."""
        if not (self._folder / index_format.INDEX).exists():
            if self._folder.exists():
                raise UserError(
                    f"{self._folder} exists and is not a prepared index. Remove it, or set --name or --out "
                    "to another."
                )
            return False
        body = json.loads((self._folder / index_format.INDEX).read_bytes())
        if body.get("made_of") != self._made_of:
            return False
        # `sign` adds a new one.
        del body["digest"]
        if not self._layout.copies:
            body["adopted"] = self._adopted_entry()
        write_whole(self._folder / index_format.INDEX, index_format.sign(body))
        return True

    def resume(self, host: BuildProcess) -> None:
        """Goes on after the files that an earlier call scanned, if it scanned the same ones."""
        begin(
            self._partial,
            {"format": index_format.FORMAT, "made_of": self._made_of},
            host,
            source=self._folder.name,
        )
        drop_damaged_states(self._partial)
        state = {
            "files": 0,
            "placed": 0,
            "records": 0,
            "ends": 0,
            "file_ends": [],
            **latest_state(self._partial),
        }
        # 0 for all of them where nothing was scanned before.
        state["bytes"] = {name: state["bytes"].get(name, 0) for name in self._appended}
        for name, size in state["bytes"].items():
            # Back to the size of the last save: what follows was not in its counts.
            with open(self._partial / name, "ab") as file:
                file.truncate(size)
        self._state = state
        if state["files"]:
            self._say(f"goes on after {state['files']:,} of {len(self._layout.files):,} files.")

    def scan(self, tokenizer: str) -> None:
        """Scans the files that are left and appends what is found."""
        layout, state = self._layout, self._state
        files = range(state["files"], len(layout.files))
        total_bytes, done_bytes = sum(self._sizes[file] for file in files), 0
        last_line_s = last_save_s = time.monotonic()
        scanner = PartScanner(layout, self._tokenizer.vocab_size, tokenizer, self._dtype)
        open_tokens = 0  # of the document that a part ends within
        with contextlib.ExitStack() as stack:
            outputs = {name: stack.enter_context(open(self._partial / name, "ab")) for name in self._appended}
            for part in scanner.scan(files):
                open_tokens = self._append(part, open_tokens, outputs)
                done_bytes += self._sizes[part.file] if part.last else 0
                if part.last and time.monotonic() - last_save_s >= SAVE_S:
                    last_save_s = time.monotonic()
                    self._save(outputs)
                if time.monotonic() - last_line_s >= SAVE_S:
                    last_line_s = time.monotonic()
                    self._say(
                        f"{done_bytes / 2**30:,.1f} of {total_bytes / 2**30:,.1f} GiB, {state['tokens']:,} "
                        "tokens"
                    )
        if layout.splits and not state["ends"]:
            raise UserError(
                f"{layout.root / layout.names[0]}: none of the {state['tokens']:,} ids is "
                f"{self._tokenizer.end_id}, the end id of --tokenizer {tokenizer}, so there are no "
                "documents. Set --end-token to the token that ends the documents of these files."
            )

    def _append(self, part: ScannedPart, open_tokens: int, outputs: dict[str, Any]) -> int:
        """Appends a part; returns the tokens of the document that it ends within."""
        state = self._state
        # Counted before a last document without an end is added: none at all means a wrong end id.
        state["ends"] += len(part.ends)
        ends = part.ends
        # Without an end in this part the open document goes on: -open_tokens adds up the parts so far.
        tokens_after = part.tokens - (int(ends[-1]) if len(ends) else -open_tokens)
        # A document never goes on in the next file.
        if part.last and tokens_after:
            ends, tokens_after = np.append(ends, part.tokens), 0
        # The first document of the part began `open_tokens` before it.
        lengths = np.diff(ends, prepend=-open_tokens)
        if len(lengths) and (longest := int(lengths.max())) >= 1 << 31:
            raise UserError(
                f"{self._layout.files[part.file].path}: a document of {longest:,} tokens; documents have "
                f"fewer than {1 << 31:,}. Set --end-token to the token that ends the documents of these "
                "files."
            )
        lengths = lengths.astype(np.uint32)
        # A run per document, where other bytes lie between them (MDS).
        if part.offsets is not None:
            first = state["tokens"] + ends - lengths
            runs = np.stack([first, part.offsets, np.full(len(ends), part.file)], axis=1)
        # Later parts of a file belong to the run of its first part.
        elif state["placed"] > part.file:
            runs = np.empty((0, 3), np.int64)
        else:
            # First token of the run in the source, byte where it begins, number of its file.
            runs = np.asarray([[state["tokens"], self._layout.files[part.file].first_byte, part.file]])
            state["placed"] = part.file + 1
        outputs[_RUNS].write(runs.astype("<i8").tobytes())
        outputs[index_format.LENGTHS].write(lengths.tobytes())
        line = {"records": len(lengths), "tokens": part.tokens, "ids": part.hash, "lengths": digest(lengths)}
        outputs[index_format.SHARDS].write(json.dumps(line).encode() + b"\n")
        if part.ids is not None:
            outputs[index_format.IDS].write(part.ids.tobytes())
        if index_format.MASKS in outputs:
            # Runs of a part count from its first token, those of the index from the first of the source.
            outputs[index_format.MASKS].write((part.ignored + state["tokens"]).astype("<i8").tobytes())
        state["records"] += len(lengths)
        state["tokens"] += part.tokens
        state["empty"] += int((lengths == 0).sum())
        if part.last:
            # Parts come in order, so this file is done.
            self._layout.files[part.file].close()
            state["files"] = part.file + 1
            self._end_files(part.file)
            state["file_ends"].append(state["records"])
        return tokens_after

    def _end_files(self, count: int) -> None:
        """Notes the end of each of the first `count` files that has none yet: they are empty."""
        ends = self._state["file_ends"]
        ends += [ends[-1] if ends else 0] * (count - len(ends))

    def _save(self, outputs: dict[str, Any]) -> None:
        for name, file in outputs.items():
            file.flush()
            os.fdatasync(file.fileno())
            self._state["bytes"][name] = file.tell()
        # After the sync: the state must not say more than the disk holds.
        write_whole(self._partial / f"adopted{STATE}", json.dumps(self._state))

    def finish(self) -> None:
        """Writes the remaining files of the index and gives the folder its name."""
        state, partial = self._state, self._partial
        if not state["records"]:
            raise UserError(
                f"--from: the {len(self._layout.files)} files below {self._layout.root} hold no ids."
            )
        self._end_files(len(self._layout.files))
        # Before `seal`, which notes the size of lengths.bin.
        write_lengths(partial / index_format.LENGTHS, partial / "lengths.tmp", state["records"])
        # Adopted ids have no bad records, but readers expect the file.
        (partial / index_format.SKIPPED).write_bytes(b"")
        files = {"names": self._layout.names, "file_ends": state["file_ends"]}
        body = {"made_of": self._made_of, "dtype": self._dtype.name, "skipped": 0}
        body |= {key: state[key] for key in ("records", "tokens", "empty")}
        if not self._layout.copies:
            write_places(partial / _RUNS, partial / index_format.PLACES, state["tokens"])
            files |= {"sizes": self._sizes, "edges": self._edges}
            body["adopted"] = self._adopted_entry()
        # Before index.json, which holds the hash of this file.
        (partial / index_format.FILES).write_text(json.dumps(files))
        write_whole(partial / index_format.INDEX, index_format.seal(partial, body))
        publish(partial, self._folder)

    def _adopted_entry(self) -> dict[str, str]:
        return {
            "root": str(self._layout.root),
            "dtype": self._layout.files[0].dtype.name,
            "command": self._command,
        }

    def _say(self, text: str) -> None:
        print(f"{self._folder.name}: {text}", file=self._stream, flush=True)
