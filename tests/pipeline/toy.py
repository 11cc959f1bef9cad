"""Linear toy pipeline in whole numbers, run by interpreters of the table and of the instructions; exact or
wrong.

All arithmetic is int64 modulo 2**64, a ring, so sums in any order are equal to the last bit, and a wrong
operand shows.
"""

import collections
import dataclasses
import random
from typing import Any

import numpy as np

from jtrain.pipeline.instructions import PipelineProgram
from jtrain.pipeline.schedule import PipelineSchedule, StageHop, StageOp
from jtrain.pipeline.tick_grid import NONE
from jtrain.pipeline.ticks import TickColumn, Ticks, arriving_cotangent, arriving_input

type Array = np.ndarray[Any, np.dtype[np.int64]]
BATCH, WIDTH = 2, 3


@dataclasses.dataclass(frozen=True)
class Toy:
    """x = embedding[m]; x = x @ weights[stage] for each virtual stage; loss = sum((x - target[m]) ** 2) /
    2.
    """

    embedding: Array
    weights: Array
    target: Array


@dataclasses.dataclass
class Gradients:
    """Sums over microbatches: of the weights, and of each microbatch's embedding."""

    weights: Array
    embedding: Array

    def equals(self, other: "Gradients") -> bool:
        """True if all gradients are equal to the last bit."""
        return bool((self.weights == other.weights).all() and (self.embedding == other.embedding).all())


def make_toy(schedule: PipelineSchedule, seed: int = 0) -> Toy:
    """A toy for the virtual stages and microbatches of a schedule."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.integers(-(2**62), 2**62, shape)

    batches = (schedule.microbatches, BATCH, WIDTH)
    return Toy(draw(*batches), draw(schedule.virtual_stages, WIDTH, WIDTH), draw(*batches))


def zeros(toy: Toy) -> Gradients:
    """No gradients yet."""
    return Gradients(np.zeros_like(toy.weights), np.zeros_like(toy.embedding))


def unpipelined(toy: Toy) -> Gradients:
    """The gradients, one microbatch after the other."""
    found = zeros(toy)
    for m in range(len(toy.embedding)):
        xs = [toy.embedding[m]]
        for w in toy.weights:
            xs.append(xs[-1] @ w)
        dy = xs[-1] - toy.target[m]
        for stage in reversed(range(len(toy.weights))):
            found.weights[stage] += xs[stage].T @ dy
            dy = dy @ toy.weights[stage].T
        found.embedding[m] += dy
    return found


class _Pool:
    """Slots of one array of one worker; None is empty. Refuses to read an empty one or to write over a full
    one.
    """

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.peak = 0

    def write(self, slot: int, value: Any) -> None:
        assert slot >= 0
        assert self.slots[slot] is None, "a value is written over"
        self.slots[slot] = value
        self.peak = max(self.peak, sum(value is not None for value in self.slots))

    def read(self, slot: int, *, free: bool = False) -> Any:
        assert slot >= 0
        value = self.slots[slot]
        assert value is not None, "an empty slot is read"
        if free:
            self.slots[slot] = None
        return value


def run_table(ticks: Ticks, toy: Toy) -> tuple[Gradients, dict[str, tuple[int, ...]]]:
    """Does what the documentation of `ticks.py` tells an executor; returns gradients, and peaks of slots per
    worker.
    """
    schedule, stages = ticks.schedule, ticks.schedule.stages
    found = zeros(toy)
    inputs = [_Pool(ticks.num_inputs) for _ in range(stages)]
    cotangents = [_Pool(ticks.num_cotangents) for _ in range(stages)]
    stashes = [_Pool(ticks.num_stashes) for _ in range(stages)]
    for row in ticks.table:
        ys: list[Any] = [None] * stages
        dxs: list[Any] = [None] * stages
        for p in range(stages):
            here = {field: int(row[p, field]) for field in TickColumn}
            if here[TickColumn.EMBED_MICROBATCH] != NONE and here[TickColumn.FORWARD_EMBEDS] == 1:
                assert p == ticks.embed_worker
                inputs[p].write(
                    here[TickColumn.FORWARD_INPUT], toy.embedding[here[TickColumn.EMBED_MICROBATCH]]
                )
            if here[TickColumn.FORWARD_CHUNK] != NONE:
                stage = schedule.stage(p, here[TickColumn.FORWARD_CHUNK])
                ys[p] = inputs[p].read(here[TickColumn.FORWARD_INPUT]) @ toy.weights[stage]
        assert (row[:, TickColumn.HEAD_MICROBATCH] == row[0, TickColumn.HEAD_MICROBATCH]).all(), (
            "all workers compute the loss"
        )
        if (m := int(row[0, TickColumn.HEAD_MICROBATCH])) != NONE:
            assert (row[:, TickColumn.HEAD_COTANGENT] != NONE).nonzero()[0].tolist() == [ticks.head_worker]
            slot = int(row[ticks.head_worker, TickColumn.HEAD_COTANGENT])
            cotangents[ticks.head_worker].write(slot, ys[ticks.head_worker] - toy.target[m])
        for p in range(stages):
            here = {field: int(row[p, field]) for field in TickColumn}
            if here[TickColumn.BACKWARD_CHUNK] != NONE:
                stage = schedule.stage(p, here[TickColumn.BACKWARD_CHUNK])
                x = inputs[p].read(here[TickColumn.BACKWARD_INPUT], free=True)
                dy = cotangents[p].read(here[TickColumn.BACKWARD_COTANGENT], free=True)
                dxs[p] = dy @ toy.weights[stage].T
                if here[TickColumn.BACKWARD_STASH] == NONE:
                    found.weights[stage] += x.T @ dy
                else:
                    stashes[p].write(here[TickColumn.BACKWARD_STASH], (x, dy))
            if here[TickColumn.WEIGHT_CHUNK] != NONE:
                x, dy = stashes[p].read(here[TickColumn.WEIGHT_STASH], free=True)
                found.weights[schedule.stage(p, here[TickColumn.WEIGHT_CHUNK])] += x.T @ dy
        if (m := int(row[0, TickColumn.EMBED_GRADIENT_MICROBATCH])) != NONE:
            found.embedding[m] += dxs[ticks.embed_worker]
        for hop in ticks.schedule.activation_hops:
            _move(hop, (stages - 1, 0), ys, row[:, arriving_input(hop)], inputs)
        for hop in ticks.schedule.cotangent_hops:
            _move(hop, (0, stages - 1), dxs, row[:, arriving_cotangent(hop)], cotangents)
    assert all(pool.slots == [None] * len(pool.slots) for pool in inputs + cotangents + stashes), (
        "a value is left"
    )
    pools = {"inputs": inputs, "cotangents": cotangents, "stashes": stashes}
    return found, {name: tuple(pool.peak for pool in of) for name, of in pools.items()}


def _move(hop: StageHop, wrap: tuple[int, int], sent: list[Any], slots: Array, pools: list[_Pool]) -> None:
    """The permute of one hop; receivers without a slot drop what comes."""
    n = len(sent)
    pairs = {
        StageHop.DOWN: [(p, p + 1) for p in range(n - 1)],
        StageHop.UP: [(p + 1, p) for p in range(n - 1)],
        StageHop.LOCAL: [(p, p) for p in range(n)],
        StageHop.WRAP: [wrap],
    }[hop]
    receivers = {target for _, target in pairs}
    assert all(slot == NONE for p, slot in enumerate(slots) if p not in receivers)
    for source, target in pairs:
        if slots[target] != NONE:
            pools[target].write(int(slots[target]), sent[source])


def run_program(program: PipelineProgram, toy: Toy, seed: int = 0) -> Gradients:
    """Runs the workers' instructions in a random interleaving; messages wait in mailboxes."""
    schedule, rng = program.schedule, random.Random(seed)
    found, added = zeros(toy), zeros(toy)
    arrays: list[dict[tuple[str, int], Any]] = [{} for _ in program.workers]
    outputs: list[dict[str, Any]] = [{} for _ in program.workers]
    mail: dict[tuple[int, int, str, int, int], Any] = {}
    at: collections.Counter[int] = collections.Counter()  # worker -> its next instruction
    while True:
        ready = []
        for p, instructions in enumerate(program.workers):
            if at[p] < len(instructions):
                one = instructions[at[p]]
                sender = one.stage - 1 if one.kind == "RECV_F" else one.stage + 1
                if (
                    not one.kind.startswith("RECV")
                    or (one.peer, p, one.kind[-1], sender, one.microbatch) in mail
                ):
                    ready.append(p)
        if not ready:
            assert all(at[p] == len(of) for p, of in enumerate(program.workers)), "a deadlock"
            return found
        p = rng.choice(ready)
        one = program.workers[p][at[p]]
        at[p] += 1
        slots, m, stage = arrays[p], one.microbatch, one.stage
        reads = [slots[value.array, slot] for value, slot in one.reads]
        writes = [(value.array, slot) for value, slot in one.writes]
        match one.kind:
            case "RECV_F" | "RECV_B":
                sender = stage - 1 if one.kind == "RECV_F" else stage + 1
                slots[writes[0]] = mail.pop((one.peer, p, one.kind[-1], sender, m))
            case "SEND_F" | "SEND_B":
                mail[p, one.peer, one.kind[-1], stage, m] = outputs[p][one.kind[-1]]
            case "F":
                x = toy.embedding[m] if stage == 0 else reads[0]
                y = outputs[p]["F"] = x @ toy.weights[stage]
                given = [x] if stage == 0 else []
                given.append(y - toy.target[m] if stage == schedule.virtual_stages - 1 else y)
                slots.update(zip(writes, given, strict=False))
            case "I" | "B":
                x, dy = reads
                dx = outputs[p]["B"] = dy @ toy.weights[stage].T
                if one.kind == "B":
                    added.weights[stage] += x.T @ dy
                if stage == 0:
                    found.embedding[m] += dx
                slots.update(zip(writes, ([(x, dy)] if one.kind == "I" else []) + [dx], strict=False))
            case "W":
                x, dy = reads[0]
                added.weights[stage] += x.T @ dy
            case "REDUCE":
                found.weights[stage] += added.weights[stage]
            case _ if one.frees is not None:
                del slots[one.frees[0].array, one.frees[1]]


def random_schedule(rng: random.Random) -> PipelineSchedule:
    """A valid schedule: every worker takes any of its operations that are ready, in any order."""
    stages, microbatches, chunks = rng.randint(1, 4), rng.randint(1, 4), rng.choice((1, 1, 2, 2, 3))
    placement = rng.choice(("round_robin", "v")) if chunks == 2 else "round_robin"
    empty = PipelineSchedule("random", stages, microbatches, chunks, placement, ((),) * stages)
    ops: list[StageOp] = []
    for stage in range(stages * chunks):
        for m in range(microbatches):
            split = rng.random() < 0.5
            ops += [
                StageOp("F", stage, m),
                *([StageOp("I", stage, m), StageOp("W", stage, m)] if split else [StageOp("B", stage, m)]),
            ]
    every = dataclasses.replace(empty, streams=(tuple(ops),))
    streams: list[list[StageOp]] = [[] for _ in range(stages)]
    left, done = list(ops), set[StageOp]()
    while left:
        op = rng.choice([op for op in left if all(need in done for need in every.needs(op))])
        left.remove(op)
        done.add(op)
        streams[empty.worker(op.stage)].append(op)
    return dataclasses.replace(empty, streams=tuple(map(tuple, streams)))
