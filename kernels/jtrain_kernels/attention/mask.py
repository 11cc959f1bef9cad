"""Which keys a query sees, and what a pass over queries and keys is: what every implementation offers."""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Mask:
    """Of the keys of its own segment, a query at index l sees those at index m with

    causal: m <= l; queries and keys are then the same positions.
    window: also m > l - window, so `window` keys with its own at most; only of a causal mask.
    """

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.causal or self.window is None, self


CAUSAL, EVERY = Mask(), Mask(causal=False)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Attention without its gradient rule: two functions over blocks of queries and keys.

    forward: (q_BLNH, k_BMKH, v_BMKH, segment_BL, segment_BM, *, mask, chunk) -> (y_BLNH, lse_BNL): the result in q's
      dtype, and each query's log-partition, float32, -inf where it sees no key; its y is 0 then.
    backward: (q_BLNH, k_BMKH, v_BMKH, segment_BL, segment_BM, y_BLNH, lse_BNL, dy_BLNH, *, mask, chunk) -> (dq_BLNH,
      dk_BMKH, dv_BMKH). Where the keys are only some of those that a query sees, y and lse are of all of them: then
      the gradients of all such blocks add up to the whole (arXiv:2310.01889, appendix B).
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
