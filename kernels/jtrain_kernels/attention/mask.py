"""Attention masks and score caps, and the interface of an implementation: a forward and a backward pass over
blocks.
"""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Mask:
    """Mask within a segment, for a query at index l and a key at index m, and the bound of scores.

    causal: the query sees keys with m <= l; queries and keys are the same positions.
    window: the query also needs m > l - window, so it sees at most `window` keys, its own included; causal
      masks only.
    soft_cap: scores become soft_cap * tanh(score / soft_cap) before the mask (arXiv:2408.00118, section 2);
      None leaves them as they are.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        assert self.causal or self.window is None, self


@dataclasses.dataclass(frozen=True)
class Passes:
    """Attention without its gradient rule: two functions over blocks of queries and keys.

    forward: (q_BLNH, k_BMKH, v_BMKP, segment_BL, segment_BM, *, mask, chunk) -> (y_BLNP, lse_BNL): the result
      in q's dtype, and each query's log-partition in float32. A query that sees no key has y = 0 and lse =
      -inf.
    backward: (q_BLNH, k_BMKH, v_BMKP, segment_BL, segment_BM, y_BLNP, lse_BNL, dy_BLNP, *, mask, chunk) ->
      (dq_BLNH, dk_BMKH, dv_BMKP). If a query sees more keys than those of the block, y and lse are over all
      its keys; the gradients of all blocks then add up to the whole gradient (arXiv:2310.01889, appendix B).
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
