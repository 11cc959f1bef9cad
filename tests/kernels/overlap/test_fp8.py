"""Overlapped FP8 collectives against plain ones: the same numbers, half of the bytes on the wire."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jtrain_kernels import device, registry
from jtrain_kernels.fp8.api import Fp8Kernel
from jtrain_kernels.overlap import api, fp8
from jtrain_kernels.overlap.xla.op import OverlapPlan
from tests.kernels.overlap.test_api import PLANS, N, chain, inputs

SCALE_33 = np.array([[2, 16, 8], [2, 32, 4], [0.5, 8, 16]], np.float32)
"""Scales of the two kernels before, which share x, and of the one after."""
SPECS = (P(None, "t"), P(None, "t"), P(None, "t"), P("t"))


def with_plan(plan: OverlapPlan, scale: Any, seen: Any) -> Any:
    """The two ops with delayed scaling, or with None with current scaling."""
    first, last = (
        ((None, None), (None, None)) if scale is None else ((scale[:2], seen[:2]), (scale[2:], seen[2:]))
    )
    return (
        lambda x, *kernels: fp8.all_gather_matmul(x, kernels, *first, plan),
        lambda x, kernel: fp8.matmul_reduce_scatter(x, kernel, *last, plan),
    )


def through_api(forced: str, scale: Any, seen: Any) -> Any:
    """The same two ops through the public functions."""

    def of(index: int, kernel: Array) -> Fp8Kernel:
        return Fp8Kernel(kernel) if scale is None else Fp8Kernel(kernel, scale[index], seen[index])

    def on() -> Any:
        each = {"all_gather_matmul_fp8": forced, "matmul_reduce_scatter_fp8": forced}
        return registry.on(device.from_name("cpu"), forced=each)

    def gather(x: Array, *kernels: Array) -> tuple[Array, ...]:
        with on():
            return api.all_gather_matmul_fp8(x, *map(of, (0, 1), kernels), axis_name="t", axis_size=N)

    def scatter(x: Array, kernel: Array) -> Array:
        with on():
            return api.matmul_reduce_scatter_fp8(x, of(2, kernel), axis_name="t", axis_size=N)

    return gather, scatter


def step(make: Any, *, delayed: bool) -> Any:
    """Jitted output of the chain, gradients of its weighted sum, and the amax values."""

    def local(x: Array, up: Array, gate: Array, down: Array, weight: Array, scale: Array) -> Any:
        def objective(args: Any, seen: Array) -> tuple[Array, Array]:
            y = chain(make(scale, seen) if delayed else make(None, None), *args)
            return jnp.sum((y * weight).astype(jnp.float32)), y

        differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)
        (grads, seen), y = differentiate((x, up, gate, down), jnp.zeros_like(scale))
        return y, grads, jax.lax.pmax(seen, "t")

    mesh = Mesh(np.array(jax.devices()[:N]), ("t",))
    out = (SPECS[0], SPECS, P())
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(*SPECS, SPECS[0], P()), out_specs=out, check_vma=False)
    )


@functools.cache
def plain(delayed: bool) -> Any:
    """What the plain collectives give."""
    return step(lambda *scaling: through_api("xla", *scaling), delayed=delayed)(*inputs("float32"), SCALE_33)


@pytest.mark.parametrize("delayed", (False, True), ids=("current", "delayed"))
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.swizzle)
def test_they_are_the_plain_collectives_in_8_bits(plan: OverlapPlan, delayed: bool) -> None:
    """The same tensors are rounded, so only float32 sums of at most 64 terms differ: 2e-6 of the largest
    element.

    The results are far from unrounded ones, because an e4m3 number is off by up to 1/16.
    """
    arrays = inputs("float32")
    got = step(lambda *scaling: with_plan(plan, *scaling), delayed=delayed)(*arrays, SCALE_33)
    want = plain(delayed)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * max(float(np.abs(theirs).max()), 1))
    x, up, gate, down, _ = (np.asarray(a, np.float64) for a in arrays)
    exact = (x @ up * (x @ gate)) @ down
    assert 0.01 < np.abs(got[0] - exact).max() / np.abs(exact).max() < 0.2
    seen_33 = np.asarray(got[2])
    if delayed:
        assert (seen_33 > 0).all()
        np.testing.assert_array_equal(seen_33[:2, 0], np.float32(np.abs(x).max()))
        np.testing.assert_array_equal(seen_33[:, 1], [np.float32(np.abs(k).max()) for k in (up, gate, down)])


@pytest.mark.parametrize(("forced", "kinds"), [("permute", (True, False)), ("xla", (False, True))], ids=str)
def test_what_is_gathered_travels_in_8_bits(forced: str, kinds: tuple[bool, bool]) -> None:
    """x is sent as e4m3 in both passes, dy as e5m2, partial sums in x's dtype; plain collectives send no
    FP8.
    """
    arrays = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in inputs("float32")]
    program = step(lambda *scaling: through_api(forced, *scaling), delayed=True)
    text = program.lower(*arrays, jax.ShapeDtypeStruct((3, 3), jnp.float32)).as_text()
    assert ("collective_permute" in text, "all_gather" in text or "reduce_scatter" in text) == kinds
    sent = re.findall(r"collective_permute.*-> tensor<[\dx]*x(\w+)>", text)
    assert set(sent) == ({"bf16", "f8E4M3FN", "f8E5M2"} if forced == "permute" else set())


def test_where_they_run_and_what_they_cost() -> None:
    """They need FP8 units and pieces that are not too small; matmuls and bytes then take half the time."""
    op, h200 = api.ALL_GATHER_MATMUL_FP8, device.from_name("h200")
    case = dict(op.cases["llama8b"])
    message = r"kernels\.all_gather_matmul_fp8=permute: v5p has no 8-bit matmul units"
    with pytest.raises(ValueError, match=message):
        registry.choose(op, device.from_name("v5p"), case, forced="permute")
    x: Any = case["x"]
    small = case | {"x": jax.ShapeDtypeStruct((1, 64, x.shape[2]), x.dtype)}
    assert [registry.choose(op, h200, avals).implementation.name for avals in (case, small)] == [
        "permute",
        "xla",
    ]
    bf16 = {name: value for name, value in case.items() if name not in ("scale", "seen")}
    seconds = []
    for of, avals in ((op, case), (api.ALL_GATHER_MATMUL, bf16)):
        (cost_s,) = (i.cost_s(h200, avals) for i in of.implementations if i.name == "permute")
        assert cost_s is not None
        seconds.append(cost_s)
    assert 1.5 < seconds[1] / seconds[0] < 2
