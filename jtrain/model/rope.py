"""Rotary position embedding, with the frequency scalings of published models."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling that stretches wavelengths longer than the context of pretraining.

    Frequencies whose wavelength is over `original_seq_len / low_freq_factor` are divided by `factor`; those
    under `original_seq_len / high_freq_factor` stay; frequencies between the two are blended.

    factor: longest context over that of pretraining.
    low_freq_factor: `original_seq_len` over the wavelength from which on all of the scaling counts.
    high_freq_factor: `original_seq_len` over the wavelength up to which none of it counts.
    original_seq_len: context of pretraining, in tokens.

    Source: Llama 3.1's `rope_scaling` of type `llama3` (arXiv:2407.21783, section 3.4.2).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192

    def scale(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies, float64."""
        del theta
        wavelengths_in_context = self.original_seq_len * freq / (2 * math.pi)
        unscaled = (wavelengths_in_context - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        # 1: the wavelength is short and its frequency stays; 0: it is long and divided by `factor`.
        unscaled = np.clip(unscaled, 0.0, 1.0)
        return unscaled * freq + (1 - unscaled) * freq / self.factor


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides all frequencies by `factor` (position interpolation, arXiv:2306.15595).

    factor: longest context over that of pretraining.
    """

    factor: float

    def scale(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies, float64."""
        del theta
        return freq / self.factor


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Rotates the fastest pairs of a head alone, `share` of them, at the frequencies of the whole head (Gemma
    4).

    share: share of the pairs that are rotated.
    """

    share: float

    def scale(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies, float64: 0 for pairs that stay as they are."""
        del theta
        return np.where(np.arange(len(freq)) < int(self.share * len(freq)), freq, 0.0)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3): divides low frequencies by `factor`, blended over a ramp of dims.

    factor: longest context over that of pretraining.
    original_seq_len: context of pretraining, in tokens.
    beta_fast: rotations over `original_seq_len` at which the ramp begins.
    beta_slow: rotations over `original_seq_len` at which the ramp ends.
    truncate: True rounds the ends of the ramp to whole dims.
    attention_factor: multiplies cosine and sine, and with them scores by its square; 1 where the model's
      attention has a scale of its own.
    """

    factor: float
    original_seq_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies, float64."""
        dims = 2 * len(freq)

        def dim_of(rotations: float) -> float:
            # The dim whose angle makes so many rotations over the context of pretraining.
            return dims * math.log(self.original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        # An empty ramp would divide by zero.
        ramp = np.clip((np.arange(len(freq)) - low) / (max(high - low, 0) or 0.001), 0.0, 1.0)
        return freq / self.factor * ramp + freq * (1 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Factor of YaRN by which longer contexts sharpen attention (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of base `theta` (arXiv:2104.09864), in the half-split layout of Llama checkpoints.

    theta: base of the wavelengths: larger ones tell positions farther apart.
    scaling: of the frequencies, for contexts longer than in pretraining.
    rotated_share: share of each head's dims that is rotated: its first ones.
    backwards: True rotates by negative angles (nanochat).
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | LinearScaling | ProportionalScaling | YarnScaling | None = None
    rotated_share: float = 1.0
    backwards: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rotated_share <= 1:
            raise UserError(
                f"rope.rotated_share={self.rotated_share} must be above 0 and at most 1. Set rope=None for "
                "attention without positions."
            )

    def rotated_dims(self, head_dim: int) -> int:
        """Dims of a head that are rotated, in pairs."""
        return int(head_dim * self.rotated_share) // 2 * 2

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position, float32 [R]."""
        dims = self.rotated_dims(head_dim)
        # float64 until the last line, so that each frequency is rounded once.
        freq = self.theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
        if self.scaling is not None:
            freq = self.scaling.scale(freq, self.theta)
        return freq.astype(np.float32)

    def tables(
        self, position_BL: Int[Array, "B L"], head_dim: int
    ) -> tuple[Float[Array, "B L R"], Float[Array, "B L R"]]:
        """Cosine and sine of every position's angles, float32."""
        sign = -1 if self.backwards else 1
        angle = (
            position_BL[..., None].astype(jnp.float32) * (sign * self.frequencies(head_dim))[None, None, :]
        )
        if isinstance(self.scaling, YarnScaling) and self.scaling.attention_factor != 1:
            factor = self.scaling.attention_factor
            return jnp.cos(angle) * factor, jnp.sin(angle) * factor
        return jnp.cos(angle), jnp.sin(angle)


@dataclasses.dataclass(frozen=True)
class QueryTemperature:
    """Factor of queries that grows with their position (arXiv:2501.19399).

    It is 1 + beta * log(1 + floor((position + offset) / scale)), or where it `is_power`
    (1 + (position + offset) / scale) ** beta (Beam).

    beta: growth of the factor; 0 leaves queries as they are.
    scale: positions over which the factor takes one step.
    offset: added to every position.
    is_power: True for the second form.
    """

    beta: float
    scale: int
    offset: int = 0
    is_power: bool = False

    def factor(self, position_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
        """The factor at every position, float32."""
        steps_BL = (position_BL + self.offset).astype(jnp.float32) / self.scale
        if self.is_power:
            return jnp.exp(self.beta * jnp.log1p(steps_BL))
        steps_BL = jnp.floor(steps_BL)
        return 1.0 + self.beta * jnp.log1p(steps_BL)


class PositionTables(NamedTuple):
    """Values that layers read of positions: cosine and sine, factor of queries, and number of the chunk."""

    cos: Any
    sin: Any
    query_factor_BL: Any
    chunk_BL: Any


@dataclasses.dataclass(frozen=True)
class Positions:
    """All that attention reads of positions, where that is more than a rotation.

    rope: None for no rotation.
    temperature: None for no factor of queries.
    chunk_size: positions of a document that see each other alone; None for the whole document.
    """

    rope: RopeSpec | None
    temperature: QueryTemperature | None
    chunk_size: int | None

    @property
    def scaling(self) -> Llama3Scaling | LinearScaling | ProportionalScaling | YarnScaling | None:
        """Scaling of the rotation."""
        return None if self.rope is None else self.rope.scaling

    def rotated_dims(self, head_dim: int) -> int:
        """Dims of a head that are rotated, in pairs."""
        return 0 if self.rope is None else self.rope.rotated_dims(head_dim)

    def tables(self, position_BL: Int[Array, "B L"], head_dim: int) -> PositionTables:
        """Values of every position."""
        rotation = (None, None) if self.rope is None else self.rope.tables(position_BL, head_dim)
        factor_BL = None if self.temperature is None else self.temperature.factor(position_BL)
        chunk_BL = None if self.chunk_size is None else position_BL // self.chunk_size
        return PositionTables(*rotation, factor_BL, chunk_BL)
