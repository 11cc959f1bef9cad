"""Sources of a saved run: what a checkpoint keeps of each, and how a source that has gained files goes on."""

import dataclasses
import re
from typing import Any, NamedTuple

from jtrain.data.sources.generations import Generation
from jtrain.data.sources.source import field_of
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.source_order import join
from jtrain.data.stream.source_setup import SourceSetup

_MOST_TRIED = 4096
"""Most files among which the new one is searched for: each try hashes the names of all files."""


class Resumed(NamedTuple):
    """Source that goes on from a checkpoint, and a line for the log if files have joined it."""

    stream: ChunkStream
    message: str


def source_to_json(setup: SourceSetup, last_file: str) -> dict[str, Any]:
    """Returns what a checkpoint keeps of a source.

    Args:
      setup: setup of the processes that read it.
      last_file: name of its last file.
    """
    return {
        "fingerprint": setup.fingerprint,
        "cut": [setup.window_bytes, setup.chunk_bytes],
        "opened_whole": setup.eager_bytes is None,
        "generations": [list(generation) for generation in setup.generations],
        "last_file": last_file,
    }


def running_setup(stream: ChunkStream) -> SourceSetup:
    """Returns the setup with which other processes open an open source: its files and no others, opened
    alike.
    """
    corpus = stream.corpus
    setup = dataclasses.replace(
        stream.setup,
        chunk_bytes=stream.chunk_bytes,
        fingerprint=stream.fingerprint(),
        grouped=stream.is_grouped,
    )
    if corpus is None:
        return setup
    return dataclasses.replace(
        setup,
        # None opens every file, 0 none that can wait: other processes must not decide by sizes.
        eager_bytes=None if corpus.is_open else 0,
        num_files=len(corpus.names),
        generations=stream.generations,
    )


def resume_source(
    stream: ChunkStream,
    saved: dict[str, Any],
    *,
    cursor: int,
    anchor: WindowAnchor | None,
    step: int,
    epochs: int | None,
) -> Resumed | str:
    """Returns a source as it goes on from a checkpoint, or why it cannot and what to do.

    Args:
      stream: the source, opened with the settings of this start.
      saved: result of `source_to_json`.
      cursor: the first chunk that was not drawn.
      anchor: where a window at or before it begins, if there are windows.
      step: step of the checkpoint.
      epochs: how often the source is read; None: without end.
    """
    window_bytes, chunk_bytes = saved["cut"]
    generations = tuple(Generation(*generation) for generation in saved["generations"])
    # Cuts and windows of the first start: today's estimates may differ and would change the order.
    setup = dataclasses.replace(stream.setup, window_bytes=window_bytes, chunk_bytes=chunk_bytes)
    corpus = stream.corpus
    if corpus is None or not generations:
        # A prepared source saves no generations: any change of it is refused.
        is_unchanged = stream.fingerprint() == saved["fingerprint"]
        return Resumed(stream.with_setup(setup), "") if is_unchanged else _changed(stream, saved)
    if corpus.is_open != saved["opened_whole"]:
        # Opened as at the first start, however large it is now: how it is opened decides the order.
        corpus.close()
        reopened_setup = dataclasses.replace(setup, eager_bytes=None if saved["opened_whole"] else 0)
        stream = ChunkStream(reopened_setup, stream.opening)
        corpus = stream.corpus
        assert corpus is not None
    num_saved, num_files = generations[-1].files, len(corpus.names)
    # A file whose sizes only reading tells has all files opened. It cannot join an order without windows, nor
    # one of files that are opened as they are read.
    unknown_size_file = corpus.first_of_unknown_sizes if corpus.is_open else None
    if unknown_size_file is not None and (unknown_size_file >= num_saved or not saved["opened_whole"]):
        return _other_format(stream, corpus.names[unknown_size_file])
    # The first files must be those of then; the fingerprint over these alone tells.
    if num_saved > num_files or stream.fingerprint(range(num_saved)) != saved["fingerprint"]:
        return _changed(stream, saved)
    old_stream = stream.with_setup(dataclasses.replace(setup, generations=generations))
    if num_saved == num_files:
        return Resumed(old_stream, "")
    # In the old order: only it knows which slots before the cursor have been read.
    joining = join(old_stream.order, cursor, anchor, files=num_files, epochs=epochs)
    joined_stream = old_stream.with_setup(dataclasses.replace(setup, generations=(*generations, joining)))
    return Resumed(joined_stream, _message_of_joined(joined_stream, step))


def _message_of_joined(stream: ChunkStream, step: int) -> str:
    """Returns the line for the log about the files of the last generation."""
    corpus = stream.corpus
    assert corpus is not None
    # Generations count all files up to theirs, so files num_old to num_new - 1 have joined.
    num_old, num_new = (generation.files for generation in stream.generations[-2:])
    count = len(corpus.stored_names(num_old, num_new))
    documents = (
        f"{corpus.records_before(num_new) - corpus.records_before(num_old):,} documents, "
        if corpus.is_open
        else ""
    )
    size = int(corpus.file_sizes()[num_old:num_new].sum())
    line = (
        f"step {step}: {field_of(stream.setup.name)} has gained {count:,} {'files' if count > 1 else 'file'} "
        f"({documents}{size:,} bytes; first: {corpus.names[num_old]}); from this step on they are read "
        "together with what the running epoch has left of the others"
    )
    if stream.setup.eval_fraction:
        line += "; evaluations go on with held-out documents of the files that the run began with"
    return line


def _changed(stream: ChunkStream, saved: dict[str, Any]) -> str:
    """Returns why a source is not the one that was saved, and what to do."""
    reason, way_out = "", "Restore the files, the tokenizer, data.eval_fraction and seed"
    if stream.prepared is not None:
        reason = (
            "what is prepared anew, or with more files, has another order: an index is cut and shuffled as "
            "a whole"
        )
        way_out = "Restore the folder that data.prepared named"
    elif stream.corpus is not None and saved["generations"]:
        reason, way_out = _changed_files(stream, saved, way_out)
    return (
        f"the data state was saved with sources.{stream.setup.name}={saved['fingerprint']!r}, but here it is "
        f"{stream.fingerprint()!r}{f' ({reason})' if reason else ''}: {ways_out(way_out)}"
    )


def _changed_files(stream: ChunkStream, saved: dict[str, Any], way_out: str) -> tuple[str, str]:
    """Returns what changed of a source's files, as far as their number and the name of the last one tell, and
    a way.
    """
    corpus, num_saved, last_file = stream.corpus, saved["generations"][-1][-1], saved["last_file"]
    assert corpus is not None
    last_name = re.sub(r"@\d+$", "", last_file)  # of a stripe, the name of its file
    names = corpus.names
    if last_file not in names:
        return f"its last file of then, {last_name}, is gone", way_out
    # Names ascend: the position of the old last file tells how many files now sort before it.
    position = names.index(last_file)
    if position < num_saved:
        num_gone = num_saved - 1 - position
        return (
            f"{num_gone:,} of its {num_saved:,} files are gone"
            if num_gone
            else "its files, or what reads them, changed",
            way_out,
        )
    # The last file of then is now so many places further back.
    num_new = position + 1 - num_saved
    # If the new names are one run: `num_new` names are left out at each position until the fingerprint fits.
    candidates = range(num_saved if num_saved <= _MOST_TRIED else 0)
    first_new = next(
        (
            number
            for number in candidates
            if stream.fingerprint(_numbers_without(number, num_new, num_saved)) == saved["fingerprint"]
        ),
        None,
    )
    if first_new is None:
        return (
            f"{num_new:,} more files than then sort before its last one of then, {last_name}, "
            "or others changed",
            way_out,
        )
    subject = (
        f"{names[first_new]} sorts" if num_new == 1 else f"{num_new:,} files from {names[first_new]} on sort"
    )
    return (
        f"{subject} before {last_name}, which the run has read: new files can only join if their names sort "
        "after all others",
        f"Rename it so that it sorts after {last_name}"
        if num_new == 1
        else f"Rename them so that they sort after {last_name}",
    )


def _numbers_without(first: int, count: int, num_saved: int) -> list[int]:
    """Returns the numbers of `num_saved` files: the first ones, without the `count` from `first` on."""
    return [n for n in range(num_saved + count) if not first <= n < first + count]


def _other_format(stream: ChunkStream, name: str) -> str:
    return (
        f"{field_of(stream.setup.name)} has gained {name}, whose texts have sizes that are only known by "
        "reading them, unlike those of the files that were there: "
        f"{ways_out('Move such files to a folder of their own')}"
    )


def ways_out(way_out: str) -> str:
    """Returns the end of a message that refuses a data state, with one way to mend it and the general
    ones.
    """
    return (
        f"the next batches would differ from those of the uninterrupted run. {way_out}, start in a new "
        "--workdir, or add --allow-change data: the weights go on, and the data begins anew."
    )
