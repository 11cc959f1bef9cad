"""What attention reads of positions beside their rotation: chunks of a document, and the temperature of queries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.rope import QueryTemperature
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

SIZES: dict[str, Any] = dict(
    num_layers=1, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, vocab_size=64
)
TOKENS = np.random.default_rng(0).integers(0, 64, (1, 16)).astype(np.int32)


def logits(attention: AttentionSpec, segments: list[int], positions: list[int]) -> np.ndarray:
    model = Transformer(**SIZES, pattern=(BlockSpec(attention),))
    params = draw_weights(model.param_infos(), noise=0.0)
    token_BL, position_BL, segment_BL = map(
        jnp.asarray, (TOKENS, np.array([positions], np.int32), np.array([segments], np.int32))
    )
    return np.asarray(jax.jit(model.logits)(params, Batch(token_BL, token_BL, position_BL, segment_BL)))


def test_chunks_of_a_document_are_documents_to_attention() -> None:
    """A row of documents of 12 and 3 tokens in chunks of 5 is one of documents of 5, 5, 2 and 3, and padding."""
    positions = [*range(12), *range(3), 0]
    chunked = logits(AttentionSpec(chunk_size=5), [1] * 12 + [2] * 3 + [0], positions)
    cut = logits(AttentionSpec(), [1] * 5 + [2] * 5 + [3] * 2 + [4] * 3 + [0], positions)
    np.testing.assert_allclose(chunked[:, :15], cut[:, :15], atol=1e-5)
    whole = logits(AttentionSpec(), [1] * 12 + [2] * 3 + [0], positions)
    assert np.abs(whole - chunked)[:, 5:12].max() > 0.01


def test_temperature_multiplies_queries_by_their_position() -> None:
    """The formula of arXiv:2501.19399, at positions on both sides of a step."""
    factor = QueryTemperature(0.5, 4, offset=1).factor(jnp.asarray([[0, 2, 3, 7, 100]]))
    want = 1 + 0.5 * np.log(1 + np.asarray([[0, 0, 1, 2, 25]]))
    np.testing.assert_allclose(factor, want, rtol=1e-6)
    positions, segments = list(range(16)), [1] * 16
    plain = logits(AttentionSpec(rope=None), segments, positions)
    warm = logits(AttentionSpec(rope=None, temperature=QueryTemperature(2.0, 8)), segments, positions)
    np.testing.assert_array_equal(warm[:, :8], plain[:, :8])
    assert np.abs(warm - plain)[:, 8:].max() > 0.01


def test_what_cannot_be_is_refused() -> None:
    """Chunks without positions, and experts of which several would read inputs of their own."""
    with pytest.raises(UserError, match=r"chunk_size=0 of attention must be at least 1\. Set None"):
        Transformer(**SIZES, pattern=(BlockSpec(AttentionSpec(chunk_size=0)),))
    with pytest.raises(
        UserError, match=r"weight_input=True with model\.moe\.top_k=2.*Set model\.moe\.top_k=1"
    ):
        MoESpec(num_experts=4, top_k=2, weight_input=True)
