"""Flows that switches spread over links of equal cost by a hash (ECMP): how uneven the links' loads are.

A connection between two adapters is one flow. With several queue pairs per connection, and switches that hash
the destination queue pair too (E-ECMP, Meta, SIGCOMM 2024), each queue pair is a flow of its own, of a part
of the bytes. The last link to finish decides, so what counts is the expected load of the fullest link: balls
thrown into bins.
"""

import math

import numpy as np

NEGLIGIBLE = 1e-30
"""Probability that is left out."""


def expected_max_load(flows: int, links: int, queue_pairs: int = 1) -> float:
    """Expected load of the fullest link, in flows; exact.

    The loads of n = flows * queue_pairs balls in `links` bins are independent Poisson variables, given that
    their sum is n. So P(all loads <= m) is the coefficient of x^n in (sum of the Poisson masses up to m,
    times x^k)^links, by the Poisson mass at n of their sum; and the expectation is the sum over m of P(some
    load > m).
    """
    balls = flows * queue_pairs
    if links == 1:
        return float(flows)
    mean = balls / links
    log_mass = np.arange(balls + 1) * math.log(mean) - mean - _log_factorials(balls)
    mass = np.exp(log_mass)
    lightest = int(np.argmax(mass > NEGLIGIBLE))  # loads below have no part of the sum
    # The Poisson mass at `balls` of the sum, by which the coefficient is divided.
    total = math.exp(balls * math.log(balls) - balls - math.lgamma(balls + 1))
    first_limit = math.ceil(mean)
    expected = float(first_limit)  # some link has at least the mean
    for limit in range(first_limit, balls + 1):
        at_most = _coefficient(mass[lightest : limit + 1], links, balls - links * lightest) / total
        # Further terms are smaller still.
        if at_most > 1 - 1e-9:
            break
        expected += 1 - max(0.0, at_most)
    return expected / queue_pairs


def simulated_max_load(
    flows: int, links: int, queue_pairs: int = 1, *, trials: int = 4000, seed: int = 0
) -> float:
    """Mean load of the fullest link over `trials` random hashes, in flows."""
    rng = np.random.default_rng((seed, flows, links, queue_pairs))
    loads = rng.multinomial(flows * queue_pairs, np.full(links, 1 / links), size=trials)
    return float(loads.max(axis=1).mean()) / queue_pairs


def effective_queue_pairs(
    queue_pairs: int, array_bytes: float, channels: int, chunk_bytes: int = 512 * 1024
) -> int:
    """Queue pairs that carry bytes of one collective: no more than it sends messages on a connection.

    With `NCCL_IB_SPLIT_DATA_ON_QPS=0` NCCL posts whole messages in turn, each on the next queue pair.

    Args:
      array_bytes: what one adapter sends; channels: connections that share it.
      chunk_bytes: one message: an eighth of `NCCL_BUFFSIZE`, 4 MiB.
    """
    return max(1, min(queue_pairs, math.floor(array_bytes / (channels * chunk_bytes))))


def _log_factorials(largest: int) -> np.ndarray:
    """Logarithms of 0! to largest!."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, largest + 1)))])


def _coefficient(polynomial: np.ndarray, power: int, index: int) -> float:
    """Coefficient of x^index of a polynomial to a power, by Fourier transforms."""
    degree = power * (len(polynomial) - 1)
    if not 0 <= index <= degree:
        return 0.0
    size = 1 << degree.bit_length()
    base = np.fft.rfft(polynomial, size)
    raised = np.ones_like(base)
    while power:  # several times faster than the power of complex numbers
        if power % 2:
            raised = raised * base
        base, power = base * base, power // 2
    return float(np.fft.irfft(raised, size)[index])
