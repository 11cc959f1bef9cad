"""Weights, batches and summaries that follow from names and numbers alone, with or without torch."""

import zlib

import numpy as np

ROWS, COLUMNS = 4, 128
IGNORED = -1
"""Target where there is nothing to predict, as in jtrain."""
FIRST_TOKEN = 4
"""Smallest drawn id: those below may be an embedding's padding, whose gradient torch leaves out."""
PACKED = ((50, 1, 2, 40, 35), (3, 90, 20), (128,), (17, 17, 60, 5))
"""Lengths of the documents of each packed row; what is left is padding."""
DIRECTIONS = 3
"""Random directions onto which each gradient is projected."""
POSITIONS = ((0, 0), (0, 51), (0, 90), (1, 17), (1, 112), (2, 127), (3, 33), (3, 95))
"""Rows and columns of the logits that a summary keeps whole; none is padding."""


def draw(name: str, shape: tuple, center: float, scale: float, seed: int = 0) -> np.ndarray:
    """Weights of a tensor; RandomState, whose numbers no version of numpy changes."""
    state = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    return np.asarray(center + scale * state.standard_normal(shape), np.float32)


def batches(seed: int, vocabulary: int) -> dict[str, dict[str, np.ndarray]]:
    """The two batches, as jtrain has them: a document's last token has no target."""
    random = np.random.RandomState(seed)
    out = {}
    for label, lengths_by_row in (("unpacked", ((COLUMNS,),) * ROWS), ("packed", PACKED)):
        token = random.randint(FIRST_TOKEN, vocabulary, (ROWS, COLUMNS)).astype(np.int32)
        target, position, segment = np.full_like(token, IGNORED), np.zeros_like(token), np.zeros_like(token)
        for row, lengths in enumerate(lengths_by_row):
            start = 0
            for number, length in enumerate(lengths):
                end = start + length
                segment[row, start:end] = number + 1
                position[row, start:end] = np.arange(length)
                target[row, start : end - 1] = token[row, start + 1 : end]
                start = end
            token[row, start:] = 0
        out[label] = dict(token_BL=token, target_BL=target, position_BL=position, segment_BL=segment)
    return out


def summary(logits: np.ndarray, loss: float, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Few numbers that see every logit and every gradient: some rows, and projections onto random directions.

    gradients: a row for each, in the order of the names: its norm, then its products with the directions.
    """
    direction = draw("direction of logits", logits.shape[-1:], 0.0, 1.0)
    return {
        "loss": np.asarray(loss, np.float64),
        "logits": np.stack([logits[position] for position in POSITIONS]),
        "projected": (logits.astype(np.float64) @ direction).astype(np.float32),
        "gradients": np.array([_project(name, grads[name]) for name in sorted(grads)]),
    }


def _project(name: str, array: np.ndarray) -> list[float]:
    flat = array.astype(np.float64).ravel()
    directions = [draw(f"direction {k} of {name}", flat.shape, 0.0, 1.0) for k in range(DIRECTIONS)]
    return [
        float(np.linalg.norm(flat)),
        *(float(flat @ direction.astype(np.float64)) for direction in directions),
    ]
