"""Sources of a saved run: what a checkpoint keeps of each, and how a source that has gained files goes on."""

import dataclasses
from typing import Any, NamedTuple

from jtrain.data.sources.generations import Generation
from jtrain.data.sources.source import field_of
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.source_order import join
from jtrain.data.stream.source_setup import SourceSetup

_MOST_TRIED = 4096
"""Most files of which one is looked for that sorts before an old one: each try hashes the names of all of
them."""


class Resumed(NamedTuple):
    """Source that goes on from a checkpoint, and a line for the log if files have joined it."""

    stream: ChunkStream
    said: str


def saved_source(setup: SourceSetup, last_file: str) -> dict[str, Any]:
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
        eager_bytes=None if corpus.is_open else 0,
        num_files=len(corpus.names),
        generations=stream.generations,
    )


def resumed(
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
      saved: what `saved_source` returned.
      cursor: the first chunk that was not drawn.
      anchor: where a window at or before it begins, if there are windows.
      step: step of the checkpoint.
      epochs: how often the source is read; None: without end.
    """
    window_bytes, chunk_bytes = saved["cut"]
    generations = tuple(Generation(*generation) for generation in saved["generations"])
    setup = dataclasses.replace(stream.setup, window_bytes=window_bytes, chunk_bytes=chunk_bytes)
    corpus = stream.corpus
    if corpus is None or not generations:
        same = stream.fingerprint() == saved["fingerprint"]
        return Resumed(stream.resumed(setup), "") if same else _changed(stream, saved)
    if corpus.is_open != saved["opened_whole"]:
        # It is opened as at the first start, which decides the order, however large it is now.
        corpus.close()
        again = dataclasses.replace(setup, eager_bytes=None if saved["opened_whole"] else 0)
        stream = ChunkStream(again, stream.opening)
        corpus = stream.corpus
        assert corpus is not None
    known, here = generations[-1].files, len(corpus.names)
    other = corpus.first_of_unknown_sizes if corpus.is_open else None
    if other is not None and (other >= known or not saved["opened_whole"]):
        return _other_format(stream, corpus.names[other])
    if known > here or stream.fingerprint(range(known)) != saved["fingerprint"]:
        return _changed(stream, saved)
    before = stream.resumed(dataclasses.replace(setup, generations=generations))
    if known == here:
        return Resumed(before, "")
    joining = join(before.order, cursor, anchor, files=here, epochs=epochs)
    after = before.resumed(dataclasses.replace(setup, generations=(*generations, joining)))
    return Resumed(after, _said(after, step))


def _said(stream: ChunkStream, step: int) -> str:
    """Returns the line for the log about the files of the last generation."""
    corpus = stream.corpus
    assert corpus is not None
    old, new = (generation.files for generation in stream.generations[-2:])
    count = len(corpus.stored_names(old, new))
    documents = (
        f"{corpus.records_before(new) - corpus.records_before(old):,} documents, " if corpus.is_open else ""
    )
    size = int(corpus.file_sizes()[old:new].sum())
    line = (
        f"step {step}: {field_of(stream.setup.name)} has gained {count:,} {'files' if count > 1 else 'file'} "
        f"({documents}{size:,} bytes; first: {corpus.names[old]}); from this step on they are read together "
        "with what the running epoch has left of the others"
    )
    if stream.setup.eval_fraction:
        line += "; evaluations go on with held-out documents of the files that the run began with"
    return line


def _changed(stream: ChunkStream, saved: dict[str, Any]) -> str:
    """Returns why a source is not the one that was saved, and what to do."""
    why, way = "", "Restore the files, the tokenizer, data.eval_fraction and seed"
    if stream.prepared is not None:
        why = (
            "what is prepared anew, or with more files, has another order: an index is cut and shuffled as "
            "a whole"
        )
        way = "Restore the folder that data.prepared named"
    elif stream.corpus is not None and saved["generations"]:
        why, way = _changed_files(stream, saved, way)
    return (
        f"the data state was saved with sources.{stream.setup.name}={saved['fingerprint']!r}, but here it is "
        f"{stream.fingerprint()!r}{f' ({why})' if why else ''}: {ways_out(way)}"
    )


def _changed_files(stream: ChunkStream, saved: dict[str, Any], way: str) -> tuple[str, str]:
    """Returns what changed of a source's files, as far as their number and the name of the last one tell, and
    a way.
    """
    corpus, known, last = stream.corpus, saved["generations"][-1][-1], saved["last_file"]
    assert corpus is not None
    names = corpus.names
    if last not in names:
        return f"its last file of then, {last}, is gone", way
    place = names.index(last)
    if place < known:
        gone = known - 1 - place
        return (
            f"{gone:,} of its {known:,} files are gone" if gone else "its files, or what reads them, changed",
            way,
        )
    new = place + 1 - known
    tried = range(known if known <= _MOST_TRIED else 0)
    first = next(
        (n for n in tried if stream.fingerprint(_without(n, new, known)) == saved["fingerprint"]), None
    )
    if first is None:
        return (
            f"{new:,} more files than then sort before its last one of then, {last}, or others changed",
            way,
        )
    which = f"{names[first]} sorts" if new == 1 else f"{new:,} files from {names[first]} on sort"
    return (
        f"{which} before {last}, which the run has read: new files can only join if their names sort after "
        "all others",
        f"Rename it so that it sorts after {last}"
        if new == 1
        else f"Rename them so that they sort after {last}",
    )


def _without(first: int, count: int, known: int) -> list[int]:
    """Returns the numbers of the first files without `count` from `first` on, `known` of them."""
    return [n for n in range(known + count) if not first <= n < first + count]


def _other_format(stream: ChunkStream, name: str) -> str:
    return (
        f"{field_of(stream.setup.name)} has gained {name}, whose texts have sizes that are only known by "
        "reading them, unlike those of the files that were there: "
        f"{ways_out('Move such files to a folder of their own')}"
    )


def ways_out(way: str) -> str:
    """Returns the end of a message that refuses a data state, with one way to mend it and the general
    ones.
    """
    return (
        f"the next batches would differ from those of the uninterrupted run. {way}, start in a new "
        "--workdir, or add --allow-change data: the weights go on, and the data begins anew."
    )
