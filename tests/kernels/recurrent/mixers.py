"""The recurrences that share tests, each with its reference and inputs: the gated delta rule with a decay per
head and per channel (KDA), and Mamba-2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain_kernels.delta_rule.api import delta_rule
from jtrain_kernels.delta_rule.reference import delta_rule_reference
from jtrain_kernels.mamba2.api import mamba2
from jtrain_kernels.mamba2.reference import mamba2_reference
from jtrain_kernels.recurrence.documents import RecurrentState
from tests.kernels.gradients import normal

B, K, N, H, P = 2, 2, 4, 8, 4
"""Sequences, key heads, value heads, and sizes of a key and a value."""

CHUNK = 8
"""Tokens of a chunk where a test does not choose: each doubling takes a fifth longer to compile."""


def wide(x: Any) -> jax.Array:
    """Float32, or float64 in the reference."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A recurrence of normal numbers: `run` and `reference` make log-decays and step sizes of them.

    shapes: of the inputs, for a length.
    per_token: number of inputs that are per token; they come first.
    gate: index of the input that log-decays are made of; -softplus of it or softplus times a rate.
    run: inputs, segments, and keywords of the op -> y and the state.
    reference: inputs, segments, state, its segment -> y and the state, token by token.
    """

    name: str
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    per_token: int
    gate: int
    run: Callable[..., tuple[jax.Array, RecurrentState]]
    reference: Callable[..., tuple[jax.Array, jax.Array]]

    def inputs(self, length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
        return tuple(normal(seed + i, *shape) for i, shape in enumerate(self.shapes(length)))

    def __str__(self) -> str:
        return self.name


def _delta_gates(g: Any, beta: Any) -> tuple[jax.Array, jax.Array]:
    # Betas up to 2, where the state may change its sign.
    return -jax.nn.softplus(wide(g) - 1.0), 2.0 * jax.nn.sigmoid(wide(beta))


def _delta(q: Any, k: Any, v: Any, g: Any, beta: Any, segment: Any, **keywords: Any) -> Any:
    keywords = {"chunk": CHUNK, "normalize": True, **keywords}
    return delta_rule(q, k, v, *_delta_gates(g, beta), segment, **keywords)


def _delta_reference(q: Any, k: Any, v: Any, g: Any, beta: Any, *rest: Any) -> Any:
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return delta_rule_reference(q / jnp.sqrt(float(H)), k, v, *_delta_gates(g, beta), *rest)


def _mamba2(x: Any, dt: Any, b: Any, c: Any, a: Any, d: Any, segment: Any, **keywords: Any) -> Any:
    keywords = {"chunk": CHUNK, **keywords}
    return mamba2(x, jax.nn.softplus(wide(dt)), -jnp.exp(wide(a)), b, c, wide(d), segment, **keywords)


def _mamba2_reference(x: Any, dt: Any, b: Any, c: Any, a: Any, d: Any, *rest: Any) -> Any:
    return mamba2_reference(x, jax.nn.softplus(dt), -jnp.exp(a), b, c, d, *rest)


def _delta_shapes(length: int, *channels: int) -> tuple[tuple[int, ...], ...]:
    key, heads = (B, length, K, H), (B, length, N)
    return key, key, (B, length, N, P), (*heads, *channels), heads


def _mamba2_shapes(length: int) -> tuple[tuple[int, ...], ...]:
    state = (B, length, K, H)
    return (B, length, N, P), (B, length, N), state, state, (N,), (N,)


DELTA_RULE = Mixer("delta_rule", _delta_shapes, 5, 3, _delta, _delta_reference)
KDA = Mixer("kda", lambda length: _delta_shapes(length, H), 5, 3, _delta, _delta_reference)
MAMBA2 = Mixer("mamba2", _mamba2_shapes, 4, 1, _mamba2, _mamba2_reference)
MIXERS = (DELTA_RULE, KDA, MAMBA2)


def packed(seed: int, length: int) -> np.ndarray:
    """Segments of two rows of random documents: of one token, of many, and padding at the end."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(B):
        sizes = [1, *draw.integers(1, length // 2, 30).tolist()]
        row = np.repeat(np.arange(1, len(sizes) + 1), draw.permutation(sizes))
        row = row[: length - draw.integers(0, 6)]
        rows.append(np.pad(row, (0, length - len(row))))
    return np.asarray(rows, np.int32)


def flat(y: Any, state: Any, segment: np.ndarray) -> jax.Array:
    """Results of all tokens that are no padding, and the state, in one vector."""
    y = jnp.where((jnp.asarray(segment) > 0)[..., None, None], wide(y), 0.0)
    return jnp.concatenate([y.reshape(-1), state.reshape(-1)])
