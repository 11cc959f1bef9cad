"""rms_norm, rope and swiglu against JAX's own derivatives of the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jtrain_kernels import compat, registry
from jtrain_kernels.device import from_name
from jtrain_kernels.rms_norm.api import rms_norm
from jtrain_kernels.rope.api import rope
from jtrain_kernels.swiglu import mosaic_gpu
from jtrain_kernels.swiglu.api import GROUPED_SWIGLU, swiglu
from jtrain_kernels.swiglu.reference import swiglu_reference
from tests.kernels.gradients import agree_with, dtypes, normal


@dtypes
def test_rms_norm_is_its_formula(dtype: str) -> None:
    """Value and the gradients of x and scale agree; eps is large enough that forgetting it would show."""

    def formula(x: Array, scale: Array) -> Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale[None, None]

    agree_with(lambda x, s: rms_norm(x, s, 0.1), formula, (normal(0, 2, 8, 16), normal(1, 16)), dtype)


@dtypes
def test_rope_turns_pairs_half_a_head_apart(dtype: str) -> None:
    """Rotation is multiplication by exp(i angle) as complex numbers; its gradient is the opposite
    rotation.
    """
    angle = normal(1, 2, 8, 4)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def formula(x: Array) -> Array:
        turned = (x[..., :4] + 1j * x[..., 4:]) * jnp.exp(1j * jnp.asarray(angle, jnp.float64))[:, :, None, :]
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    agree_with(lambda x: rope(x, cos, sin), formula, (normal(0, 2, 8, 3, 8),), dtype)


@pytest.mark.parametrize("used", (0, 70))
def test_swiglu_of_groups_touches_no_block_after_them(used: int) -> None:
    """Rows in use are those of the formula, rounded once; blocks of 64 rows after them stay uninitialised.

    The emulated GPU initialises results with nan.
    """
    gate, up, dy = (jnp.asarray(normal(seed, 192, 128), jnp.bfloat16) for seed in range(3))
    kernel = mosaic_gpu.differentiable(compat.gpu_interpret())
    count = jnp.asarray([used], jnp.int32)
    y, vjp = jax.vjp(lambda gate, up: kernel(gate, up, count), gate.at[used:].set(jnp.nan), up)
    want, reference = jax.vjp(swiglu_reference, gate, up)
    for got, right in zip((y, *vjp(dy.at[used:].set(jnp.nan))), (want, *reference(dy)), strict=True):
        a, b = np.asarray(got, np.float32), np.asarray(right, np.float32)
        np.testing.assert_allclose(a[:used], b[:used], rtol=2**-8, atol=1e-6)
        assert np.all(np.isnan(a[-(-used // 64) * 64 :]))


def test_swiglu_of_groups_says_where_it_runs_and_where_it_pays() -> None:
    """It is predicted to be faster where a buffer is mostly empty, not yet taken for it, and says what it
    refuses.
    """
    case, h200 = GROUPED_SWIGLU.cases["qwen3_30b_a3b"], from_name("h200")
    kernel, plain = GROUPED_SWIGLU.implementations
    for expected, ratio in ((32768, 4 / 9), (131072, 10 / 9)):
        avals = {**case, "expected_rows": expected}
        seconds = [implementation.cost_s(h200, avals) or 0.0 for implementation in (kernel, plain)]
        assert seconds[0] / seconds[1] == pytest.approx(ratio, rel=0.05)
    choice = registry.choose(GROUPED_SWIGLU, h200, case)
    assert choice.implementation is plain
    assert "no hardware has run the kernel yet" in dict(choice.rejected)["mosaic_gpu"]
    odd = {"gate": jax.ShapeDtypeStruct((100, 768), jnp.bfloat16)}
    wide = {"gate": jax.ShapeDtypeStruct((128, 768), jnp.float32)}
    for device, changes, reason in (
        ("v5p", {}, "it is for NVIDIA GPUs from Hopper on"),
        ("a100", {}, "it is for NVIDIA GPUs from Hopper on"),
        ("h200", odd, r"it takes multiples of 64 rows and 128 columns, not \(100, 768\)"),
        ("h200", wide, "it is for bfloat16, not float32"),
    ):
        with pytest.raises(ValueError, match=rf"kernels\.grouped_swiglu=mosaic_gpu: {reason}"):
            registry.choose(GROUPED_SWIGLU, from_name(device), {**case, **changes}, forced="mosaic_gpu")


@dtypes
def test_swiglu_is_its_formula(dtype: str) -> None:
    """The result is `gate * sigmoid(gate) * up`, also where sigmoid saturates."""

    def formula(gate: Array, up: Array) -> Array:
        return gate / (1 + jnp.exp(-gate)) * up

    agree_with(swiglu, formula, (10 * normal(0, 4, 64), normal(1, 4, 64)), dtype)
    far = jnp.asarray([[-200.0, 200.0]], dtype)
    np.testing.assert_allclose(swiglu(far, jnp.ones_like(far)).astype(jnp.float32), [[0.0, 200.0]])
