"""Writer of the index of one source: appends shards in order as they finish, and survives a kill any time.

OUT/.NAME.partial/plan.json      what is being built and from what; written first
OUT/.NAME.partial/*.unit         finished shards that wait for earlier ones
OUT/.NAME.partial/*.bin, ...     files of the index, as far as they are written
OUT/.NAME.partial/*state.json    how far that is; a file that is longer was being appended to when the build was killed
"""

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.data.pretokenized.partial_folder import (
    NOTHING,
    STATE,
    begin,
    drop_damaged_states,
    latest_state,
    publish,
    write_lengths,
)
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.pretokenized.shard import Recipe, ShardSummary, Task, read_shard
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import field_of
from jtrain.errors import FileError, UserError

_MOST_RECORDS = 1 << 20
_UNKNOWN_BYTES = 4096  # assumed size of a record where the source does not know its size
_APPENDED = (index_format.IDS, index_format.LENGTHS, index_format.SHARDS, index_format.SKIPPED)
_REFRESH_S = 1.0
_MOST_WAITING = 1 << 14
"""Shards listed at a time for the next ones to make: more than this process has workers."""


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
    """Returns the first record of each shard, then the number of records; cuts no group of records."""
    total = len(corpus)
    size_bytes = corpus.size_bytes or total * _UNKNOWN_BYTES
    # Records per shard, from the mean bytes per record.
    step = min(_MOST_RECORDS, max(1, shard_bytes * total // size_bytes))
    cuts = np.arange(0, total, step, dtype=np.int64)
    group = np.searchsorted(corpus.group_starts, cuts, side="right") - 1
    # A cut within a decoded group moves to its start, or two workers would decode it.
    cuts = np.where(corpus.group_bytes[group] > 0, corpus.group_starts[group], cuts)
    return np.append(np.unique(cuts), total)


class IndexWriter:
    """Writer of the index of one source; processes of this and other hosts may have writers of it too.

    Each makes its share of the shards. The first of them appends shards; should two think that they are the
    first, both write the same bytes to the same places.

    Attributes:
      recipe: the source and how to tokenise it.
      index: position of the source among those of the build.
      workers: worker processes of this process on this source now.
      notes: lines for the user about what an earlier call left, and about files that are not data.
      records, records_done: all records of the source, and those in shards that were there at the start.
      num_missing: shards that nobody had finished at the last look.
    """

    def __init__(self, index: int, recipe: Recipe, out: Path, shard_bytes: int, host: BuildProcess) -> None:
        self.recipe = recipe
        self.index = index
        self.workers = self.num_missing = 0
        self.notes: list[str] = []
        self._host = host
        self._folder = out / recipe.name
        self._partial = out / f".{recipe.name}.partial"
        self._index: PreparedIndex | None = None
        self._appended = _APPENDED if recipe.source.mask is None else (*_APPENDED, index_format.MASKS)
        self._state_of_row: Literal["made", "there"] = "made"
        tokenizer = recipe.open_tokenizer()
        corpus = recipe.open_corpus()
        if corpus.left_out:
            self.notes.append(f"{recipe.name}: {corpus.left_out}.")
        self._made_of = recipe.made_of(corpus, tokenizer)
        self._dtype = tokenizer.id_dtype
        self._starts = shard_starts(corpus, shard_bytes)
        self.records = self.records_done = len(corpus)
        parts, ends = corpus.identity_parts
        files = json.dumps({**parts.to_json(), "file_ends": ends.tolist()})
        # Names and counts are enough here; the workers open the corpus themselves.
        corpus.close()
        self._state: dict[str, Any] = NOTHING
        self._finished_shards: set[int] = set()
        self._shards_at_work: set[int] = set()
        self._is_counted = np.zeros(len(self._starts) - 1, np.bool_)
        self._queue: collections.deque[int] = collections.deque()
        self._refreshed_s = 0.0
        self._is_appender = False
        self._is_reported = False
        # Another process may be about to give this folder its name.
        with host.changing_folders(recipe.name):
            # An earlier call was killed after it wrote index.json and before it renamed the folder.
            if (self._partial / index_format.INDEX).exists():
                publish(self._partial, self._folder)
            if (self._folder / index_format.INDEX).exists():
                existing = PreparedIndex(self._folder)
                if existing.made_of == self._made_of:
                    existing.check(on_bad_record=recipe.on_bad_record)
                    self._index, self._state_of_row, self._is_reported = existing, "there", True
                    return
                self.notes.append(
                    f"{recipe.name}: the index there was made of other data; it will be replaced."
                )
            elif self._folder.exists():
                raise UserError(
                    f"{self._folder} exists and is not a prepared index. Remove it, or choose another --out."
                )
            shards = index_format.digest(self._starts.tobytes())
            plan = {"format": index_format.FORMAT, "made_of": self._made_of, "units": shards}
            if begin(self._partial, plan, host, source=recipe.name):
                self.notes.append(
                    f"{recipe.name}: an unfinished index of other data was there; starting afresh."
                )
            # Every process writes it, with the same bytes.
            host.write_whole(self._partial / index_format.FILES, files)
        self.sweep()
        self.refresh()
        # After the refresh, which reads the state with its count of skipped records.
        self._check_skipped()
        self.records_done = self.records_of_others()
        if self.records_done:
            self.notes.append(
                f"{recipe.name}: goes on after {self.records_done:,} of {self.records:,} records."
            )

    @property
    def is_complete(self) -> bool:
        return self._index is not None

    def next_task(self) -> Task | None:
        """Returns a shard of this process's share to make, or None if there is none."""
        if self.is_complete:
            return None
        if not self._queue and time.monotonic() - self._refreshed_s >= _REFRESH_S:
            self.refresh()
        while self._queue:
            shard = self._queue.popleft()
            is_made = shard in self._finished_shards or self._path(shard).exists()
            if is_made or shard < latest_state(self._partial)["units"]:
                continue  # made by another process since the folder was last listed
            self._shards_at_work.add(shard)
            first, end = self._starts[shard : shard + 2].tolist()
            return Task(self.index, shard, first, end, self._made_of, self._path(shard), self._host.name)
        return None

    def add(self, shard: int) -> None:
        """Notes that a worker of this process has finished this shard."""
        self._shards_at_work.discard(shard)
        self._is_counted[shard] = True
        self._finished_shards.add(shard)

    def give_back(self, shard: int) -> None:
        """Puts a shard back that a worker of this process did not finish."""
        self._shards_at_work.discard(shard)
        self._queue.appendleft(shard)

    def records_of_others(self) -> int:
        """Returns the records of shards that others have finished since the last call."""
        is_done = np.zeros_like(self._is_counted)
        # Shards are appended in order, so a number says which are in the index.
        is_done[: len(is_done) if self.is_complete else self._state["units"]] = True
        is_done[list(self._finished_shards)] = True
        is_done[list(self._shards_at_work)] = False  # their workers report their records
        new_shards = np.flatnonzero(is_done & ~self._is_counted)
        self._is_counted[new_shards] = True
        return int((self._starts[new_shards + 1] - self._starts[new_shards]).sum())

    def refresh(self) -> bool:
        """Looks what others have done; returns True if they have completed the source."""
        self._refreshed_s = time.monotonic()
        if self.is_complete:
            return False
        try:
            names = os.listdir(self._partial)
            latest = latest_state(self._partial)
            number, processes = self._host.share(self.recipe.name)
            # The appender's own state is the newest; a newer one means that another took over.
            self._is_appender = self._is_appender and number == 0 and latest["units"] <= self._state["units"]
            if not self._is_appender:
                self._state = latest
        except FileNotFoundError:
            with contextlib.suppress(FileError):
                index = PreparedIndex(self._folder)
                if index.made_of == self._made_of:
                    self._index = index
                    self._host.end(self.recipe.name)
                    return True
            raise FileError(
                f"{self._partial} was removed while it was being written to. Run the same command again."
            ) from None
        self._finished_shards = {int(name[:8]) for name in names if name.endswith(".unit")}
        is_done = np.zeros(len(self._starts) - 1, np.bool_)
        is_done[: self._state["units"]] = True
        is_done[[*self._finished_shards, *self._shards_at_work]] = True
        missing = np.flatnonzero(~is_done)
        self.num_missing = len(missing)
        # This process's share: the shards whose number leaves its rank as the remainder.
        self._queue = collections.deque(missing[missing % processes == number][:_MOST_WAITING].tolist())
        return False

    def advance(self) -> bool:
        """Appends the shards whose turn has come; returns True once, when the source is complete."""
        if not self.is_complete and time.monotonic() - self._refreshed_s >= _REFRESH_S:
            self.refresh()
        if not self.is_complete:
            try:
                self._advance()
            except FileNotFoundError:  # another process took this one for dead and finished the index
                self.refresh()
        is_complete = self.is_complete and not self._is_reported
        self._is_reported = self.is_complete
        return is_complete

    def _advance(self) -> None:
        num_shards = len(self._starts) - 1
        if self._state["units"] not in self._finished_shards and self._state["units"] < num_shards:
            return
        if not self._is_appender:
            # The first process appends; a process that becomes the first reads the state of the one before.
            if self._host.share(self.recipe.name)[0] != 0:
                return
            # In this order: the latest state may be one that a power cut left ahead of its files.
            drop_damaged_states(self._partial)
            self._state = latest_state(self._partial)
            self._is_appender = True
        while self._state["units"] in self._finished_shards:
            self._append()
        if self._state["units"] == num_shards:
            self._finish()

    def _append(self) -> None:
        """Appends finished shards in order, saves the state, then removes their files."""
        state = dict(self._state, bytes=dict(self._state["bytes"]))
        first_shard = state["units"]
        with contextlib.ExitStack() as stack:
            files = {}
            for name in self._appended:
                # Not mode "ab" or "wb": neither keeps the contents and lets the writer seek.
                handle = os.open(self._partial / name, os.O_CREAT | os.O_WRONLY, 0o666)
                files[name] = stack.enter_context(os.fdopen(handle, "wb"))
                # From where the state says, over the bytes of an append that was killed.
                files[name].seek(state["bytes"].get(name, 0))
            while state["units"] in self._finished_shards:
                self._finished_shards.remove(state["units"])
                summary = self._append_unit(self._path(state["units"]), files)
                if summary is None:
                    self._path(state["units"]).unlink(missing_ok=True)
                    self._refreshed_s = 0.0  # then it waits again, here or in the process whose it is
                    break
                state["units"] += 1
                state["tokens"] += summary.tokens
                state["empty"] += summary.empty
                state["skipped"] += len(summary.skipped)
            for name, file in files.items():
                file.flush()
                # Before the state: it must not say more than the disk holds.
                os.fdatasync(file.fileno())
                state["bytes"][name] = file.tell()
        if state["units"] == first_shard:
            return
        # A new name each time: a process that was taken for dead cannot put an older state over a newer one.
        self._host.write_whole(self._partial / f"{state['units']:08}{STATE}", json.dumps(state))
        self._state = state
        for old_state in self._partial.glob(f"*{STATE}"):
            if old_state.name < f"{state['units']:08}":
                old_state.unlink(missing_ok=True)
        # Only now: until the state was written they would be needed again.
        for shard in range(first_shard, state["units"]):
            self._path(shard).unlink(missing_ok=True)

    def _append_unit(self, path: Path, files: dict[str, io.BufferedWriter]) -> ShardSummary | None:
        """Appends one shard; returns None, with the files where they were, if it has to be made again.

        Shard files are not synced to disk, so one that an earlier call left may have holes: its hash tells.
        """
        contents = read_shard(path)
        if contents is None:
            return None
        summary, ids_bytes, lengths = contents
        # An earlier call left records out. Made again, the shard's worker reports the first of them.
        if summary.skipped and self.recipe.on_bad_record == "fail":
            return None
        ids_end = files[index_format.IDS].tell()
        with open(path, "rb") as ids:
            # The next append overwrites what was copied.
            if copy_hashed(ids, files[index_format.IDS], ids_bytes) != summary.ids:
                files[index_format.IDS].seek(ids_end)
                return None
        files[index_format.LENGTHS].write(lengths)
        if self.recipe.source.mask is not None:
            first_token = ids_end // self._dtype.itemsize
            files[index_format.MASKS].write((np.asarray(summary.ignored, np.int64) + first_token).tobytes())
        line = {name: getattr(summary, name) for name in ("records", "tokens", "ids", "lengths")}
        files[index_format.SHARDS].write(json.dumps(line).encode() + b"\n")
        for record, identity, reason in summary.skipped:
            line = {"record": record, "document": identity, "why": reason}
            files[index_format.SKIPPED].write(json.dumps(line).encode() + b"\n")
        return summary

    def _finish(self) -> None:
        """Adds the starts to lengths.bin, writes index.json and gives the folder its final name."""
        lengths = self._partial / index_format.LENGTHS
        tokens = write_lengths(
            lengths, lengths.with_name(f"lengths.unit.{self._host.name}.tmp"), self.records
        )
        for name in self._appended:
            if name == index_format.LENGTHS:
                continue
            # A shard that was rejected may have been longer than the one made again.
            os.truncate(self._partial / name, self._state["bytes"][name])
        # Two counts of the same tokens: over the whole file, and by the summaries of the shards.
        assert tokens == self._state["tokens"]
        body = {"made_of": self._made_of, "dtype": self._dtype.name, "records": self.records}
        body |= {key: self._state[key] for key in ("tokens", "empty", "skipped")}
        self._host.write_whole(self._partial / index_format.INDEX, index_format.seal(self._partial, body))
        with self._host.changing_folders(self.recipe.name):
            publish(self._partial, self._folder)
        self._host.end(self.recipe.name)
        self._index = PreparedIndex(self._folder)

    def _check_skipped(self) -> None:
        if self.recipe.on_bad_record == "fail" and self._state["skipped"]:
            first = json.loads((self._partial / index_format.SKIPPED).read_text().splitlines()[0])
            raise UserError(
                f"{field_of(self.recipe.name)}: {self._partial} leaves out {self._state['skipped']} bad "
                f"records, but data.on_bad_record='fail'. The first is {first['document']}: {first['why']} "
                f"Mend it, then remove {self._partial}."
            )

    def sweep(self) -> None:
        """Removes unfinished files of this process and of dead ones; call it while no worker is writing."""
        for folder in (self._partial, self._folder):  # another process may have renamed one to the other
            for leftover in folder.glob("*.unit.*.tmp"):
                owner = leftover.name.removesuffix(".tmp").partition(".unit.")[2]
                if owner == self._host.name or self._host.is_alive(owner) is False:
                    leftover.unlink(missing_ok=True)

    def summary(self) -> IndexSummary:
        """Returns the row of the final table; the source must be complete."""
        assert self._index is not None
        return summary_of(self._index, self.recipe.name, self._state_of_row)

    def _path(self, shard: int) -> Path:
        return self._partial / f"{shard:08}.unit"


def summary_of(index: PreparedIndex, name: str, state: Literal["made", "there"]) -> IndexSummary:
    """Returns the row of an index in the final table."""
    size = sum(file.stat().st_size for file in Path(index.location).iterdir())
    return IndexSummary(
        name, state, index.num_records, index.num_tokens, index.num_empty, index.num_skipped, size
    )


def copy_hashed(source: io.BufferedReader, target: io.BufferedWriter, size: int) -> str:
    """Copies bytes; returns their hash."""
    ids_hash = hashlib.blake2b(digest_size=16)
    while size:
        block = source.read(min(size, 1 << 20))
        if not block:
            break
        ids_hash.update(block)
        target.write(block)
        size -= len(block)
    return ids_hash.hexdigest()
