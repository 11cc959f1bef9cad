"""Log-probabilities of given tokens on any layout: `jtrain.logprobs`.

Every call computes batches of one shape, so a model is compiled once, and a sequence has the same bits
whatever else is in the call: its row and its neighbours enter no sum of its own, and where it begins in a row
is a multiple of the power of two that holds it, so that the terms of its sums are grouped alike. Where a row
is split over `context`, a sequence lies within one piece of it, or alone in a row.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config import tree
from jtrain.config.devices import resolve_mesh
from jtrain.config.resume import config_from_text, open_checkpoint
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.config.trained_params import read_params
from jtrain.data import put_batch
from jtrain.data.constructor.context_order import context_order
from jtrain.errors import UserError
from jtrain.layout.batch_split import check_batch
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import make_mesh
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.plan.auto_layout import choose_layout
from jtrain.runtime.stores import workdir_path
from jtrain.step.state import abstract_state, place_params
from jtrain.step.train_step import make_eval_step

_LEAST_SLOT = 64
"""Tokens of the smallest piece of a row that a sequence takes: fewer would pack more, and move vectors of a
CPU.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model with its parameters on a mesh, and the shape of the batches that `logprobs` computes with it.

    params: as `TrainState.params` has them in this layout; another step's are put in by
      `dataclasses.replace`, which compiles nothing anew.
    rows, seq_len: sequences of a batch over all devices, and tokens of each.
    step: that the parameters are of; None for others.
    """

    model: Transformer
    params: Params
    layout: Layout
    mesh: Mesh
    rows: int
    seq_len: int
    step: int | None = None

    def __post_init__(self) -> None:
        check_batch(self.layout.spec, self.layout.mesh, global_batch=self.rows, seq_len=self.seq_len)


def logprobs(
    model: str | Path | PlacedModel,
    tokens: Sequence[Any] | np.ndarray,
    segments: np.ndarray | None = None,
    *,
    step: int | None = None,
    sets: Sequence[str] = (),
) -> list[Float32[np.ndarray, " n"]]:
    """Returns the log-probability of each token of some sequences, given those before it, in nats below 0.

    A sequence of n tokens has n - 1 of them: number i is that of token i + 1. In a process for each host, all
    give the same tokens and get all results.

    Example:
      >>> jtrain.logprobs("runs/tiny", [[100, 101, 102], [100, 101]])
      [array([-2.1, -1.9], dtype=float32), array([-2.1], dtype=float32)]

    Args:
      model: folder of a run, whose newest checkpoint is read at each call, in the run's own layout with as
        many devices along `data` as are here, and an adapter merged; or a model that is placed already, as by
        `read_placed`.
      tokens: ids of each sequence; with `segments` rows of several sequences, [B, L].
      segments: [B, L], the number of the sequence that each token of a row is in, 0 in padding; results are
        in the order of rows, and of numbers within a row.
      step: checkpoint of a folder; None for the newest.
      sets: `PATH=VALUE` each, fields of a folder's run that differ, such as `mesh.tensor=2`,
        `data.seq_len=4096` or `data.global_batch=64`, the rows of a batch.

    Raises:
      FileError: the folder has no checkpoint.
      UserError: a sequence is no list of ids, is longer than a row, or has an id that the model has not; rows
        and `segments` do not fit each other; `step` or `sets` with a model that is placed already.
    """
    if not isinstance(model, PlacedModel):
        model = read_placed(model, step, sets)
    elif step is not None or sets:
        raise UserError(
            f"step={step} and sets={list(sets)} are of a folder that is read, and the model is placed "
            "already. Leave them out, or give the folder of the run."
        )
    sequences = _sequences(tokens, segments)
    _check(sequences, vocab_size=model.model.vocab_size, seq_len=model.seq_len)
    context = model.layout.mesh.context
    starts = place_sequences([len(ids) for ids in sequences], seq_len=model.seq_len, context=context)
    order_L = context_order(model.seq_len, context, model.layout.context_order)
    eval_step = _eval_step(model.model, model.layout, model.mesh)
    column_L = np.argsort(order_L)
    results = [np.zeros(max(0, len(ids) - 1), np.float32) for ids in sequences]
    by_batch: dict[int, list[int]] = {}
    for index, start in enumerate(starts):
        by_batch.setdefault(start.row // model.rows, []).append(index)
    unread: collections.deque[tuple[list[int], Array]] = collections.deque()

    def read() -> None:
        indices, nats = unread.popleft()
        nats_BL = np.asarray(jax.device_get(nats))[:, column_L]
        for index in indices:
            row, column = starts[index]
            results[index][:] = -nats_BL[row % model.rows, column : column + len(results[index])]

    for indices in by_batch.values():
        contents = [(sequences[index], starts[index]) for index in indices]
        batch = _batch(contents, rows=model.rows, seq_len=model.seq_len, order_L=order_L)
        unread.append((indices, eval_step(model.params, put_batch(batch, model.mesh))))
        # The devices compute a batch while the host reads the one before.
        if len(unread) > 1:
            read()
    while unread:
        read()
    return results


def read_placed(workdir: str | Path, step: int | None = None, sets: Sequence[str] = ()) -> PlacedModel:
    """Reads the parameters of a checkpoint into the layout of its run on the devices that are here.

    Args:
      step, sets: as of `logprobs`.

    Raises:
      FileError: there is no checkpoint.
      UserError: the layout needs other devices.
    """
    path = workdir_path(str(workdir))
    with Checkpoints(path, CheckpointSpec()) as checkpoints:
        step, trained = open_checkpoint(checkpoints, step)
        config = config_from_text(checkpoints.config_text(step))
    config.mesh.data = "auto"
    for text in sets:
        tree.set_path(config, text)
    devices, _ = resolve_mesh(config, jax.devices())
    choose_layout(config, devices=devices, workdir=None)
    run = build_run(config)
    mesh = make_mesh(run.mesh, devices)
    plain = dataclasses.replace(run, adapter=None)
    layout = run_layout(plain)
    likes = abstract_state(layout, build_run_optimizer(plain), mesh).params
    with Checkpoints(path, CheckpointSpec(), layer_order=layout.layer_order) as checkpoints:
        if run.adapter is None:
            params = checkpoints.restore_part(step, {"params": likes})["params"]
            return PlacedModel(run.model, params, layout, mesh, *_shape(run), step)
    with Checkpoints(path, CheckpointSpec()) as checkpoints:
        merged = read_params(checkpoints, step, trained, lambda _: run.precision.param_dtype)
    arrays = jax.tree.map(np.asarray, merged)
    infos = tuple(p.info for p in layout.params)
    return PlacedModel(run.model, place_params(infos, likes, arrays), layout, mesh, *_shape(run), step)


class SequenceStart(NamedTuple):
    """First token of a sequence; rows are counted over all batches."""

    row: int
    column: int


def place_sequences(lengths: Sequence[int], *, seq_len: int, context: int) -> list[SequenceStart]:
    """Returns where each sequence begins in rows of `seq_len` tokens, the longest first.

    A sequence takes a power of two of tokens, and begins at a multiple of it. Example, rows of 256: lengths
    100, 60, 130 and 20 take 128, 64, 256 and 64 tokens, so the third is alone in row 0, and the others are in
    row 1, at 0, 128 and 192.

    Args:
      context: devices that share a row, each an early and a late piece of it.
    """
    piece = seq_len if context == 1 else seq_len // (2 * context)

    def slot_of(length: int) -> int:
        slot = max(_LEAST_SLOT, 1 << max(0, length - 1).bit_length())
        # A row's pieces lie on different devices, each from a multiple of a piece on.
        fits = slot <= piece and (context == 1 or piece % slot == 0)
        return slot if fits else seq_len

    slots = [slot_of(length) for length in lengths]
    starts: dict[int, SequenceStart] = {}
    row, column = 0, 0
    # From the longest on: then every column is a multiple of the slots that follow.
    for index in sorted(range(len(lengths)), key=lambda index: -slots[index]):
        slot = slots[index]
        size = seq_len if slot == seq_len else piece
        if column % size + slot > size:
            # The rest of this piece is too short.
            column += size - column % size
        if column + slot > seq_len:
            row, column = row + 1, 0
        starts[index] = SequenceStart(row, column)
        column += slot
    return [starts[index] for index in range(len(lengths))]


def _shape(run: Run) -> tuple[int, int]:
    return run.data.global_batch, run.data.seq_len


@functools.lru_cache(maxsize=8)
def _eval_step(
    model: Transformer, layout: Layout, mesh: Mesh
) -> Callable[[Params, Batch], Float[Array, "B L"]]:
    """The compiled step of a model, kept from call to call."""
    return make_eval_step(model, layout, mesh)


def _sequences(tokens: Any, segments: np.ndarray | None) -> list[Int[np.ndarray, " n"]]:
    rows = [_ids(index, ids) for index, ids in enumerate(tokens)]
    if segments is None:
        return rows
    sequences: list[Int[np.ndarray, " n"]] = []
    if [len(row) for row in rows] != [len(numbers) for numbers in segments]:
        raise UserError(
            f"segments has rows of {[len(numbers) for numbers in segments]} numbers, and tokens of "
            f"{[len(row) for row in rows]}. Give a number for each token of each row, 0 for padding."
        )
    for index, (row, numbers) in enumerate(zip(rows, np.asarray(segments), strict=True)):
        # Where another sequence, or padding, begins.
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1)]
        pieces = [
            (int(numbers[start]), ids) for start, ids in zip(starts, np.split(row, starts[1:]), strict=True)
        ]
        pieces = [(number, ids) for number, ids in pieces if number > 0]
        order = [number for number, _ in pieces]
        if order != sorted(set(order)):
            raise UserError(
                f"row {index} of segments has the sequences {order}: each is in one piece, and numbers "
                "ascend along a row. Number the sequences of each row from 1 on."
            )
        sequences += [ids for _, ids in pieces]
    return sequences


def _ids(index: int, ids: Any) -> Int[np.ndarray, " n"]:
    array = np.asarray(ids)
    # An empty list has no dtype of its own.
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise UserError(
            f"tokens[{index}] is {ids!r:.60}, and a sequence is a list of ids, as whole numbers. Give a "
            "list of sequences: [[1, 2, 3]] for a single one."
        )
    return array.astype(np.int64)


def _check(sequences: Sequence[np.ndarray], *, vocab_size: int, seq_len: int) -> None:
    for index, ids in enumerate(sequences):
        if len(ids) > seq_len:
            raise UserError(
                f"sequence {index} has {len(ids):,} tokens, and a row has data.seq_len={seq_len:,}. Give "
                f"shorter ones, or rows of {len(ids):,} or more: sets=['data.seq_len=...'], or "
                "PlacedModel.seq_len."
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong_id = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise UserError(
                f"sequence {index} has the id {wrong_id}, and the model has ids from 0 to {vocab_size - 1} "
                f"(model.vocab_size={vocab_size})."
            )


def _batch(
    contents: Sequence[tuple[np.ndarray, SequenceStart]],
    *,
    rows: int,
    seq_len: int,
    order_L: Int[np.ndarray, " L"],
) -> Batch:
    """Batch of sequences and where they begin, its columns in the order of `context`."""
    token_BL, position_BL, segment_BL = (np.zeros((rows, seq_len), np.int32) for _ in range(3))
    target_BL = np.full((rows, seq_len), IGNORE, np.int32)
    for ids, (row, column) in contents:
        span = row % rows, slice(column, column + len(ids))
        token_BL[span], position_BL[span] = ids, np.arange(len(ids))
        # Segments ascend along a row, and a column's is the same whatever lies before it.
        segment_BL[span] = 1 + column // _LEAST_SLOT
        target_BL[row % rows, column : column + max(0, len(ids) - 1)] = ids[1:]
    return Batch(*(array[:, order_L] for array in (token_BL, target_BL, position_BL, segment_BL)))
