"""One source's index on its way from units to a whole: what is done, what waits, what is appended next.

OUT/.NAME.partial/plan.json      what is being made, and of what; written first, after files.json
OUT/.NAME.partial/*.unit         units that workers finished and that wait for those before them
OUT/.NAME.partial/*.bin, ...     the index's files as far as they go
OUT/.NAME.partial/state.json     how far that is: what is longer than it says was being appended when a kill came
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

from jtrain.data import prepared
from jtrain.data.prepared import Prepared
from jtrain.data.source import Corpus, field_of
from jtrain.data.unit import Recipe, Task, read_unit
from jtrain.durable import sync_directory, write_whole

_MOST_RECORDS = 1 << 20
_UNKNOWN_BYTES = 4096  # of a record, where a source does not know its size
_STATE, _PLAN = "state.json", "plan.json"
_APPENDED = (prepared.IDS, prepared.LENGTHS, prepared.UNITS, prepared.SKIPPED)


@dataclasses.dataclass(frozen=True)
class Made:
    """One row of the summary; `state` is `made`, or `there` if it was already."""

    name: str
    state: Literal["made", "there"]
    records: int
    tokens: int
    empty: int
    skipped: int
    bytes: int


def unit_starts(corpus: Corpus, unit_bytes: int) -> Int64[np.ndarray, " units_and_end"]:
    """First record of each unit, and of all records at the end. What is decoded as a whole is not cut."""
    total = len(corpus)
    size_bytes = corpus.size_bytes or total * _UNKNOWN_BYTES
    step = min(_MOST_RECORDS, max(1, unit_bytes * total // size_bytes))
    cuts = np.arange(0, total, step, dtype=np.int64)
    group = np.searchsorted(corpus.group_starts, cuts, side="right") - 1
    cuts = np.where(corpus.group_bytes[group] > 0, corpus.group_starts[group], cuts)
    return np.append(np.unique(cuts), total)


class Assembly:
    """One source on its way: what is done, what waits, what is appended next."""

    def __init__(self, index: int, recipe: Recipe, out: Path, unit_bytes: int) -> None:
        self.recipe = recipe
        self.index = index
        self.workers = 0
        self.notes: list[str] = []
        self.waiting: collections.deque[Task] = collections.deque()
        self._folder = out / recipe.name
        self._partial = out / f".{recipe.name}.partial"
        self._index: Prepared | None = None
        self._state_of_row: Literal["made", "there"] = "made"
        tokenizer = recipe.open_tokenizer()
        corpus = recipe.open_corpus()
        self._made_of = recipe.made_of(corpus, tokenizer)
        self._dtype = tokenizer.id_dtype
        self._starts = unit_starts(corpus, unit_bytes)
        self.records = self.records_done = len(corpus)
        files = json.dumps({"names": corpus.names, "file_ends": corpus.file_ends.tolist()})
        corpus.close()
        if (self._partial / prepared.INDEX).exists():  # killed between two renames
            self._publish()
        if (self._folder / prepared.INDEX).exists():
            existing = Prepared(self._folder)
            if existing.made_of == self._made_of:
                existing.check(on_bad_record=recipe.on_bad_record)
                self._index, self._state_of_row = existing, "there"
                return
            self.notes.append(f"{recipe.name}: the index there was made of something else; it will be replaced.")
        elif self._folder.exists():
            raise ValueError(f"{self._folder} is there and is no prepared index. Remove it, or choose another --out.")
        units = prepared.digest(self._starts.tobytes())
        self._begin({"format": prepared.FORMAT, "made_of": self._made_of, "units": units}, files)

    def _begin(self, plan: dict[str, Any], files: str) -> None:
        """Goes on in the partial folder if it is of the same plan, else starts anew."""
        here = _read_json(self._partial / _PLAN)
        if here != plan:
            if here is not None:
                self.notes.append(f"{self.recipe.name}: an unfinished index of something else was there; started anew.")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir()
            (self._partial / prepared.FILES).write_text(files)
            write_whole(self._partial / _PLAN, json.dumps(plan))
        state = _read_json(self._partial / _STATE)
        if state is None or any(_size(self._partial / name) < size for name, size in state["bytes"].items()):
            state = {"units": 0, "tokens": 0, "empty": 0, "skipped": 0, "bytes": {}}
        self._state: dict[str, Any] = state
        for name in _APPENDED:
            with open(self._partial / name, "ab") as file:
                file.truncate(state["bytes"].get(name, 0))  # what follows was appended, but not yet noted
        must_not_skip = self.recipe.on_bad_record == "fail"
        if must_not_skip and state["skipped"]:
            first = json.loads((self._partial / prepared.SKIPPED).read_text().splitlines()[0])
            raise ValueError(
                f"{field_of(self.recipe.name)}: {self._partial} leaves out {state['skipped']} bad records, but "
                f"data.on_bad_record='fail'. The first is {first['document']}: {first['why']} When it is mended, "
                f"remove {self._partial}."
            )
        self.sweep()
        done = [int(unit.stem) for unit in self._partial.glob("*.unit")]
        for unit in done:
            if unit < state["units"] or not _is_whole(self._path(unit), must_not_skip=must_not_skip):
                self._path(unit).unlink()
        self._ready = {unit for unit in done if self._path(unit).exists()}
        self.records_done = int(self._starts[state["units"]])
        self.records_done += sum(int(self._starts[unit + 1] - self._starts[unit]) for unit in self._ready)
        bounds = self._starts.tolist()
        for unit in range(state["units"], len(bounds) - 1):
            if unit not in self._ready:
                first, end = bounds[unit : unit + 2]
                self.waiting.append(Task(self.index, unit, first, end, self._made_of, self._path(unit)))
        if self.records_done:
            self.notes.append(f"{self.recipe.name}: goes on after {self.records_done:,} of {self.records:,} records.")

    def sweep(self) -> None:
        """Removes what killed writers left; nobody may be writing."""
        for left in self._partial.glob("*.tmp"):
            left.unlink()

    def add(self, unit: int) -> None:
        """A worker finished this unit."""
        self._ready.add(unit)

    def advance(self) -> bool:
        """Appends what can be appended; True once the source is complete, and then never again."""
        if self._index is not None:
            return False
        while self._state["units"] in self._ready:
            self._append()
        if self._state["units"] == len(self._starts) - 1:
            self._finish()
            return True
        return False

    def _append(self) -> None:
        """Appends a run of ready units, then notes it, then removes their files: a kill repeats at most that."""
        state = dict(self._state, bytes={})
        first = state["units"]
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(open(self._partial / name, "ab")) for name in _APPENDED}
            while state["units"] in self._ready:
                self._ready.remove(state["units"])
                path = self._path(state["units"])
                found = read_unit(path)
                assert found is not None, path
                unit, ids_bytes, lengths = found
                files[prepared.LENGTHS].write(lengths)
                with open(path, "rb") as ids:
                    _copy(ids, files[prepared.IDS], ids_bytes)
                line = {"records": unit.records, "tokens": unit.tokens, "ids": unit.ids, "lengths": unit.lengths}
                files[prepared.UNITS].write(json.dumps(line).encode() + b"\n")
                for record, identity, why in unit.skipped:
                    line = {"record": record, "document": identity, "why": why}
                    files[prepared.SKIPPED].write(json.dumps(line).encode() + b"\n")
                state["units"] += 1
                state["tokens"] += unit.tokens
                state["empty"] += unit.empty
                state["skipped"] += len(unit.skipped)
            for name, file in files.items():
                file.flush()
                os.fdatasync(file.fileno())
                state["bytes"][name] = file.tell()
        write_whole(self._partial / _STATE, json.dumps(state))
        self._state = state
        for unit in range(first, state["units"]):
            self._path(unit).unlink()

    def _finish(self) -> None:
        """Adds the starts, seals the index and gives the folder its name."""
        with open(self._partial / prepared.LENGTHS, "r+b") as file:
            file.truncate(self._state["bytes"][prepared.LENGTHS])
            blocks = -(-self.records // prepared.BLOCK)
            file.truncate(blocks * prepared.BLOCK * 4)
            token = 0
            for block in range(0, blocks, 1 << 16):
                file.seek(block * prepared.BLOCK * 4)
                lengths = np.frombuffer(file.read(prepared.BLOCK * 4 << 16), np.uint32).reshape(-1, prepared.BLOCK)
                ends = token + np.cumsum(lengths.sum(axis=1, dtype=np.int64))
                file.seek((blocks * prepared.BLOCK * 4) + block * 8)
                file.write(np.append(np.asarray([token], np.int64), ends).tobytes())
                token = int(ends[-1])
            file.flush()
            os.fdatasync(file.fileno())
        assert token == self._state["tokens"]
        body = {"made_of": self._made_of, "dtype": self._dtype.name, "records": self.records}
        body |= {key: self._state[key] for key in ("tokens", "empty", "skipped")}
        write_whole(self._partial / prepared.INDEX, prepared.seal(self._partial, body))
        self._publish()
        self._index = Prepared(self._folder)

    def _publish(self) -> None:
        """Puts the finished folder in the place of what was there."""
        for name in (_STATE, _PLAN):
            (self._partial / name).unlink(missing_ok=True)
        away = self._partial.with_name(f".{self.recipe.name}.replaced")
        shutil.rmtree(away, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(away)
        self._partial.rename(self._folder)
        sync_directory(self._folder.parent)
        shutil.rmtree(away, ignore_errors=True)

    def made(self) -> Made:
        """The row of the summary, of a complete source."""
        index = self._index
        assert index is not None
        size = sum(file.stat().st_size for file in self._folder.iterdir())
        counts = (index.num_records, index.num_tokens, index.num_empty, index.num_skipped)
        return Made(self.recipe.name, self._state_of_row, *counts, size)

    def _path(self, unit: int) -> Path:
        return self._partial / f"{unit:08}.unit"


def _is_whole(path: Path, *, must_not_skip: bool) -> bool:
    """Whether a unit that an earlier call left can be used: it was not synced, so hashes are compared."""
    found = read_unit(path)
    if found is None:
        return False
    unit, ids_bytes, _ = found
    if unit.skipped and must_not_skip:
        return False
    with open(path, "rb") as file:
        return prepared.digest(file.read(ids_bytes)) == unit.ids


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _copy(source: io.BufferedReader, target: io.BufferedWriter, size: int) -> None:
    while size:
        block = source.read(min(size, 1 << 20))
        assert block, "a whole unit is as long as it says"
        target.write(block)
        size -= len(block)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
