"""Overlapped collectives against plain ones and float64: values, gradients, and the choice of
implementation.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jtrain_kernels import compat, device, registry
from jtrain_kernels.overlap import api
from jtrain_kernels.overlap.overlap_cost import OpWork, overlapped_s, plain_s
from jtrain_kernels.overlap.swizzle import Swizzle
from jtrain_kernels.overlap.xla import op
from jtrain_kernels.overlap.xla.op import OverlapPlan

N = 4
PLANS = (
    OverlapPlan("t", N, "ring"),
    OverlapPlan("t", N, "bidirectional"),
    OverlapPlan("t", N, "full_mesh", parts=2),
)
B, R, D, F = 2, 8, 6, 8  # R: rows of one rank; F: columns of all ranks together


@functools.cache
def inputs(dtype: str) -> tuple[Array, ...]:
    """Inputs x [B, N * R, D], two kernels [D, F], a kernel back [F, D], and a weight for each output
    element.
    """
    draw = np.random.default_rng(0)
    shapes = ((B, N * R, D), (D, F), (D, F), (F, D), (B, N * R, D))
    return tuple(jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes)


def chain(ops: Any, x: Any, up: Any, gate: Any, down: Any) -> Any:
    """Feed-forward layer: gather, two matmuls, a product, and a matmul with reduce-scatter."""
    u, g = ops[0](x, up, gate)
    return ops[1](u * g, down)


def sharded(ops: Any) -> Any:
    """Jitted output of the chain and gradients of its weighted sum, on whole arrays."""
    mesh = Mesh(np.array(jax.devices()[:N]), ("t",))
    specs = (P(None, "t"), P(None, "t"), P(None, "t"), P("t"))

    def local(x: Array, up: Array, gate: Array, down: Array, weight: Array) -> Any:
        def objective(args: Any) -> tuple[Array, Array]:
            y = chain(ops, *args)
            return jnp.sum((y * weight).astype(jnp.float32)), y

        grads, y = jax.grad(objective, has_aux=True)((x, up, gate, down))
        return y, grads

    rows = specs[0]
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(*specs, rows), out_specs=(rows, specs), check_vma=False)
    )


def with_plan(plan: OverlapPlan) -> Any:
    return (
        lambda x, *kernels: op.all_gather_matmul(x, kernels, plan),
        lambda x, kernel: op.matmul_reduce_scatter(x, kernel, plan),
    )


@functools.cache
def in_float64() -> tuple[np.ndarray, list[np.ndarray]]:
    """Expected y = (x up * x gate) down and the gradients of sum(y * weight), derived by hand."""
    x, up, gate, down, weight = (np.asarray(a, np.float64) for a in inputs("float32"))
    u, g = x @ up, x @ gate
    dh = weight @ down.T
    du, dg = dh * g, dh * u
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    grads = [
        du @ up.T + dg @ gate.T,
        flat(x).T @ flat(du),
        flat(x).T @ flat(dg),
        flat(u * g).T @ flat(weight),
    ]
    return (u * g) @ down, grads


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.swizzle)
def test_values_and_gradients_are_those_of_float64(plan: OverlapPlan) -> None:
    """Float32 sums of at most 64 terms: 2e-6 of the largest element is 17 units in the last place."""
    y, grads = sharded(with_plan(plan))(*inputs("float32"))
    want, want_grads = in_float64()
    for got, exact in zip((y, *grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


def test_bfloat16_is_rounded_no_more_than_plain_collectives_round() -> None:
    """Sums are float32 on both sides of a hop, so the error against float64 stays below that of psum in
    bfloat16.

    The margin is one half, because a partial sum is rounded at each of three hops.
    """
    want, want_grads = in_float64()

    def error(ops: Any) -> list[float]:
        y, grads = sharded(ops)(*inputs("bfloat16"))
        pairs = zip((y, *grads), (want, *want_grads), strict=True)
        return [float(np.abs(np.asarray(a, np.float64) - b).mean()) for a, b in pairs]

    def plain(x: Array, *kernels: Array) -> tuple[Array, ...]:
        whole = jax.lax.all_gather(x, "t", axis=1, tiled=True)
        return tuple(whole @ kernel for kernel in kernels)

    def plain_out(x: Array, kernel: Array) -> Array:
        return jax.lax.psum_scatter(x @ kernel, "t", scatter_dimension=1, tiled=True)

    for ours, theirs in zip(error(with_plan(PLANS[0])), error((plain, plain_out)), strict=True):
        assert 0 < ours < 1.5 * theirs


def through_api(forced: str) -> Any:
    """The chain through the public functions, three-dimensional kernels among them."""
    each = {"all_gather_matmul": forced, "matmul_reduce_scatter": forced}

    def gather(x: Array, *kernels: Array) -> tuple[Array, ...]:
        first, *rest = kernels
        cubes = (first.reshape(D, 2, -1), *rest)
        with registry.on(device.from_name("cpu"), forced=each):
            u, *others = api.all_gather_matmul(x, *cubes, axis_name="t", axis_size=N)
        return u.reshape(*u.shape[:2], -1), *others

    def scatter(x: Array, kernel: Array) -> Array:
        with registry.on(device.from_name("cpu"), forced=each):
            cube = kernel.reshape(1, *kernel.shape)
            return api.matmul_reduce_scatter(x[:, :, None], cube, axis_name="t", axis_size=N)

    return gather, scatter


@pytest.mark.parametrize(("forced", "kinds"), [("permute", (True, False)), ("xla", (False, True))], ids=str)
def test_the_implementation_that_is_forced_runs(forced: str, kinds: tuple[bool, bool]) -> None:
    """One program has only permutes, the other only whole collectives; the results agree.

    The tolerance is 2e-6 of the largest element, as above: 17 units in its last place. JAX 0.11 needs two.
    """
    step = sharded(through_api(forced))
    text = step.lower(*inputs("float32")).as_text()
    assert ("collective_permute" in text, "all_gather" in text or "reduce_scatter" in text) == kinds
    y, _ = step(*inputs("float32"))
    want = in_float64()[0]
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.abs(want).max())


def mlp(rows: int, columns: int, contracted: int) -> registry.Avals:
    x = jax.ShapeDtypeStruct((1, rows // 8, contracted), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((contracted, columns), jnp.bfloat16)
    return {"x": x, "kernel_0": kernel, "axis_name": "t", "axis_size": 8}


def test_small_matmuls_are_not_split_and_the_choice_says_why() -> None:
    """The cost model reproduces two measurements: 34 GFLOP per GPU lost to plain collectives, 275 won."""
    h100 = device.from_name("h100")
    small = registry.choose(api.ALL_GATHER_MATMUL, h100, mlp(4096, 512, 8192))
    large = registry.choose(api.ALL_GATHER_MATMUL, h100, mlp(8192, 4096, 4096))
    assert (small.implementation.name, large.implementation.name) == ("xla", "permute")
    assert dict(small.rejected)["permute"].startswith("predicted")
    assert dict(large.rejected)["xla"].startswith("predicted")


def smallest_gflop(spec: device.DeviceSpec, work: OpWork, swizzle: Swizzle) -> float:
    """Smallest GFLOP per device at which overlapping wins, as rows are added; infinite if it never wins."""
    rows = work.ranks
    while rows < 2**30:
        grown = dataclasses.replace(work, rows=rows)
        if overlapped_s(spec, grown, swizzle, 1) < plain_s(spec, grown):
            return grown.flops() / 1e9
        rows *= 2
    return float("inf")


def test_there_is_a_size_below_which_overlapping_loses() -> None:
    """It exists on every GPU and TPU for llama8b; on an H100 it is near the 100 GFLOP at which others fall
    back.
    """
    work = OpWork(ranks=8, rows=8, contracted=4096, columns=1792 * 2, sent_bytes=4096 * 2)
    for name in ("h100", "h200", "b200", "v5e", "v5p", "v6e", "tpu7x"):
        spec = device.from_name(name)
        swizzle = "ring" if spec.platform == "gpu" else "bidirectional"
        assert plain_s(spec, work) < overlapped_s(spec, work, swizzle, 1)
        assert 0 < smallest_gflop(spec, work, swizzle) < 1000
    assert 50 < smallest_gflop(device.from_name("h100"), work, "ring") < 300


def test_swizzles_follow_the_links() -> None:
    """A torus uses both directions, a switch one with larger pieces; a swizzle must divide the rows."""

    def best(name: str, rows: int) -> int:
        avals = mlp(rows, 8, 8)
        return registry.choose(api.ALL_GATHER_MATMUL, device.from_name(name), avals, forced="permute").config[
            "swizzle"
        ]

    assert [best("h200", 64), best("v5p", 64), best("v5p", 8)] == [0, 1, 0]


def test_rows_that_do_not_split_are_refused_when_forced() -> None:
    avals = {
        "x": jax.ShapeDtypeStruct((1, 30, 8), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "axis_name": "t",
        "axis_size": 8,
    }
    message = "kernels.matmul_reduce_scatter=permute: 30 rows do not split evenly over 8 devices"
    with pytest.raises(ValueError, match=message):
        registry.choose(api.MATMUL_REDUCE_SCATTER, device.from_name("cpu"), avals, forced="permute")


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("chip", ("v5p:2x2x2", "h200:8"))
def test_what_travels_is_beside_matmuls_as_compiled(chip: str) -> None:
    """In a feed-forward layer of llama8b over 8 chips, forward and backward, every permute overlaps with a
    matmul.
    """
    from jtrain.hlo.traffic import overlap, traffic
    from jtrain.plan.compile.compiled_step import topology_devices

    mesh = Mesh(np.array(topology_devices(chip)), ("t",))
    plan = OverlapPlan("t", 8, "ring" if chip.startswith("h200") else "bidirectional")
    ops = with_plan(plan)

    def local(x: Array, up: Array, gate: Array, down: Array, dy: Array) -> Any:
        y, backward = jax.vjp(lambda *args: chain(ops, *args), x, up, gate, down)
        return y, backward(dy)

    specs = (P(None, "t"), P(None, "t"), P(None, "t"), P("t"))
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(*specs, specs[0]), out_specs=(specs[0], specs), check_vma=False
    )
    shapes = ((1, 8192, 4096), (4096, 14336), (4096, 14336), (14336, 4096), (1, 8192, 4096))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (*specs, specs[0]), strict=True)
    ]
    with compat.no_compile_cache():
        text = jax.jit(step).lower(*arguments).compile().as_text()
    rows = traffic(text or "", {"t": 8})
    assert {row.kind for row in rows} == {"collective-permute"}
    sent = overlap(rows)
    assert sent.wire_bytes == 5 * 8192 * 4096 * 2 * 7 // 8  # two gathers, one again, two scatters
    assert sent.hidden_bytes == sent.wire_bytes
