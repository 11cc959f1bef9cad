"""Rotary embedding in one pass over memory, by Pallas for TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jtrain.hlo.memory_traffic import passes
from jtrain_kernels import compat, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.device import from_name
from jtrain_kernels.rope import pallas_tpu
from jtrain_kernels.rope.api import ROPE, rope, rope_by
from tests.kernels.gradients import agree_with, in_float32, normal

ANGLE = normal(1, 2, 16, 64)


@in_float32("heads", (3,), (16,))
def test_the_tpu_kernel_turns_pairs_half_a_head_apart(
    dtype: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient are those of complex multiplication by exp(i angle); emulated with race detection.

    The 32 tokens are four blocks.
    """
    monkeypatch.setattr(pallas_tpu, "VMEM_BYTES", 2**19)
    assert pallas_tpu.block_tokens(32, heads, 128, jnp.dtype(dtype).itemsize) == 8

    def formula(x: Array) -> Array:
        turned = (x[..., :64] + 1j * x[..., 64:]) * jnp.exp(1j * jnp.asarray(ANGLE, jnp.float64))[
            :, :, None, :
        ]
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    rotation = partial(
        pallas_tpu.rotated, interpret=compat.tpu_interpret("eager", uninitialized_memory="nan")
    )
    cos, sin = jnp.cos(ANGLE), jnp.sin(ANGLE)
    agree_with(lambda x: rope_by(x, cos, sin, rotation), formula, (normal(0, 2, 16, heads, 128),), dtype)
    assert not compat.tpu_races_found()


def test_it_rounds_as_the_reference_does() -> None:
    """Both compute two products and a sum in float32, at most one bit of bfloat16 apart where the CPU fuses
    them.
    """
    rotation = partial(pallas_tpu.rotated, interpret=compat.tpu_interpret("eager"))
    cos, sin, x = jnp.cos(ANGLE), jnp.sin(ANGLE), jnp.asarray(normal(0, 2, 16, 8, 128), jnp.bfloat16)
    got, want = (np.asarray(y, np.float32) for y in (rope_by(x, cos, sin, rotation), rope(x, cos, sin)))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
    assert np.mean(got == want) > 0.99


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "reason"),
    (
        ("h200", (1, 8192, 32, 128), "bfloat16", "it is for TPUs, not for a h200"),
        ("v5p", (1, 8192, 32, 64), "bfloat16", "heads of 64 do not fill 128 lanes once"),
        ("v5p", (1, 12, 32, 128), "bfloat16", "12 tokens of 32 heads do not divide into blocks"),
        ("v5p", (1, 8192, 32, 128), "float16", "x is float16, not bfloat16 or float32"),
    ),
)
def test_where_it_cannot_run_it_says_why(
    device: str, shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    """Forcing it is an error that lists the implementations."""
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    given: Any = dict(ROPE.cases["llama8b"]) | {"x_BLNH": x}
    with pytest.raises(ValueError, match=rf"kernels\.rope=pallas_tpu: {reason}.* There are: pallas_tpu, xla"):
        registry.choose(ROPE, from_name(device), given, forced="pallas_tpu")


@pytest.mark.aot
@pytest.mark.parametrize(
    "device", ("v5e", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v5p", "v6e", "tpu7x")))
)
def test_tpus_make_one_pass_of_it(device: str) -> None:
    """At 8192 tokens of 32 heads the kernel moves x, y and the angles; XLA moves at least 2.5 times as
    much.
    """
    given = ROPE.cases["llama8b"]
    shapes = [given[name] for name in ("x_BLNH", "cos_BLR", "sin_BLR")]
    moved = {}
    for name in ("pallas_tpu", "xla"):
        report = aot.compile_for(device, rope, *shapes, forced={"rope": name})
        assert aot.failures(report) == ()
        assert any("rope" in call for call in report.calls) == (name == "pallas_tpu")
        moved[name] = sum(p.read_bytes + p.written_bytes for p in passes(report.hlo))
    assert moved["xla"] > 2.5 * moved["pallas_tpu"]
