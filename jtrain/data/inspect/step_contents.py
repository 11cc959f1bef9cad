"""Contents of one step: which documents its rows hold, where, and what is learned of them."""

import itertools
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.dataset import TextDataset
from jtrain.data.inspect.excerpt import mark_learned
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.layout.constants import IGNORE
from jtrain.runtime.multihost import process_index


def pieces_of_step(dataset: TextDataset, step: int, *, tokens: bool = False) -> list[dict[str, Any]]:
    """Returns one entry per document piece of batch `step`, in the order of rows and segments.

    Args:
      tokens: True to add `tokens`, as the vocabulary spells them, and `is_learned` of each.

    Returns:
      Dicts with `row`, `source`, `document` (file:number), `chunk` of the document, `start_token` and
      `end_token` in that chunk, `text`; of a preference pair `answer`, better or worse; for sources with a
      loss mask also `learned`, the spans of those tokens that are targets, and `marked`, the text in short
      with the learned spans between [[ and ]].
    """
    with dataset.train_batches(inline=True) as iterator:
        batch = next(itertools.islice(iterator, step, None))
        assert iterator.plan is not None
        pieces = iterator.plan.pieces
    entries, position, row = [], 0, 0
    for i in range(len(pieces)):
        source, start, end = int(pieces.source[i]), int(pieces.start[i]), int(pieces.end[i])
        # Pieces are sorted by row and lie end to end: the position starts anew with each row.
        position, row = (position if pieces.row[i] == row else 0), int(pieces.row[i])
        in_row = slice(position, position + end - start)
        ids, target, segment = (a[row, in_row] for a in (batch.token_BL, batch.target_BL, batch.segment_BL))
        position += len(ids)
        stream = dataset.streams[source]
        chunk = stream.locate(np.asarray([pieces.document[i]], np.int64))
        # A pair has two texts, any other piece one.
        borders = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(ids)]
        for number, (first, stop) in enumerate(itertools.pairwise(borders)):
            entry = {
                "row": row,
                "source": dataset.names[source],
                "document": stream.identity_of(int(chunk.record[0])),
                "chunk": int(chunk.first[0]),
                **({"answer": ("better", "worse")[number]} if dataset.spec.has_pairs else {}),
                "start_token": start + first,
                "end_token": start + stop,
            }
            entries.append(
                entry | _contents(stream, ids[first:stop], target[first:stop], start + first, tokens)
            )
    return entries


def _contents(
    stream: ChunkStream,
    ids: Int[np.ndarray, " n"],
    target: Int[np.ndarray, " n"],
    start: int,
    tokens: bool,
) -> dict[str, Any]:
    """Text of a piece, what of it is learned, and its tokens; `start` is the first one's place in its chunk."""
    # The marks of a chat template are a part of its text.
    mask = stream.setup.source.mask
    is_chat = mask is not None and mask.is_chat
    values = [int(i) for i in ids]
    contents: dict[str, Any] = {"text": stream.tokenizer.decode(values, specials=is_chat)}
    if tokens:
        # Token i is the target at i - 1, so that the first token of a piece is never learned.
        contents["tokens"] = [stream.tokenizer.spell(i) for i in values]
        contents["is_learned"] = [False, *(target[:-1] != IGNORE).tolist()][: len(ids)]
    if mask is not None:
        # Token i is the target at i - 1, so that the first token of a piece is never learned.
        edges = np.concatenate([[0, 0], target[:-1] != IGNORE, [0]])
        spans = [(int(a), int(b)) for a, b in np.flatnonzero(np.diff(edges)).reshape(-1, 2).tolist()]
        contents["learned"] = [[start + a, start + b] for a, b in spans]
        contents["marked"] = mark_learned(values, spans, stream.tokenizer, specials=is_chat)
    return contents


def documents_of_batch(
    dataset: TextDataset, state: dict[str, Any] | None, *, step: int
) -> dict[str, list[str]]:
    """Returns the documents of the batch after a data state by source: `file:number`, in the order of rows.

    Reads that one batch again, in this thread. Process 0 alone looks; the others get an empty dict, and so
    does a process that cannot read the batch any more, because the message that wants to name documents
    matters more.

    Args:
      state: as `BatchIterator.state` returned it; None for the state before the first batch.
      step: number of the batch, from 0, if there is no state.
    """
    if process_index() != 0:
        return {}
    # A resume replaces streams by those of the saved state: put back below.
    streams = list(dataset.streams)
    names_by_source: dict[str, list[str]] = {}
    try:
        with dataset.train_batches(state, first_step=step, inline=True) as iterator:
            next(iterator)
            assert iterator.plan is not None
            pieces = iterator.plan.pieces
        for source, document in zip(pieces.source.tolist(), pieces.document.tolist(), strict=True):
            stream = dataset.streams[source]
            record = int(stream.locate(np.asarray([document], np.int64)).record[0])
            names = names_by_source.setdefault(dataset.names[source], [])
            if (name := stream.identity_of(record)) not in names:
                names.append(name)
    except Exception as error:  # any format may fail in its own way
        print(
            f"the documents of step {step + 1} could not be looked up: {type(error).__name__}: {error}",
            flush=True,
        )
    finally:
        dataset.streams[:] = streams
    return names_by_source
