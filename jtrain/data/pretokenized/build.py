"""Builder of pretokenised indexes, `python -m jtrain.data prepare`: tokenises sources once, in parallel.

Each source is cut into shards, ranges of records worth some MB; the cut depends on the corpus alone. Worker
processes write one file per shard. One process appends those files in order to the index in
OUT/.NAME.partial/ and renames that folder to OUT/NAME after the last shard. The same command may run on any
number of hosts at once: number i of n makes shards i, i + n, ... A build may be killed at any instant: others
take over, or the same command continues from the files that are left, and the finished bytes are the same.
Training reads the index with reader.py.
"""

import collections
import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection as pipes
from pathlib import Path
from typing import Literal

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.data.pretokenized.progress import Progress, ProgressBar, ProgressOutput
from jtrain.data.pretokenized.shard import Recipe, Task
from jtrain.data.pretokenized.writer import IndexSummary, IndexWriter
from jtrain.data.sources.source import Source, field_of
from jtrain.errors import FileError, UserError

SHARD_BYTES = 1 << 24
"""Bytes of source files per shard: about 8 s of byte-pair encoding, which each worker loses when it is
killed."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Deaths on one shard: one may be chance, three are due to the shard or the machine.
_TRIES = 3
# Longest wait for a worker's news, and the pause where only other processes have work.
_POLL_S = 1.0
_IDLE_S = 0.1


def prepare(
    recipes: Sequence[Recipe],
    out: Path,
    *,
    workers: int,
    stream: ProgressOutput,
    command: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[IndexSummary]:
    """Builds the index of each source that has none, continuing where an earlier call stopped.

    An index that was built from other data is replaced once the new one is complete. Several calls, on one
    host or many that share `out`, build together; each returns when all of it is complete.

    Args:
      out: folder that receives one folder per source.
      workers: processes that read and tokenise. Each takes 60 MB, plus a few MB of text or, for formats that
        decode records in groups, one group.
      stream: progress output: a bar on a terminal, otherwise a line every 10 s.
      command: command line that repeats this call; kept in OUT/command.txt.
      shard_bytes: bytes of source files per shard.

    Raises:
      UserError: a bad record where `on_bad_record` is fail, a damaged index, or a wrong argument.
      FileError: a file cannot be read, the disk is full, `out` is being written from other data, or workers
        keep dying.
    """
    if workers < 1:
        raise UserError(f"--workers {workers} must be at least 1.")
    for recipe in recipes:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", recipe.name):
            raise UserError(
                f"{field_of(recipe.name)}: the name is a folder's too: use letters, digits, '_', '-', and "
                "'.' except at the start."
            )
        if recipe.source.rejected_field is not None:
            raise UserError(
                f"{field_of(recipe.name)}.rejected_field={recipe.source.rejected_field!r}: an index of "
                "prepared tokens holds no preference pairs. Read them as text, without data prepare."
            )
    out.mkdir(parents=True, exist_ok=True)
    with _explain_disk_full(out), BuildProcess(out) as host, contextlib.ExitStack() as stack:
        if command is not None:
            host.write_whole(out / index_format.COMMAND, command + "\n")
        # Opens all sources before any work: a wrong path shows at once and not after hours.
        builds = [IndexWriter(index, recipe, out, shard_bytes, host) for index, recipe in enumerate(recipes)]
        progress = (ProgressBar if stream.isatty() else Progress)(
            stream, sum(build.records for build in builds)
        )
        stack.callback(progress.close)
        for build in builds:
            progress.advance(build.records_done, 0)
            for line in build.notes:
                progress.say(line)
        progress.start()
        # Not more workers than shards: each takes 60 MB.
        pool = _Pool(recipes, workers=min(workers, max(1, sum(build.num_missing for build in builds))))
        for build in builds:
            stack.callback(build.sweep)  # runs after the pool is closed; on a full disk every byte counts
        # Registered last and so called first: workers end before their files are swept.
        stack.callback(pool.close)
        pool.run(builds, progress)
        return [build.summary() for build in builds]


class _Worker:
    """Worker process that tokenises shards.

    Attributes:
      task: the shard in progress, if any.
      source: index of the source of its latest task.
      reported: records and tokens of `task` that the process has reported as done.
    """

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        own_end, child_end = socket.socketpair()
        code = (
            # jax is not needed and takes seconds and memory; None makes an import of it fail.
            f"import sys; sys.modules['jax'] = None; sys.path[:] = {sys.path!r}; "
            f"from jtrain.data.pretokenized import shard; shard.serve({child_end.fileno()})"
        )
        # One worker per core: threads of the libraries would compete with the other workers.
        one_thread = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with child_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | one_thread | {"TOKENIZERS_PARALLELISM": "false"},
            )
        # `child_end` is closed here by now, so the connection ends when the worker dies.
        self.connection = pipes.Connection(own_end.detach())
        self.task: Task | None = None
        self.source: int | None = None
        self.reported = [0, 0]
        with contextlib.suppress(OSError):  # it has died already: `recv` will report that
            self.connection.send(list(recipes))

    def start(self, task: Task) -> None:
        """Hands the process a shard to tokenise."""
        self.task, self.source, self.reported = task, task.source, [0, 0]
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def close(self) -> int:
        """Ends the process, even amid a shard, by closing its connection; returns the exit code."""
        # The worker ends with its connection; only one that hangs is killed.
        self.connection.close()
        try:
            return self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class _Pool:
    """Pool of workers. A worker stays with the source whose files it has open while that has shards left."""

    def __init__(self, recipes: Sequence[Recipe], *, workers: int) -> None:
        self._recipes = recipes
        self._max_workers = workers
        self._workers: list[_Worker] = []
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()

    def run(self, builds: Sequence[IndexWriter], progress: Progress) -> None:
        """Runs all builds to their end."""
        while True:
            for build in builds:
                self._advance(build, progress)
            self._give_work(builds)
            busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
            if busy:
                # Wakes up every second without news, to see what other hosts have done.
                for connection in pipes.wait(list(busy), timeout=_POLL_S):
                    self._listen(busy[connection], builds, progress)  # pyright: ignore[reportArgumentType]
            elif all(build.is_complete for build in builds):
                return
            else:
                time.sleep(_IDLE_S)  # other processes do the rest
            # Redraws the bar, whose speed falls while nothing comes.
            progress.advance(0, 0)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _give_work(self, builds: Sequence[IndexWriter]) -> None:
        # Idle workers first, then new ones up to the limit, as long as there are shards.
        for worker in [*self._workers, *(None,) * (self._max_workers - len(self._workers))]:
            if worker is not None and worker.task is not None:
                continue
            source = None if worker is None else worker.source
            assignment = self._next_task(builds, source)
            # No shard for this worker is none for any.
            if assignment is None:
                return
            build, task = assignment
            if worker is None:
                worker = _Worker(self._recipes)
                self._workers.append(worker)
            build.workers += 1
            worker.start(task)

    def _next_task(
        self, builds: Sequence[IndexWriter], source: int | None
    ) -> tuple[IndexWriter, Task] | None:
        """Returns a task, of `source` if possible, otherwise of the source with the fewest workers."""
        for build in sorted(builds, key=lambda build: (build.index != source, build.workers)):
            if (task := build.next_task()) is not None:
                return build, task
        return None

    def _listen(self, worker: _Worker, builds: Sequence[IndexWriter], progress: Progress) -> None:
        task = worker.task
        assert task is not None
        build = builds[task.source]
        try:
            kind, *details = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker, build, task, progress)
            return
        if kind == "progress":
            worker.reported[0] += details[0]
            worker.reported[1] += details[1]
            progress.advance(*details)
        elif kind == "done":
            worker.task = None
            build.workers -= 1
            build.add(task.shard)
        elif kind == "bad record":
            raise UserError(f"{field_of(build.recipe.name)}: {details[0]}")
        elif build.refresh() or build.is_complete:
            # Another process took this one for dead, finished the index and moved the folder.
            worker.task = None
            build.workers -= 1
        elif kind == "error":
            message = f"{field_of(build.recipe.name)}: {details[1]}"
            if details[0] in _DISK_FULL:
                raise OSError(details[0], message)  # `_explain_disk_full` words it
            raise FileError(message)
        else:
            raise RuntimeError(f"a worker failed on {_describe_task(build, task)}:\n{details[0]}")

    def _bury(self, worker: _Worker, build: IndexWriter, task: Task, progress: Progress) -> None:
        """Puts a dead worker's shard back in the queue; raises FileError if several workers died on it."""
        self._workers.remove(worker)
        build.workers -= 1
        # The shard will be counted again by the worker that repeats it.
        progress.advance(-worker.reported[0], -worker.reported[1])
        code = worker.close()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._deaths[task.source, task.shard] += 1
        if (deaths := self._deaths[task.source, task.shard]) == _TRIES:
            raise FileError(
                f"{field_of(build.recipe.name)}: {deaths} workers died ({cause}) on "
                f"{_describe_task(build, task)}. If memory is short, lower --workers. Run the same command "
                "again: it goes on where this one stopped."
            )
        progress.say(f"a worker died ({cause}) on {_describe_task(build, task)}; doing it again.")
        build.give_back(task.shard)

    def _advance(self, build: IndexWriter, progress: Progress) -> None:
        is_complete = build.advance()
        progress.advance(build.records_of_others(), 0)
        if is_complete:
            row = build.summary()
            skipped = f", {row.skipped:,} bad ones left out" if row.skipped else ""
            progress.say(f"{row.name}: {row.records:,} records, {row.tokens:,} tokens{skipped}.")


def prepare_command(
    sources: Mapping[str, Source],
    out: Path,
    *,
    tokenizer: str,
    end_token: str | None,
    on_bad_record: Literal["fail", "skip"],
    cache_dir: Path,
    workers: int | None,
    command: str,
) -> list[IndexSummary]:
    """Runs `python -m jtrain.data prepare`: prepares all sources, prints a table and returns its rows.

    Args:
      sources: name -> source. A source's own tokenizer takes precedence over `tokenizer` and finds its own
        end token.
      workers: worker processes; None for one per core that this process may use.
      command: command line that repeats this call; kept beside the indexes and shown when one of them is
        stale.
    """
    if "://" in str(out) or ":/" in str(out):  # Path made one slash of two
        raise UserError(
            f"--out {out}: indexes can only be written to local folders. Set --out to a local path."
        )
    recipes = [
        Recipe(
            name=name,
            source=source,
            tokenizer=source.tokenizer or tokenizer,
            end_token=None if source.tokenizer else end_token,
            on_bad_record=on_bad_record,
            cache_dir=cache_dir,
        )
        for name, source in sources.items()
    ]
    # Cores that this process may use, not all of the machine's.
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    start_s = time.monotonic()
    rows = prepare(recipes, out, workers=workers, stream=sys.stderr, command=command)
    _print_table(rows, time.monotonic() - start_s)
    return rows


def _print_table(rows: Sequence[IndexSummary], elapsed_s: float) -> None:
    from jtrain.report.table import Table, numbers, words
    from jtrain.report.terminal import print_blocks

    table = Table("", words("source") + numbers("records", "tokens", "empty", "bad, left out", "MiB", ""))
    for row in rows:
        counts = (f"{n:,}" for n in (row.records, row.tokens, row.empty, row.skipped))
        table.add(row.name, *counts, f"{row.bytes / 2**20:,.1f}", row.state)
    tokens, size = sum(row.tokens for row in rows), sum(row.bytes for row in rows)
    print_blocks(
        [table, f"{len(rows)} sources, {tokens:,} tokens, {size / 2**20:,.1f} MiB, {elapsed_s:.1f} s"]
    )


def _describe_task(build: IndexWriter, task: Task) -> str:
    return f"records {task.first} to {task.end - 1} of {build.recipe.name}"


@contextlib.contextmanager
def _explain_disk_full(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise FileError(
            f"--out {out}: the disk is full, or a limit on the size of files is reached ({error}); "
            f"{shutil.disk_usage(out).free / 2**20:,.0f} MiB are free. Make room and run the same command "
            "again: it goes on where this one stopped."
        ) from error
