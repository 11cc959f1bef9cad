import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import ParamInfo
from jtrain.optim import AdamW, Cosine, Moments, Muon, Optimizer, build, state_bytes
from tests.optim.test_state import moments_like

SHAPES = {  # Y=3, D=24, N=4, H=6, F=40, V=56; D over 8 devices leaves 3, so vector loops have a tail
    "embed.table_VD": ("VD", (56, 24)),
    "final_norm.scale_D": ("D", (24,)),
    "layers.attention.o_NHD": ("YNHD", (3, 4, 6, 24)),
    "layers.attention.q_DNH": ("YDNH", (3, 24, 4, 6)),
    "layers.attention_norm.scale_D": ("YD", (3, 24)),
    "layers.mlp.down_FD": ("YFD", (3, 40, 24)),
    "layers.mlp.gate_DF": ("YDF", (3, 24, 40)),
    "unembed.kernel_DV": ("DV", (24, 56)),
}
NOT_BY_MUON = {"embed.table_VD", "final_norm.scale_D", "layers.attention_norm.scale_D", "unembed.kernel_DV"}


def nested(by_path: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in by_path.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def by_path(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        ".".join(str(key.key) for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


INFOS = nested({path: ParamInfo(path, shape, dims, "normal", 0.02) for path, (dims, shape) in SHAPES.items()})


def random(seed: int, scale: float = 1.0, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    draw = {path: scale * rng.standard_normal(shape) for path, (_, shape) in SHAPES.items()}
    return nested({path: jnp.asarray(x, dtype) for path, x in draw.items()})


def step_of(opt: Optimizer) -> Any:
    """Jitted update with donated buffers, in the order that lets JAX reuse them."""
    return jax.jit(
        lambda params, state, grads, step: opt.update(grads, state, params, step), donate_argnums=(0, 1)
    )


@pytest.mark.smoke
def test_adamw_is_the_published_formula() -> None:
    """Twenty updates equal a float64 reference with warm-up, cosine, clipping, eps and decay of matrices
    only.
    """
    spec = AdamW(
        1e-2, Cosine(0.1), warmup_steps=5, b1=0.9, b2=0.99, eps=1e-3, weight_decay=0.3, clip_norm=100.0
    )
    opt = build(spec, num_steps=20, params=INFOS)
    params, update = random(0), step_of(opt)
    state = opt.init(params)
    p = {path: np.float64(x) for path, x in by_path(params).items()}
    start, m, v = dict(p), dict.fromkeys(p, 0.0), dict.fromkeys(p, 0.0)
    clipped = 0
    for k in range(20):
        grads = random(k + 1, scale=0.5 + 0.05 * k)
        g = {path: np.float64(x) for path, x in by_path(grads).items()}
        norm = math.sqrt(sum(float((x**2).sum()) for x in g.values()))
        clipped += norm > 100.0
        lr = 1e-2 * min((k + 1) / 5, 1.0) * (0.1 + 0.45 * (1 + math.cos(math.pi * max(k - 5, 0) / 15)))
        for path in p:
            gc = g[path] * min(1.0, 100.0 / norm)
            m[path] = 0.9 * m[path] + 0.1 * gc
            v[path] = 0.99 * v[path] + 0.01 * gc**2
            adam = m[path] / (1 - 0.9 ** (k + 1)) / (np.sqrt(v[path] / (1 - 0.99 ** (k + 1))) + 1e-3)
            decay = 0.0 if "scale" in path else 0.3
            p[path] = p[path] - lr * (adam + decay * p[path])
        params, state, metrics = update(params, state, grads, k)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        np.testing.assert_allclose(metrics["learning_rate"], lr, rtol=1e-6)

    assert 3 < clipped < 17, "both sides of the clip must be seen"
    for path, got in by_path(params).items():
        assert np.abs(p[path] - start[path]).max() > 0.02, (
            "the parameters must move, or equality proves nothing"
        )
        np.testing.assert_allclose(got, p[path], atol=2e-6, err_msg=path)
        np.testing.assert_allclose(by_path(state.mu)[path], m[path], atol=1e-6)
        np.testing.assert_allclose(by_path(state.nu)[path], v[path], rtol=1e-5)


def test_only_matrices_decay() -> None:
    """With gradients of zero a matrix shrinks by lr * weight_decay and a norm scale stays, for both
    optimizers.
    """
    for spec in (AdamW(0.1, warmup_steps=0, weight_decay=0.5), Muon(0.1, warmup_steps=0, weight_decay=0.5)):
        opt, params = build(spec, num_steps=10, params=INFOS), random(0)
        got, _, _ = jax.jit(opt.update)(jax.tree.map(jnp.zeros_like, params), opt.init(params), params, 0)
        for path, x in by_path(params).items():
            factor = 1.0 if "scale" in path else 0.95
            np.testing.assert_allclose(by_path(got)[path], factor * x, rtol=1e-6, err_msg=path)


def test_the_rate_and_the_bias_correction_come_from_step_alone() -> None:
    """An update at step 7 with zero moments uses lr(7) and the bias correction of eight updates."""
    opt, params = build(AdamW(1e-3, warmup_steps=10, clip_norm=None), num_steps=20, params=INFOS), random(0)
    assert {x.shape for x in jax.tree.leaves(opt.init(params))} == {x.shape for x in jax.tree.leaves(params)}
    got, _, metrics = jax.jit(opt.update)(random(1), opt.init(params), params, 7)
    np.testing.assert_allclose(metrics["learning_rate"], 8e-4, rtol=1e-6)
    g = np.float64(random(1)["final_norm"]["scale_D"])
    adam = 0.1 * g / (1 - 0.9**8) / (np.sqrt(0.05 * g**2 / (1 - 0.95**8)) + 1e-8)
    moved = np.float64(params["final_norm"]["scale_D"]) - got["final_norm"]["scale_D"]
    np.testing.assert_allclose(moved, 8e-4 * adam, rtol=1e-3)


def as_matrices(path: str, stack: np.ndarray) -> np.ndarray:
    """Reshapes layers' arrays to (Y, inputs, outputs)."""
    width_last = path.endswith("D")
    return stack.reshape(3, -1, 24) if width_last else stack.reshape(3, 24, -1)


def test_muon_makes_each_layers_update_orthogonal() -> None:
    """Each layer's update has singular values near 1 and RMS 0.2; AdamW updates all other parameters."""
    common = {
        "peak_lr": 1.0,
        "schedule": Cosine(1.0),
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "clip_norm": None,
    }
    muon = build(Muon(**common), num_steps=10, params=INFOS)
    adamw = build(AdamW(**common), num_steps=10, params=INFOS)
    params, grads = random(0), random(1)
    got, state, _ = jax.jit(muon.update)(grads, muon.init(params), params, 0)
    want, _, _ = jax.jit(adamw.update)(grads, adamw.init(params), params, 0)
    assert set(by_path(state.nu)) == NOT_BY_MUON
    for path, param in by_path(params).items():
        if path in NOT_BY_MUON:
            np.testing.assert_array_equal(by_path(got)[path], by_path(want)[path], err_msg=path)
            continue
        update = as_matrices(path, np.asarray(param - by_path(got)[path], np.float64))
        grad = as_matrices(path, np.asarray(by_path(grads)[path], np.float64))
        values = np.linalg.svd(update, compute_uv=False) / (0.2 * math.sqrt(max(update.shape[1:])))
        before = np.linalg.svd(grad, compute_uv=False)
        assert before.max() / before.min() > 3, "orthogonalizing must have had work to do"
        assert values.shape[1] == 24
        assert 0.6 < np.median(values) < 1.3
        assert 0.2 < values.min() <= values.max() < 1.3
        assert 0.14 < np.sqrt((update**2).mean()) < 0.24
        u, _, vt = np.linalg.svd(grad, full_matrices=False)
        assert ((update / np.linalg.norm(update)) * (u @ vt)).sum() / math.sqrt(3 * 24) > 0.5, (
            "not towards U V^T"
        )


def test_a_stack_of_layers_is_updated_as_each_layer_alone() -> None:
    """Muon treats layers independently: each equals the only layer of a one-layer model."""
    opt, params, grads = build(Muon(0.1, clip_norm=None), num_steps=10, params=INFOS), random(0), random(1)
    got, state, _ = jax.jit(opt.update)(grads, opt.init(params), params, 0)
    assert not np.array_equal(got["layers"]["mlp"]["gate_DF"], params["layers"]["mlp"]["gate_DF"])

    def only(y: int, tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "layers": jax.tree.map(lambda x: x[y : y + 1], tree["layers"])}

    one_layer = {
        **INFOS,
        "layers": jax.tree.map(lambda i: dataclasses.replace(i, shape=(1, *i.shape[1:])), INFOS["layers"]),
    }
    single = build(Muon(0.1, clip_norm=None), num_steps=10, params=one_layer)
    update = jax.jit(single.update)
    for y in range(3):
        alone, alone_state, _ = update(only(y, grads), single.init(only(y, params)), only(y, params), 0)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(only(y, got)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(jax.tree.leaves(alone_state.mu), jax.tree.leaves(only(y, state.mu)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_experts_are_a_batch_of_matrices() -> None:
    """A stack of experts YXDF is updated as if each expert were a layer."""
    rng = np.random.default_rng(0)
    p, g = (jnp.asarray(rng.standard_normal((2, 3, 8, 12)), jnp.float32) for _ in range(2))

    def updated(dims: str, shape: tuple[int, ...]) -> np.ndarray:
        opt = build(
            Muon(0.1, clip_norm=None), num_steps=9, params={"w": ParamInfo("w", shape, dims, "normal", 1.0)}
        )
        params = {"w": p.reshape(shape)}
        return np.asarray(opt.update({"w": g.reshape(shape)}, opt.init(params), params, 0)[0]["w"]).reshape(
            p.shape
        )

    assert not np.allclose(updated("YDF", (6, 8, 12)), p)
    np.testing.assert_allclose(
        updated("YXDF", (2, 3, 8, 12)), updated("YDF", (6, 8, 12)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("dim", "params_split"),
    [
        ("D", False),
        ("Y", True),
        pytest.param("D", True, marks=pytest.mark.slow),
        pytest.param("Y", False, marks=pytest.mark.slow),
    ],
)
def test_the_update_is_bitwise_the_same_on_any_layout(
    emulated_devices: list[jax.Device], params_split: bool, dim: str
) -> None:
    """Three AdamW updates with gradients and moments split over devices are bitwise equal to one device's."""
    opt = build(AdamW(1e-2, warmup_steps=2, clip_norm=1e6), num_steps=10, params=INFOS)
    size = 8 if dim == "D" else 3
    mesh = Mesh(np.array(emulated_devices[:size]), ("data",))
    split = jax.tree.map(
        lambda i: NamedSharding(mesh, P(*("data" if d == dim else None for d in i.dims))), INFOS
    )
    whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), INFOS)

    def run(param_sharding: Any, sharding: Any, out: Any) -> tuple[Any, Any, Any]:
        params = jax.device_put(random(0), param_sharding)
        state = jax.device_put(
            opt.init(params), moments_like(opt, sharding) if sharding is not None else None
        )

        @functools.partial(jax.jit, out_shardings=out)
        def update(params: Any, state: Any, grads: Any, step: Any) -> Any:
            if sharding is not None:  # as the train step does
                params = jax.lax.with_sharding_constraint(params, sharding)
            params, state, metrics = opt.update(grads, state, params, step)
            if sharding is not None:
                params = jax.lax.with_sharding_constraint(params, sharding)
            return params, state, metrics

        metrics = {}
        for k in range(3):
            params, state, metrics = update(params, state, jax.device_put(random(k + 1), sharding), k)
        return params, state, metrics

    params_as = split if params_split else whole
    want = run(None, None, None)
    got = run(params_as, split, (params_as, moments_like(opt, split), None))
    mu = got[1].mu["layers"]["mlp"]["gate_DF"]
    assert len({shard.index for shard in mu.addressable_shards}) == size, "the moments must really be split"
    assert not np.array_equal(want[0]["embed"]["table_VD"], random(0)["embed"]["table_VD"])
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(got[2]["grad_norm"], want[2]["grad_norm"], rtol=1e-6)


def test_muon_on_split_matrices_agrees_with_one_device(emulated_devices: list[jax.Device]) -> None:
    """The momentum is bitwise equal; the update agrees to 1e-4, since matrix products sum in another
    order.
    """
    opt = build(Muon(1e-2, warmup_steps=0, clip_norm=1e6), num_steps=10, params=INFOS)
    mesh = Mesh(np.array(emulated_devices), ("data",))
    split = jax.tree.map(
        lambda i: NamedSharding(mesh, P(*("data" if d == "D" else None for d in i.dims))), INFOS
    )
    params, grads = random(0), random(1)
    want, want_state, _ = jax.jit(opt.update)(grads, opt.init(params), params, 0)
    update = jax.jit(opt.update, out_shardings=(split, moments_like(opt, split), None))
    state = jax.device_put(opt.init(params), moments_like(opt, split))
    got, state, _ = update(jax.device_put(grads, split), state, jax.device_put(params, split), 0)
    for a, b, start in zip(*(jax.tree.leaves(tree) for tree in (got, want, params)), strict=True):
        assert np.abs(b - start).max() > 1e-3
        np.testing.assert_allclose(a - start, b - start, atol=1e-6 + 1e-4 * float(np.abs(b - start).max()))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kind", "moment_dtype"),
    [
        (AdamW, "float32"),
        (Muon, "bfloat16"),
        pytest.param(AdamW, "bfloat16", marks=pytest.mark.slow),
        pytest.param(Muon, "float32", marks=pytest.mark.slow),
    ],
)
def test_the_state_is_as_large_as_the_planner_says(kind: type[AdamW], moment_dtype: Any) -> None:
    """Dtypes stay the same over an update with bf16 gradients and parameters, and bytes equal
    `state_bytes`.
    """
    spec = kind(1e-3, moment_dtype=moment_dtype)
    opt, params = build(spec, num_steps=10, params=INFOS), random(0, dtype="bfloat16")
    params, state, metrics = jax.eval_shape(
        opt.update, random(1, dtype="bfloat16"), opt.init(params), params, 0
    )
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {moment_dtype}
    assert {x.dtype.name for x in metrics.values()} == {"float32"}
    predicted = sum(state_bytes(spec, info, info.size) for info in jax.tree.leaves(INFOS))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == predicted
    width = 4 if moment_dtype == "float32" else 2
    gate = state_bytes(spec, INFOS["layers"]["mlp"]["gate_DF"], 1)
    assert (gate, state_bytes(spec, INFOS["embed"]["table_VD"], 1)) == (
        width if kind is Muon else 2 * width,
        2 * width,
    )


def test_bf16_moments_follow_at_the_rates_that_are_allowed_and_stand_still_at_those_refused() -> None:
    """The second moment follows a tenfold smaller gradient within 10 % at b2 = 0.95, and never at b2 =
    0.999.
    """
    infos = {"w": ParamInfo("w", (256,), "D", "ones")}

    def after(b2: float, num_steps: int, force: bool) -> np.ndarray:
        spec = AdamW(
            1e-3, warmup_steps=0, clip_norm=None, b2=b2, moment_dtype="float32" if force else "bfloat16"
        )
        object.__setattr__(spec, "moment_dtype", "bfloat16")
        opt = build(spec, num_steps=num_steps, params=infos)
        params, grads = {"w": jnp.ones(256)}, {"w": jnp.linspace(0.1, 0.2, 256)}
        large = jax.tree.map(lambda g: (100 * g**2).astype(jnp.bfloat16), grads)
        state = Moments(mu=opt.init(params).mu, nu=large)
        update = step_of(opt)
        for k in range(num_steps):
            params, state, _ = update(params, state, grads, k)
        return np.asarray(state.nu["w"], np.float64) / np.asarray(grads["w"], np.float64) ** 2

    allowed = after(0.95, 300, force=False)
    assert 0.005 < np.abs(allowed - 1).max() < 0.1, allowed
    stuck = after(0.999, 300, force=True)
    assert stuck.min() > 99, "if this falls, bf16 moments are better than we say"


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_the_update_runs_in_place(kind: type[AdamW]) -> None:
    """Donated f32 buffers are overwritten without a copy or a temporary as large as a stack (Muon: one
    layer).
    """
    layers = 64

    def deep(info: ParamInfo) -> ParamInfo:
        return dataclasses.replace(info, shape=(layers, *info.shape[1:])) if info.dims[0] == "Y" else info

    infos = jax.tree.map(deep, INFOS)
    opt = build(kind(1e-3), num_steps=10, params=infos)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, jnp.float32), infos)
    state = jax.eval_shape(opt.init, params)
    compiled = step_of(opt).lower(params, state, params, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    donated = sum(4 * math.prod(x.shape) for x in jax.tree.leaves((params, state)))
    one_stack = 4 * layers * 24 * 24
    assert memory.alias_size_in_bytes >= donated
    assert memory.temp_size_in_bytes < one_stack / (2 if kind is Muon else 8)
    copied = re.findall(rf"= f32\[{layers},[^ ]* copy\(", compiled.as_text())
    assert not copied, "a whole stack is copied, for Muon once per layer"
    assert len(re.findall(rf"= f32\[{layers},[^ ]* fusion\(", compiled.as_text())) >= 2 * 4, (
        "the text must be as read"
    )


def test_state_map_puts_values_where_the_moments_are() -> None:
    """A value of any type, here the parameter's path, takes the place of every array of the state."""
    paths = jax.tree.map(lambda info: info.path, INFOS)
    state = moments_like(build(AdamW(1e-3), num_steps=1, params=INFOS), paths)
    assert state.mu == paths
    assert state.nu == paths
    state = moments_like(build(Muon(1e-3), num_steps=1, params=INFOS), paths)
    assert state.mu == paths
    assert set(by_path(state.nu).values()) == NOT_BY_MUON
    assert set(state.nu["layers"]) == {"attention_norm"}, "no empty branches"


def test_muon_refuses_a_matrix_whose_inputs_it_cannot_tell() -> None:
    """Muon needs the model's width at one end of the dimensions; AdamW does not."""
    odd = {"w": ParamInfo("layers.odd.w_FDH", (2, 3, 4, 5), "YFDH", "normal", 1.0)}
    with pytest.raises(ValueError, match=r"inputs from outputs of layers.odd.w_FDH with dimensions YFDH"):
        build(Muon(1e-3), num_steps=10, params=odd)
    assert build(AdamW(1e-3), num_steps=10, params=odd).params == odd
