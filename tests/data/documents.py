"""Reference for the tokens of a document."""

import numpy as np
from jaxtyping import Int

from jtrain.data.tokenizer import Tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " tokens"]:
    """Returns the ids of a document with its begin and end ids; no ids for an empty document."""
    if not text:
        return np.empty(0, np.int32)
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    return np.concatenate(
        [begin, tokenizer.encode(text), [tokenizer.end_id]], dtype=np.int32, casting="unsafe"
    )
