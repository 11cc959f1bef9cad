"""Blocks of frozen matrices: the bits of bitsandbytes, and what int8 may lose."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jtrain.layout.dims import ParamInfo
from jtrain.model.adapters.block_quantization import NF4, dequantize, quantize, stored_arrays

PEER = np.load(Path(__file__).parents[2] / "golden" / "bitsandbytes" / "nf4.npz")


def info(dims: str, shape: tuple[int, ...]) -> ParamInfo:
    return ParamInfo(f"layers.mlp.w_{dims}", shape, dims, "normal", 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("jitted", [False, True])
def test_nf4_has_the_bits_of_bitsandbytes(dtype: str, jitted: bool) -> None:
    """Codes, scales and the numbers that come back, also of numbers between two codes and of a block of zeros."""
    weight_DF = jnp.asarray(PEER["weight"].T, dtype)
    matrix = info("DF", weight_DF.shape)
    wrap = jax.jit if jitted else lambda fn: fn
    blocks = wrap(lambda x: quantize(matrix, x, "nf4"))(weight_DF)
    np.testing.assert_array_equal(blocks.codes.T, PEER[f"codes/{dtype}"])
    np.testing.assert_array_equal(blocks.scale.T, PEER[f"scale/{dtype}"])
    assert len(np.unique(PEER[f"codes/{dtype}"])) > 200, "nearly every pair of codes occurs"
    back = wrap(lambda blocks: dequantize(blocks, dtype))(blocks)
    np.testing.assert_array_equal(np.asarray(back.T, np.float32), PEER[f"back/{dtype}"])


SHAPES = {
    "DF": ((128, 24), (64, 24), (2, 24)),
    "YDNH": ((3, 64, 2, 6), (3, 32, 2, 6), (3, 1, 2, 6)),
    "YNHD": ((2, 4, 32, 8), (2, 4, 16, 8), (2, 2, 1, 8)),
    "YXFD": ((2, 3, 64, 5), (2, 3, 32, 5), (2, 3, 1, 5)),
}


@pytest.mark.parametrize("dims", SHAPES)
def test_blocks_lie_along_the_inputs_whatever_dimensions_they_are(dims: str) -> None:
    """A block is 64 inputs of one output, of one layer and expert: numpy on the flat matrix gives the same."""
    shape, codes, scales = SHAPES[dims]
    matrix = info(dims, shape)
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    blocks = quantize(matrix, jnp.asarray(value), "nf4")
    assert (blocks.codes.shape, blocks.scale.shape, blocks.shape) == (codes, scales, shape)
    lead = len(dims) - len(dims.removeprefix("Y").removeprefix("X"))
    outputs = int(np.prod(shape[lead + matrix.num_inputs :]))
    flat = value.reshape(-1, 64, outputs)
    largest = np.abs(flat).max(axis=1, keepdims=True)
    nearest = NF4[np.abs((flat / largest)[..., None] - NF4).argmin(-1)]
    np.testing.assert_allclose(dequantize(blocks, "float32"), (nearest * largest).reshape(shape), rtol=1e-6)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stored_arrays(matrix, "nf4")) == jax.tree.map(
        lambda x: (x.shape, x.dtype), blocks
    )


def test_int8_is_half_a_step_away_at_most() -> None:
    value = np.random.default_rng(1).normal(size=(128, 6)).astype(np.float32)
    value[:64, 0] = 0.0
    blocks = quantize(info("DF", value.shape), jnp.asarray(value), "int8")
    assert blocks.codes.dtype == jnp.int8
    steps = np.repeat(np.asarray(blocks.scale), 64, axis=0) / 127
    error = np.abs(np.asarray(dequantize(blocks, "float32")) - value)
    assert (error <= 0.5001 * steps).all()
    assert error.max() > 0.4 * steps.max(), "rounding is seen"
    assert not error[:64, 0].any()


def test_numbers_are_rounded_once() -> None:
    value = jnp.asarray(np.random.default_rng(2).normal(size=(64, 40)), jnp.float32)
    blocks = quantize(info("DF", value.shape), value, "nf4")
    once = np.asarray(dequantize(blocks, "float32")).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(dequantize(blocks, "bfloat16")), once)
