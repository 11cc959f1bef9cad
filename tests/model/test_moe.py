"""Mixture of experts: router formulas, dispatch to experts and back, and one layer against float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtrain.model import expert_dispatch, ops
from jtrain.model.expert_dispatch import (
    buffer_rows,
    exchanges_of,
    from_rows,
    order_of,
    send,
    send_back,
    to_rows,
)
from jtrain.model.moe import ExpertWeight, MoE
from jtrain.model.param import map_params, param_infos
from jtrain.model.router import MoESpec, route
from jtrain.model.sizes import ModelSizes

SPEC = MoESpec(num_experts=6, top_k=2)
WIDTH, HIDDEN = 16, 24
SIZES = ModelSizes(
    num_layers=1,
    d_model=WIDTH,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    d_ff=HIDDEN,
    norm_eps=1e-5,
    attention_chunk=8,
)


def layer_of(spec: MoESpec) -> tuple[Any, Any]:
    """Forward function and parameters of one layer."""
    module = MoE(spec, SIZES, layers=1)
    rng = np.random.default_rng(0)
    # Larger than a fresh model's: choices are clear, and float32 and float64 make the same ones.
    params = map_params(
        lambda info: jnp.asarray(4 * info.std * rng.standard_normal(info.shape[1:]), jnp.float32),
        param_infos(module),
    )

    def apply(params: Any, x: Any, valid: Any) -> Any:
        layer = nnx.merge(nnx.split(module)[0], params)
        routing, losses = layer.route(x, valid, tensor=1, context=1)
        return layer(x, routing, expert=1), losses

    return apply, params


def by_hand(params: Any, x: Any, valid: Any, spec: MoESpec) -> Any:
    """Reference in float64 as in the papers, every expert for every token, with both losses."""
    p, xs = params, x
    logits = xs @ p["router_DX"]
    prob = jax.nn.softmax(logits, axis=-1)
    chosen = logits >= jnp.sort(logits, axis=-1)[..., -spec.top_k][..., None]
    chosen = chosen & valid[..., None]
    weight = jnp.where(chosen, prob, 0)
    if spec.normalize_top_k:
        weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    wide = jax.nn.silu(jnp.einsum("bld,xdf->blxf", xs, p["gate_XDF"])) * jnp.einsum(
        "bld,xdf->blxf", xs, p["up_XDF"]
    )
    out = jnp.einsum("blxd,blx->bld", jnp.einsum("blxf,xfd->blxd", wide, p["down_XFD"]), weight)
    if spec.shared_experts:
        shared = p["shared"]
        out = out + (jax.nn.silu(xs @ shared["gate_DF"]) * (xs @ shared["up_DF"])) @ shared["down_FD"]
    tokens = valid.sum(-1)
    share = jax.lax.stop_gradient(chosen.sum(1)) * spec.num_experts / spec.top_k / tokens[:, None]
    mean = jnp.where(valid[..., None], prob, 0).sum(1) / tokens[:, None]
    balance = ((share * mean).sum(-1) * tokens).sum()
    z = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum()
    return out, balance, z


@pytest.fixture
def undefined_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills rows that ops leave undefined with nan, in results and in gradients."""

    def poisoned(x: Any, group_size: Any) -> Any:
        return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_size))[:, None], x, jnp.nan)

    @jax.custom_vjp
    def both_ways(x: Any, group_size: Any) -> Any:
        return poisoned(x, group_size)

    both_ways.defvjp(
        lambda x, group_size: (poisoned(x, group_size), group_size),
        lambda group_size, dx: (poisoned(dx, group_size), None),
    )
    matmul, swiglu = ops.grouped_matmul, ops.grouped_swiglu

    def grouped_matmul(x: Any, kernel: Any, group_size: Any) -> Any:
        return both_ways(matmul(both_ways(x, group_size), kernel, group_size), group_size)

    def grouped_swiglu(gate: Any, up: Any, group_size: Any, *, expected_rows: int) -> Any:
        gate, up = both_ways(gate, group_size), both_ways(up, group_size)
        return both_ways(swiglu(gate, up, group_size, expected_rows=expected_rows), group_size)

    monkeypatch.setattr(ops, "grouped_matmul", grouped_matmul)
    monkeypatch.setattr(ops, "grouped_swiglu", grouped_swiglu)


@pytest.mark.usefixtures("undefined_is_nan")
@pytest.mark.parametrize(
    ("normalize", "shared"),
    [
        (True, 2),
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_the_papers_formula(normalize: bool, shared: int) -> None:
    """Output, losses and all gradients agree with the unsorted float64 reference within 1e-5 of the
    largest.
    """
    spec = dataclasses.replace(SPEC, normalize_top_k=normalize, shared_experts=shared)
    apply, params = layer_of(spec)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 40, WIDTH)).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    valid = np.ones(x.shape[:2], bool)
    valid[1, 25:] = False

    def ours(params: Any, x: Any) -> Any:
        y, losses = apply(params, x, jnp.asarray(valid))
        return jnp.sum(y * dy) + 0.3 * losses.balance + 0.1 * losses.z, (y, losses.balance, losses.z)

    def theirs(params: Any, x: Any) -> Any:
        y, balance, z = by_hand(params, x, jnp.asarray(valid), spec)
        return jnp.sum(y * dy) + 0.3 * balance + 0.1 * z, (y, balance, z)

    (_, got), got_grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(params, jnp.asarray(x))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        (_, want), want_grads = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True))(*wide)
        want, want_grads = jax.tree.map(np.asarray, (want, want_grads))
    jax.tree.map(close, (got, got_grads), (want, want_grads))
    if not shared:
        assert not np.any(got[0][1, 25:]), "padding is served by nobody"


def close(got: Any, want: Any) -> None:
    scale = np.abs(want).max()
    assert scale > 1e-3, "all but zero proves nothing"
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale, atol=1e-5)


def test_balance_is_one_where_all_experts_serve_alike_and_more_where_not() -> None:
    """The balance loss is 1 per token at balance for any top_k, and lowers the probability of crowded
    experts.
    """
    spec = MoESpec(num_experts=4, top_k=2)
    even = jnp.asarray([[[9.0, 9.0, 0, 0], [0, 0, 9.0, 9.0]]])
    crowded = jnp.asarray([[[9.0, 8.0, 0, 0], [9.0, 8.0, 0, 0]]])
    valid = jnp.ones((1, 2), bool)

    def balance(logits: Any) -> Any:
        return route(logits, valid, spec)[1].balance

    assert float(balance(even)) == pytest.approx(2, rel=1e-6)  # two tokens
    assert float(balance(crowded)) > 3.9
    push = jax.grad(balance)(crowded + 0.0)[0].sum(0)
    assert push[0] + push[1] > 0
    assert push[2] + push[3] < 0


@pytest.mark.smoke
def test_rows_are_by_expert_and_stable_within() -> None:
    """Order of three tokens, computed by hand; the second token goes to no expert."""
    order = order_of(jnp.asarray([[2, 0], [3, 3], [0, 1]], jnp.int32), num_experts=3)
    assert order.pair_P.tolist() == [1, 4, 5, 0, 2, 3]
    assert order.row_TS.tolist() == [[3, 0], [4, 5], [1, 2]]
    assert order.count_X.tolist() == [2, 1, 1]


def test_rows_and_their_gradients_are_gathers_alone() -> None:
    """Neither direction scatters rows: accelerators would serialise scatters, or add in any order."""
    order = order_of(jnp.asarray(np.random.default_rng(0).integers(0, 4, (8, 2)), jnp.int32), num_experts=4)

    def there_and_back(x: Any, weight: Any) -> Any:
        return jnp.sum(from_rows(to_rows(x, order), weight, order) ** 2)

    text = jax.jit(jax.grad(there_and_back, (0, 1))).lower(jnp.ones((8, 3)), jnp.ones((8, 2))).as_text()
    assert "stablehlo.gather" in text
    assert "stablehlo.scatter" not in text


DEVICES = 4

COUNTS = {
    "anything": lambda rng: rng.integers(0, 7, (4, 8)),
    "one expert has all": lambda rng: np.eye(8, dtype=int)[[5] * 4] * 24,
    "one device sends nothing": lambda rng: rng.integers(0, 7, (4, 8)) * np.array([[1], [0], [1], [1]]),
    "nobody sends anything": lambda rng: np.zeros((4, 8), int),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_rows_reach_their_experts_and_come_back(counts: Any) -> None:
    """Every row reaches its expert in order and returns bitwise, over four devices with two experts each.

    The gradient of `send` is `send_back`, and the other way round.
    """
    rng = np.random.default_rng(2)
    count_EX = counts(rng)
    rows = 48
    most = buffer_rows(rows, 2, num_experts=8, expert=DEVICES)
    assert most == DEVICES * 24 * 2
    x = rng.standard_normal((DEVICES, rows, 3)).astype(np.float32)
    want = np.zeros((DEVICES, most, 3), np.float32)
    first = np.cumsum(count_EX, axis=1) - count_EX
    for device in range(DEVICES):
        parts = [
            x[e, first[e, z] : first[e, z] + count_EX[e, z]]
            for z in (2 * device, 2 * device + 1)
            for e in range(DEVICES)
        ]
        arrived = np.concatenate(parts)
        want[device, : len(arrived)] = arrived

    def local(x: Any, count: Any, dy: Any) -> Any:
        exchange = exchanges_of([count[0]])[0]
        got, back = jax.vjp(lambda x: send(x, exchange, jnp.zeros((most, 0))), x[0])
        home, there = jax.vjp(lambda y: send_back(y, exchange, x[0, :, :0]), got)
        return got[None], home[None], back(dy[0])[0][None], there(x[0])[0][None], exchange.group_size[None]

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    dy = rng.standard_normal(want.shape).astype(np.float32)
    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    )
    got, home, grad, there, group_size = run(x, jnp.asarray(count_EX, jnp.int32), dy)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(group_size, count_EX.sum(0).reshape(DEVICES, 2))
    used = np.arange(rows)[None, :, None] < count_EX.sum(1)[:, None, None]
    np.testing.assert_array_equal(home, np.where(used, x, 0))
    np.testing.assert_array_equal(there, want)
    assert np.sum(np.asarray(grad) * x, dtype=np.float64) == pytest.approx(
        np.sum(dy * want, dtype=np.float64), abs=1e-3
    )


def test_accelerators_exchange_rows_by_one_ragged_all_to_all() -> None:
    """One ragged all-to-all of sixteen slices sorts rows by expert; only the CPU pads."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))

    def local(x: Any, count: Any) -> Any:
        return send(x[0], exchanges_of([count[0]])[0], jnp.zeros((64, 0)))[None]

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    )
    shapes = (
        jax.ShapeDtypeStruct((DEVICES, 16, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((DEVICES, 16), jnp.int32),
    )
    text = {p: run.trace(*shapes).lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    for platform in ("cuda", "tpu"):
        assert text[platform].count("@ragged_all_to_all") == 1
        assert "stablehlo.all_to_all" not in text[platform]
    assert "ragged" not in text["cpu"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_experts=1, top_k=1), r"num_experts=1 must be at least 2\. Set model\.moe=None"),
        (dict(num_experts=8, top_k=9), r"top_k=9 must be from 1 to model\.moe\.num_experts=8"),
        (dict(num_experts=8, top_k=0), r"top_k=0 must be from 1"),
        (dict(num_experts=8, top_k=2, shared_experts=-1), r"shared_experts=-1 must be at least 0"),
        (dict(num_experts=8, top_k=2, balance_loss=-1.0), r"balance_loss=-1\.0 must be at least 0"),
        (dict(num_experts=8, top_k=2, router_z_loss=-1.0), r"router_z_loss=-1\.0 must be at least 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    """Each refusal names its field."""
    with pytest.raises(ValueError, match=message):
        MoESpec(**fields)


def over_experts(spec: MoESpec, params: Any, x: Any, dy: Any, valid: Any) -> Any:
    """Output, gradients of parameters and of x of one layer whose experts are split over four devices."""
    module = MoE(spec, SIZES, layers=1)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    specs = jax.tree.map(lambda a: P("expert") if a.ndim == 3 else P(), params)

    def local(params: Any, x: Any, dy: Any, valid: Any) -> Any:
        def apply(params: Any, x: Any) -> Any:
            layer = nnx.merge(nnx.split(module)[0], params)
            routing, _ = layer.route(x, valid, tensor=1, context=1)
            return layer(x, routing, expert=DEVICES)

        y, vjp = jax.vjp(jax.checkpoint(apply), params, x)
        dparams, dx = vjp(dy)
        return (
            y,
            jax.tree.map(lambda a, s: a if s == P("expert") else jax.lax.psum(a, "expert"), dparams, specs),
            dx,
        )

    split = P("expert")
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, *[split] * 3), out_specs=(split, specs, split), check_vma=False
    )
    return jax.jit(run)(params, x, dy, valid)


def uneven() -> tuple[MoESpec, Any, Any, Any, Any]:
    """Layer of eight experts of which the first gets no token and the last most; one device's tokens are
    padding.
    """
    spec = MoESpec(num_experts=8, top_k=2)
    _, params = layer_of(spec)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((DEVICES, 40, WIDTH)).astype(np.float32)
    x[..., 0] = 3.0  # a constant feature is a bias of the router
    params["router_DX"] = params["router_DX"].at[0, 0].add(-40.0).at[0, 7].add(2.0)
    valid = np.ones(x.shape[:2], bool)
    valid[1, 25:] = valid[2] = False
    return spec, params, x, rng.standard_normal(x.shape).astype(np.float32), valid


@pytest.mark.usefixtures("undefined_is_nan")
@pytest.mark.parametrize("pieces", (pytest.param(1, marks=pytest.mark.slow), 4))
def test_pieces_that_overlap_are_the_papers_formula(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and all gradients agree with float64 within 1e-5 of the largest, exchanged whole or in four
    pieces.
    """
    monkeypatch.setattr(expert_dispatch, "MIN_PIECE_ROWS", 80 // pieces)
    assert expert_dispatch.num_pieces(40, 2) == pieces
    spec, params, x, dy, valid = uneven()
    got = over_experts(spec, params, x, dy, valid)
    assert not np.any(got[0][2]), "padding is served by nobody"
    assert not np.any(got[1]["gate_XDF"][0]), "an expert without rows has no gradient"

    @jax.jit
    def wanted(params: Any, x: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda params, x: by_hand(params, x, jnp.asarray(valid), spec)[0], params, x)
        return y, *vjp(dy)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        want = jax.tree.map(np.asarray, wanted(*wide, jnp.asarray(dy, jnp.float64)))
    jax.tree.map(close, got, want)


def test_the_sum_over_pieces_is_rounded_once() -> None:
    """In bfloat16, the gradient of a weight used by four pieces is that of one use of all rows.

    Only the order of a float32 sum differs; a sum of bfloat16 parts changes one element in two.
    """
    rng = np.random.default_rng(4)
    x, w, dy = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((64, 16), (1, 16, 24), (64, 24)))

    def grad(pieces: int) -> Any:
        def total(w: Any) -> Any:
            weight = ExpertWeight.of(w, uses=pieces)
            size = jnp.asarray([64 // pieces])
            ys = [weight.multiply(x, size).astype(jnp.float32) for x in jnp.split(x, pieces)]
            return jnp.sum(jnp.concatenate(ys) * dy.astype(jnp.float32))

        return np.asarray(jax.jit(jax.grad(total))(w), np.float32)

    one, four = grad(1), grad(4)
    assert np.all(one)
    assert np.mean(one != four) < 0.02


@pytest.mark.smoke
def test_a_layer_has_four_pieces_unless_they_are_small_or_unequal() -> None:
    """A piece has at least 8192 rows, and all have the same number of tokens."""
    tokens = (16384, 4096, 3072, 2048, 2047, 1024, 10, 4099)
    assert [expert_dispatch.num_pieces(n, 8) for n in tokens] == [4, 4, 3, 2, 1, 1, 1, 1]
