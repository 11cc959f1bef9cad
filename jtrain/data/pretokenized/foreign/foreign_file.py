"""Interface of foreign token files: each is scanned once, in parts, for its documents and its largest id."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt

from jtrain.errors import UserError

PART_BYTES = 1 << 25
"""Bytes of ids scanned at a time by a thread."""


@dataclasses.dataclass(frozen=True)
class PartContent:
    """Contents of one part of a file.

    ids: ids of the part, as stored, read as unsigned numbers: a negative id becomes one beyond any
      vocabulary.
    ends: end of each document that ends in this part, in tokens from the start of the part; equal to the one
      before for an empty document.
    offsets: byte offset of each document in the file; None if the ids of the whole file lie one after
      another.
    ignored: runs of tokens of the part that are not learned, by its labels.
    """

    ids: UInt[np.ndarray, " tokens"]
    ends: Int[np.ndarray, " documents"]
    offsets: Int[np.ndarray, " documents"] | None = None
    ignored: Int[np.ndarray, "runs 2"] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int64))


class ForeignFile(abc.ABC):
    """File of token ids.

    Attributes:
      path: the file that holds the ids.
      dtype: dtype of `PartContent.ids`.
      first_byte: byte offset of the first id, where the ids of the whole file lie one after another.
      has_labels: True if a column of labels says which ids are learned.
    """

    path: Path
    dtype: np.dtype[Any]
    first_byte = 0
    has_labels = False

    @abc.abstractmethod
    def num_parts(self) -> int: ...

    @abc.abstractmethod
    def scan(self, part: int) -> PartContent:
        """Reads a part; called from several threads, on different parts."""

    def close(self) -> None:  # noqa: B027 (most layouts keep nothing)
        """Frees what was kept between the scans."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignLayout:
    """Files of one layout, ready to be scanned.

    kind: megatron, llm.c, raw, npy, mds or parquet.
    root: folder that `names` are relative to.
    names: names of the files of ids, sorted.
    files: the files.
    decided_by: other settings that decide the documents, such as the end id; part of the identity of the
      index.
    splits: True if the documents are found by the end id, False if the layout marks them.
    copies: True if the ids must be copied, because the layout has no ids at fixed offsets.
    dtype_is_assumed: True if nothing in the files tells the dtype of the ids.
    """

    kind: str
    root: Path
    names: list[str]
    files: Sequence[ForeignFile]
    decided_by: dict[str, str | int]
    splits: bool = False
    copies: bool = False
    dtype_is_assumed: bool = False


LABELS, NOT_LEARNED = "labels", -100
"""Column of the targets of the ids, at the same places, and what stands for a token that is no target."""


def ignored_runs(
    content: PartContent,
    labels: Int[np.ndarray, " tokens"],
    label_ends: Int[np.ndarray, " documents"],
    path: Path,
) -> Int[np.ndarray, "runs 2"]:
    """Returns the runs of tokens that are not learned by their labels.

    Raises:
      UserError: the labels are not as many as the ids, or others than these and -100.
    """
    way_out = (
        "Write labels that are the ids or -100, at the same places (models shift them), or drop the column."
    )
    if not np.array_equal(content.ends, label_ends):
        raise UserError(f"{path}: column {LABELS!r} has not as many labels as there are ids. {way_out}")
    is_ignored = labels == NOT_LEARNED
    wrong = np.flatnonzero(~is_ignored & (labels != content.ids.astype(np.int64)))
    if len(wrong):
        token = int(wrong[0])
        raise UserError(
            f"{path}: token {token:,} of this part has label {labels[token]} and id {content.ids[token]}. "
            f"{way_out}"
        )
    borders = np.flatnonzero(np.diff(np.concatenate([[False], is_ignored, [False]]).astype(np.int8)))
    return borders.reshape(-1, 2)


def unsigned(dtype: Any, label: str) -> np.dtype[Any]:
    """Returns the unsigned dtype of the same size; refuses all but little-endian integers."""
    dtype = np.dtype(dtype)
    # One byte has no order, so only longer ids are checked for it.
    if dtype.kind not in "iu" or (dtype.itemsize > 1 and dtype.newbyteorder("<") != dtype):
        raise UserError(
            f"{label}: ids must be little-endian integers, and these are {dtype}. Write them as uint32."
        )
    return np.dtype(f"<u{dtype.itemsize}")
