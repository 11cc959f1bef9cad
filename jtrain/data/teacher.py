"""Log-probabilities of a teacher, stored in a folder by samples of a run: its most probable tokens after each
learned one.

The folder has parts, each a safetensors file that is written whole: `hash` [samples, 16] bytes, `first`
[samples + 1] int64, `id` [targets, J] int32 and `logprob` [targets, J + 1] float32, of which targets
`first[i]` to `first[i + 1]` - 1 are of sample i, in order. The last logarithm is of all other tokens
together. J = 32 takes 260 bytes per target.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Int32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jtrain.data.references import PlacedSample, refuse_other_records, samples_in
from jtrain.errors import FileError, UserError
from jtrain.runtime.atomic_io import write_whole

PART_BYTES = 1 << 26
"""Bytes after which a part is written: what a killed `jtrain data reference` computes again at most."""
_FORMAT = "1"


class _Part(NamedTuple):
    """Open part of a folder, with the hashes of its samples and where each one's targets begin."""

    file: Any
    hashes: list[bytes]
    first: list[int]
    metadata: dict[str, str]


class StoredTeacher:
    """Reader of a folder of a teacher's log-probabilities.

    Args:
      path: the folder.
      top_k: tokens after each target that are read.

    Raises:
      FileError: there is no part in it, or one that cannot be read.
      UserError: it has fewer tokens of each than `top_k`.
    """

    def __init__(self, path: str, *, top_k: int) -> None:
        self._path, self._top_k = path, top_k
        self._parts = [_open_part(part) for part in parts_in(Path(path))]
        if not self._parts:
            raise FileError(
                f"objective.stored={path!r} has nothing that a teacher said. Make it with `jtrain data "
                "reference`."
            )
        kept = int(self._parts[0].metadata["top_k"])
        if top_k > kept:
            raise UserError(
                f"objective.top_k={top_k}, and objective.stored={path!r} has the {kept} most probable "
                f"tokens. Set objective.top_k={kept}, or make it again, in another folder, with `jtrain "
                "data reference`."
            )
        self._places = {
            key: (part, start, end)
            for part in self._parts
            for key, start, end in zip(part.hashes, part.first[:-1], part.first[1:], strict=True)
        }

    def at_targets(
        self,
        token_BL: Int[np.ndarray, "B L"],
        target_BL: Int[np.ndarray, "B L"],
        segment_BL: Int[np.ndarray, "B L"],
        order_L: Int[np.ndarray, " L"],
        *,
        vocab_size: int,
    ) -> tuple[Int32[np.ndarray, "B L J"], Float32[np.ndarray, "B L J+1"]]:
        """Returns the most probable tokens at the targets of a batch, and their log-probabilities and the
        others'.

        Args:
          order_L: place in the text of each column.
          vocab_size: ids of the model that learns.

        Raises:
          UserError: a sample is not among the stored ones, or the teacher says a token that the model has
            not.
        """
        inverse_L = np.argsort(order_L)
        token_BL, target_BL, segment_BL = (a[:, inverse_L] for a in (token_BL, target_BL, segment_BL))
        # Ids must differ, even where nobody reads them.
        id_BLJ = np.broadcast_to(
            np.arange(self._top_k, dtype=np.int32), (*token_BL.shape, self._top_k)
        ).copy()
        logprob_BLI = np.zeros((*token_BL.shape, self._top_k + 1), np.float32)
        for sample in samples_in(token_BL, target_BL, segment_BL):
            id_BLJ[sample.row, sample.targets], logprob_BLI[sample.row, sample.targets] = self._read(
                sample, token_BL
            )
        if id_BLJ.max(initial=0) >= vocab_size:
            raise UserError(
                f"objective.stored={self._path!r} has token {id_BLJ.max()}, and the model has ids up to "
                f"{vocab_size - 1} (model.vocab_size={vocab_size}). Teacher and model need one tokenizer: "
                f"set model.vocab_size above {id_BLJ.max()}, or take another teacher."
            )
        return id_BLJ[:, order_L], logprob_BLI[:, order_L]

    def _read(self, sample: PlacedSample, token_BL: Int[np.ndarray, "B L"]) -> tuple[np.ndarray, np.ndarray]:
        if (place := self._places.get(sample.hash)) is None:
            raise refuse_other_records(self._path, len(self._places), sample, token_BL)
        part, start, end = place
        id_nJ = part.file.get_slice("id")[start:end]
        return id_nJ[:, : self._top_k], keep(part.file.get_slice("logprob")[start:end], self._top_k)


def keep(logprob_nI: Float[np.ndarray, "n I"], top_k: int) -> Float[np.ndarray, "n _"]:
    """Returns the first `top_k` logarithms, and that of all that is left."""
    rest_n = np.logaddexp.reduce(logprob_nI[:, top_k:].astype(np.float64), axis=1)
    return np.concatenate([logprob_nI[:, :top_k], rest_n[:, None].astype(np.float32)], axis=1)


class TeacherWriter:
    """Writes what a teacher says into a folder, and goes on where a killed writer ended.

    Args:
      teacher: what the numbers are of, the same for all parts of a folder.

    Raises:
      UserError: the folder has parts of another teacher, or with another number of tokens.
    """

    def __init__(self, path: Path, *, top_k: int, teacher: str) -> None:
        self._path, self._top_k, self._metadata = (
            path,
            top_k,
            dict(format=_FORMAT, top_k=str(top_k), teacher=teacher),
        )
        self.stored: set[bytes] = set()
        """Hashes of the samples that are written, or will be by `flush`."""
        self._waiting: list[tuple[bytes, np.ndarray, np.ndarray]] = []
        self._bytes, self._number = 0, 0
        path.mkdir(parents=True, exist_ok=True)
        for name in parts_in(path):
            part = _open_part(name)
            for field, own in self._metadata.items():
                if (other := part.metadata[field]) != own:
                    raise UserError(
                        f"--out {path}: {name.name} has {field}={other}, and this one would have "
                        f"{field}={own}. Give another folder, or remove this one."
                    )
            self.stored.update(part.hashes)
            self._number = int(name.stem) + 1

    def add(
        self, sample: PlacedSample, id_LJ: Int[np.ndarray, "L J"], logprob_LI: Float[np.ndarray, "L I"]
    ) -> None:
        """Adds a sample, from the columns of its row, unless it is there."""
        if sample.hash in self.stored:
            return
        self.stored.add(sample.hash)
        self._waiting.append((sample.hash, id_LJ[sample.targets], logprob_LI[sample.targets]))
        self._bytes += sum(array.nbytes for array in self._waiting[-1][1:])

    def flush_full(self) -> None:
        """Writes what is waiting if it is as much as a part has."""
        if self._bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is waiting as a part."""
        if not self._waiting:
            return
        hashes, ids, logprobs = zip(*self._waiting, strict=True)
        first = np.cumsum([0, *(len(array) for array in ids)])
        tensors = dict(
            hash=np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1),
            first=first.astype(np.int64),
            id=np.concatenate(ids).astype(np.int32),
            logprob=np.concatenate(logprobs).astype(np.float32),
        )
        write_whole(self._path / f"{self._number:06d}.safetensors", save(tensors, self._metadata))
        self._waiting, self._bytes, self._number = [], 0, self._number + 1


def parts_in(path: Path) -> list[Path]:
    """Returns the parts of a folder in order; none if it is not there."""
    return sorted(path.glob("[0-9]*.safetensors"))


def _open_part(path: Path) -> _Part:
    try:
        # Not closed: it is a map of the file, which is read as batches need it.
        file: Any = safe_open(path, framework="numpy").__enter__()
        metadata = file.metadata() or {}
        hashes, first = file.get_tensor("hash"), file.get_tensor("first")
        if metadata.get("format") != _FORMAT:
            raise SafetensorError(f"format {metadata.get('format')}, not {_FORMAT}")
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path} cannot be read ({error}). Remove it, and make it again with `jtrain data reference`."
        ) from error
    return _Part(file, [row.tobytes() for row in hashes], first.tolist(), metadata)
