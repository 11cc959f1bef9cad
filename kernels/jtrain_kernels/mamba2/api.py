"""Mamba-2: a recurrence whose state decays by one number per head and token.

Letters here: N heads of size P, K groups of heads with one input and output of the state, S size of a state.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.attention.context import WHOLE_ROWS, RowSplit
from jtrain_kernels.errors import UserError
from jtrain_kernels.mamba2 import chunked
from jtrain_kernels.recurrence import parts
from jtrain_kernels.recurrence.chunks import check_chunk
from jtrain_kernels.recurrence.documents import RecurrentState, empty_state, mask_padding


def mamba2(
    x_BLNP: Float[Array, "B L N P"],
    dt_BLN: Float[Array, "B L N"],
    a_N: Float[Array, " N"],
    b_BLKS: Float[Array, "B L K S"],
    c_BLKS: Float[Array, "B L K S"],
    d_N: Float[Array, " N"],
    segment_BL: Int[Array, "B L"],
    *,
    initial: RecurrentState | None = None,
    split: RowSplit = WHOLE_ROWS,
    chunk: int = 128,
) -> tuple[Float[Array, "B L N P"], RecurrentState]:
    """State space model of Mamba-2 (arXiv:2405.21060).

    Per token and head, with S the state of the token's document, zeros at its start:

        S = exp(dt a) S + dt b x;  y = c S + d x

    Head n uses b and c of group n * K // N. Padding leaves S as it is; its results mean nothing. The state is
    float32; matmuls and results have x's dtype. One token (L = 1) is one step of the recurrence.

    The backward pass keeps the inputs and N * S * P * 4 bytes per 1024 tokens, and computes each 1024 tokens
    again.

    Args:
      dt_BLN: step size, positive: after its bias, softplus and limits.
      a_N: rate of decay, negative.
      b_BLKS, c_BLKS: input and output of the state, K groups of state size S.
      d_N: skip.
      initial: state of the tokens before, as returned by the call for them.
      split: of the row over devices; call it under shard_map. A part's state and decay are gathered from all
        devices; for them the part's last state is computed first.
      chunk: tokens computed at once; a power of two.

    Returns:
      y, and the state after the row: the same on all devices of `split`.

    Raises:
      UserError: heads or chunk do not fit, or the split's parts do not divide.
    """
    (B, _, N, P), (K, S) = x_BLNP.shape, b_BLKS.shape[2:]
    if N % K:
        raise UserError(f"mamba2: {N} heads are no multiple of {K} groups.")
    check_chunk("mamba2", chunk)
    arrays = dict(x_BLNP=x_BLNP, dt_BLN=mask_padding(dt_BLN, segment_BL), b_BLKS=b_BLKS, c_BLKS=c_BLKS)

    def run(arrays: parts.StateArrays, document_BL: Array, state_BNSP: Array) -> tuple[Array, Array]:
        state = dict(document_BL=document_BL, state_BNSP=state_BNSP)
        return registry.call(MAMBA2, **arrays, a_N=a_N, d_N=d_N, **state, chunk=chunk)

    def transition(arrays: parts.StateArrays, document_BL: Array) -> tuple[Array, Array]:
        dt_BLN = arrays["dt_BLN"]
        # From a state of zeros: what the part itself adds.
        _, own_sum = run(arrays, document_BL, jnp.zeros((len(dt_BLN), N, S, P), jnp.float32))
        decay_BN = jnp.exp(jnp.sum(dt_BLN, axis=1) * a_N.astype(jnp.float32)[None])
        # A document that starts within the part forgets the state before the part.
        decay_BN = jnp.where(document_BL[:, -1:] == 0, decay_BN, 0.0)
        return decay_BN[..., None, None], own_sum

    start = empty_state(B, N, S, P) if initial is None else initial
    return parts.run_row("mamba2", run, transition, jnp.multiply, arrays, segment_BL, start, split)


_HEADS = jax.ShapeDtypeStruct((128,), jnp.float32)
_GROUPS = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
MAMBA2 = registry.Op(
    "mamba2",
    (registry.Implementation("xla", chunked.mamba2, cost_s=cost.mamba2_s),),
    cases={
        "nemotron_h": {  # 128 heads of 64, 8 groups of state size 128
            "x_BLNP": jax.ShapeDtypeStruct((1, 8192, 128, 64), jnp.bfloat16),
            "dt_BLN": jax.ShapeDtypeStruct((1, 8192, 128), jnp.float32),
            "a_N": _HEADS,
            "b_BLKS": _GROUPS,
            "c_BLKS": _GROUPS,
            "d_N": _HEADS,
            "document_BL": jax.ShapeDtypeStruct((1, 8192), jnp.int32),
            "state_BNSP": jax.ShapeDtypeStruct((1, 128, 128, 64), jnp.float32),
            "chunk": 128,
        }
    },
)
OPS = (MAMBA2,)
