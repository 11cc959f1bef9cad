"""One batch for every test that compares runs: what a real batch has, and what no two parts of it share."""

import functools

import numpy as np

from jtrain.layout.dims import IGNORE, Batch

ROWS, COLS, VOCAB = 32, 16, 64
"""Sizes that every mesh, number of microbatches and group of sequences of the tests divides; no count below
does."""

EMPTY, UNSCORED, ONE_TOKEN_DOCUMENTS, ONE_DOCUMENT = 5, 3, 14, 21
"""Rows of padding alone, without a target, of documents of one token, and of one document that fills the
row."""


@functools.cache
def adversarial_batch() -> Batch:
    """[32, 16]; every row has other tokens, documents, padding and prompts, so no part can stand for another.

    Documents have 1 to 7 tokens. The targets inside of a prompt, the first part of every second document, are
    masked. Row 5 is empty and row 3 predicts nothing, so devices and microbatches differ in their valid
    targets, and their total, 239, is a prime. Padding is as the data plane makes it: token 0, position 0,
    segment 0.
    """
    rng = np.random.default_rng(7)  # a seed with which 239 targets and 439 tokens are both prime
    token, target, position, segment = (np.zeros((ROWS, COLS), np.int32) for _ in range(4))
    target[:] = IGNORE
    for row in range(ROWS):
        first, number = 0, 0
        filled = COLS - int(rng.integers(0, 5))
        if row in (EMPTY, ONE_TOKEN_DOCUMENTS, ONE_DOCUMENT):
            filled = COLS * (row != EMPTY)
        while first < filled:
            length = {ONE_TOKEN_DOCUMENTS: 1, ONE_DOCUMENT: COLS}.get(row, int(rng.integers(1, 8)))
            length, number = min(length, filled - first), number + 1
            document = slice(first, first + length)
            token[row, document] = ids = rng.integers(0, VOCAB, length)
            position[row, document] = np.arange(length)
            segment[row, document] = number
            prompt = int(rng.integers(0, length)) if number % 2 == 0 else 0
            if row != UNSCORED:
                target[row, first + prompt : first + length - 1] = ids[prompt + 1 :]
            first += length
    return Batch(token, target, position, segment)
