"""Log-probabilities of samples by another model, stored beforehand and found by the hash of a sample's
tokens.

A hash is of the ids and targets of a sample, so it is the same wherever it is packed, and another one for
another template, tokenizer, mask or record. Of the texts of preference pairs a sum is stored, of what a
teacher says the most probable tokens after each one that is learned.
"""

import dataclasses
import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from jtrain.errors import FileError, UserError
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.runtime.atomic_io import write_whole

_FORMAT = 2
_HASH_BYTES = 16
_STEPS_PER_NAT = 1024.0
"""Inverse of the unit of the nats of each token: few bits, so that their float32 sum is exact."""


class PlacedSample(NamedTuple):
    """Sample in a row, tokens `start` to `end` - 1; `targets` are the columns of those that have a target."""

    row: int
    start: int
    end: int
    targets: Int[np.ndarray, " n"]
    hash: bytes


def samples_in(
    token_BL: Int[np.ndarray, "B L"], target_BL: Int[np.ndarray, "B L"], segment_BL: Int[np.ndarray, "B L"]
) -> Iterator[PlacedSample]:
    """Yields the samples of a batch, whose columns are in the order of the text."""
    for row, (token, target, segment) in enumerate(zip(token_BL, target_BL, segment_BL, strict=True)):
        # Padding, if there is any, is one more piece at the end, of number 0.
        edges = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(segment)]
        for start, end in itertools.pairwise(edges):
            if segment[start] == 0:
                continue
            digest = hashlib.blake2b(digest_size=_HASH_BYTES)
            for array in (token, target):
                digest.update(np.ascontiguousarray(array[start:end], "<i4"))
            targets = np.flatnonzero(target[start:end] != IGNORE) + start
            yield PlacedSample(row, start, end, targets, digest.digest())


def refuse_other_records(
    name: str, count: int, sample: PlacedSample, token_BL: Int[np.ndarray, "B L"]
) -> UserError:
    """The error of a sample that is not among the `count` stored ones of `objective.stored`."""
    return UserError(
        f"objective.stored={name!r} is of other records: of its {count:,} samples none has the hash "
        f"{sample.hash.hex()} of one of this run, which has {sample.end - sample.start} tokens, the first "
        f"of them {token_BL[sample.row, sample.start :][:8].tolist()}. Records, template, tokenizer and "
        "what is learned must be those it was made from. Make it again with `jtrain data reference`."
    )


class StoredReferences:
    """Nats of the texts of preference pairs, by their hashes.

    Args:
      nats: sum over the targets of each text.
      name: file that they are from, for messages.
    """

    def __init__(self, nats: dict[bytes, float], *, name: str) -> None:
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
        if int(version) != _FORMAT or hashes.shape != (len(nats), _HASH_BYTES) or nats.ndim != 1:
            raise FileError(f"{field} holds no log-probabilities of pairs. {make}")
        keys = (row.tobytes() for row in hashes)
        return cls(dict(zip(keys, nats.tolist(), strict=True)), name=path)

    def write(self, path: Path) -> None:
        """Writes the file at once, sorted by hash."""
        hashes = sorted(self.nats)
        content = io.BytesIO()
        np.savez(
            content,
            format=np.asarray(_FORMAT),
            hash=np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, _HASH_BYTES),
            nats=np.asarray([self.nats[key] for key in hashes], np.float64),
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
          UserError: a text is not among the stored ones.
        """
        inverse_L = np.argsort(order_L)
        token_BL, target_BL, segment_BL = (a[:, inverse_L] for a in (token_BL, target_BL, segment_BL))
        nats_BL = np.zeros(token_BL.shape, np.float32)
        for sample in samples_in(token_BL, target_BL, segment_BL):
            if (total := self.nats.get(sample.hash)) is None:
                raise refuse_other_records(self._name, len(self.nats), sample, token_BL)
            nats_BL[sample.row, sample.targets] = spread(total, len(sample.targets))
        return nats_BL[:, order_L]

    def beside(self, batch: Batch, order_L: Int[np.ndarray, " L"]) -> Batch:
        """Returns a batch of the host with what `at_targets` returns."""
        nats_BL = self.at_targets(batch.token_BL, batch.target_BL, batch.segment_BL, order_L)
        return dataclasses.replace(batch, reference_BL=nats_BL)


def spread(total: float, count: int) -> Float32[np.ndarray, " count"]:
    """Returns numbers alike in float32 whose sum is `total` to a few ulp of one of them, and not of the sum.

    Example: 1000.1 nats of 3 tokens are 333.366..., 333.366... and the rest, each a multiple of 1 / 1024 but
      one.
    """
    each = np.full(count, round(total / max(count, 1) * _STEPS_PER_NAT) / _STEPS_PER_NAT)
    if count:
        each[0] += total - count * each[0]
    return each.astype(np.float32)


def sums_of_samples(
    nats_BL: Float32[np.ndarray, "B L"],
    token_BL: Int[np.ndarray, "B L"],
    target_BL: Int[np.ndarray, "B L"],
    segment_BL: Int[np.ndarray, "B L"],
) -> dict[bytes, float]:
    """Returns the nats of each sample of a batch by hash, summed in float64."""
    return {
        sample.hash: float(nats_BL[sample.row, sample.start : sample.end].sum(dtype=np.float64))
        for sample in samples_in(token_BL, target_BL, segment_BL)
    }
