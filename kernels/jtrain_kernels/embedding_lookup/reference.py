"""Reference embedding lookup: indexing, differentiated by JAX."""

from jaxtyping import Array, Float, Int


def embedding_lookup_reference(
    table_VD: Float[Array, "V D"], token_BL: Int[Array, "B L"]
) -> Float[Array, "B L D"]:
    """`table[token]`."""
    return table_VD[token_BL]
