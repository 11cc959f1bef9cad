"""Splash attention interpreted on a CPU, and the limits of each implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels import device, registry
from jtrain_kernels.attention import splash, tokamax, xla
from jtrain_kernels.attention.api import ATTENTION
from jtrain_kernels.attention.mask import Mask
from tests.kernels.gradients import normal

L, N, K, H = 256, 2, 1, 128
BLOCKS: dict[str, Any] = dict(chunk=64, block_q=128, block_kv=128, interpret=True)
SEGMENT = np.asarray([[1] * 100 + [2] * 90 + [0] * 66], np.int32)
OTHER = np.asarray([[5] * 60 + [1] * 196], np.int32)
"""Segments of keys: the first document sees some of them, the others none."""


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (Mask(), SEGMENT),
        (Mask(window=100), SEGMENT),
        (Mask(causal=False), OTHER),
        (Mask(soft_cap=0.7), SEGMENT),
    ],
    ids=("causal", "window", "every", "capped"),
)
def test_its_passes_are_those_of_plain_jax(mask: Mask, keys: np.ndarray) -> None:
    """Results, log-partitions (-inf for rows without keys) and gradients of both passes agree in float32, to
    1e-4.

    The tolerance allows for sums of 256 float32 products in another order: 256 * 2^-24, times 6 operations.
    """
    q, k, v, dy = (jnp.asarray(normal(i, 1, L, heads, H)) for i, heads in enumerate((N, K, K, N)))
    arrays = q, k, v, jnp.asarray(SEGMENT), jnp.asarray(keys)
    y, lse = splash.forward(*arrays, mask=mask, **BLOCKS)
    want_y, want_lse = xla.forward(*arrays, mask=mask, chunk=64)
    seen_BNL = np.isfinite(np.asarray(want_lse))
    assert seen_BNL.all() == mask.causal
    np.testing.assert_array_equal(np.isfinite(np.asarray(lse)), seen_BNL)
    np.testing.assert_allclose(np.asarray(lse)[seen_BNL], np.asarray(want_lse)[seen_BNL], atol=1e-4)
    rows = seen_BNL.swapaxes(1, 2)
    np.testing.assert_allclose(np.asarray(y)[rows], np.asarray(want_y)[rows], atol=1e-4)
    # As in a ring, where the result and its log-partition are over more keys than these.
    given = *arrays, want_y, jnp.where(seen_BNL, want_lse + 0.5, 3.0), dy
    got = splash.backward(*given, mask=mask, **BLOCKS)
    for one, want in zip(got, xla.backward(*given, mask=mask, chunk=64), strict=True):
        assert np.abs(np.asarray(want)).max() > 1e-2, "all but zero, so equality would prove nothing"
        np.testing.assert_allclose(np.asarray(one), np.asarray(want), atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("size", (pytest.param(32, marks=pytest.mark.slow), 96))
def test_heads_that_fill_no_registers_are_padded(size: int) -> None:
    """Results, log-partitions and gradients agree with plain JAX as above, and have the heads' own size."""
    q, k, v, dy = (jnp.asarray(normal(i, 1, L, heads, size)) for i, heads in enumerate((N, K, K, N)))
    arrays = q, k, v, jnp.asarray(SEGMENT), jnp.asarray(SEGMENT)
    y, lse = splash.forward(*arrays, mask=Mask(), **BLOCKS)
    want_y, want_lse = xla.forward(*arrays, mask=Mask(), chunk=64)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(want_lse), atol=1e-4)
    np.testing.assert_allclose(np.asarray(y), np.asarray(want_y), atol=1e-4)
    given = *arrays, want_y, want_lse, dy
    got = splash.backward(*given, mask=Mask(), **BLOCKS)
    for one, want in zip(got, xla.backward(*given, mask=Mask(), chunk=64), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(want), atol=1e-4 * float(jnp.abs(want).max()))


def test_heads_of_values_are_padded_to_a_size_of_their_own() -> None:
    """Results and gradients agree with plain JAX as above, with keys of heads of 160 and values of 96."""
    q, k, v, dy = (
        jnp.asarray(normal(i, 1, L, heads, size))
        for i, (heads, size) in enumerate(((N, 160), (K, 160), (K, 96), (N, 96)))
    )
    arrays = q, k, v, jnp.asarray(SEGMENT), jnp.asarray(SEGMENT)
    y, _ = splash.forward(*arrays, mask=Mask(), **BLOCKS)
    want_y, want_lse = xla.forward(*arrays, mask=Mask(), chunk=64)
    np.testing.assert_allclose(np.asarray(y), np.asarray(want_y), atol=1e-4)
    given = *arrays, want_y, want_lse, dy
    got = splash.backward(*given, mask=Mask(), **BLOCKS)
    for one, want in zip(got, xla.backward(*given, mask=Mask(), chunk=64), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(want), atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("window", (None, 70), ids=("causal", "window"))
def test_the_range_of_keys_that_tokamax_gets_is_the_mask(window: int | None) -> None:
    """For causal rows of documents and for blocks of other keys, exactly the keys of the mask lie in the
    range.
    """
    segment, other = jnp.asarray(SEGMENT), jnp.asarray(OTHER)
    for mask, keys in ((Mask(window=window), segment), (Mask(causal=False), other)):
        first_B1L, end_B1L = tokamax.key_ranges(segment, keys, mask)
        assert (end_B1L is None) == mask.causal
        key_M, query_L = np.arange(L), np.arange(L)
        got_LM = key_M >= np.asarray(first_B1L)[0, 0][:, None]
        if end_B1L is not None:
            got_LM &= key_M < np.asarray(end_B1L)[0, 0][:, None]
        want_LM = SEGMENT[0][:, None] == np.asarray(keys)[0][None]
        distance_LM = query_L[:, None] - key_M
        if mask.causal:  # the kernel itself hides later keys
            got_LM &= distance_LM >= 0
            want_LM &= (distance_LM >= 0) & (distance_LM < (mask.window or L))
        np.testing.assert_array_equal(got_LM, want_LM)
        assert 0 < want_LM.sum() < L * L / 2


def shapes(L: int = 1024, H: int = 128, dtype: str = "bfloat16", *, causal: bool = True) -> registry.Avals:
    query, key = (jax.ShapeDtypeStruct((1, L, heads, H), jnp.dtype(dtype)) for heads in (4, 2))
    segment = jax.ShapeDtypeStruct((1, L), jnp.int32)
    arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKP=key, segment_BL=segment, segment_BM=segment)
    return dict(arrays, chunk=512, window=None, causal=causal)


@pytest.mark.parametrize(
    ("name", "chip", "avals", "reason"),
    [
        ("splash", "h200", shapes(), "splash is a kernel for TPUs"),
        (
            "splash",
            "v5p",
            shapes(L=100),
            "takes multiples of 128 positions, but there are 100 queries and 100 keys",
        ),
        ("cudnn", "h200", {**shapes(), "soft_cap": 50.0}, "cuDNN does not cap scores, but soft_cap=50.0"),
        ("cudnn", "v5p", shapes(), "cuDNN runs on NVIDIA GPUs from Ampere on"),
        ("cudnn", "h200", shapes(dtype="float32"), "in bfloat16 or float16, not in float32"),
        ("cudnn", "a100", shapes(H=256), "a multiple of 8 up to 128 on a100, but head_dim=256"),
        ("cudnn", "h200", shapes(L=101), "an even number of positions .* 101 queries"),
        ("tokamax", "a100", shapes(), r"are for Hopper and Blackwell \(sm90 and sm100\) GPUs"),
        ("tokamax", "b200", shapes(H=256), "takes heads of up to 128 on b200, but head_dim=256"),
    ],
)
def test_what_an_implementation_cannot_do_it_says(
    name: str, chip: str, avals: registry.Avals, reason: str
) -> None:
    """Forcing it is an error with the reason and the implementations; nothing falls back."""
    with pytest.raises(
        ValueError, match=rf"kernels\.attention={name}: .*{reason}.*There are: cudnn, tokamax, splash, xla"
    ):
        registry.choose(ATTENTION, device.from_name(chip), avals, forced=name)


def test_splash_runs_on_every_tpu() -> None:
    """The blocks divide the positions."""
    for chip in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        choice = registry.choose(ATTENTION, device.from_name(chip), shapes(L=384), forced="splash")
        assert choice.config == {"block_q": 128, "block_kv": 128}
