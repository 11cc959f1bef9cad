import jax
import jax.numpy as jnp
import numpy as np

from jtrain_kernels.embedding_lookup.api import embedding_lookup
from jtrain_kernels.embedding_lookup.reference import embedding_lookup_reference
from tests.kernels.gradients import agree_with, dtypes, normal

TOKENS = np.random.default_rng(0).integers(0, 20, (4, 32), dtype=np.int32)  # each row of the table many times


@dtypes
def test_rows_and_the_sum_of_their_gradients(dtype: str) -> None:
    """Gradients of equal tokens are added; rows without a token get zero."""
    agree_with(
        lambda w: embedding_lookup(w, jnp.asarray(TOKENS)),
        lambda w: embedding_lookup_reference(w, jnp.asarray(TOKENS)),
        (normal(0, 24, 8),),
        dtype,
    )


def test_a_bfloat16_table_still_sums_in_float32() -> None:
    """1 + 300 * 2^-8 is lost if each of 300 additions rounds to bfloat16."""
    table, token = jnp.zeros((2, 4), jnp.bfloat16), jnp.zeros((1, 301), jnp.int32)
    dx = jnp.full((1, 301, 4), 2.0**-8, jnp.bfloat16).at[0, 0].set(1.0)
    (got,) = jax.vjp(lambda w: embedding_lookup(w, token), table)[1](dx)
    np.testing.assert_allclose(got[0].astype(jnp.float32), 1 + 300 * 2.0**-8, rtol=2.0**-8)


def test_the_gradient_is_the_same_bits_every_time() -> None:
    """Bit-exact resuming depends on it."""
    dx = jnp.asarray(normal(3, 4, 32, 8))
    backward = jax.jit(lambda w, dx: jax.vjp(lambda w: embedding_lookup(w, jnp.asarray(TOKENS)), w)[1](dx)[0])
    runs = [np.asarray(backward(jnp.zeros((24, 8)), dx)) for _ in range(5)]
    assert np.abs(runs[0]).max() > 1
    assert all(np.array_equal(runs[0], other) for other in runs[1:])
