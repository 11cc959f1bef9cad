"""Share of tokens/s that the guard and the checks for silent corruption cost in `tiny`; flipped bits found.

    python -m jtrain.bench integrity_cost

Two programs of the step take turns on one state: one as it ships, one in which nothing looks for bad numbers
or sums bits. Pairs are in the order ABBA, and the median of the paired differences counts, with its interval
of 95 % by order statistics, so a machine that slows down for a while changes little. What the checks do
depends on the state alone, not on the batch: so the difference is also measured in steps of a small batch,
where a tenth of a millisecond shows, and divided by the time of a whole step. CPU time is that of all
threads; it shows what another program's load hides.

The host's part (reading the metrics, comparing sums, judging) and the recomputation count too, the latter by
its default interval. Run it on an idle machine: about 3 minutes on two cores.
"""

import contextlib
import ctypes
import dataclasses
import math
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.bench import Options, Row, option, row
from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config.devices import resolve_mesh
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.data import open_dataset, put_batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import make_mesh
from jtrain.optim import Optimizer, optimizer
from jtrain.runtime.platform import keep_freed_memory
from jtrain.step import optimizer_update, recompute, train_step
from jtrain.step.checksums import METRIC, summed_arrays
from jtrain.step.guard import GuardState, StepNumbers
from jtrain.step.state import abstract_state, init_state
from jtrain.train.bad_steps.bad_steps import BadSteps
from jtrain.train.integrity import IntegrityCheck

SHORT = ("data.global_batch=1", "data.seq_len=128")
"""Settings of the small batch."""


OPTIONS = (
    option("--pairs", type=int, default=60, help="pairs of whole steps"),
    option("--short-pairs", type=int, default=500, help="pairs of steps of a small batch"),
    option("--flips", type=int, default=60, help="bits to flip, each in a state of its own"),
)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Config, and what its steps need."""

    run: Run
    mesh: Any
    layout: Layout
    optimizer: Optimizer
    batch: Any

    def step(self, *, checks: bool) -> Any:
        """Returns the compiled step, with all checks or without any."""
        # The guard is patched out while the step is traced; the compiled step keeps that.
        with contextlib.nullcontext() if checks else no_guard():
            step: Any = train_step.make_train_step(
                self.run.model, self.optimizer, self.layout, self.mesh, checksums=checks
            )
            return step.lower(abstract_state(self.layout, self.optimizer, self.mesh), self.batch).compile()

    def state(self) -> Any:
        return init_state(self.layout, self.optimizer, self.mesh, seed=0)


@contextlib.contextmanager
def no_guard() -> Iterator[None]:
    """Context in which a step is traced without a guard: all updates are applied, and nothing is counted."""

    def judge_update(guard: GuardState, *_: Any, **__: Any) -> tuple[GuardState, dict[str, Any]]:
        return guard, {"applied": True, "bounds": jnp.full(2, jnp.inf), "skipped_updates": guard.skipped}

    def none(_: Any) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    with (
        # Every name through which the step reaches the guard: a new one would stay in the plain program.
        mock.patch.object(train_step, "judge_update", judge_update),
        mock.patch.object(train_step, "not_finite", none),
        mock.patch.object(optimizer, "mark_nonfinite", lambda param, _: param),
        mock.patch.object(optimizer_update, "not_finite", none),
        mock.patch.object(optimizer_update, "not_finite_on_cpu", none),
    ):
        yield


def run(args: Options) -> Iterator[Row]:
    """Shares of a step's time, part by part and in all, then the flipped bits that were found."""
    # Before JAX allocates: freed memory that goes back to the system makes steps differ by page faults.
    keep_freed_memory()
    whole_steps, short_steps = _steps(()), _steps(SHORT)
    checked, plain = _time_in_turns(whole_steps, args.pairs)
    # Medians of the plain program: row 0 is wall time, row 1 CPU time.
    step_ms, step_cpu_ms = np.median(plain, axis=1).tolist()
    tokens = whole_steps.run.data.global_batch * whole_steps.run.data.seq_len
    yield row("tiny without any check", 1e3 * tokens / step_ms, "tokens/s")
    small_checked, small_plain = _time_in_turns(short_steps, args.short_pairs)
    # What the checks do depends on the state alone, so a small batch shows the same milliseconds.
    device_ms = float(np.median(small_checked[0] - small_plain[0]))
    for label, differences_ms in (
        ("whole steps", checked - plain),
        ("device, from steps of a small batch", small_checked - small_plain),
    ):
        yield _share(label, differences_ms[0], step_ms)
        yield _share(f"{label}, CPU time", differences_ms[1], step_cpu_ms)
    # The host's work does not depend on the batch, so the cheap steps serve.
    host_ms = _host_ms(short_steps)
    yield row("host: reading and judging the numbers of a step", 100 * host_ms / step_ms, "% of tokens/s")
    first_ms, repeat_ms = _recompute_ms(whole_steps)
    # None would mean that the default no longer recomputes, and the sum below would have no meaning.
    interval = whole_steps.run.integrity.recompute_every_steps
    assert interval is not None
    yield row(
        f"recomputation of {repeat_ms:.0f} ms every {interval} steps",
        100 * repeat_ms / interval / step_ms,
        "% of tokens/s",
    )
    yield row("recomputation, compiled once per attempt", first_ms / 1e3, "s")
    total_ms = device_ms + host_ms + repeat_ms / interval
    yield row(
        "guards, hashes and checks at the defaults, sum of device (small batch), host and recomputation",
        100 * total_ms / (step_ms + total_ms),
        "% of tokens/s",
        bar="<= 1",
    )
    yield row(
        f"flipped bits found and located, of {args.flips}",
        _count_located(short_steps, args.flips),
        "flips",
        baseline=args.flips,
        bar=">= 1",
    )


def _share(what: str, differences_ms: np.ndarray, step_ms: float) -> Row:
    """Row of the median difference in per cent of a step, with its interval."""
    ordered = np.sort(differences_ms) / step_ms * 100
    # The median lies between these order statistics in 95 % of samples, whatever the distribution.
    half = 0.98 * math.sqrt(len(ordered))  # 1.96 standard deviations of the rank of the median
    low, high = (
        ordered[int(np.clip(len(ordered) / 2 + side * half, 0, len(ordered) - 1))] for side in (-1, 1)
    )
    middle = float(np.median(ordered))
    return row(
        f"{what}, median of {len(ordered)} pairs (95 %: {low:.2f} .. {high:.2f})", middle, "% of tokens/s"
    )


def _steps(sets: tuple[str, ...]) -> _Steps:
    config = load_config("tiny", (), ["optimizer.warmup_steps=0", *sets])
    devices, _ = resolve_mesh(config, jax.devices())
    built = build_run(config)
    mesh = make_mesh(built.mesh, devices)
    batch = put_batch(next(open_dataset(built.data, seed=0).train_batches()), mesh)
    return _Steps(built, mesh, run_layout(built), build_run_optimizer(built), batch)


def _time_in_turns(steps: _Steps, pairs: int) -> list[np.ndarray]:
    """Times of both programs in ms, with checks and without: [wall and CPU time of all threads, pairs]."""
    programs = {checks: steps.step(checks=checks) for checks in (True, False)}
    state = steps.state()
    times_ms = {checks: np.zeros((2, pairs + 1)) for checks in programs}
    for pair in range(pairs + 1):
        # ABBA: a machine that slows down evenly adds as much to both.
        for checks in (True, False) if pair % 2 else (False, True):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            state, metrics = jax.block_until_ready(programs[checks](state, steps.batch))
            times_ms[checks][:, pair] = (
                1e3 * (time.perf_counter() - start_s),
                1e3 * (time.process_time() - start_cpu_s),
            )
            # Freed before the other program's clock starts.
            del metrics
    return [times_ms[checks][:, 1:] for checks in (True, False)]  # the first pair warms caches


def _host_ms(steps: _Steps, rounds: int = 300) -> float:
    """Returns the time that the loop's host spends per step on the metrics of the checks."""
    run, state = steps.run, steps.state()
    _, with_checks = steps.step(checks=True)(state, steps.batch)
    _, without = steps.step(checks=False)(steps.state(), steps.batch)
    with tempfile.TemporaryDirectory() as folder:
        # Stand-ins with the few attributes that the checks read: the loop itself is not measured.
        context: Any = types.SimpleNamespace(
            mesh=steps.mesh,
            start_step=0,
            job=types.SimpleNamespace(layout=steps.layout),
            run=run,
            workdir=Path(folder),
        )
        checkpoints = Checkpoints(Path(folder), CheckpointSpec())
        integrity = IntegrityCheck(run.integrity, checkpoints)
        integrity.on_start(context)
        bad_steps = BadSteps(run.guard, Path(folder), steps.mesh, checkpoints, print, print)
        number = iter(range(1, 10**6))

        def judge() -> None:
            values = jax.device_get(with_checks)
            # Every other number: consecutive steps would be compared, and these metrics repeat one step.
            step = 2 * next(number)
            integrity.check(step, values)
            bad_steps.check(StepNumbers.of(step, values, ""), dispatched=step, last=False, documents=dict)

        # Fetching the metrics costs the loop without checks too, so it is subtracted.
        checked_ms, plain_ms = _median_ms(judge, rounds), _median_ms(lambda: jax.device_get(without), rounds)
    return checked_ms - plain_ms


def _median_ms(call: Callable[[], Any], rounds: int) -> float:
    times_ms = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        call()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return float(np.median(times_ms))


def _recompute_ms(steps: _Steps, rounds: int = 10) -> tuple[float, float]:
    """Returns the time of the first pair of signatures, which compiles, and the median of later pairs."""
    state = steps.state()
    signature = recompute.make_signature(steps.run.model, steps.layout, steps.mesh)
    roll = recompute.make_roll(steps.mesh)

    # Both: a recomputation compares a step's signature with that of the batch rolled over the devices.
    def both() -> None:
        jax.block_until_ready(
            [signature(state.params, state.scaling, b) for b in (steps.batch, roll(steps.batch))]
        )

    return _median_ms(both, 1), _median_ms(both, rounds)


def _count_located(steps: _Steps, flips: int) -> int:
    """Flips one bit of each of `flips` states in memory; returns how many the next step locates."""
    step, rng = steps.step(checks=True), np.random.default_rng(0)
    state, _ = step(steps.state(), steps.batch)
    names = [name for name, _ in summed_arrays(abstract_state(steps.layout, steps.optimizer, steps.mesh))]
    _, metrics = step(jax.tree.map(jnp.copy, state), steps.batch)
    expected_sums = np.asarray(metrics[METRIC])[:, 0]
    located = 0
    for _ in range(flips):
        # A copy, because the step donates its state, and the flip must not reach the next round.
        flipped_state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        array, device = int(rng.integers(len(names))), int(rng.integers(steps.mesh.size))
        part = dict(summed_arrays(flipped_state))[names[array]].addressable_shards[device].data
        # On a CPU the buffer's address can be written to, which no JAX function would do.
        memory = (ctypes.c_uint8 * part.nbytes).from_address(part.unsafe_buffer_pointer())
        memory[int(rng.integers(part.nbytes))] ^= 1 << int(rng.integers(8))
        _, metrics = step(flipped_state, steps.batch)
        # Found and located: exactly one sum differs, that of the device and array that were flipped.
        located += np.argwhere(np.asarray(metrics[METRIC])[:, 0] != expected_sums).tolist() == [
            [device, array]
        ]
    return located
