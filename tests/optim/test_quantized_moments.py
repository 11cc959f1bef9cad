"""Eight-bit moments: the published map, its error bounds, and whole blocks on every shard."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.optim import AdamW, Muon, build, check_layout
from jtrain.optim.quantized_moments import MomentBlocks, blocks_of, decode, encode
from jtrain.optim.rounding import Noise

INFO = ParamInfo("layers.mlp.gate_DF", (2, 8, 512), "YDF", "normal", 1.0)
BLOCKS = MomentBlocks("F", -1, 128)


def published_map(signed: bool) -> np.ndarray:
    """Positive values of arXiv:2110.02861's dynamic map without its 1.0, computed as by its authors, in
    float64.
    """
    values: list[float] = []
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        values += list(10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2)
    return np.sort(values)


def moment(signed: bool, spread: float = 2.0) -> jax.Array:
    """Random moments of lognormal sizes, with another scale in each block."""
    rng = np.random.default_rng(0)
    size = np.exp(spread * rng.standard_normal(INFO.shape)) * np.repeat(np.logspace(-9, 0, 64), 128).reshape(
        INFO.shape
    )
    value = size * rng.choice([-1.0, 1.0], INFO.shape) if signed else size**2
    return jnp.asarray(value, jnp.float32)


def sizes(x: jax.Array, signed: bool) -> np.ndarray:
    """Inputs of the map in float64, blocks last: the size of a first moment, the root of a second one."""
    value = np.float64(x).reshape(-1, 128)
    return np.abs(value) if signed else np.sqrt(value)


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_stands_for_a_value_of_the_published_map(signed: bool) -> None:
    """Codes decoded with scale 1 are the map's values in order; 0 is 0, and negative codes mirror positive
    ones.
    """
    wanted = published_map(signed)
    assert len(wanted) == (127 if signed else 254)
    codes = np.arange(len(wanted) + 1)
    blocks = MomentBlocks("D", -1, len(codes))
    got = np.asarray(
        decode(jnp.asarray(codes, jnp.int8 if signed else jnp.uint8), jnp.ones(1), blocks), np.float64
    )
    assert got[0] == 0.0
    np.testing.assert_allclose(got[1:], wanted if signed else wanted**2, rtol=2e-6)
    if signed:
        mirrored = decode(jnp.asarray(-codes, jnp.int8), jnp.ones(1), blocks)
        np.testing.assert_array_equal(mirrored, -np.float32(got))


@pytest.mark.parametrize("signed", [True, False])
def test_to_nearest_the_error_is_within_half_a_cell(signed: bool) -> None:
    """Values in decade k are off by at most 0.45 / 2^k 10^(k - K) of the block's largest, which is exact."""
    levels = 6 if signed else 7
    top = 1 - 0.45 / 2**levels
    x = moment(signed)
    codes, scale = encode(x, BLOCKS, signed=signed, bits=None)
    assert (codes.dtype, scale.dtype) == (jnp.int8 if signed else jnp.uint8, jnp.float32)
    assert (codes.shape, scale.shape) == (x.shape, (2, 8, 4))
    back = decode(codes, scale, BLOCKS)
    np.testing.assert_array_equal(np.sign(back)[np.abs(codes) > 0], np.sign(x)[np.abs(codes) > 0])
    want, got = sizes(x, signed), sizes(back, signed)
    largest = want.max(axis=1, keepdims=True)
    share = want / largest * top
    k = np.clip(np.floor(np.log10(share)) + 1 + levels, levels - 6, levels)
    bound = np.where(share < 1e-7, 6e-7, 0.45 / 2**k * 10 ** (k - levels))
    error = np.abs(got - want) / largest * top
    assert (error <= bound * (1 + 1e-4) + 1e-7).all()
    assert (error / bound)[share > 1e-3].max() > 0.95, "the bound must be tight"
    assert len(np.unique(np.asarray(codes))) > 150, "many codes must be used"
    at = want.argmax(axis=1)[:, None]
    np.testing.assert_allclose(np.take_along_axis(got, at, 1), largest, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_a_reference_that_searches_the_published_map(signed: bool) -> None:
    """Codes equal those of a search in float64, except by one at the edges of cells."""
    levels = 6 if signed else 7
    top = 1 - 0.45 / 2**levels
    x = moment(signed, spread=1.0)
    codes, _ = encode(x, BLOCKS, signed=signed, bits=None)
    share = sizes(x, signed)
    share = share / share.max(axis=1, keepdims=True) * top
    edges = np.concatenate(
        [
            10.0 ** (d - 6) * np.linspace(0.1, 1, 2 ** (d if signed else d + 1), endpoint=False)
            for d in range(7)
        ]
    )
    want = np.searchsorted(edges, share, side="right")
    got = np.abs(np.int32(codes)).reshape(-1, 128)
    assert np.abs(got - want).max() <= 1
    at_edge = np.abs(share[..., None] / edges - 1).min(axis=-1) < 1e-5
    np.testing.assert_array_equal(got[~at_edge], want[~at_edge])
    assert at_edge.mean() < 0.01


@pytest.mark.parametrize("signed", [True, False])
def test_by_chance_the_mean_is_the_moment(signed: bool) -> None:
    """The mean of 2000 stochastic roundings is the value, within six standard deviations.

    One rounding between neighbours w apart has deviation sqrt((x - below) (above - x)), the mean a 45th of
    that. The bound adds 12 w / 2000 for values so near one neighbour that the other is drawn only a few
    times.
    """
    x, count = moment(signed, spread=1.0), 2000

    def rounded(bits: jax.Array) -> jax.Array:
        return decode(*encode(x, BLOCKS, signed=signed, bits=bits), BLOCKS)

    @jax.jit
    def mean() -> jax.Array:
        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            return total + (rounded(Noise(INFO, step).bits("mu", x.shape)) / x - 1)

        return jax.lax.fori_loop(0, count, add, jnp.zeros_like(x)) / count

    one, other = (
        np.float64(rounded(jnp.full(x.shape, word, jnp.uint32)) / x - 1) for word in (0, 0xFFFFFFFF)
    )
    apart = np.abs(one - other)
    deviation = np.sqrt(np.maximum(-one * other, 0))
    assert np.median(deviation) > 3e-3, "roundings must differ"
    assert (np.abs(np.float64(mean())) < 6 * deviation / math.sqrt(count) + 12 * apart / count + 2e-6).all()


def test_zeros_stay_and_a_second_moment_never_becomes_zero() -> None:
    """Zero blocks have scale 0; a positive second moment far below the block's largest keeps the smallest
    code.
    """
    zeros = jnp.zeros(INFO.shape)
    for signed in (True, False):
        codes, scale = encode(zeros, BLOCKS, signed=signed, bits=None)
        assert not np.asarray(codes).any()
        assert not np.asarray(scale).any()
        np.testing.assert_array_equal(decode(codes, scale, BLOCKS), zeros)
    tiny = zeros.at[..., 0].set(1.0).at[..., 1].set(1e-30)
    for noise in (None, Noise(INFO, jnp.int32(0)).bits("nu", INFO.shape)):
        codes, scale = encode(tiny, BLOCKS, signed=False, bits=noise)
        assert {tuple(row) for row in np.asarray(codes)[..., :3].reshape(-1, 3)} == {(254, 1, 0)}
        assert float(decode(codes, scale, BLOCKS)[0, 0, 1]) > 0
        first, _ = encode(tiny, BLOCKS, signed=True, bits=noise)
        assert {tuple(row) for row in np.asarray(first)[..., :3].reshape(-1, 3)} == {(127, 0, 0)}


def test_blocks_lie_where_shards_do_not_cut_them() -> None:
    """Blocks lie along heads or the feed-forward width; vocabulary, scales and odd sizes stay float32."""
    found = {
        dims: blocks_of(ParamInfo(dims, shape, dims, "normal", 1.0))
        for dims, shape in {
            "YDNH": (2, 256, 8, 128),
            "YNHD": (2, 8, 64, 256),
            "YDF": (2, 256, 896),
            "YXFD": (2, 4, 192, 256),
            "DV": (256, 50257),
            "VD": (50257, 256),
            "YD": (2, 256),
            "D": (256,),
            "YFD": (2, 100, 256),
        }.items()
    }
    assert found == {
        "YDNH": MomentBlocks("H", -1, 128),
        "YNHD": MomentBlocks("H", -2, 64),
        "YDF": MomentBlocks("F", -1, 128),
        "YXFD": MomentBlocks("F", -2, 64),
        "DV": None,
        "VD": None,
        "YD": None,
        "D": None,
        "YFD": None,
    }


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_mesh_that_cuts_blocks_is_refused(kind: type[AdamW]) -> None:
    """The message has the parameter, both sizes, and a mesh or dtype that fits; the next smaller mesh is
    accepted.
    """
    infos = {
        "gate": ParamInfo("layers.mlp.gate_DF", (2, 256, 512), "YDF", "normal", 1.0),
        "unembed": ParamInfo("unembed.kernel_DV", (256, 512), "DV", "normal", 1.0),
    }
    opt = build(kind(1e-3, moment_dtype="int8"), num_steps=100, params=infos)

    def check(zero_stage: Any, **axes: int) -> None:
        check_layout(
            opt.spec, make_layout(LayoutSpec(zero_stage=zero_stage), MeshSpec(**axes), tuple(infos.values()))
        )

    with pytest.raises(
        ValueError,
        match=(
            r"moment_dtype=int8 keeps layers.mlp.gate_DF in blocks of 128 along model.d_ff=512, and "
            r"mesh.tensor=8 would cut them: a shard has 64. Set mesh.tensor to a divisor of 4, or "
            r"optimizer.moment_dtype=bfloat16_sr"
        ),
    ):
        check(0, tensor=8)
    check(0, data=16, tensor=4)
    check(3, data=16, tensor=4)
