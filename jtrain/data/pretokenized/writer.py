"""Writer of the index of one source: appends shards in order as workers finish them, and survives a kill at any time.

OUT/.NAME.partial/plan.json      what is being built and from what; written first, after files.json
OUT/.NAME.partial/*.unit         finished shards that wait for earlier ones
OUT/.NAME.partial/*.bin, ...     files of the index, as far as they are written
OUT/.NAME.partial/state.json     how far that is; a file that is longer was being appended to when the build was killed
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from jtrain.data.pretokenized import reader
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.pretokenized.shard import Recipe, Task, read_shard
from jtrain.data.sources.source import Corpus, field_of
from jtrain.errors import UserError
from jtrain.runtime.atomic_io import sync_directory, write_whole

_MOST_RECORDS = 1 << 20
_UNKNOWN_BYTES = 4096  # assumed size of a record where the source does not know its size
_STATE, _PLAN = "state.json", "plan.json"
_APPENDED = (reader.IDS, reader.LENGTHS, reader.SHARDS, reader.SKIPPED)


@dataclasses.dataclass(frozen=True)
class IndexSummary:
    """Row of the final table; `state` is `there` if the index existed already."""

    name: str
    state: Literal["made", "there"]
    records: int
    tokens: int
    empty: int
    skipped: int
    bytes: int


def shard_starts(corpus: Corpus, shard_bytes: int) -> Int64[np.ndarray, " shards_and_end"]:
    """Returns the first record of each shard, then the number of records. No group of records is cut in two."""
    total = len(corpus)
    size_bytes = corpus.size_bytes or total * _UNKNOWN_BYTES
    step = min(_MOST_RECORDS, max(1, shard_bytes * total // size_bytes))
    cuts = np.arange(0, total, step, dtype=np.int64)
    group = np.searchsorted(corpus.group_starts, cuts, side="right") - 1
    cuts = np.where(corpus.group_bytes[group] > 0, corpus.group_starts[group], cuts)
    return np.append(np.unique(cuts), total)


class IndexWriter:
    """Writer of the index of one source.

    Attributes:
      recipe: the source and how to tokenise it.
      index: position of the source among those of the build.
      workers: worker processes on this source now.
      notes: lines for the user about what an earlier call left, and about files that are not data.
      waiting: shards to tokenise.
      records, records_done: all records of the source, and those in finished shards.
    """

    def __init__(self, index: int, recipe: Recipe, out: Path, shard_bytes: int) -> None:
        self.recipe = recipe
        self.index = index
        self.workers = 0
        self.notes: list[str] = []
        self.waiting: collections.deque[Task] = collections.deque()
        self._folder = out / recipe.name
        self._partial = out / f".{recipe.name}.partial"
        self._index: PreparedIndex | None = None
        self._state_of_row: Literal["made", "there"] = "made"
        tokenizer = recipe.open_tokenizer()
        corpus = recipe.open_corpus()
        if corpus.left_out:
            self.notes.append(f"{recipe.name}: {corpus.left_out}.")
        self._made_of = recipe.made_of(corpus, tokenizer)
        self._dtype = tokenizer.id_dtype
        self._starts = shard_starts(corpus, shard_bytes)
        self.records = self.records_done = len(corpus)
        names, ends = corpus.identities
        files = json.dumps({"names": names, "file_ends": ends.tolist()})
        corpus.close()
        if (self._partial / reader.INDEX).exists():  # an earlier call was killed between two renames
            self._publish()
        if (self._folder / reader.INDEX).exists():
            existing = PreparedIndex(self._folder)
            if existing.made_of == self._made_of:
                existing.check(on_bad_record=recipe.on_bad_record)
                self._index, self._state_of_row = existing, "there"
                return
            self.notes.append(f"{recipe.name}: the index there was made of other data; it will be replaced.")
        elif self._folder.exists():
            raise UserError(f"{self._folder} exists and is not a prepared index. Remove it, or choose another --out.")
        shards = reader.digest(self._starts.tobytes())
        self._begin({"format": reader.FORMAT, "made_of": self._made_of, "units": shards}, files)

    def _begin(self, plan: dict[str, Any], files: str) -> None:
        """Continues in the partial folder if its plan is the same, otherwise starts afresh."""
        here = _read_json(self._partial / _PLAN)
        if here != plan:
            if here is not None:
                self.notes.append(f"{self.recipe.name}: an unfinished index of other data was there; starting afresh.")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir()
            (self._partial / reader.FILES).write_text(files)
            write_whole(self._partial / _PLAN, json.dumps(plan))
        state = _read_json(self._partial / _STATE)
        if state is None or any(_size(self._partial / name) < size for name, size in state["bytes"].items()):
            state = {"units": 0, "tokens": 0, "empty": 0, "skipped": 0, "bytes": {}}
        self._state: dict[str, Any] = state
        for name in _APPENDED:
            with open(self._partial / name, "ab") as file:
                file.truncate(state["bytes"].get(name, 0))  # drops what was appended after state.json was written
        must_not_skip = self.recipe.on_bad_record == "fail"
        if must_not_skip and state["skipped"]:
            first = json.loads((self._partial / reader.SKIPPED).read_text().splitlines()[0])
            raise UserError(
                f"{field_of(self.recipe.name)}: {self._partial} leaves out {state['skipped']} bad records, but "
                f"data.on_bad_record='fail'. The first is {first['document']}: {first['why']} Mend it, "
                f"then remove {self._partial}."
            )
        self.sweep()
        done = [int(path.stem) for path in self._partial.glob("*.unit")]
        for shard in done:
            if shard < state["units"] or not _is_whole(self._path(shard), must_not_skip=must_not_skip):
                self._path(shard).unlink()
        self._ready = {shard for shard in done if self._path(shard).exists()}
        self.records_done = int(self._starts[state["units"]])
        self.records_done += sum(int(self._starts[shard + 1] - self._starts[shard]) for shard in self._ready)
        bounds = self._starts.tolist()
        for shard in range(state["units"], len(bounds) - 1):
            if shard not in self._ready:
                first, end = bounds[shard : shard + 2]
                self.waiting.append(Task(self.index, shard, first, end, self._made_of, self._path(shard)))
        if self.records_done:
            self.notes.append(f"{self.recipe.name}: goes on after {self.records_done:,} of {self.records:,} records.")

    def sweep(self) -> None:
        """Removes temporary files of killed workers; call it only while no worker is writing."""
        for left in self._partial.glob("*.tmp"):
            left.unlink()

    def add(self, shard: int) -> None:
        """Notes that a worker has finished this shard."""
        self._ready.add(shard)

    def advance(self) -> bool:
        """Appends the shards whose turn has come; returns True once, when that completes the source."""
        if self._index is not None:
            return False
        while self._state["units"] in self._ready:
            self._append()
        if self._state["units"] == len(self._starts) - 1:
            self._finish()
            return True
        return False

    def _append(self) -> None:
        """Appends ready shards in order, then updates state.json, then removes their files: a kill repeats one call."""
        state = dict(self._state, bytes={})
        first = state["units"]
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(open(self._partial / name, "ab")) for name in _APPENDED}
            while state["units"] in self._ready:
                self._ready.remove(state["units"])
                path = self._path(state["units"])
                found = read_shard(path)
                assert found is not None, path
                summary, ids_bytes, lengths = found
                files[reader.LENGTHS].write(lengths)
                with open(path, "rb") as ids:
                    _copy(ids, files[reader.IDS], ids_bytes)
                line = {name: getattr(summary, name) for name in ("records", "tokens", "ids", "lengths")}
                files[reader.SHARDS].write(json.dumps(line).encode() + b"\n")
                for record, identity, why in summary.skipped:
                    line = {"record": record, "document": identity, "why": why}
                    files[reader.SKIPPED].write(json.dumps(line).encode() + b"\n")
                state["units"] += 1
                state["tokens"] += summary.tokens
                state["empty"] += summary.empty
                state["skipped"] += len(summary.skipped)
            for name, file in files.items():
                file.flush()
                os.fdatasync(file.fileno())
                state["bytes"][name] = file.tell()
        write_whole(self._partial / _STATE, json.dumps(state))
        self._state = state
        for shard in range(first, state["units"]):
            self._path(shard).unlink()

    def _finish(self) -> None:
        """Adds the starts to lengths.bin, writes index.json and gives the folder its final name."""
        with open(self._partial / reader.LENGTHS, "r+b") as file:
            file.truncate(self._state["bytes"][reader.LENGTHS])
            blocks = -(-self.records // reader.BLOCK)
            file.truncate(blocks * reader.BLOCK * 4)
            token = 0
            for block in range(0, blocks, 1 << 16):
                file.seek(block * reader.BLOCK * 4)
                lengths = np.frombuffer(file.read(reader.BLOCK * 4 << 16), np.uint32).reshape(-1, reader.BLOCK)
                ends = token + np.cumsum(lengths.sum(axis=1, dtype=np.int64))
                file.seek((blocks * reader.BLOCK * 4) + block * 8)
                file.write(np.append(np.asarray([token], np.int64), ends).tobytes())
                token = int(ends[-1])
            file.flush()
            os.fdatasync(file.fileno())
        assert token == self._state["tokens"]
        body = {"made_of": self._made_of, "dtype": self._dtype.name, "records": self.records}
        body |= {key: self._state[key] for key in ("tokens", "empty", "skipped")}
        write_whole(self._partial / reader.INDEX, reader.seal(self._partial, body))
        self._publish()
        self._index = PreparedIndex(self._folder)

    def _publish(self) -> None:
        """Replaces the old index folder, if there is one, by the finished one."""
        for name in (_STATE, _PLAN):
            (self._partial / name).unlink(missing_ok=True)
        away = self._partial.with_name(f".{self.recipe.name}.replaced")
        shutil.rmtree(away, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(away)
        self._partial.rename(self._folder)
        sync_directory(self._folder.parent)
        shutil.rmtree(away, ignore_errors=True)

    def summary(self) -> IndexSummary:
        """Returns the row of the final table; the source must be complete."""
        index = self._index
        assert index is not None
        size = sum(file.stat().st_size for file in self._folder.iterdir())
        counts = (index.num_records, index.num_tokens, index.num_empty, index.num_skipped)
        return IndexSummary(self.recipe.name, self._state_of_row, *counts, size)

    def _path(self, shard: int) -> Path:
        return self._partial / f"{shard:08}.unit"


def _is_whole(path: Path, *, must_not_skip: bool) -> bool:
    """True if a shard of an earlier call can be used. Shard files are not synced to disk, so hashes are compared."""
    found = read_shard(path)
    if found is None:
        return False
    summary, ids_bytes, _ = found
    if summary.skipped and must_not_skip:
        return False
    with open(path, "rb") as file:
        return reader.digest(file.read(ids_bytes)) == summary.ids


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _copy(source: io.BufferedReader, target: io.BufferedWriter, size: int) -> None:
    while size:
        block = source.read(min(size, 1 << 20))
        assert block, "a complete shard file is as long as its footer says"
        target.write(block)
        size -= len(block)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
