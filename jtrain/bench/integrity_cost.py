"""Tokens/s of the train step with the checks for silent corruption over the step without, and flipped bits found.

    python -m jtrain.bench integrity_cost

Both steps take turns in ABBA order in one process, so that a machine that slows down slows both. `tiny` is the config;
`wide` has 4 times its parameters and the same tokens per step, so its checks cost a similar share. The recomputation
counts by its default interval. Run it on an idle machine.
"""

import argparse
import ctypes
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.bench import Row, row
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, run_layout
from jtrain.data import open_dataset, put_batch
from jtrain.layout import Layout
from jtrain.mesh import make_mesh
from jtrain.optim import Optimizer
from jtrain.plan.from_run import make_optimizer
from jtrain.step import recompute
from jtrain.step.checksums import METRIC, summed_arrays
from jtrain.step.state import abstract_state, init_state
from jtrain.step.train_step import make_train_step
from jtrain_kernels.host_memory import keep_freed_memory

MODELS = {"tiny": (), "wide": ("model.d_model=512", "model.d_ff=1536", "model.num_heads=16", "model.num_kv_heads=8")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each step")
    parser.add_argument("--flips", type=int, default=60, help="bits to flip, each in a state of its own")


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Both steps of one config, and what they need."""

    run: Run
    mesh: Any
    layout: Layout
    optimizer: Optimizer
    batch: Any

    def step(self, *, checksums: bool) -> Any:
        return make_train_step(self.run.model, self.optimizer, self.layout, self.mesh, checksums=checksums)

    def state(self) -> Any:
        return init_state(self.layout, self.optimizer, self.mesh, seed=0)


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of both models, then the flips."""
    keep_freed_memory()
    for name, sets in MODELS.items():
        steps = _steps(sets)
        checked_ms, plain_ms, ratios = _turns(steps, args.rounds, args.steps)
        tokens = 1e3 * steps.run.data.global_batch * steps.run.data.seq_len
        spread = f"quarters {np.quantile(ratios, 0.25):.4f} .. {np.quantile(ratios, 0.75):.4f} of {len(ratios)}"
        ratio = statistics.median(ratios)
        yield row(f"{name}, checksums in every step ({spread})", tokens / plain_ms * ratio, "tokens/s",
                  baseline=tokens / plain_ms, bar=">= 0.99")  # fmt: skip
        again_ms = _recompute_ms(steps, args.rounds)
        every = steps.run.integrity.recompute_every_steps
        assert every is not None
        with_both_ms = plain_ms / ratio + again_ms / every
        yield row(f"{name}, with a recomputation of {again_ms:.0f} ms every {every} steps", tokens / with_both_ms,
                  "tokens/s", baseline=tokens / plain_ms, bar=">= 0.99")  # fmt: skip
        yield row(f"{name}, fastest step with checksums", checked_ms, "ms", baseline=plain_ms)
        if name == "tiny":
            yield row(f"flipped bits found and located, of {args.flips}", _found(steps, args.flips), "flips",
                      baseline=args.flips, bar=">= 1")  # fmt: skip


def _steps(sets: tuple[str, ...]) -> _Steps:
    built = build_run(load_config("tiny", (), ["optimizer.warmup_steps=0", *sets]))
    mesh = make_mesh(built.mesh, jax.devices())
    batch = put_batch(next(open_dataset(built.data, seed=0).train_batches()), mesh)
    return _Steps(built, mesh, run_layout(built), make_optimizer(built), batch)


def _turns(steps: _Steps, rounds: int, count: int) -> tuple[float, float, list[float]]:
    """Returns the fastest steps in ms, with and without checksums, and the ratio of each pair of turns."""
    programs = {checksums: steps.step(checksums=checksums) for checksums in (True, False)}
    states = {checksums: steps.state() for checksums in programs}
    times_ms: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for checksums in (True, False) if turn % 2 else (False, True):
            state, metrics, program = states[checksums], None, programs[checksums]
            start_s = time.perf_counter()
            for _ in range(count):
                state, metrics = program(state, steps.batch)
            jax.block_until_ready((state, metrics))
            states[checksums] = state
            times_ms[checksums].append(1e3 * (time.perf_counter() - start_s) / count)
    checked, plain = (times[1:] for times in (times_ms[True], times_ms[False]))  # the first turn compiles
    return min(checked), min(plain), [p / c for p, c in zip(plain, checked, strict=True)]


def _recompute_ms(steps: _Steps, rounds: int) -> float:
    """Returns the median time of both computations of a signature."""
    state = steps.state()
    signature = recompute.make_signature(steps.run.model, steps.layout, steps.mesh)
    roll = recompute.make_roll(steps.mesh)
    times_ms = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        jax.block_until_ready([signature(state.params, state.scaling, b) for b in (steps.batch, roll(steps.batch))])
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times_ms[1:])


def _found(steps: _Steps, flips: int) -> int:
    """Flips one bit of each of `flips` states in memory; returns how many the next step finds, where they are."""
    step, rng = steps.step(checksums=True), np.random.default_rng(0)
    state, _ = step(steps.state(), steps.batch)
    names = [name for name, _ in summed_arrays(abstract_state(steps.layout, steps.optimizer, steps.mesh))]
    _, metrics = step(jax.tree.map(jnp.copy, state), steps.batch)
    right = np.asarray(metrics[METRIC])[:, 0]
    found = 0
    for _ in range(flips):
        here = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        array, device = int(rng.integers(len(names))), int(rng.integers(steps.mesh.size))
        part = dict(summed_arrays(here))[names[array]].addressable_shards[device].data
        memory = (ctypes.c_uint8 * part.nbytes).from_address(part.unsafe_buffer_pointer())
        memory[int(rng.integers(part.nbytes))] ^= 1 << int(rng.integers(8))
        _, metrics = step(here, steps.batch)
        found += np.argwhere(np.asarray(metrics[METRIC])[:, 0] != right).tolist() == [[device, array]]
    return found
