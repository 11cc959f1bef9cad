"""Where every array lives: sharding, dtype and bytes of parameters, gradients and optimizer state.

The rule is one table, `SPLITS`: which mesh axis splits which dimension. `tensor` always splits its dimensions.
`data` splits D, as far as the ZeRO stage says (arXiv:1910.02054): optimizer state from stage 1, gradients from stage
2, parameters from stage 3. Norm scales are whole on every device at every stage: they are a ten-thousandth of a
model, and gathering them would cost a collective each.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec as P

from jtrain.dims import ParamInfo
from jtrain.mesh import AXES, BATCH_AXES, MeshSpec, shard_size

SPLITS = {"N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "D": "data"}
"""Dimension letter -> the mesh axis that may split it."""

FIELDS = {"N": "model.num_heads", "K": "model.num_kv_heads", "F": "model.d_ff", "V": "model.vocab_size"}
FIELDS |= {"D": "model.d_model"}
"""Dimension letter -> the config field that sizes it, for messages."""

type Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
    """How one model is laid out over a mesh; changes speed and memory, never the losses.

    zero_stage: over the `data` axis: 0 all replicated; 1 optimizer state sharded; 2 also gradients; 3 also parameters.
    microbatches: the global batch is computed in this many parts, their gradients added.
    remat: what a layer keeps for its backward pass: `none` recomputes nothing, `full` recomputes all from the
      layer's input, `named` keeps only `remat_save` besides that input.
    remat_save: names out of `jtrain.model.transformer.SAVEABLE`.
    param_dtype: of parameters between steps.
    compute_dtype: of matmuls and activations; softmax, norms and the loss are float32 always.
    reduce_dtype: in which gradients are summed over devices.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    microbatches: int = 1
    remat: Literal["none", "full", "named"] = "none"
    remat_save: tuple[str, ...] = ()
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    reduce_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"layout.zero_stage={self.zero_stage!r} must be 0, 1, 2 or 3.")
        if self.microbatches < 1:
            raise ValueError(f"layout.microbatches={self.microbatches} must be at least 1.")
        if (self.remat == "named") != bool(self.remat_save):
            raise ValueError(
                f"layout.remat={self.remat!r} with layout.remat_save={self.remat_save!r}: names are what remat=named "
                "keeps, and only that. Set both or neither."
            )


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where one parameter, its gradient and its optimizer state live.

    data_dim, tensor_dim: index into `info.shape` of the dimension those axes may split, None if none.
    """

    info: ParamInfo
    zero_stage: int
    data_dim: int | None
    tensor_dim: int | None

    def spec(self, *, over_data: bool) -> P:
        """The partition over `tensor`, and if asked over `data`."""
        axes: list[str | None] = [None] * len(self.info.shape)
        if self.tensor_dim is not None:
            axes[self.tensor_dim] = "tensor"
        if over_data and self.data_dim is not None:
            axes[self.data_dim] = "data"
        return P(*axes)

    @property
    def param(self) -> P:
        return self.spec(over_data=self.zero_stage >= 3)

    @property
    def optimizer(self) -> P:
        """Also of the gradient that the optimizer reads."""
        return self.spec(over_data=self.zero_stage >= 1)

    @property
    def accumulator(self) -> P:
        """Of the gradient while microbatches are added up."""
        return self.spec(over_data=self.zero_stage >= 2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a whole model on a mesh."""

    spec: LayoutSpec
    mesh: MeshSpec
    params: tuple[ParamLayout, ...]

    def local_size(self, spec: P, shape: tuple[int, ...]) -> int:
        """Elements that one device holds of an array of `shape` under `spec`."""
        shards = math.prod(self.mesh.shape[axis] for axis in spec if axis is not None)
        return math.prod(shape) // shards


def make_layout(spec: LayoutSpec, mesh: MeshSpec, infos: tuple[ParamInfo, ...]) -> Layout:
    """Decides where every array of a model lives.

    Raises:
      ValueError: a dimension does not split evenly over its axis; or an axis that nothing uses yet is over 1.
    """
    for axis in ("stage", "expert", "context"):
        if mesh.shape[axis] != 1:
            raise ValueError(
                f"mesh.{axis}={mesh.shape[axis]}: no layout splits anything over `{axis}` yet, so its devices would "
                f"repeat each other's work. Set mesh.{axis}=1 and use mesh.data, mesh.tensor or mesh.replica."
            )
    layouts: list[ParamLayout] = []
    for info in infos:
        dims: dict[str, int | None] = {"data": None, "tensor": None}
        if info.is_matrix:
            for index, letter in enumerate(info.dims):
                axis = SPLITS.get(letter)
                # Stage 0 splits nothing over data, so it asks nothing of D.
                if axis is None or (axis == "data" and spec.zero_stage == 0):
                    continue
                shard_size(FIELDS[letter], info.shape[index], mesh.shape, (axis,))
                dims[axis] = index
        layouts.append(ParamLayout(info, spec.zero_stage, dims["data"], dims["tensor"]))
    return Layout(spec, mesh, tuple(layouts))


def check_batch(spec: LayoutSpec, mesh: MeshSpec, *, global_batch: int, seq_len: int) -> int:
    """Sequences that one device computes at a time.

    Raises:
      ValueError: sequences or positions do not split evenly.
    """
    rows = shard_size("data.global_batch", global_batch, mesh.shape, BATCH_AXES)
    shard_size("data.seq_len", seq_len, mesh.shape, ("context", "tensor"))
    if rows % spec.microbatches:
        shards = global_batch // rows
        raise ValueError(
            f"data.global_batch={global_batch} over {shards} devices is {rows} sequences each, which "
            f"layout.microbatches={spec.microbatches} does not divide. Set data.global_batch to a multiple of "
            f"{shards * spec.microbatches}, or change layout.microbatches."
        )
    return rows // spec.microbatches


def unsplit_axes(spec: P, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes with more than one device over which an array is whole: a gradient must be summed over each."""
    return tuple(axis for axis in AXES if mesh[axis] > 1 and axis not in spec)


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
