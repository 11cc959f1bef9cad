"""How many tokens' logits to hold at a time, by a model of what a chunk costs.

A chunk of few tokens reads and writes the sum of the unembedding's gradient, D * V float32, more often than its matmul
can hide; one of many only takes memory. What each pass reads and writes is as XLA:GPU fuses the loss (read from its HLO
for an H200): logits float32 are written by their matmul, read by the maximum, by the sum of exponentials and by what
makes their gradient; the sum of the kernel's gradient is added to in its matmul's epilogue.
"""

import dataclasses

from jtrain_kernels.device import DeviceSpec

MATMUL, MEMORY, NETWORK = 0.8, 0.85, 0.8
"""Shares of the makers' peaks that large matmuls, passes over memory, and collectives reach."""

BUDGET_BYTES = 2 * 2**30
"""What a chunk may take, beside the gradients."""

CANDIDATES = tuple(128 * size for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128))
"""Multiples of what fills a tile."""

UNKNOWN = 1024
"""Where nothing is published of a device. Best of 256 to 4096 on two cores of an EPYC with V = 32000."""

ENOUGH = 1.01
"""A chunk that costs 1 % more than the best, and takes less memory, is better."""

_LAUNCH_S = 5e-6
_HOP_S = 1e-5
"""What a kernel and a collective take at least."""

_F32 = 4


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One size of chunks, predicted.

    tokens: of each device.
    seconds: of loss and gradient of all its tokens; matmul_s, softmax_s, sums_s, network_s: what of it the matmuls take
      by themselves, the passes over the logits, what of the gradient's sum no matmul hides, and the collectives.
    temp_bytes: logits and their gradient of a chunk, and the hidden states that it gathers.
    """

    tokens: int
    matmul_s: float
    softmax_s: float
    sums_s: float
    network_s: float
    temp_bytes: int

    @property
    def seconds(self) -> float:
        return self.matmul_s + self.softmax_s + self.sums_s + self.network_s


def predict(
    device: DeviceSpec, chunk: int, *, tokens: int, d_model: int, vocab: int, itemsize: int = 2, shards: int = 1
) -> Chunk | None:
    """Loss and gradient of a device's `tokens` in chunks of `chunk`; None where the device's peaks are unknown.

    Args:
      vocab: all of it; the device has vocab / shards columns, and meets the tokens of all shards.
      itemsize: bytes of what is multiplied.
    """
    peak = device.peak_bf16_flops if itemsize == 2 else None
    if peak is None or device.hbm_bytes_per_s is None:
        return None
    chunk = min(chunk, tokens)
    times, met, columns = -(-tokens // chunk), chunk * shards, -(-vocab // shards)
    flops, memory = peak * MATMUL, device.hbm_bytes_per_s * MEMORY
    product_s = 2 * met * d_model * columns / flops
    states, kernel, gradient = met * d_model * itemsize, d_model * columns * itemsize, met * columns * itemsize
    logits, total = met * columns * _F32, d_model * columns * _F32
    # Bytes of the three matmuls: logits, gradient of the states, gradient of the kernel.
    moved = (states + kernel + logits, gradient + kernel + states, gradient + states + 2 * total)
    matmul_s = 3 * product_s
    sums_s = sum(max(0.0, size / memory - product_s) for size in moved)
    softmax_s = (3 * logits + gradient) / memory + 6 * _LAUNCH_S
    network_s = 0.0
    if shards > 1:
        link = (device.link_bytes_per_s or device.hbm_bytes_per_s) * NETWORK
        network_s = 2 * states * (shards - 1) / shards / link + 3 * _HOP_S
    temp = logits + gradient + (2 * states if shards > 1 else 0)
    return Chunk(chunk, times * matmul_s, times * softmax_s, times * sums_s, times * network_s, temp)


def best_chunk(
    device: DeviceSpec,
    *,
    tokens: int,
    d_model: int,
    vocab: int,
    itemsize: int = 2,
    shards: int = 1,
    budget_bytes: int = BUDGET_BYTES,
) -> tuple[int, str]:
    """Tokens of a chunk, and why: the fewest within 1 % of the fastest that the budget allows."""
    sizes = dict(tokens=tokens, d_model=d_model, vocab=vocab, itemsize=itemsize, shards=shards)
    found = [predict(device, chunk, **sizes) for chunk in CANDIDATES]
    known = [chunk for chunk in found if chunk is not None]
    if not known:
        return min(UNKNOWN, tokens), f"nothing is published of a {device.name}'s peaks, so the usual size"
    fitting = [chunk for chunk in known if chunk.temp_bytes <= budget_bytes]
    if not fitting:
        least = min(known, key=lambda chunk: chunk.temp_bytes)
        return least.tokens, f"{least.temp_bytes / 2**30:.2f} GiB is over the budget, but no chunk takes less"
    fastest = min(chunk.seconds for chunk in fitting)
    best = min((c for c in fitting if c.seconds <= ENOUGH * fastest), key=lambda chunk: chunk.temp_bytes)
    return best.tokens, (
        f"{best.seconds * 1e3:.3g} ms predicted on a {device.name}, {best.sums_s * 1e3:.3g} of it for the gradient's "
        f"sum that no matmul hides; {best.temp_bytes / 2**30:.2f} GiB"
    )
