"""Real computation of data_end_to_end's vision-like step: one image or sequence after another on one core.

Runs in jtrain's environment, but imports only numpy, with OPENBLAS_NUM_THREADS=1.

Each line of standard input is a step: `{"images": [patches, ...], "sequences": [tokens, ...]}`. The answer holds the
CPU seconds of each image in the encoder (patches cut out of pixels, attention over them, an MLP) and of each sequence
in the backbone (attention over its tokens, an MLP).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from data_protocol import answer

PATCH = 14
ENCODER, BACKBONE = 192, 256
"""Widths of the encoder and the backbone."""

_rng = np.random.default_rng(0)
_pixels = _rng.random((PATCH * 64, PATCH * 64, 3), dtype=np.float32)
_embed = _rng.standard_normal((PATCH * PATCH * 3, ENCODER), dtype=np.float32) / 25
_weights = {
    width: [_rng.standard_normal(shape, dtype=np.float32) / 16 for shape in ((width, 4 * width), (4 * width, width))]
    for width in (ENCODER, BACKBONE)
}


def layer(x: Any, layers: int) -> None:
    """Computes attention and MLP, the work of a transformer layer."""
    up, down = _weights[x.shape[1]]
    for _ in range(layers):
        scores = x @ x.T
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        x = x + scores @ x
        x = x + np.maximum(x @ up, 0) @ down
        x /= np.abs(x).max()


def encode(patches: int) -> None:
    """Cuts one image into patches, embeds and encodes them."""
    rows = -(-patches // 64)
    cut = _pixels[: rows * PATCH].reshape(rows, PATCH, 64, PATCH, 3).transpose(0, 2, 1, 3, 4)
    layer(cut.reshape(rows * 64, -1)[:patches] @ _embed, 2)


def seconds(work: Callable[[int], None], size: int) -> float:
    """CPU time of `work(size)`, which other programs on the machine do not change."""
    start = time.thread_time()
    work(size)
    return time.thread_time() - start


def main() -> None:
    """Warms up, then answers each line of standard input."""
    hidden = _rng.standard_normal((1 << 16, BACKBONE), dtype=np.float32)
    encode(256)
    layer(hidden[:256], 2)
    answer(ready=True)
    for line in sys.stdin:
        step = json.loads(line)
        answer(
            encoder_s=[seconds(encode, patches) for patches in step["images"]],
            backbone_s=[seconds(lambda tokens: layer(hidden[:tokens], 1), tokens) for tokens in step["sequences"]],
        )


if __name__ == "__main__":
    main()
