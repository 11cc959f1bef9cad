"""Adapters of low rank: which matrices have one, and the parameters that it adds."""

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import Literal

from jtrain.errors import UserError, did_you_mean, first_few
from jtrain.layout.dims import ADAPTER, ParamInfo
from jtrain.layout.precision import BLOCK, CODES_PER_BYTE


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Trains matrices A and B beside frozen ones: `x W + scale (x A) B` (arXiv:2106.09685).

    B begins at zero, so the first step has the losses of the base.

    rank: columns of A and rows of B, R.
    alpha: scale is alpha / rank; with `rslora` alpha / sqrt(rank) (arXiv:2312.03732).
    rslora: True divides by the square root of the rank, so that large ranks learn as fast.
    targets: names of matrices of the layers that get an adapter, as patterns: `q`, `mlp.*`, `*`. A name is
      the end of a parameter's path with or without its dimensions: `layers.attention.q_DNH` is also `q`,
      `attention.q` and `q_DNH`. Experts of a mixture have one each.
    dropout: share of the inputs of A that a train step replaces by zero, the others being multiplied by
      1 / (1 - dropout); for each matrix its own, and never in an evaluation. By place, so the same on every
      layout (`jtrain.model.adapters.dropout`). Not for experts.
    train: further parameters that are trained, whole, by the same kind of patterns: `*norm*`, `embed`.
    base: workdir, or checkpoint in one (`runs/a/checkpoints/1000`), of the frozen weights, as `jtrain hf
      import` writes it; None draws them from the seed.
    start: folder of peft whose A and B the run begins with; None draws A, and B is zero.
    base_dtype: number format of the frozen weights; None is `precision.param_dtype`. With `nf4` or `int8` the
      matrices of the layers, but for routers, are in blocks (`jtrain.model.adapters.block_quantization`), and
      other frozen weights in bfloat16.

    Raises:
      UserError: a value out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("*",)
    train: tuple[str, ...] = ()
    dropout: float = 0.0
    rslora: bool = False
    base: str | None = None
    start: str | None = None
    base_dtype: Literal["float32", "bfloat16", "nf4", "int8"] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"adapter.rank={self.rank} must be at least 1.")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"adapter.alpha={self.alpha} must be a finite number above 0.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"adapter.dropout={self.dropout} must be 0 or more, and less than 1.")
        if not self.targets:
            raise UserError('adapter.targets is empty. Name matrices, such as ("q", "v"), or "*" for all.')
        if self.base_dtype not in (None, "float32", "bfloat16", *CODES_PER_BYTE):
            raise UserError(
                f"adapter.base_dtype={self.base_dtype!r} must be float32, bfloat16, nf4, int8 or None."
            )

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def infos(self, infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
        """All parameters of a model with this adapter, sorted by path: those of the base, frozen unless
        `train` names them, and A and B of every target.

        Raises:
          UserError: a pattern matches nothing, or a target is trained whole as well.
        """
        targets = _matching("targets", self.targets, [info for info in infos if _can_adapt(info)])
        trained = _matching("train", self.train, infos)
        if both := sorted(targets & trained):
            raise UserError(
                f"adapter.train and adapter.targets both name {first_few(both, 3)}: a matrix is trained "
                "whole or has an adapter. Take it out of one of them."
            )
        return _adapted(infos, targets, trained, self.rank, self.base_dtype)


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Matrices that an adapter adds and freezes, by names of parameters without the path to their layer.

    targets: names of matrices with an adapter; trained: of parameters that are trained whole.
    """

    rank: int
    targets: tuple[str, ...]
    trained: tuple[str, ...]
    base_dtype: str | None

    @classmethod
    def of(cls, infos: Sequence[ParamInfo]) -> "Adaptation | None":
        """Adaptation of a model with an adapter; None without one."""
        added = [info for info in infos if info.is_adapter]
        if not added:
            return None
        targets = {info.path.rpartition(ADAPTER)[0] for info in added}
        trained = {info.path for info in infos if not info.is_adapter and not info.frozen}
        own, whole = (
            tuple(sorted({path.rpartition(".")[2] for path in paths})) for paths in (targets, trained)
        )
        rank = added[0].shape[added[0].dims.index("R")]
        # Where matrices are in blocks, the others are in bfloat16.
        dtypes = [info.dtype for info in infos if info.frozen]
        return cls(rank, own, whole, next((dtype for dtype in dtypes if dtype in CODES_PER_BYTE), dtypes[0]))

    @property
    def block(self) -> int:
        """Numbers of a block of frozen matrices; 1 if they are in no blocks."""
        return BLOCK if self.base_dtype in CODES_PER_BYTE else 1

    def infos(self, infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
        """The parameters of another model with adapters at the same names."""
        named = {info.path: info.path.rpartition(".")[2] for info in infos}
        targets, trained = (
            {path for path, name in named.items() if name in names} for names in (self.targets, self.trained)
        )
        return _adapted(infos, targets, trained, self.rank, self.base_dtype)


def _adapted(
    infos: Sequence[ParamInfo], targets: set[str], trained: set[str], rank: int, base_dtype: str | None
) -> tuple[ParamInfo, ...]:
    """All parameters of a model, frozen but for `trained`, and A and B of the paths `targets`."""
    rest = "bfloat16" if base_dtype in CODES_PER_BYTE else base_dtype
    base = [
        info
        if info.path in trained
        else dataclasses.replace(info, frozen=True, dtype=base_dtype if _can_adapt(info) else rest)
        for info in infos
    ]
    added = [part for info in infos if info.path in targets for part in _parts(info, rank)]
    return tuple(sorted([*base, *added], key=lambda info: info.path))


def _parts(info: ParamInfo, rank: int) -> tuple[ParamInfo, ParamInfo]:
    """A and B of a target."""
    lead = len(info.dims) - len(info.dims.removeprefix("Y").removeprefix("X"))
    first_out = lead + info.num_inputs
    stack, ins, outs = slice(0, lead), slice(lead, first_out), slice(first_out, None)

    def part(name: str, dims: str, shape: tuple[int, ...], std: float) -> ParamInfo:
        dims, shape = info.dims[stack] + dims, (*info.shape[stack], *shape)
        path = f"{info.path}{ADAPTER}.{name}_{dims.removeprefix('Y')}"
        return ParamInfo(path, shape, dims, "normal", std, info.top_k)

    # A as peft draws it, of variance 1 / (3 fan_in). B is normal of deviation 0: a matrix of zeros.
    std = (3 * math.prod(info.shape[ins])) ** -0.5
    return (
        part("A", info.dims[ins] + "R", (*info.shape[ins], rank), std),
        part("B", "R" + info.dims[outs], (rank, *info.shape[outs]), 0.0),
    )


def model_infos(infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
    """The parameters of the model itself among those of one with an adapter."""
    return tuple(dataclasses.replace(info, frozen=False, dtype=None) for info in infos if not info.is_adapter)


def _can_adapt(info: ParamInfo) -> bool:
    """True for matrices of layers, except routers: their outputs choose experts and are no activations."""
    return info.is_matrix and "layers." in info.path and not info.dims.endswith("X")


def _names(path: str) -> list[str]:
    """The names of a parameter: every end of its path, with and without its dimensions."""
    parts = path.split(".")
    plain = [*parts[:-1], parts[-1].rpartition("_")[0] or parts[-1]]
    return [".".join(words[first:]) for words in (parts, plain) for first in range(len(parts))]


def _matching(field: str, patterns: tuple[str, ...], infos: Sequence[ParamInfo]) -> set[str]:
    """Paths of the parameters that a pattern matches.

    Raises:
      UserError: a pattern matches none; names the nearest.
    """
    names = {info.path: _names(info.path) for info in infos}
    matched: set[str] = set()
    for pattern in patterns:
        paths = {path for path, own in names.items() if fnmatch.filter(own, pattern)}
        if not paths:
            known = sorted({own[-1] for own in names.values()})
            kind = "matrix of the layers" if field == "targets" else "parameter"
            raise UserError(
                f"adapter.{field}: {pattern!r} matches no {kind}. {did_you_mean(pattern, known)}There are "
                f"{', '.join(known)}."
            )
        matched |= paths
    return matched
