"""Optimizer state of every precision: bytes, bitwise equality on any layout, masters, stochastic rounding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.optim import AdamW, Moments, Muon, Optimizer, build, state_bytes
from jtrain.optim.state import arrays, flatten_by_path

SHAPES = {  # over 4 shards of F whole blocks of 128 are left
    "embed.table_VD": ("VD", (24, 256)),
    "final_norm.scale_D": ("D", (256,)),
    "layers.attention.o_NHD": ("YNHD", (2, 4, 16, 256)),
    "layers.attention.q_DNH": ("YDNH", (2, 256, 4, 16)),
    "layers.attention_norm.scale_D": ("YD", (2, 256)),
    "layers.mlp.down_FD": ("YFD", (2, 512, 256)),
    "layers.mlp.gate_DF": ("YDF", (2, 256, 512)),
    "unembed.kernel_DV": ("DV", (256, 24)),
}


def moments_like(opt: Optimizer, values: Any) -> Moments:
    """One value per parameter (a sharding, say) for every array of the parameter's state."""
    by_parameter = flatten_by_path(opt.params, values)
    return opt.state_map(lambda info, _: by_parameter[info.path])


def nested(flatten_by_path: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flatten_by_path.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


BY_PATH = {path: ParamInfo(path, shape, dims, "normal", 0.02) for path, (dims, shape) in SHAPES.items()}
INFOS = nested(BY_PATH)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16_sr": {"moment_dtype": "bfloat16_sr", "param_rounding": "stochastic"},
    "int8": {"moment_dtype": "int8", "master_dtype": "float32"},
}
STEPS = 3


def random(seed: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return nested(
        {path: jnp.asarray(rng.standard_normal(shape), dtype) for path, (_, shape) in SHAPES.items()}
    )


def optimizer(**fields: Any) -> Optimizer:
    return build(AdamW(1e-2, warmup_steps=2, clip_norm=1e6, b2=0.99, **fields), num_steps=10, params=INFOS)


def updated(opt: Optimizer, constrain: Any = lambda tree: tree, out: Any = None, split: Any = None) -> Any:
    """Parameters in bfloat16 and state after three updates; `split` places the gradients."""
    masters = random(0)
    params, state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters), opt.init(masters)
    if out is not None:
        params, state = jax.device_put((params, state), out)

    def update(params: Any, state: Any, grads: Any, step: Any) -> Any:
        return opt.update(grads, state, constrain(params), step)[:2]

    jitted = jax.jit(update, out_shardings=out)
    for k in range(STEPS):
        params, state = jitted(params, state, jax.device_put(random(k + 1), split), k)
    return params, state


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_operation_is_rounded_for_itself() -> None:
    """Three updates equal numpy's, one operation after the other in float32: no product is contracted with a
    sum.
    """
    opt = optimizer(master_dtype="float32", weight_decay=0.3)
    jitted = jax.jit(lambda p, s, g, k: (opt.begin(g, k), *opt.update(g, s, p, k)[:2]))
    params, state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random(0)), opt.init(random(0))
    p = np.asarray(random(0)["layers"]["mlp"]["gate_DF"])
    m = v = np.zeros_like(p)
    one, b1, b2, decay = (np.float32(x) for x in (1.0, 0.9, 0.99, 0.3))
    contracted = 0
    for k in range(STEPS):
        update, params, state = jitted(params, state, random(k + 1), k)
        assert update.grad_scale == one
        g = np.asarray(random(k + 1)["layers"]["mlp"]["gate_DF"])
        exact = np.float64(np.float32(0.1)) * g + np.float64(b1 * m)
        m, v = np.float32(0.1) * g + b1 * m, np.float32(1 - 0.99) * (g * g) + b2 * v
        contracted += int((np.float32(exact) != m).sum())
        rate, mu_scale, nu_scale = (
            np.asarray(x) for x in (update.learning_rate, update.mu_scale, update.nu_scale)
        )
        p = p - rate * (m * mu_scale / (np.sqrt(v * nu_scale) + np.float32(1e-8)) + decay * p)
    assert contracted > 1000, "contraction must show"
    for name, want in (("mu", m), ("nu", v), ("master", p)):
        assert want.dtype == np.float32
        np.testing.assert_array_equal(getattr(state, name)["layers"]["mlp"]["gate_DF"], want, err_msg=name)


WHOLE: dict[str, Any] = {}


def whole(precision: str) -> Any:
    """State after three updates on one device; computed once."""
    if precision not in WHOLE:
        params, state = WHOLE[precision] = updated(optimizer(**PRECISIONS[precision]))
        gate = np.float32(params["layers"]["mlp"]["gate_DF"])
        assert np.abs(gate - np.float32(random(0)["layers"]["mlp"]["gate_DF"])).max() > 5e-3
        assert len(np.unique(np.float32(state.mu["layers"]["mlp"]["gate_DF"]))) > 100
    return WHOLE[precision]


LAYOUTS = (
    (dict(data=8), 0),
    (dict(data=8), 1),
    (dict(data=8), 3),
    (dict(data=2, tensor=4), 2),
    (dict(data=2, tensor=4), 3),
    (dict(data=4, tensor=2), 1),
)
QUICK = {(3, 1)}
"""Numbers of the layout and of the precision of the quick test; the next test has the other precision."""


@pytest.mark.parametrize(
    ("axes", "zero_stage", "precision"),
    [
        pytest.param(*layout, precision, marks=[pytest.mark.slow] * ((i, j) not in QUICK))
        for i, layout in enumerate(LAYOUTS)
        for j, precision in enumerate(PRECISIONS)
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_layout(axes: dict[str, int], zero_stage: Any, precision: str) -> None:
    """Three updates, placed as in the train step, give the state and parameters of one device."""
    opt = optimizer(**PRECISIONS[precision])
    layout = make_layout(LayoutSpec(zero_stage=zero_stage), MeshSpec(**axes), tuple(BY_PATH.values()))
    mesh = make_mesh(layout.mesh, jax.devices())
    of_param = nested({p.info.path: NamedSharding(mesh, p.param_partition) for p in layout.params})
    of_state = nested({p.info.path: NamedSharding(mesh, p.optimizer_partition) for p in layout.params})
    out = (of_param, moments_like(opt, of_state))

    def constrain(params: Any) -> Any:
        return jax.tree.map(jax.lax.with_sharding_constraint, params, of_state)

    params, state = updated(opt, constrain, out, of_state)
    split = sum(len({str(shard.index) for shard in x.addressable_shards}) > 1 for x in jax.tree.leaves(state))
    assert (split > 10) == (zero_stage > 0 or "tensor" in axes), "the state must really be split"
    assert_equal((params, state), whole(precision))


@pytest.mark.parametrize("precision", ("bfloat16_sr", pytest.param("int8", marks=pytest.mark.slow)))
def test_bits_do_not_depend_on_whether_layers_come_one_by_one(precision: str) -> None:
    """Updating layer by layer, or shard by shard in a shard_map, gives the result of the whole."""
    opt = optimizer(**PRECISIONS[precision])
    mesh = make_mesh(MeshSpec(data=4, tensor=2), jax.devices())
    layout = make_layout(LayoutSpec(zero_stage=3), MeshSpec(data=4, tensor=2), tuple(BY_PATH.values()))
    specs = {p.info.path: p.optimizer_partition for p in layout.params}

    def by_layer(params: Any, state: Any, grads: Any, step: Any) -> Any:
        update, leaves = opt.begin(grads, step), opt.leaves(state)
        for path, info in BY_PATH.items():
            param, grad = flatten_by_path(INFOS, params)[path], flatten_by_path(INFOS, grads)[path]
            if not info.dims.startswith("Y"):
                params, leaves[path] = _set(
                    params, path, opt.update_param(update, info, grad, param, leaves[path])
                )
                continue
            done = [
                opt.update_param(
                    update, info, grad[y], param[y], {k: x[y] for k, x in leaves[path].items()}, layer=y
                )
                for y in range(2)
            ]
            params, leaves[path] = _set(params, path, jax.tree.map(lambda *x: jnp.stack(x), *done))
        return params, opt.state(leaves)

    def by_shard(params: Any, state: Any, grads: Any, step: Any) -> Any:
        update, leaves = opt.begin(grads, step), opt.leaves(state)
        for path, info in BY_PATH.items():
            spec = specs[path]
            of_leaf = dict.fromkeys(leaves[path], spec)

            def local(
                update: Any, grad: Any, param: Any, leaf: Any, info: ParamInfo = info, spec: Any = spec
            ) -> Any:
                axis = [jax.lax.axis_index(a) * n if a else 0 for a, n in zip(spec, grad.shape, strict=True)]
                return opt.update_param(update, info, grad, param, leaf, start=tuple(axis))

            sharded = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P(), spec, spec, of_leaf),
                out_specs=(spec, of_leaf),
                check_vma=False,
            )
            new = sharded(
                update,
                flatten_by_path(INFOS, grads)[path],
                flatten_by_path(INFOS, params)[path],
                leaves[path],
            )
            params, leaves[path] = _set(params, path, new)
        return params, opt.state(leaves)

    for form in (by_layer, by_shard):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random(0))
        state, jitted = opt.init(random(0)), jax.jit(form)
        for k in range(STEPS):
            params, state = jitted(params, state, random(k + 1), k)
        assert_equal((params, state), whole(precision))


def _set(params: Any, path: str, new: tuple[Any, Any]) -> tuple[Any, Any]:
    """Replaces the parameter at `path` by the first of `new`; returns the tree and the second."""
    *parents, last = path.split(".")
    params = jax.tree.map(lambda x: x, params)
    node = params
    for parent in parents:
        node = node[parent]
    node[last] = new[0]
    return params, new[1]


MOMENTS = ("float32", "bfloat16", "bfloat16_sr", "int8")
PRODUCT = list(itertools.product((AdamW, Muon), MOMENTS, ("none", "float32")))


@pytest.mark.parametrize(("kind", "moment_dtype", "master_dtype"), PRODUCT)
def test_the_closed_form_is_the_bytes_of_the_arrays(
    kind: type[AdamW], moment_dtype: Any, master_dtype: Any
) -> None:
    """Bytes match for whole and split parameters; int8 takes 2 bytes and two scales per block, Muon half of
    it.
    """
    spec = kind(1e-3, moment_dtype=moment_dtype, master_dtype=master_dtype)
    opt = build(spec, num_steps=100, params=INFOS)
    state = jax.eval_shape(opt.init, random(0))
    for path, leaf in opt.leaves(state).items():
        info = BY_PATH[path]
        assert {name: (x.shape, x.dtype) for name, x in leaf.items()} == {
            name: (x.shape, x.dtype) for name, x in arrays(spec, info).items()
        }
        assert state_bytes(spec, info, info.size) == sum(x.size * x.dtype.itemsize for x in leaf.values())
        assert state_bytes(spec, info, info.size // 2) * 2 == state_bytes(spec, info, info.size)
    gate, embed = (BY_PATH[path] for path in ("layers.mlp.gate_DF", "embed.table_VD"))
    per_moment = {"float32": 4.0, "bfloat16": 2.0, "bfloat16_sr": 2.0, "int8": 1 + 4 / 128}[moment_dtype]
    master = 4 if master_dtype == "float32" else 0
    moments = 1 if kind is Muon else 2
    assert state_bytes(spec, gate, gate.size) == (moments * per_moment + master) * gate.size
    of_embed = 2 * (4 if moment_dtype == "int8" else per_moment)
    assert state_bytes(spec, embed, embed.size) == (of_embed + master) * embed.size
