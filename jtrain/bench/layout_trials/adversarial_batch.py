"""Batches in which no two rows, and no two microbatches, have the same documents."""

import numpy as np

ROWS, COLUMNS = 16, 16
IGNORED = -1
"""Target where there is nothing to predict, `jtrain.layout.constants.IGNORE`; the test holds the two
together."""


def draw_batch(seed: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Draws the arrays of a batch, [ROWS, COLUMNS]: an empty row, a row without targets, one-token documents,
    padding, masked prompts.

    Every row has documents of other lengths, so microbatches and devices differ in positions, segments and in
    the number of targets; positions restart at 0 in each document, and a document's last token has no target.
    """
    # 77 keeps these draws apart from other uses of the seed.
    rng = np.random.default_rng([seed, 77])
    token = rng.integers(0, vocab_size, (ROWS, COLUMNS), np.int32)
    target, position, segment = np.full_like(token, IGNORED), np.zeros_like(token), np.zeros_like(token)
    # Four different rows, each of which is one special case.
    empty, untrained, full, single = rng.choice(ROWS, 4, replace=False)
    for row in range(ROWS):
        filled = COLUMNS if row in (full, single, untrained) else int(rng.integers(COLUMNS // 2, COLUMNS + 1))
        # Columns beyond `filled` stay padding: segment 0, position 0, no target.
        column, document = 0, 0
        while row != empty and column < filled:
            # One row begins with documents of a single token, one has a single long document.
            max_length = 1 if row == single and column < 3 else COLUMNS if row == full else 7
            length = min(int(rng.integers(1, max_length + 1)) if row != full else max_length, filled - column)
            document += 1
            end = column + length
            segment[row, column:end] = document
            position[row, column:end] = np.arange(length)
            # A masked prompt: its tokens are read but not predicted.
            prompt = int(rng.integers(0, length)) if rng.random() < 0.3 else 0
            if row != untrained:
                # A token's target is the next one; the last has none.
                target[row, column + prompt : end - 1] = token[row, column + prompt + 1 : end]
            column = end
    return dict(token_BL=token, target_BL=target, position_BL=position, segment_BL=segment)
