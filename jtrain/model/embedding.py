"""Rows of an embedding that is split by rows over `tensor`, or in a pipeline over `stage` and `tensor`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.model.forward_placement import Placement
from jtrain.model.norm import unscaled_norm
from jtrain.model.tensor_parallel import scatter_sequence


def check_embedding_norm(stage: int) -> None:
    """Refuses norms of embeddings over stages.

    Raises:
      UserError: each stage of a pipeline has only a part of what the rows are the sum of.
    """
    if stage > 1:
        raise UserError(
            f"model.embedding_norm=True with mesh.stage={stage}: stages add up their parts of the embedding "
            "after it. Set mesh.stage=1."
        )


def normalized(x_BLD: Float[Array, "B _ D"], placement: Placement, eps: float) -> Float[Array, "B _ D"]:
    """Embedding rows divided by their root mean square.

    Raises:
      UserError: as `check_embedding_norm`.
    """
    check_embedding_norm(placement.stage)
    return unscaled_norm("D", x_BLD.shape[-1], eps=eps)(x_BLD)


def embedding_rows(
    table_VD: Float[Array, "_ _"],
    token_BL: Int[Array, "B L"],
    placement: Placement,
    lookup: Callable[[Array, Array], Array],
) -> Float[Array, "B _ D"]:
    """Embedding rows of the tokens; each device adds the rows of its block of the vocabulary."""
    # Stage is the outer axis: a pipeline splits V over stages first, then over `tensor`.
    axis, shards = placement.vocabulary.values()
    if shards == 1:
        return lookup(table_VD, token_BL)
    rows = table_VD.shape[0]
    local_BL = token_BL - jax.lax.axis_index(axis) * rows
    mine_BL = (local_BL >= 0) & (local_BL < rows)
    # Row 0 for tokens of other devices, masked below: exactly one device has a term for each token.
    x_BLD = lookup(table_VD, jnp.where(mine_BL, local_BL, 0))
    return scatter_sequence(jnp.where(mine_BL[..., None], x_BLD, 0), placement.tensor)
