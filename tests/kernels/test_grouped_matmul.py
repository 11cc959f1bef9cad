"""Grouped matmul: every implementation against float64, with empty, small and large groups, and rows without
one.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jtrain.plan.compile.compiled_step import no_compile_cache, topology_devices
from jtrain_kernels import registry
from jtrain_kernels.device import from_name
from jtrain_kernels.grouped_matmul.api import GROUPED_MATMUL, grouped_matmul
from jtrain_kernels.grouped_matmul.reference import grouped_matmul_reference
from tests.kernels.gradients import agree_with, dtypes, normal

ROWS = 300
GROUPS = {
    "even": (75, 75, 75, 75),
    "empty, one row, blocks and a bit": (0, 1, 270, 29),
    "the first has all": (300, 0, 0, 0),
    "the last has all": (0, 0, 0, 300),
    "rows of no group": (10, 0, 130, 7),
    "no rows at all but one": (0, 0, 1, 0),
}


@dtypes
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
def test_each_group_of_rows_has_its_matrix(dtype: str, sizes: tuple[int, ...]) -> None:
    """Value and both gradients agree in rows of groups: sums over up to 300 rows, accumulated in float32."""
    group_size, used = jnp.asarray(sizes, jnp.int32), sum(sizes)
    agree_with(
        lambda x, w: grouped_matmul(x, w, group_size)[:used],
        lambda x, w: grouped_matmul_reference(x, w, group_size)[:used],
        (normal(0, ROWS, 24), normal(1, len(sizes), 24, 40)),
        dtype,
    )


def test_rows_of_no_group_neither_count_nor_spread() -> None:
    """Rows without a group do not enter other rows and the gradients, even if they hold nan."""
    group_size = jnp.asarray((3, 0, 5), jnp.int32)
    x, w, dy = normal(0, 140, 8), normal(1, 3, 8, 4), normal(2, 140, 4)
    y, vjp = jax.vjp(
        lambda x, w: grouped_matmul(x, w, group_size), jnp.asarray(x).at[8:].set(jnp.nan), jnp.asarray(w)
    )
    dx, dw = vjp(jnp.asarray(dy).at[8:].set(jnp.nan))
    clean, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, group_size), jnp.asarray(x), jnp.asarray(w))
    clean_dx, clean_dw = vjp(jnp.asarray(dy).at[8:].set(0))
    np.testing.assert_array_equal(y[:8], clean[:8])
    np.testing.assert_array_equal(dx[:8], clean_dx[:8])
    np.testing.assert_array_equal(dw, clean_dw)
    assert np.any(dw[0])
    assert not np.any(dw[1]), "a group without rows has no gradient"


def test_a_float32_kernel_under_bfloat16_rows_gets_a_float32_gradient() -> None:
    """The gradient is not rounded to bfloat16 on its way."""
    x, w = jnp.asarray(normal(0, 64, 8), jnp.bfloat16), jnp.asarray(normal(1, 2, 8, 4))
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray((20, 44))), x, w)
    dx, dw = vjp(jnp.asarray(normal(2, 64, 4), jnp.bfloat16))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert np.any(np.asarray(dw) != np.asarray(dw.astype(jnp.bfloat16), np.float32))


def test_only_the_tpu_is_given_a_ragged_dot() -> None:
    """XLA:CPU and XLA:GPU make `ragged_dot` dense (all rows with all matrices), so they get a loop with one
    product.
    """
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 16), (3, 16, 24))]
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.jit(grouped_matmul).trace(*shapes, sizes)
    text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert "ragged_dot" in text["tpu"]
    assert "while" not in text["tpu"]
    for platform in ("cpu", "cuda"):
        assert "ragged_dot" not in text[platform]
        assert text[platform].count("dot_general") == 1
        assert "stablehlo.while" in text[platform]


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Columns and the number of groups are checked."""
    with pytest.raises(ValueError, match=r"x \(5, 3\) and 2 groups do not fit kernel \(2, 4, 6\)"):
        grouped_matmul(jnp.zeros((5, 3)), jnp.zeros((2, 4, 6)), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="3 groups do not fit"):
        grouped_matmul(jnp.zeros((5, 4)), jnp.zeros((2, 4, 6)), jnp.zeros(3, jnp.int32))


def test_on_a_hopper_gpu_tokamax_is_predicted_to_win_and_elsewhere_says_why_it_is_not() -> None:
    """tokamax's kernels are for bfloat16 on Hopper only."""
    case = GROUPED_MATMUL.cases["qwen3_30b_a3b up"]
    hopper = registry.choose(GROUPED_MATMUL, from_name("h200"), case)
    assert hopper.implementation.name == "tokamax"
    for name, reason in (("b200", "for Hopper GPUs"), ("cpu", "for Hopper GPUs"), ("v5p", "for Hopper GPUs")):
        choice = registry.choose(GROUPED_MATMUL, from_name(name), case)
        assert choice.implementation.name == "xla"
        assert reason in dict(choice.rejected)["tokamax"]
    wide = {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    odd = {"kernel": jax.ShapeDtypeStruct((128, 2048, 770), jnp.bfloat16)}
    for changes, message in (
        (wide, "multiplies bfloat16 with bfloat16, not float32"),
        (odd, "multiples of 128"),
    ):
        with pytest.raises(ValueError, match=rf"kernels\.grouped_matmul=tokamax: .*{message}"):
            registry.choose(GROUPED_MATMUL, from_name("h200"), {**case, **changes}, forced="tokamax")


@pytest.mark.aot
@pytest.mark.slow
def test_tokamax_compiles_for_an_h200_forward_and_backward() -> None:
    """The program contains tokamax's two kernels, so nothing fell back; compiling needs no live device."""
    device = topology_devices("h200:1")[0]
    case = GROUPED_MATMUL.cases["qwen3_30b_a3b up"]
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
        for a in (case["x"], case["kernel"], case["group_size"])
        if isinstance(a, jax.ShapeDtypeStruct)
    ]

    def both(x: jax.Array, w: jax.Array, size: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, size), x, w)
        return y, vjp(y)

    with registry.on(from_name("h200"), forced={"grouped_matmul": "tokamax"}), no_compile_cache():
        text = jax.jit(both).lower(*shapes).compile().as_text() or ""
    assert {"ragged_dot_sm90", "ragged_contracting_dim_dot_sm90"} <= set(re.findall(r"ragged\w*_sm90", text))
