"""Small updates under rounding: kept by masters and by chance, and settings that would do nothing."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.layout.dims import ParamInfo
from jtrain.layout.mesh import MeshSpec
from jtrain.optim import AdamW, Moments, build, check_layout
from jtrain.optim.state import flatten_by_path, load_moment
from tests.layouts import layout_from
from tests.optim.test_state import BY_PATH, INFOS, assert_equal, nested, optimizer, random


def test_masters_follow_the_float32_run_and_parameters_are_them_rounded() -> None:
    """After twenty updates, masters equal a float32 run's parameters and moments agree, bit for bit."""
    full, rounded = optimizer(), optimizer(master_dtype="float32")
    want, got = random(0), jax.tree.map(lambda x: x.astype(jnp.bfloat16), random(0))
    want_state, state = full.init(want), rounded.init(random(0))
    assert not np.array_equal(np.float32(got["final_norm"]["scale_D"]), want["final_norm"]["scale_D"])
    update_full, update_rounded = (
        jax.jit(lambda p, s, g, k, o=o: o.update(g, s, p, k)) for o in (full, rounded)
    )
    for k in range(20):
        grads = random(k + 1)
        want, want_state, _ = update_full(want, want_state, grads, k)
        got, state, _ = update_rounded(got, state, grads, k)
    assert np.abs(want["final_norm"]["scale_D"] - random(0)["final_norm"]["scale_D"]).max() > 1e-2
    assert_equal((state.master, state.mu, state.nu), (want, want_state.mu, want_state.nu))
    assert_equal(got, jax.tree.map(lambda x: x.astype(jnp.bfloat16), want))
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"bfloat16"}


def mlp_of(seed: int) -> dict[str, Any]:
    """Random arrays of the two matrices of a feed-forward layer."""
    return {
        name: array for name, array in random(seed)["layers"]["mlp"].items() if name in ("gate_DF", "down_FD")
    }


def test_no_two_roundings_share_their_noise() -> None:
    """Which elements are rounded away from 0 is unrelated between arrays of the state, layers, parameters and
    steps.

    The same noise for two of them relates them by a third; noise of their own by 0.03, of parameters that
    hardly move.
    """
    paths = ("layers.mlp.gate_DF", "layers.mlp.down_FD")
    infos = nested({path: BY_PATH[path] for path in paths})
    opt, exact = (
        build(AdamW(1e-2, b2=0.99, **fields), num_steps=10, params=infos)
        for fields in (dict[str, Any](moment_dtype="int8", param_rounding="stochastic"), dict[str, Any]())
    )
    masters = jax.tree.map(lambda _, x: x.astype(jnp.bfloat16), infos, {"layers": {"mlp": mlp_of(0)}})
    update, update_exactly = jax.jit(opt.update), jax.jit(exact.update)
    rounded_up: dict[tuple[Any, ...], np.ndarray] = {}
    for step in (3, 4):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), masters)
        grads = {"layers": {"mlp": mlp_of(step)}}
        want_params, want, _ = update_exactly(grads, exact.init(wide), wide, step)
        params, state, _ = update(grads, opt.init(masters), masters, step)
        leaves = opt.leaves(state)
        for path in paths:
            got = {name: load_moment(opt.spec, BY_PATH[path], leaves[path], name) for name in ("mu", "nu")}
            got["param"] = flatten_by_path(opt.params, params)[path].astype(jnp.float32)
            right = exact.leaves(want)[path] | {"param": flatten_by_path(opt.params, want_params)[path]}
            for name, layer in itertools.product(got, (0, 1)):
                key = step, path, name, layer
                rounded_up[key] = np.asarray(abs(got[name][layer]) > abs(right[name][layer])).ravel()
    related = np.abs(np.corrcoef(np.stack(list(rounded_up.values())))) - np.eye(len(rounded_up))
    worst = np.unravel_index(related.argmax(), related.shape)
    assert related.max() < 0.1, [list(rounded_up)[index] for index in worst]


def test_small_updates_are_lost_to_nearest_and_kept_on_average_by_chance() -> None:
    """1000 updates of 1e-5 move weights of 1 by 0.01 on average; rounded to nearest the weights do not move.

    One stochastic rounding has a deviation of at most 2^-9, so 1000 of them 2^-9 sqrt(1000). The bound for
    the mean over 4096 weights is six times a 64th of that.
    """
    infos = {"w": ParamInfo("w", (4096,), "D", "ones")}

    def moved(rounding: Any) -> np.ndarray:
        spec = AdamW(1e-5, warmup_steps=0, weight_decay=0.0, clip_norm=None, param_rounding=rounding)
        spec = dataclasses.replace(spec, schedule=dataclasses.replace(spec.schedule, final_fraction=1.0))
        opt = build(spec, num_steps=1000, params=infos)
        params = {"w": jnp.ones(4096, jnp.bfloat16)}

        def one(k: jax.Array, carry: tuple[Any, Moments]) -> tuple[Any, Moments]:
            return opt.update({"w": jnp.ones(4096)}, carry[1], carry[0], k)[:2]

        last = jax.jit(lambda p: jax.lax.fori_loop(0, 1000, one, (p, opt.init(p))))(params)[0]["w"]
        return np.asarray(last, np.float64)

    assert (moved("nearest") == 1.0).all()
    np.testing.assert_allclose(1 - moved("stochastic").mean(), 0.01, atol=6 * 2.0**-9 * np.sqrt(1000) / 64)


@pytest.mark.parametrize("moment_dtype", ["bfloat16_sr", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_second_moment_falls_at_any_rate(moment_dtype: Any) -> None:
    """A moment 100 times too large falls to g^2 at b2=0.999 within 7000 updates; bf16 to nearest never
    would.
    """
    info = ParamInfo("layers.w_DF", (1, 8, 128), "YDF", "normal", 1.0)
    spec = AdamW(1e-3, warmup_steps=0, clip_norm=None, b2=0.999, moment_dtype=moment_dtype)
    opt = build(spec, num_steps=7000, params={"w": info})
    g = jnp.exp(jnp.asarray(np.random.default_rng(0).standard_normal(info.shape), jnp.float32))
    strong = build(dataclasses.replace(spec, b2=0.0), num_steps=7000, params={"w": info})

    @jax.jit
    def run() -> Moments:
        params = {"w": jnp.ones(info.shape)}
        _, state, _ = strong.update({"w": 10 * g}, strong.init(params), params, 0)

        def one(k: jax.Array, carry: tuple[Any, Moments]) -> tuple[Any, Moments]:
            return opt.update({"w": g}, carry[1], carry[0], k)[:2]

        return jax.lax.fori_loop(0, 7000, one, (params, state))[1]

    state = run()
    got = np.asarray(load_moment(spec, info, opt.leaves(state)["layers.w_DF"], "nu") / g**2, np.float64)
    assert abs(got.mean() - (1 + 99 * 0.999**7000)) < 0.05
    assert np.quantile(got, 0.95) < (1.2 if moment_dtype == "bfloat16_sr" else 2.5)


@pytest.mark.parametrize(
    ("fields", "param_dtype", "message"),
    [
        (
            {"master_dtype": "float32"},
            "float32",
            r"master_dtype=float32 with precision.param_dtype=float32: such",
        ),
        (
            {"param_rounding": "stochastic"},
            "float32",
            r"param_rounding=stochastic with precision.param_dtype=float32: ",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(fields: dict[str, Any], param_dtype: Any, message: str) -> None:
    """Masters and stochastic rounding are refused without bfloat16 parameters and accepted with them."""
    opt = build(AdamW(1e-3, **fields), num_steps=100, params=INFOS)
    for dtype in (param_dtype, "bfloat16"):
        layout = layout_from(dict(param_dtype=dtype), MeshSpec(), tuple(BY_PATH.values()))
        if dtype == param_dtype:
            with pytest.raises(ValueError, match=message):
                check_layout(opt.spec, layout)
        else:
            check_layout(opt.spec, layout)


def test_both_ways_to_keep_small_updates_at_once_are_refused() -> None:
    """Stochastic rounding of parameters that have masters is refused."""
    with pytest.raises(
        ValueError, match=r"param_rounding=stochastic with optimizer.master_dtype=float32: the masters"
    ):
        AdamW(1e-3, master_dtype="float32", param_rounding="stochastic")
