"""The guard's judgement of single steps, against NumPy, on histories that are made up."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.optim import AdamW, build
from jtrain.step.guard import (
    FLOORS,
    LEFT_OUT,
    MIN_HISTORY,
    WINDOW,
    GuardSpec,
    GuardState,
    first_guard,
    judge_update,
    not_finite,
    not_finite_on_cpu,
)

SIGMAS = 6.0
LONGEST = 2000


def run(
    values: np.ndarray,
    guard: GuardState | None = None,
    *,
    first: int = 0,
    sigmas: float | None = SIGMAS,
    jumps: tuple[int, ...] = (),
) -> Any:
    """Judges rows of (loss, norm) one after another; returns the last state and stacked metrics."""
    padded = np.zeros((LONGEST, 2), np.float32)
    padded[: len(values)] = values
    states, found = scanned(first_guard() if guard is None else guard, np.int32(first), padded, sigmas, jumps)
    guard = jax.tree.map(lambda x: np.asarray(x)[len(values) - 1], states)
    return guard, {name: np.asarray(value)[: len(values)] for name, value in found.items()}


@functools.partial(jax.jit, static_argnums=(3, 4))
def scanned(guard: GuardState, first: Any, values: Any, sigmas: float | None, jumps: tuple[int, ...]) -> Any:
    """States and metrics after each row; one program for all tests."""

    def one(carry: tuple[GuardState, Any], value_2: Any) -> Any:
        guard, step = carry
        guard, found = judge_update(guard, step, value_2[0], value_2[1], sigmas=sigmas, jumps=jumps)
        return (guard, step + 1), (guard, found)

    return jax.lax.scan(one, (guard, first), values)[1]


def noisy(steps: int, seed: int = 0) -> np.ndarray:
    """Losses around 3 with a spread of 0.3, and gradient norms around 1 that are skewed upwards."""
    rng = np.random.default_rng(seed)
    return np.stack([3 + 0.3 * rng.standard_normal(steps), np.exp(0.4 * rng.standard_normal(steps))], axis=1)


def test_bounds_are_median_and_deviation_of_the_window_before() -> None:
    """Equal to NumPy's from the first step with enough history; infinite before; NaN is in no history."""
    values = noisy(3 * WINDOW)
    values[150, 0] = math.nan
    values[200, 1] = math.inf
    guard, found = run(values)
    kept = np.where(np.isfinite(values), values, np.nan).astype(np.float32)
    for step in range(len(values)):
        history = kept[max(0, step - WINDOW) : step]
        if len(history) < MIN_HISTORY:
            assert np.isinf(found["bounds"][step]).all()
            continue
        middle = np.nanmedian(history, axis=0)
        spread = 1.4826 * np.nanmedian(abs(history - middle), axis=0)
        bound = middle + SIGMAS * np.maximum(spread, np.asarray(FLOORS, np.float32) * middle)
        np.testing.assert_allclose(found["bounds"][step], bound, rtol=1e-5)
    skipped = np.flatnonzero(~found["applied"])
    np.testing.assert_array_equal(skipped, [150, 200])
    assert int(guard.skipped) == found["skipped_updates"][-1] == 2
    np.testing.assert_array_equal(np.roll(guard.history, -len(values) % WINDOW, axis=1), kept[-WINDOW:].T)


@pytest.mark.parametrize(
    ("column", "factor", "applied"), [(0, 1.9, False), (0, 0.1, True), (1, 30, False), (1, 5, True)]
)
def test_only_far_above_is_bad(column: int, factor: float, applied: bool) -> None:
    """A loss or norm far above its history is bad; one far below is not, nor a norm that clipping handles."""
    values = noisy(200)
    values[-1, column] *= factor
    assert bool(run(values)[1]["applied"][-1]) is applied
    assert run(values)[1]["applied"][:-1].all()
    assert run(values, sigmas=None)[1]["applied"].all(), "guard.sigmas=None checks only for NaN and infinity"


def test_a_smooth_loss_has_room_and_a_new_level_becomes_normal() -> None:
    """Without a floor, noise of 1 % above a constant would be bad; a lasting rise is bad only for a while."""
    flat = np.ones((4 * WINDOW, 2)) * [2.0, 0.5]
    flat[WINDOW::7, 0] *= 1.01
    assert run(flat)[1]["applied"].all()
    risen = noisy(6 * WINDOW)
    risen[WINDOW:, 0] *= 2
    bad = np.flatnonzero(~run(risen)[1]["applied"])
    assert bad[0] == WINDOW
    assert 10 < len(bad) <= WINDOW // 2


@pytest.mark.parametrize("seed", range(3))
def test_low_losses_have_room_and_their_spikes_are_found(seed: int) -> None:
    """Memorised text: 0.001 to 0.003 nats, batches of 0.02 to 0.047 with gradients as many times larger: no
    good update is skipped in 2,000 steps; a loss of 0.5 is, and so is a norm 1,000 times the median.
    """
    rng = np.random.default_rng(seed)
    low = rng.uniform(0.001, 0.003, 2000)
    hard = rng.random(2000) < 0.01
    low[hard] = rng.uniform(0.02, 0.047, hard.sum())
    assert hard[MIN_HISTORY:].sum() > 8
    values = np.stack([low, 0.05 * low / 0.002 * rng.uniform(0.7, 1.4, 2000)], axis=1)
    assert run(values)[1]["applied"].all()
    spikes = values.copy()
    spikes[1000, 0], spikes[1500, 1] = 0.5, 50.0
    assert np.flatnonzero(~run(spikes)[1]["applied"]).tolist() == [1000, 1500]


CORPORA = ("memorised", "bimodal", "fine-tuning", "switching", "clean")
SWITCHES = (500, 1200)
SPIKES = (400, 900, 1700)
"""Steps at which all three kinds of spikes come, outside the 64 steps after a switch."""


def series(corpus: str, seed: int) -> np.ndarray:
    """Loss and norm of 2,000 steps, as a corpus of this kind gives them."""
    rng = np.random.default_rng(seed)
    step = np.arange(2000)
    noise = rng.standard_normal(2000)
    if corpus == "memorised":
        loss = rng.uniform(0.001, 0.003, 2000)
        rare = rng.random(2000) < 0.01
        loss[rare] = rng.uniform(0.02, 0.047, rare.sum())
    elif corpus == "bimodal":  # a tenth of the 8 rows of a batch are of a source that is twice as hard
        loss = (1.6 + 1.6 * rng.binomial(8, 0.1, 2000) / 8) * np.exp(0.05 * noise)
    elif corpus == "fine-tuning":
        loss = (0.05 + 1.5 * np.exp(-step / 100)) * np.exp(0.2 * noise)
    elif corpus == "switching":
        level = np.select([step < SWITCHES[0], step < SWITCHES[1]], [2.0, 3.5], 1.2)
        loss = level * np.exp(0.03 * noise)
    else:
        loss = (2 + 4 * np.exp(-step / 150)) * np.exp(0.03 * noise)
    norm = 0.5 * loss / np.median(loss) * np.exp(0.4 * rng.standard_normal(2000))
    return np.stack([loss, norm], axis=1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("corpus", CORPORA)
def test_no_corpus_loses_a_good_update_and_spikes_are_found(corpus: str, seed: int) -> None:
    """3 seeds of 5 kinds, 2,000 steps each: 0 skips, and 3 of 3 spikes of each of loss and norm."""
    jumps = SWITCHES if corpus == "switching" else ()
    values = series(corpus, seed)
    assert np.flatnonzero(~run(values, jumps=jumps)[1]["applied"]).tolist() == []
    for column, size in ((0, 10.0), (1, 1000.0)):
        spikes = values.copy()
        spikes[list(SPIKES), column] = size * values[:, column].max()
        assert np.flatnonzero(~run(spikes, jumps=jumps)[1]["applied"]).tolist() == list(SPIKES)


def test_a_switch_that_is_not_announced_costs_updates() -> None:
    """What the announcement is for: the same series, without it."""
    skipped = np.flatnonzero(~run(series("switching", 0))[1]["applied"])
    assert skipped[0] == SWITCHES[0]
    assert len(skipped) > 30


def test_steps_are_left_out_and_bounds_begin_anew_by_number() -> None:
    """The two decisions that the host puts into the state: steps count from 1, and decide alike after a
    resume.
    """
    values = noisy(3 * WINDOW)
    values[200:, 0] *= 3
    steps = np.zeros(LEFT_OUT, np.int32)
    steps[:2] = (5, 131)
    guard = GuardState(first_guard().history, np.int32(0), steps, np.int32(210))
    _, whole = run(values, guard)
    np.testing.assert_array_equal(np.flatnonzero(~whole["applied"]) + 1, [5, 131, *range(201, 211)])
    assert np.isinf(whole["bounds"][210 : 210 + MIN_HISTORY]).all()
    assert np.isfinite(whole["bounds"][210 + MIN_HISTORY :]).all()
    half, _ = run(values[:205], guard)
    _, rest = run(values[205:], half, first=205)
    for name, value in rest.items():
        np.testing.assert_array_equal(value, whole[name][205:])


@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_in_2000_steps_of_noise(seed: int) -> None:
    """Neither normal losses that fall nor log-normal norms reach a bound."""
    values = noisy(2000, seed)
    values[:, 0] += 3 * np.exp(-np.arange(2000) / 300)
    assert run(values)[1]["applied"].all()


def test_the_fast_count_is_the_count() -> None:
    """NaN and infinities of both signs, which cancel to NaN; a sum that overflows hides and invents none."""
    large = np.full(300, 3e38, np.float32)
    arrays: list[Any] = [
        np.zeros((20, 30), np.float32),
        large,
        np.zeros(5, np.int32),
        jnp.zeros(7, jnp.bfloat16),
    ]
    assert int(not_finite_on_cpu(arrays)) == 0
    arrays[0][3, 4:7] = np.nan, np.inf, -np.inf
    arrays[3] = arrays[3].at[2].set(np.inf)
    assert int(not_finite_on_cpu(arrays)) == int(not_finite(arrays)) == 4


@pytest.mark.parametrize("applied", [True, False])
def test_a_moment_that_is_not_finite_shows_in_its_weight(applied: bool) -> None:
    """An infinite second moment divides the update away, so the weight alone would look healthy."""
    info = ParamInfo("w", (4,), "D", "normal", 0.02)
    optimizer = build(
        AdamW(peak_lr=1e-3, warmup_steps=0, moment_dtype="bfloat16"), num_steps=10, params={"w": info}
    )
    grad, param = jnp.full(4, 0.1), jnp.arange(4.0)
    zeros = jnp.zeros(4, jnp.bfloat16)
    moments = {"mu": zeros, "nu": zeros.at[2].set(jnp.inf)}
    update = dataclasses.replace(optimizer.begin({"w": grad}, 0), applied=jnp.asarray(applied))
    new, of_it = optimizer.update_param(update, info, grad, param, moments)
    assert np.isnan(new).tolist() == [False, False, True, False]
    assert np.isposinf(of_it["nu"]).tolist() == [False, False, True, False]
    assert (np.asarray(new)[[0, 1, 3]] == [0.0, 1.0, 3.0]).all() == (not applied)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sigmas": 0.0}, "guard.sigmas=0.0 must be above 0 and finite, or None"),
        ({"sigmas": math.inf}, "guard.sigmas=inf must be above 0 and finite, or None"),
        ({"max_skips": 0}, "guard.max_skips=0 must be from 1 to 128"),
        ({"max_rollbacks": 33}, "guard.max_rollbacks=33 must be from 1 to 32"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    """With the field, its value and its range."""
    with pytest.raises(UserError, match=message):
        GuardSpec(**fields)
