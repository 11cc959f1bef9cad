"""Cost model for the chunk size of the loss: the number of tokens whose logits exist at a time.

Small chunks read and write the accumulated gradient of the unembedding, D * V float32, more often than their
matmuls can hide; large chunks only take memory. Reads and writes follow XLA:GPU's fusions of the loss (from
its HLO for an H200): float32 logits are written by their matmul, and read by the maximum, by the sum of
exponentials and by the computation of their gradient; the kernel's gradient is accumulated in the epilogue of
its matmul.
"""

import dataclasses

from jtrain_kernels.device import DeviceSpec

MATMUL, MEMORY, NETWORK = 0.8, 0.85, 0.8
"""Fractions of the published peaks that large matmuls, passes over memory, and collectives reach."""

BUDGET_BYTES = 2 * 2**30
"""Memory budget of a chunk, without the gradients."""

CANDIDATES = tuple(128 * size for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128))
"""Candidate chunk sizes, multiples of a tile's 128 rows."""

UNKNOWN = 1024
"""Chunk size for a device without published peaks. Best of 256 to 4096 on two cores of an EPYC with V =
32000."""

ENOUGH = 1.01
"""Accepted cost relative to the fastest chunk size: one that is at most 1 % slower and takes less memory is
better."""

_LAUNCH_S = 5e-6
_HOP_S = 1e-5
"""Minimum time of a kernel, and of a collective."""

_F32 = 4


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Predicted cost of a chunk size, for loss and gradient of all tokens of a device.

    tokens: tokens of a chunk per device.
    matmul_s: time of the matmuls alone.
    softmax_s: time of the passes over the logits.
    sums_s: time to accumulate gradients that no matmul hides.
    network_s: time of the collectives.
    temp_bytes: a chunk's logits, their gradient, and the hidden states that it gathers.
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
    device: DeviceSpec,
    chunk: int,
    *,
    tokens: int,
    d_model: int,
    vocab: int,
    itemsize: int = 2,
    shards: int = 1,
) -> Chunk | None:
    """Predicts the cost of a device's `tokens` in chunks of `chunk`; None if the device's peaks are unknown.

    Args:
      vocab: size of the whole vocabulary; the device has vocab / shards columns and processes all shards'
        tokens.
      itemsize: bytes per element of the matmuls' operands.
    """
    # Float32 matmuls have no published peak, so their chunk is not predicted.
    peak = device.peak_bf16_flops if itemsize == 2 else None
    if peak is None or device.hbm_bytes_per_s is None:
        return None
    # A device with fewer tokens than a chunk has one smaller chunk.
    chunk = min(chunk, tokens)
    # A chunk has `chunk` tokens of each shard's device.
    num_chunks, chunk_tokens, columns = -(-tokens // chunk), chunk * shards, -(-vocab // shards)
    flops, memory = peak * MATMUL, device.hbm_bytes_per_s * MEMORY
    product_s = 2 * chunk_tokens * d_model * columns / flops
    states, kernel, gradient = (
        chunk_tokens * d_model * itemsize,
        d_model * columns * itemsize,
        chunk_tokens * columns * itemsize,
    )
    logits, total = chunk_tokens * columns * _F32, d_model * columns * _F32
    # Bytes of the three matmuls: logits, gradient of the states, gradient of the kernel.
    moved_bytes = (states + kernel + logits, gradient + kernel + states, gradient + states + 2 * total)
    matmul_s = 3 * product_s
    # Only the bytes that take longer than their matmul count; the rest hides behind it.
    sums_s = sum(max(0.0, size / memory - product_s) for size in moved_bytes)
    # Three readings of the logits and one writing of their gradient; a launch for each of six fusions.
    softmax_s = (3 * logits + gradient) / memory + 6 * _LAUNCH_S
    network_s = 0.0
    if shards > 1:
        link = (device.link_bytes_per_s or device.hbm_bytes_per_s) * NETWORK
        # States are gathered, gradients scattered; the parts of the log-partition are a third collective.
        network_s = 2 * states * (shards - 1) / shards / link + 3 * _HOP_S
    temp = logits + gradient + (2 * states if shards > 1 else 0)
    return Chunk(
        chunk,
        num_chunks * matmul_s,
        num_chunks * softmax_s,
        num_chunks * sums_s,
        num_chunks * network_s,
        temp,
    )


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
    """Best tokens per chunk, and the reason: the fewest within 1 % of the fastest that fits the budget."""
    sizes = dict(tokens=tokens, d_model=d_model, vocab=vocab, itemsize=itemsize, shards=shards)
    predictions = [predict(device, chunk, **sizes) for chunk in CANDIDATES]
    costs = [chunk for chunk in predictions if chunk is not None]
    if not costs:
        return min(UNKNOWN, tokens), f"no peaks are published for a {device.name}, so the default size"
    fitting = [chunk for chunk in costs if chunk.temp_bytes <= budget_bytes]
    if not fitting:
        # Nothing fits: the smallest is taken, and the reason says that it is over the budget.
        smallest = min(costs, key=lambda chunk: chunk.temp_bytes)
        return (
            smallest.tokens,
            f"{smallest.temp_bytes / 2**30:.2f} GiB is over the budget, but no chunk takes less",
        )
    fastest = min(chunk.seconds for chunk in fitting)
    best = min((c for c in fitting if c.seconds <= ENOUGH * fastest), key=lambda chunk: chunk.temp_bytes)
    return best.tokens, (
        f"{best.seconds * 1e3:.3g} ms predicted on a {device.name}, {best.sums_s * 1e3:.3g} of it to "
        f"accumulate gradients that no matmul hides; {best.temp_bytes / 2**30:.2f} GiB"
    )
