from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Array

from jtrain.plan.compile.compiled_step import no_compile_cache, topology_devices
from jtrain_kernels import device
from jtrain_kernels.fp8 import history
from jtrain_kernels.fp8.api import Fp8Kernel, linear_fp8, rounded_weight
from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, dequantise, largest, quantise, scale_of, unsupported
from jtrain_kernels.fp8.reference import linear_fp8_reference
from tests.kernels.gradients import normal

SHAPES = [((2, 8, 4), (4, 6), 1), ((2, 8, 4), (4, 3, 5), 1), ((2, 8, 3, 5), (3, 5, 4), 2)]


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 numbers rounded to an FP8 format by another library, scaled as `scale_of` documents."""
    fraction, exponent = np.frexp(np.abs(x).max())
    top, power = np.frexp(float(ml_dtypes.finfo(dtype).max))
    scale = 2.0 ** (power - exponent - (fraction > top))
    return (x * scale).astype(dtype).astype(np.float64) / scale


@pytest.mark.parametrize(("x", "kernel", "num_in"), SHAPES, ids=["plain", "to heads", "from heads"])
def test_value_and_gradients_are_those_of_operands_rounded_by_ml_dtypes(
    x: tuple[int, ...], kernel: tuple[int, ...], num_in: int
) -> None:
    """Products of the rounded operands are compared in float64: only float32 sums differ, 1e-5 of the largest
    element.

    Without rounding the results differ by more than 1e-2, so the comparison is not vacuous.
    """
    a, w = normal(0, *x).astype(np.float64), normal(1, *kernel).astype(np.float64)
    a2, w2 = a.reshape(-1, int(np.prod(kernel[:num_in]))), w.reshape(int(np.prod(kernel[:num_in])), -1)
    dy = 2.0**-20 * normal(2, a2.shape[0], w2.shape[1]).astype(np.float64)
    a8, w8, dy8 = (
        rounded(a2, ml_dtypes.float8_e4m3fn),
        rounded(w2, ml_dtypes.float8_e4m3fn),
        rounded(dy, ml_dtypes.float8_e5m2),
    )
    want = (a8 @ w8, dy8 @ w8.T, a8.T @ dy8)
    plain = (a2 @ w2, dy @ w2.T, a2.T @ dy)

    @jax.jit
    def run(a: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        y, vjp = jax.vjp(lambda a, w: linear_fp8(a, Fp8Kernel(w), num_in), a, w)
        return y, *vjp(dy.reshape(y.shape))

    got = run(*(jnp.asarray(v, jnp.float32) for v in (a, w, dy)))
    for one, exact, full in zip(got, want, plain, strict=True):
        size = np.abs(exact).max()
        np.testing.assert_allclose(
            np.asarray(one, np.float64).reshape(exact.shape) / size, exact / size, atol=1e-5
        )
        assert np.abs(full - exact).max() / size > 1e-2


def test_the_reference_rounds_alike_and_differentiates_itself() -> None:
    """JAX's derivative of the rounded contraction (with gradients passed through rounding) is our backward
    pass.
    """
    x, w, dy = (jnp.asarray(normal(k, *s)) for k, s in enumerate(((16, 8), (8, 12), (16, 12))))
    y, vjp = jax.vjp(lambda x, w: linear_fp8(x, Fp8Kernel(w)), x, w)
    want, want_vjp = jax.vjp(linear_fp8_reference, x, w)
    for a, b in zip((y, *vjp(dy)), (want, *want_vjp(dy)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_scales_are_powers_of_two_that_use_the_range() -> None:
    """The largest number is scaled to the upper half of the range and never beyond; 0, inf and nan get scale
    1.
    """
    amax = jnp.asarray([448.0, 449.0, 447.9, 1.0, 3e-6, 1e8], jnp.float32)
    for dtype, top in ((FORWARD, 448.0), (GRADIENT, 57344.0)):
        scaled = np.asarray(amax * scale_of(amax, dtype))
        assert (scaled <= top).all(), scaled
        assert (scaled > top / 2).all(), scaled
        fraction, _ = np.frexp(np.asarray(scale_of(amax, dtype)))
        assert (fraction == 0.5).all()
        np.testing.assert_array_equal(scale_of(amax, dtype, margin=1), scale_of(amax, dtype) / 2)
        np.testing.assert_array_equal(scale_of(jnp.asarray([0.0, jnp.inf, jnp.nan]), dtype), [1, 1, 1])


def test_another_scale_rounds_alike_within_the_range_and_exactly_in_bfloat16() -> None:
    """Devices may scale by different powers of two: only numbers below the range change."""
    x = jnp.asarray(normal(0, 4096))
    x = jnp.where(jnp.abs(x) < 0.1, 0.1, x)
    near, far = (
        dequantise(quantise(x, jnp.float32(s), FORWARD), jnp.float32(s), jnp.float32) for s in (64.0, 1.0)
    )
    np.testing.assert_array_equal(near, far)
    half = dequantise(quantise(x, jnp.float32(64), FORWARD), jnp.float32(64), jnp.bfloat16)
    np.testing.assert_array_equal(half.astype(jnp.float32), near)


def test_clipping_never_hides_an_infinity() -> None:
    """Numbers beyond the range are clipped to its end; inf and nan become nan, so that a run notices."""
    x = jnp.asarray([1e9, -1e9, jnp.inf, jnp.nan])
    got = np.asarray(quantise(x, jnp.float32(1), FORWARD).astype(jnp.float32))
    np.testing.assert_array_equal(got, [448, -448, np.nan, np.nan])
    assert np.isnan(largest(x))


def test_delayed_scaling_uses_what_it_is_given_and_reports_what_it_saw() -> None:
    """With the scales of current scaling the results are equal to it; the cotangent of `seen_3` is the amax
    values.
    """
    x, w, dy = (jnp.asarray(normal(k, *s)) for k, s in enumerate(((16, 8), (8, 12), (16, 12))))
    amax = jnp.stack([largest(v) for v in (x, w, dy)])
    scale_3 = jnp.stack([*scale_of(amax[:2], FORWARD), scale_of(amax[2], GRADIENT)])
    y, vjp = jax.vjp(lambda x, w, seen: linear_fp8(x, Fp8Kernel(w, scale_3, seen)), x, w, jnp.zeros(3))
    want, want_vjp = jax.vjp(lambda x, w: linear_fp8(x, Fp8Kernel(w)), x, w)
    dx, dw, seen = vjp(dy)
    for a, b in zip((y, dx, dw), (want, *want_vjp(dy)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(seen, amax)


def test_a_weight_rounded_before_multiplies_as_one_rounded_here() -> None:
    """Results, gradients and amax, bit for bit; the weight itself is never read, and its gradient goes to
    `value`.
    """
    x, w, dy = (jnp.asarray(normal(k, *s)) for k, s in enumerate(((16, 8), (8, 3, 4), (16, 3, 4))))
    scale_3 = jnp.asarray([4.0, 8.0, 2.0])

    def products(value: jax.Array, rounded: tuple[jax.Array, jax.Array] | None) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(
            lambda x, w, seen: linear_fp8(x, Fp8Kernel(w, scale_3, seen, rounded)), x, value, jnp.zeros(3)
        )
        return y, *vjp(dy)

    got = products(jnp.full_like(w, jnp.nan), rounded_weight(w, scale_3[1]))
    jax.tree.map(np.testing.assert_array_equal, got, products(w, None))


def test_a_history_remembers_for_its_length_and_no_longer() -> None:
    """The largest amax of the last steps decides; before the first step, the assumed values."""
    unit = jnp.float32(1e-3)
    kept = history.empty(1)
    first = np.asarray(history.scales(kept, unit))[0]
    np.testing.assert_array_equal(first[[0, 2]], [2.0, 2.0**17])
    kept = history.pushed(kept, jnp.asarray([[100.0, 1.0, 1e-3]]))
    outlier = np.asarray(history.scales(kept, unit))[0]
    np.testing.assert_array_equal(outlier, [2.0, 128.0, 2.0**24])
    for step in range(history.STEPS):
        np.testing.assert_array_equal(history.scales(kept, unit)[0], outlier, err_msg=str(step))
        kept = history.pushed(kept, jnp.asarray([[1.0, 1.0, 1e-3]]))
    assert history.scales(kept, unit)[0, 0] == 128.0


def test_dimensions_that_do_not_meet_are_refused() -> None:
    """Mismatched dimensions are refused as in `linear`."""
    with pytest.raises(ValueError, match=r"last 1 dimensions of x \(2, 3\).*\(4, 5\)"):
        linear_fp8(jnp.zeros((2, 3)), Fp8Kernel(jnp.zeros((4, 5))))


def test_devices_without_8_bit_matmuls_say_so() -> None:
    """A CPU computes the same numbers; an A100 or a v5p has no FP8 units; an MI300X has other formats."""
    able = {name for name, spec in device.DEVICES.items() if unsupported(spec) is None}
    blackwell = {"b200", "b300", "gb200", "gb300", "rtx5090"}
    assert able == {"cpu", "h100", "h200", "gh200", "tpu7x", "rtx4090", "l40s"} | blackwell
    assert "e4m3fnuz" in str(unsupported(device.from_name("mi300x")))
    assert "no 8-bit matmul units" in str(unsupported(device.from_name("v5p")))


@pytest.mark.aot
@pytest.mark.parametrize("delayed", (False, True), ids=("current", "delayed"))
def test_an_h200_multiplies_in_cublaslts_8_bit_kernels(delayed: bool) -> None:
    """All three products are FP8. With Triton's matmuls enabled, autotuning on a GPU chooses between both."""
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("h200:1")[0])

    def step(x: Array, w: Array, dy: Array, scale_3: Array) -> tuple[Array, ...]:
        def forward(x: Array, w: Array, seen: Array) -> Array:
            return linear_fp8(x, Fp8Kernel(w, scale_3, seen) if delayed else Fp8Kernel(w))

        y, vjp = jax.vjp(forward, x, w, jnp.zeros(3))
        return y, *vjp(dy)

    shapes = [
        ((256, 512), jnp.bfloat16),
        ((512, 1024), jnp.bfloat16),
        ((256, 1024), jnp.bfloat16),
        ((3,), jnp.float32),
    ]
    avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    with no_compile_cache():
        text = (
            jax.jit(step)
            .lower(*avals)
            .compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
            .as_text()
        )
    assert text is not None
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert text.count("__cublas$") == text.count("__cublas$lt$matmul$f8")
