"""Rotary position embedding, with the frequency scaling of Llama 3.1 and later."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling that stretches wavelengths longer than the context of pretraining.

    Frequencies whose wavelength is over `original_seq_len / low_freq_factor` are divided by `factor`; those
    under `original_seq_len / high_freq_factor` stay; frequencies between the two are blended.
    Source: Llama 3.1's `rope_scaling` of type `llama3` (arXiv:2407.21783, section 3.4.2).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of base `theta` (arXiv:2104.09864), in the half-split layout of Llama checkpoints."""

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position, float32 [H / 2]."""
        # float64 until the last line, so that each frequency is rounded once.
        freq = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is not None:
            s = self.scaling
            wavelengths_in_context = s.original_seq_len * freq / (2 * math.pi)
            unscaled = (wavelengths_in_context - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            # 1: the wavelength is short and its frequency stays; 0: it is long and divided by `factor`.
            unscaled = np.clip(unscaled, 0.0, 1.0)
            freq = unscaled * freq + (1 - unscaled) * freq / s.factor
        return freq.astype(np.float32)

    def tables(
        self, position_BL: Int[Array, "B L"], head_dim: int
    ) -> tuple[Float[Array, "B L R"], Float[Array, "B L R"]]:
        """Cosine and sine of every position's angles, float32."""
        angle = position_BL[..., None].astype(jnp.float32) * self.frequencies(head_dim)[None, None, :]
        return jnp.cos(angle), jnp.sin(angle)
