"""Verification of a prepared index: every hash and every start is compared with the bytes that are there."""

import concurrent.futures
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt

from jtrain.data.pretokenized.index_files import LocalFiles
from jtrain.data.pretokenized.index_format import LENGTHS, SHARDS, digest

if TYPE_CHECKING:
    from jtrain.data.pretokenized.remote_files import RemoteFiles, RemoteTable

_THREADS = 4
_BLOCKS_AT_ONCE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of a whole index with its hashes.

    files: files of the index.
    hashes: name -> hash of each small file.
    num_blocks: number of blocks of 16 records.
    lengths, block_lengths, starts: tables in lengths.bin, by record, by block, and the starts of the blocks.
    read_range: returns the ids of a range of tokens.
    ids_name: returns the name of the file that holds a token's id.
    """

    files: "LocalFiles | RemoteFiles"
    hashes: dict[str, str]
    num_blocks: int
    lengths: "np.ndarray | RemoteTable"
    block_lengths: "np.ndarray | RemoteTable"
    starts: "np.ndarray | RemoteTable"
    read_range: Callable[[int, int], UInt[np.ndarray, " tokens"]]
    ids_name: Callable[[int], str]

    def run(self) -> list[str]:
        """Reads the whole index; returns one line per damage."""
        damage = [
            f"{name} has other contents than were written"
            for name, expected_hash in self.hashes.items()
            if digest(self.files.content(name)) != expected_hash
        ]
        # The list of shards is among these files: nothing below can be compared with a damaged one.
        if damage:
            return damage
        shards = [json.loads(line) for line in self.files.content(SHARDS).splitlines()]
        counts = [(shard["records"], shard["tokens"]) for shard in shards]
        # reshape: an index without shards has no second axis.
        ends = np.cumsum(counts, axis=0).reshape(-1, 2).tolist()
        # Hashing releases the interpreter's lock, so threads suffice; shards are some MB each.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for lines in pool.map(self._verify_shard, shards, ends):
                damage += lines
        for first in range(0, self.num_blocks, _BLOCKS_AT_ONCE):
            blocks = np.arange(first, min(first + _BLOCKS_AT_ONCE, self.num_blocks))
            starts = self.starts[np.append(blocks, blocks[-1] + 1)]
            if not np.array_equal(self.block_lengths[blocks].sum(axis=1, dtype=np.int64), np.diff(starts)):
                return [*damage, f"{LENGTHS}: its starts are not the sums of its lengths"]
        return damage

    def _verify_shard(self, shard: dict[str, Any], end: list[int]) -> list[str]:
        record, token = end[0] - shard["records"], end[1] - shard["tokens"]
        damage = []
        records = np.arange(record, end[0], dtype=np.int64)
        if digest(self.lengths[records]) != shard["lengths"]:
            damage.append(f"{LENGTHS}: records {record} to {end[0] - 1} have other lengths than were written")
        if digest(self.read_range(token, end[1])) != shard["ids"]:
            damage.append(
                f"{self.ids_name(token)}: tokens {token} to {end[1] - 1} have other ids than were written"
            )
        return damage
