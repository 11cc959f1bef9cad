"""Order of positions along the `context` axis, and the split of rows over it."""

from typing import Literal

import numpy as np
from jaxtyping import Int64

from jtrain.errors import UserError

ContextSplit = Literal["contiguous", "zigzag"]


def context_order(seq_len: int, context: int, split: ContextSplit) -> Int64[np.ndarray, " seq_len"]:
    """Returns the order of a row's tokens in which device i of `context` gets the i-th equal part.

    zigzag: the row is cut into 2 * context parts; device i gets part i and the i-th part from the end, so
      that with a causal mask every device has the same attention work. Example, 8 tokens on 2 devices: the
      order is 0 1 6 7 | 2 3 4 5.

    Raises:
      UserError: the row does not split into that many equal parts.
    """
    # One device gets all parts in either split: no reason to refuse lengths that 2 does not divide.
    parts = context * (2 if split == "zigzag" and context > 1 else 1)
    if seq_len % parts:
        below = seq_len - seq_len % parts
        nearest = f"{below}, {below + parts}" if below else f"{parts}"
        raise UserError(
            f"data.seq_len={seq_len} does not split into {parts} parts ({split}, mesh.context={context}). "
            f"Nearest sizes that do: {nearest}. Set data.seq_len."
        )
    chunks = np.arange(seq_len).reshape(parts, -1)
    if parts == context:
        return chunks.reshape(-1)
    # [context, 2, part]: device i's two parts side by side.
    return np.stack([chunks[:context], chunks[::-1][:context]], axis=1).reshape(-1)
