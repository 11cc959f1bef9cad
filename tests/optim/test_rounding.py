"""Stochastic rounding: right on average, with random bits that depend only on parameter, index and step."""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import ParamInfo
from jtrain.optim.rounding import Noise, round_alone, to_bfloat16, uniform

STACK = ParamInfo("layers.mlp.gate_DF", (3, 16, 40), "YDF", "normal", 1.0)
TABLE = ParamInfo("embed.table_VD", (16, 24), "VD", "normal", 1.0)


def bits(info: ParamInfo = STACK, step: int = 0, purpose: str = "mu") -> np.ndarray:
    return np.asarray(Noise(info, jnp.int32(step)).bits(purpose, info.shape))


def test_the_mean_of_many_roundings_is_the_value() -> None:
    """The mean of 4096 roundings of each of 1920 values is the value, within six standard deviations.

    One rounding has a deviation of at most u / 2, the mean of u / 2 / 64. Rounded to nearest, some values
    would be off by nearly u / 2 every time.
    """
    x = jnp.asarray(np.random.default_rng(0).standard_normal(STACK.shape), jnp.float32)
    count = 4096

    @jax.jit
    def total() -> jax.Array:
        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            # Exact multiples of 2^-20 below 2^2 sum exactly as integers.
            rounded = to_bfloat16(x, Noise(STACK, step).bits("mu", x.shape)).astype(jnp.float32)
            return sums + ((rounded - x.astype(jnp.bfloat16).astype(jnp.float32)) * 2.0**24)

        return jax.lax.fori_loop(0, count, add, jnp.zeros_like(x))

    nearest = np.float64(x.astype(jnp.bfloat16))
    mean = nearest + np.float64(total()) / 2.0**24 / count
    unit = 2.0 ** (np.floor(np.log2(np.abs(np.float64(x)))) - 7)
    assert (np.abs(nearest - x) / unit).max() > 0.49
    assert (np.abs(mean - x) / unit).max() < 6 * 0.5 / np.sqrt(count)


def test_what_bfloat16_holds_stays_and_so_does_what_is_no_number() -> None:
    """Exact values, zeros, infinities and NaN stay unchanged for any bits; other values become a
    neighbour.
    """
    exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 2.0**-126, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for word in (0, 0xFFFFFFFF):
        got = to_bfloat16(exact, jnp.full(exact.shape, word, jnp.uint32))
        np.testing.assert_array_equal(np.float32(got), exact)
        assert np.signbit(np.asarray(got, np.float32)[1])
    x = jnp.asarray([1.001, -1.001], jnp.float32)
    np.testing.assert_array_equal(np.float32(to_bfloat16(x, jnp.zeros(2, jnp.uint32))), [1.0, -1.0])
    up = to_bfloat16(x, jnp.full(2, 0xFFFFFFFF, jnp.uint32))
    np.testing.assert_array_equal(np.float32(up), [1 + 2.0**-7, -1 - 2.0**-7])


def test_bits_are_as_good_as_random() -> None:
    """Each half of a word is uniform over 256 bins, and bits of neighbours, layers, steps and so on are
    independent.
    """
    info = ParamInfo("w", (4, 128, 512), "YDF", "normal", 1.0)
    words = bits(info)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words.ravel() >> shift) & 0xFF, minlength=256)
        expected = words.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)
    share = np.asarray(uniform(jnp.asarray(words)), np.float64)
    assert 0 <= share.min() < share.max() < 1
    others = {
        "next element": np.roll(share, 1, axis=2),
        "next row": np.roll(share, 1, axis=1),
        "next layer": np.roll(share, 1, axis=0),
        "next step": np.asarray(uniform(jnp.asarray(bits(info, step=1)))),
        "other purpose": np.asarray(uniform(jnp.asarray(bits(info, purpose="nu")))),
        "other parameter": np.asarray(
            uniform(jnp.asarray(bits(ParamInfo("v", info.shape, "YDF", "normal"))))
        ),
    }
    for name, other in others.items():
        r = np.corrcoef(share.ravel(), other.ravel())[0, 1]
        assert abs(r) < 6 / np.sqrt(share.size), name


def test_a_layer_and_a_block_have_the_bits_that_they_have_in_the_whole() -> None:
    """One layer, or a block with its start, gets the bits of the whole array."""
    whole = bits()
    step = jnp.int32(0)
    for y in range(3):
        of_layer = Noise(STACK, step, layer=jnp.int32(y)).bits("mu", STACK.shape[1:])
        np.testing.assert_array_equal(of_layer, whole[y])
        block = Noise(STACK, step, layer=y, start=(jnp.int32(4), 8)).bits("mu", (2, 5))
        np.testing.assert_array_equal(block, whole[y, 4:6, 8:13])
    np.testing.assert_array_equal(
        Noise(STACK, step, start=(1, 2, 3)).bits("mu", (2, 4, 5)), whole[1:, 2:6, 3:8]
    )
    assert len(np.unique(whole)) > 0.999 * whole.size
    table = bits(TABLE)
    np.testing.assert_array_equal(Noise(TABLE, step, start=(3, 5)).bits("mu", (2, 2)), table[3:5, 5:7])


@pytest.mark.parametrize(
    "spec", [P(None, "data", None), P(None, None, "data"), P(None, "tensor", "data")], ids=str
)
def test_bits_of_a_split_array_are_those_of_the_whole(emulated_devices: list[jax.Device], spec: P) -> None:
    """Shards get the bits of the whole array, at jit level and inside a shard_map."""
    mesh = Mesh(np.array(emulated_devices).reshape(4, 2), ("data", "tensor"))
    split = NamedSharding(mesh, spec)
    global_bits = jax.jit(lambda step: Noise(STACK, step).bits("mu", STACK.shape), out_shardings=split)
    got = global_bits(jnp.int32(0))
    assert len({str(shard.index) for shard in got.addressable_shards}) >= 4
    np.testing.assert_array_equal(got, bits())

    def of_shard(step: jax.Array) -> jax.Array:
        shape = split.shard_shape(STACK.shape)
        start = tuple(
            n * jax.lax.axis_index(axis) if axis else 0 for n, axis in zip(shape, tuple(spec), strict=True)
        )
        return Noise(STACK, step, start=start).bits("mu", shape)

    sharded = jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(sharded(jnp.int32(0)), bits())


def test_layers_beyond_32_bits_of_elements_differ() -> None:
    """Layers of a stack with more elements than uint32 has values (80 x 8192 x 28672) still get different
    bits.
    """
    info = ParamInfo("w", (80, 8192, 28672), "YDF", "normal", 1.0)
    assert info.size > 2**32
    words = [
        np.asarray(Noise(info, jnp.int32(0), layer=y, start=(8000, 28000)).bits("mu", (64, 64)))
        for y in (0, 19)
    ]
    assert (words[0] == words[1]).mean() < 0.01


def test_the_bits_are_those_of_the_published_hash() -> None:
    """Murmur3's finaliser over (path, purpose, step), layer and index: a checkpoint goes on with the noise it
    had.
    """

    def mix(word: np.ndarray) -> np.ndarray:
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return word ^ (word >> np.uint32(16))

    assert mix(np.array([1], np.uint32))[0] == 0x514E28B7, "as published"
    for info, num_layers in ((STACK, 3), (TABLE, 1)):
        layer = np.arange(num_layers, dtype=np.uint32)[:, None]
        seed = np.array([[zlib.crc32(f"{info.path}:nu".encode())]], np.uint32) ^ np.uint32(7)
        key = mix(mix(seed) + np.uint32(0x9E3779B9) * layer)
        want = mix(np.arange(np.prod(info.shape[-2:]), dtype=np.uint32)[None] ^ key)
        np.testing.assert_array_equal(bits(info, step=7, purpose="nu"), want.reshape(info.shape))


def test_products_are_rounded_one_by_one_in_optimised_programs() -> None:
    """Sums of two products have numpy's bits, although LLVM may fuse a multiplication with an addition.

    Tests run without LLVM's optimisations; this program has them. Without `round_alone` a quarter of the
    elements differ.
    """
    a, x, b, y = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

    def differing(product: Callable[[jax.Array], jax.Array]) -> float:
        step = jax.jit(lambda a, x, b, y: product(a * x) + product(b * y))
        compiled = step.lower(a, x, b, y).compile(compiler_options=options)
        return float(np.mean(np.asarray(compiled(a, x, b, y)) != a * x + b * y))

    assert differing(lambda product: product) > 0.1, "the compiler fuses nothing: the test shows nothing"
    assert differing(round_alone) == 0
