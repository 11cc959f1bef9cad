"""Log-probabilities of preference pairs by a reference, stored beforehand and found by the hash of a pair's tokens.

A hash is of the ids and targets of both texts, so it is the same wherever a pair is packed, and another one for
another template, tokenizer, mask or record.
"""

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from jtrain.errors import FileError, UserError
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.runtime.atomic_io import write_whole

_FORMAT = 1
_HASH_BYTES = 16
_STEPS_PER_NAT = 1024.0
"""Inverse of the unit of the nats of each token: few bits, so that their float32 sum is exact."""


class PlacedPair(NamedTuple):
    """Pair in a row: its texts are tokens `starts[0]` to `ends[0]` - 1 and `starts[1]` to `ends[1]` - 1."""

    row: int
    starts: tuple[int, int]
    ends: tuple[int, int]
    hash: bytes


def pairs_in(
    token_BL: Int[np.ndarray, "B L"], target_BL: Int[np.ndarray, "B L"], segment_BL: Int[np.ndarray, "B L"]
) -> Iterator[PlacedPair]:
    """Yields the pairs of a batch, whose columns are in the order of the text."""
    for row, (token, target, segment) in enumerate(zip(token_BL, target_BL, segment_BL, strict=True)):
        # Segments ascend up to the padding.
        numbers = np.arange(1, int(segment.max(initial=0)) + 2)
        length = int(np.count_nonzero(segment))
        edges = np.searchsorted(segment[:length], numbers).tolist()
        for better in range(0, len(edges) - 2, 2):
            start, border, end = edges[better : better + 3]
            parts = (array[a:b] for a, b in ((start, border), (border, end)) for array in (token, target))
            digest = hashlib.blake2b(digest_size=_HASH_BYTES)
            for part in parts:
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(part, "<i4"))
            yield PlacedPair(row, (start, border), (border, end), digest.digest())


class StoredReferences:
    """Nats of the texts of pairs, by their hashes.

    Args:
      nats: nats of the better and the worse text of each pair.
      name: file that they are from, for messages.
    """

    def __init__(self, nats: dict[bytes, tuple[float, float]], *, name: str) -> None:
        self.nats, self._name = nats, name

    @classmethod
    def read(cls, path: str) -> "StoredReferences":
        """Reads a file of `write`.

        Raises:
          FileError: it is not there, or no such file.
        """
        field = f"objective.stored={path!r}"
        make = "Make it with `jtrain data reference`, or set objective.reference=adapter_off."
        try:
            with np.load(path, allow_pickle=False) as arrays:
                version, hashes, nats = (arrays[name] for name in ("format", "hash", "nats"))
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise FileError(f"{field} cannot be read ({error}). {make}") from error
        if int(version) != _FORMAT or hashes.shape != (len(nats), _HASH_BYTES) or nats.shape[1:] != (2,):
            raise FileError(f"{field} holds no log-probabilities of pairs. {make}")
        keys = (row.tobytes() for row in hashes)
        return cls(dict(zip(keys, map(tuple, nats.tolist()), strict=True)), name=path)

    def write(self, path: Path) -> None:
        """Writes the file at once, sorted by hash."""
        hashes = sorted(self.nats)
        content = io.BytesIO()
        np.savez(
            content,
            format=np.asarray(_FORMAT),
            hash=np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, _HASH_BYTES),
            nats=np.asarray([self.nats[key] for key in hashes], np.float64).reshape(-1, 2),
        )
        write_whole(path, content.getvalue())

    def at_targets(
        self,
        token_BL: Int[np.ndarray, "B L"],
        target_BL: Int[np.ndarray, "B L"],
        segment_BL: Int[np.ndarray, "B L"],
        order_L: Int[np.ndarray, " L"],
    ) -> Float32[np.ndarray, "B L"]:
        """Returns nats at the targets of a batch whose sum over each text is that of the reference.

        Args:
          order_L: place in the text of each column.

        Raises:
          UserError: a pair is not among the stored ones.
        """
        inverse_L = np.argsort(order_L)
        token_BL, target_BL, segment_BL = (a[:, inverse_L] for a in (token_BL, target_BL, segment_BL))
        nats_BL = np.zeros(token_BL.shape, np.float32)
        for pair in pairs_in(token_BL, target_BL, segment_BL):
            if (nats := self.nats.get(pair.hash)) is None:
                raise UserError(
                    f"objective.stored={self._name!r} is a reference for other records: of its {len(self.nats):,} "
                    f"pairs none has the hash {pair.hash.hex()} of a pair of this run, whose better text has "
                    f"{pair.ends[0] - pair.starts[0]} tokens, the first of them "
                    f"{token_BL[pair.row, pair.starts[0] :][:8].tolist()}. Records, template, tokenizer and what is "
                    "learned must be those it was made from. Make it again with `jtrain data reference`."
                )
            for start, end, total in zip(pair.starts, pair.ends, nats, strict=True):
                places = np.flatnonzero(target_BL[pair.row, start:end] != IGNORE) + start
                nats_BL[pair.row, places] = spread(total, len(places))
        return nats_BL[:, order_L]

    def beside(self, batch: Batch, order_L: Int[np.ndarray, " L"]) -> Batch:
        """Returns a batch of the host with what `at_targets` returns."""
        nats_BL = self.at_targets(batch.token_BL, batch.target_BL, batch.segment_BL, order_L)
        return dataclasses.replace(batch, reference_BL=nats_BL)


def spread(total: float, count: int) -> Float32[np.ndarray, " count"]:
    """Returns numbers alike in float32 whose sum is `total` to a few ulp of one of them, and not of the sum.

    Example: 1000.1 nats of 3 tokens are 333.366..., 333.366... and the rest, each a multiple of 1 / 1024 but one.
    """
    each = np.full(count, round(total / max(count, 1) * _STEPS_PER_NAT) / _STEPS_PER_NAT)
    if count:
        each[0] += total - count * each[0]
    return each.astype(np.float32)


def sums_of_pairs(
    nats_BL: Float32[np.ndarray, "B L"],
    token_BL: Int[np.ndarray, "B L"],
    target_BL: Int[np.ndarray, "B L"],
    segment_BL: Int[np.ndarray, "B L"],
) -> dict[bytes, tuple[float, float]]:
    """Returns the nats of both texts of each pair of a batch by hash, summed in float64."""

    def total(row: int, start: int, end: int) -> float:
        return float(nats_BL[row, start:end].sum(dtype=np.float64))

    return {
        pair.hash: (
            total(pair.row, pair.starts[0], pair.ends[0]),
            total(pair.row, pair.starts[1], pair.ends[1]),
        )
        for pair in pairs_in(token_BL, target_BL, segment_BL)
    }
