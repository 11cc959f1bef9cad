"""Published pipeline schedules as functions of (stages, microbatches, chunks).

P is the number of workers, M that of microbatches, v that of chunks per worker. F, I, W are the times of one
worker's forward pass, backward pass by input and by weight for one microbatch, over all its chunks; B = I +
W. The bubble is the time in which a worker waits. In-flight microbatches are those whose forward pass is done
and whose last backward pass (W or B) is not, on the fullest worker; those of one chunk count 1/v. F&B is the
time of a forward and a backward pass that hide each other's communication; nothing that they compute leaves
before both are done.

| name | chunks | bubble | in flight | needs | source |
|---|---|---|---|---|---|
| gpipe | 1 | (P-1)(F+B) | M | | arXiv:1811.06965 |
| 1f1b | 1 | (P-1)(F+B) | P | | arXiv:2104.04473, section 2.2.1 (PipeDream-flush) |
| interleaved | v | (P-1)(F+B)/v | P + (P-1)/v | M a multiple of P | arXiv:2104.04473, section 2.2.2 |
| zb-h1 | 1 | (P-1)(F+I-W) | P | | arXiv:2401.10241, section 3 |
| zbv | 2 | (P-1)F/2, if F = I = W | P | M >= 2P-1 | arXiv:2401.10241, section 6; arXiv:2405.15362 |
| dualpipev | 2 | (P-1)(F&B+B-3W)/2, if F = I = W | P + 1/2 | M >= 2P | arXiv:2412.19437, section 3.2.1, cut
in half |

`tests/pipeline/test_published_schedules.py` holds every entry of the table against the simulator.
"""

import collections
from collections.abc import Callable

from jtrain.errors import UserError, did_you_mean
from jtrain.pipeline.schedule import ChunkPlacement, PassKind, PipelineSchedule, StageOp, stage_of


class _Stream:
    """Operations of one worker, in order; a chunk's F are counted apart from its I and B."""

    def __init__(self, worker: int, stages: int, placement: ChunkPlacement) -> None:
        self.ops: list[StageOp] = []
        self._stages = tuple(stage_of(worker, chunk, stages, placement) for chunk in (0, 1))
        self._next: collections.Counter[tuple[bool, int]] = collections.Counter()
        self._stashed: list[StageOp] = []

    def add(self, kinds: str, chunk: int) -> None:
        """Adds an operation of each kind for a chunk's next microbatch; W takes the chunk's oldest I."""
        stage = self._stages[chunk]
        for kind in kinds:
            if kind == "W":
                # I of a chunk are done in the order of microbatches, so the oldest is its next W.
                self._weight(next(op for op in self._stashed if op.stage == stage))
                continue
            counter = (kind == "F", chunk)
            op = StageOp(_KINDS[kind], stage, self._next[counter])
            self._next[counter] += 1
            self.ops.append(op)
            if kind == "I":
                self._stashed.append(op)

    def add_oldest_weight(self) -> None:
        """Adds the W of the oldest I that has none yet, of whichever chunk."""
        self._weight(self._stashed[0])

    def _weight(self, op: StageOp) -> None:
        self._stashed.remove(op)
        self.ops.append(StageOp("W", op.stage, op.microbatch))


_KINDS: dict[str, PassKind] = {"F": "F", "I": "I", "W": "W", "B": "B"}


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """All forward passes, then all backward passes (arXiv:1811.06965)."""
    _check("gpipe", stages, microbatches, chunks, required_chunks=1)
    streams = [
        [StageOp(kind, p, m) for kind in ("F", "B") for m in range(microbatches)] for p in range(stages)
    ]
    return _schedule("gpipe", stages, microbatches, 1, "round_robin", streams)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """A forward and a backward pass by turns, once the last worker has its first microbatch.

    Worker p runs P - p - 1 forward passes ahead, so at most P - p microbatches are in flight there, for any
    M.

    Source: arXiv:2104.04473, section 2.2.1; there it is called PipeDream-flush.
    """
    _check("1f1b", stages, microbatches, chunks, required_chunks=1)
    # With P = 2 and M = 3: worker 0 has F0 F1 B0 F2 B1 B2, worker 1 has F0 B0 F1 B1 F2 B2.
    streams: list[list[StageOp]] = []
    for p in range(stages):
        # The last worker has none: it does the backward pass of microbatch 0 right after its F.
        warmup = min(stages - p - 1, microbatches)
        ops = [StageOp("F", p, m) for m in range(warmup)]
        for m in range(microbatches - warmup):
            ops += [StageOp("F", p, warmup + m), StageOp("B", p, m)]
        # The warm-up's microbatches are still without a backward pass.
        streams.append(ops + [StageOp("B", p, m) for m in range(microbatches - warmup, microbatches)])
    return _schedule("1f1b", stages, microbatches, 1, "round_robin", streams)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """1F1B over `chunks` virtual stages per worker: shorter steps of the pipeline, and a shorter bubble.

    Microbatches go in groups of P: a worker runs a group through one chunk, then through the next. Worker p
    runs 2 (P - p - 1) + (v - 1) P forward passes ahead.

    Raises:
      UserError: the microbatches are not a multiple of the stages.

    Source: arXiv:2104.04473, section 2.2.2.
    """
    _check("interleaved", stages, microbatches, chunks, required_chunks=None)
    if microbatches % stages:
        below = microbatches - microbatches % stages
        nearest = f"{below}, {below + stages}" if below else str(stages)
        raise UserError(
            f"microbatches={microbatches}: schedule interleaved runs them in groups of stages={stages}. "
            f"Nearest numbers that fit: {nearest}; or take schedule 1f1b."
        )
    # (chunk, m) for P = 2, v = 2, M = 4: (0, 0), (0, 1), (1, 0), (1, 1), then those of microbatches 2 and 3.
    turns = [
        (chunk, group * stages + m)
        for group in range(microbatches // stages)
        for chunk in range(chunks)
        for m in range(stages)
    ]
    streams: list[list[StageOp]] = []
    for p in range(stages):
        forward = [StageOp("F", chunk * stages + p, m) for chunk, m in turns]
        # Backward passes go through the chunks in the opposite order.
        backward = [StageOp("B", (chunks - 1 - chunk) * stages + p, m) for chunk, m in turns]
        warmup = min(2 * (stages - p - 1) + (chunks - 1) * stages, len(turns))
        ops = forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            ops += [f, b]
        streams.append(ops + backward[len(turns) - warmup :])
    return _schedule("interleaved", stages, microbatches, chunks, "round_robin", streams)


def zbh1(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """1F1B with the backward pass split: workers do W while they would wait, in the memory of 1F1B.

    Worker p starts with P - p forward passes and does its W p microbatches after the I, so every worker has
    at most P microbatches in flight, as many as the first worker of 1F1B.

    Source: arXiv:2401.10241, section 3 (ZB-H1).
    """
    _check("zb-h1", stages, microbatches, chunks, required_chunks=1)
    streams: list[list[StageOp]] = []
    for p in range(stages):
        forward = min(stages - p, microbatches)
        ops = [StageOp("F", p, m) for m in range(forward)]
        for m in range(microbatches):
            ops.append(StageOp("I", p, m))
            # The first W come late, where 1F1B would wait: worker p owes p of them until the end.
            if m >= p:
                ops.append(StageOp("W", p, m - p))
            if forward < microbatches:
                ops.append(StageOp("F", p, forward))
                forward += 1
        streams.append(ops + [StageOp("W", p, m) for m in range(max(0, microbatches - p), microbatches)])
    return _schedule("zb-h1", stages, microbatches, 1, "round_robin", streams)


def zbv(stages: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """Zero bubble over a V: no worker waits between its first and last operation if F = I = W.

    The last virtual stage is of the first worker, so backward passes start early; 2P chunks are in flight,
    the memory of 1F1B. Worker p starts p forward passes of a chunk late and ends as late, so an optimizer that
    waits for all workers waits for the last one.

    Raises:
      UserError: there are fewer than 2P - 1 microbatches.

    Source: arXiv:2401.10241, section 6 (ZB-V); arXiv:2405.15362 calls it V-ZB.
    """
    _check("zbv", stages, microbatches, chunks, required_chunks=2, minimum=2 * stages - 1)
    streams: list[list[StageOp]] = []
    for p in range(stages):
        stream = _Stream(p, stages, "v")
        # Forward passes of chunk 0 until the first microbatch has come back up the V to this worker.
        for _ in range(2 * (stages - p) - 1):
            stream.add("F", 0)
        # Chunk 1 joins: its input comes back up from the next worker.
        for _ in range(p):
            stream.add("F", 1)
            stream.add("F", 0)
        for _ in range(stages - p):
            stream.add("FIW", 1)
        forwards_done = 2 * stages - p - 1  # forward passes of chunk 0 so far; there are P of chunk 1
        # The steady part: F, I and W of each chunk by turns, until the forward passes run out.
        for turn in range(microbatches - stages):
            stream.add("FIW" if turn + forwards_done < microbatches else "IW", 0)
            stream.add("FIW", 1)
        for _ in range(p):
            stream.add("I", 0)
            stream.add("I", 1)
        for _ in range(stages - p):
            stream.add("IW", 0)
        # The W that were put off end the schedule.
        for chunk, num_left in ((1, p), (0, p)):
            for _ in range(num_left):
                stream.add("W", chunk)
        streams.append(stream.ops)
    return _schedule("zbv", stages, microbatches, 2, "v", streams)


def dualpipev(stages: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """DualPipe folded into a V: forward passes of one chunk stand beside backward passes of the other.

    A pair of F and B that stand side by side can hide each other's communication; only the ends are split
    into I and W. Compared with DualPipe, each worker holds one copy of its weights.

    Raises:
      UserError: there are fewer than 2P microbatches.

    Source: arXiv:2412.19437, section 3.2.1, and its authors' DualPipeV, which cuts the schedule in half.
    """
    _check("dualpipev", stages, microbatches, chunks, required_chunks=2, minimum=2 * stages)
    streams: list[list[StageOp]] = []
    for p in range(stages):
        stream, later_workers = _Stream(p, stages, "v"), stages - p - 1
        for _ in range(2 * later_workers):
            stream.add("F", 0)
        for _ in range(p + 1):
            stream.add("F", 0)
            stream.add("F", 1)
        for _ in range(later_workers):
            stream.add("IWF", 1)
        # The steady part, with F of one chunk beside B of the other.
        for _ in range(microbatches - 2 * stages + p + 1):
            stream.add("F", 0)
            stream.add("B", 1)
            stream.add("F", 1)
            stream.add("B", 0)
        for _ in range(later_workers):
            stream.add("BF", 1)
            stream.add("B", 0)
        # Of the last 2p + 2 backward passes before the end, the second half leaves its W for later.
        for turn in range(2 * p + 2):
            stream.add("B" if turn <= p else "I", 1 - turn % 2)
        for _ in range(later_workers):
            stream.add_oldest_weight()
            stream.add("I", 0)
        for _ in range(p + 1):
            stream.add_oldest_weight()
        streams.append(stream.ops)
    return _schedule("dualpipev", stages, microbatches, 2, "v", streams)


PUBLISHED_SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zbh1,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
"""Name -> function of (stages, microbatches, chunks), where `chunks` may be left out."""


def make_schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """The schedule of a name in `PUBLISHED_SCHEDULES`, spelt as in a config.

    Args:
      chunks: virtual stages per worker; None takes those of the schedule (2 for interleaved, zbv and
        dualpipev).

    Raises:
      UserError: the name is unknown, or the schedule does not exist for these numbers; the message has some
        that do.
    """
    make = PUBLISHED_SCHEDULES.get(name)
    if make is None:
        raise UserError(
            f"schedule {name} is unknown. {did_you_mean(name, PUBLISHED_SCHEDULES)}Choose of: "
            f"{', '.join(PUBLISHED_SCHEDULES)}."
        )
    return make(stages, microbatches) if chunks is None else make(stages, microbatches, chunks)


def _check(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    *,
    required_chunks: int | None,
    minimum: int = 1,
) -> None:
    """Refuses numbers for which there is no such schedule."""
    for field, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"{field}={value} must be at least 1.")
    # None: interleaved takes any number.
    if required_chunks is not None and chunks != required_chunks:
        raise UserError(
            f"chunks={chunks}: schedule {name} has {required_chunks} per worker. Leave chunks out, or take "
            "schedule interleaved, which has any number."
        )
    if microbatches < minimum:
        raise UserError(
            f"microbatches={microbatches}: schedule {name} over stages={stages} needs at least {minimum}. "
            "Raise microbatches (layout.microbatches of a config), or take schedule 1f1b, which needs 1."
        )


def _schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    placement: ChunkPlacement,
    streams: list[list[StageOp]],
) -> PipelineSchedule:
    return PipelineSchedule(name, stages, microbatches, chunks, placement, tuple(map(tuple, streams)))
