"""Mixers beside each other in one branch, whose results are added (Falcon-H1, arXiv:2507.22448)."""

import dataclasses
import functools
import operator
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.mixer import Mixer, MixerSpec, Rotation
from jtrain.model.norm import NormSpec
from jtrain.model.rope import Positions, RopeSpec
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis


@dataclasses.dataclass(frozen=True)
class ParallelSpec(MixerSpec):
    """Sum of mixers of the same input.

    mixers: of different names; at most one kind of rotation.
    scales: multiply their results.
    """

    name: ClassVar[str] = "mixers"
    mixers: tuple[MixerSpec, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        names = [mixer.name for mixer in self.mixers]
        if len(set(names)) < len(names) or len(names) != len(self.scales):
            raise UserError(
                f"ParallelSpec.mixers={', '.join(names)} with {len(self.scales)} scales: mixers must be of "
                "different kinds, with a scale each."
            )

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "Parallel":
        """The layer."""
        return Parallel(self, sizes, norm, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "ParallelSpec":
        """Each mixer with the sizes that it takes from the model."""
        return dataclasses.replace(self, mixers=tuple(mixer.with_sizes(sizes) for mixer in self.mixers))

    def rotation(self, sizes: ModelSizes) -> tuple[RopeSpec | Positions, int] | None:
        """Rotary positions of the mixer that has them."""
        rotations = (mixer.rotation(sizes) for mixer in self.mixers)
        return next((rotation for rotation in rotations if rotation is not None), None)

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> tuple[Any, ...]:
        """Caches of all mixers."""
        options: Any = dict(batch=batch, max_len=max_len, dtype=dtype)
        return tuple(mixer.empty_cache(sizes, **options) for mixer in self.mixers)

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """FLOPs of all mixers."""
        return sum(mixer.mixing_flops(sizes, seq_len=seq_len) for mixer in self.mixers)


class Parallel(Mixer):
    """The layer of a `ParallelSpec`; each mixer is kept under its own name."""

    def __init__(self, spec: ParallelSpec, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> None:
        for mixer in spec.mixers:
            setattr(self, mixer.name, mixer.module(sizes, norm, layers=layers))
        self.spec = spec

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Sum of the outputs at this device's positions."""
        outputs = (
            getattr(self, mixer.name)(x_BLD, rotation, segment_BL, tensor, context)
            for mixer in self.spec.mixers
        )
        return self._sum(outputs)

    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: Any,
    ) -> tuple[Float[Array, "B L D"], tuple[Any, ...]]:
        """Sum of the outputs at the next positions, and what each mixer keeps."""
        results = [
            getattr(self, mixer.name).extend(x_BLD, rotation, position_BL, valid_BL, mixer_cache)
            for mixer, mixer_cache in zip(self.spec.mixers, cache, strict=True)
        ]
        return self._sum(y_BLD for y_BLD, _ in results), tuple(mixer_cache for _, mixer_cache in results)

    def _sum(self, outputs: Any) -> Float[Array, "B _ D"]:
        first_BLD, *others = (y_BLD * scale for y_BLD, scale in zip(outputs, self.spec.scales, strict=True))
        return functools.reduce(operator.add, others, first_BLD)
