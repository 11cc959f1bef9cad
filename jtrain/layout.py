"""Where every array lives: sharding, dtype and bytes of parameters, gradients and optimizer state.

The rule is one table, `SPLITS`: which mesh axis splits which dimension. `tensor` always splits its dimensions, and
`expert` the experts of a mixture.
`data` splits D, as far as the ZeRO stage says (arXiv:1910.02054): optimizer state from stage 1, gradients from stage
2, parameters from stage 3. Norm scales are whole on every device at every stage: they are a ten-thousandth of a
model, and gathering them would cost a collective each.

What is offloaded lies in `pinned_host` memory between its uses, whole arrays at a time, so neither the state's tree nor
a checkpoint knows of it. Norm scales stay on the device: copies of their own would cost more than they free.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec as P

from jtrain.dims import ParamInfo
from jtrain.mesh import AXES, BATCH_AXES, MeshSpec, shard_size

SPLITS = {"N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "D": "data", "X": "expert"}
"""Dimension letter -> the mesh axis that may split it."""

FIELDS = {"N": "model.num_heads", "K": "model.num_kv_heads", "F": "model.d_ff", "V": "model.vocab_size"}
FIELDS |= {"D": "model.d_model", "X": "model.moe.num_experts"}
"""Dimension letter -> the config field that sizes it, for messages."""

type Dtype = Literal["float32", "bfloat16"]

type MatmulDtype = Literal["compute", "fp8_current", "fp8_delayed"]

type Share = float | Literal["none", "as_needed"]
"""From 0.0 to 1.0; `as_needed` is the smallest that makes the run fit."""

type ContextOrder = Literal["contiguous", "zigzag"]

type MemoryKind = Literal["device", "pinned_host"]
"""As XLA names them."""


@dataclasses.dataclass(frozen=True)
class OffloadSpec:
    """What is kept in the host's memory; changes speed and device memory, never the losses.

    optimizer: share of the bytes of the optimizer's state (moments, their scales, master weights). Kept array by array,
      the largest first, so the share that is reached may be a little lower: the plan prints it.
    params: share of the bytes of the layers' parameters, array by array too; each layer's part comes when it is needed.
    activations: share of the bytes that each layer keeps for its backward pass, name by name.
    update: where offloaded optimizer state is updated: `device` streams it there and back, layer by layer; `host`
      computes AdamW on the host's cores (ZeRO-Offload, arXiv:2101.06840) and streams gradients and parameters instead.
    unified_memory: one memory for both (Grace Hopper): the driver moves pages, and nothing is placed.
    """

    optimizer: Share = "none"
    params: Share = "none"
    activations: Share = "none"
    update: Literal["device", "host"] = "device"
    unified_memory: bool = False

    def __post_init__(self) -> None:
        for name in ("optimizer", "params", "activations"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value not in ("none", "as_needed") and not (number and 0 <= value <= 1):
                raise ValueError(
                    f"layout.offload.{name}={value!r} must be a share from 0.0 to 1.0, `none`, or `as_needed`, which "
                    "takes the smallest share that fits."
                )
        if self.update not in ("device", "host"):
            raise ValueError(f"layout.offload.update={self.update!r} must be `device` or `host`.")
        if self.update == "host" and self.optimizer in ("none", 0):
            raise ValueError(
                f"layout.offload.update=host computes on optimizer state in host memory, but layout.offload.optimizer="
                f"{self.optimizer} keeps none there. Set layout.offload.optimizer=1.0, or layout.offload.update=device."
            )
        placed = [name for name in ("optimizer", "params", "activations") if getattr(self, name) not in ("none", 0)]
        if self.unified_memory and placed:
            raise ValueError(
                f"layout.offload.unified_memory=True leaves it to the driver where pages are, but layout.offload."
                f"{placed[0]}={getattr(self, placed[0])} places arrays. Set one of the two."
            )

    def share(self, name: Literal["optimizer", "params", "activations"]) -> float:
        """The share as a number.

        Raises:
          ValueError: it is still `as_needed`.
        """
        value = getattr(self, name)
        if value == "as_needed":
            raise ValueError(
                f"layout.offload.{name}=as_needed has to be resolved first: no share fits everywhere. `jtrain.plan` "
                "finds the smallest that fits the devices."
            )
        return 0.0 if value == "none" else float(value)


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
    tensor_overlap: collectives over `tensor` travel piece by piece while a layer's matmuls compute, unless the kernels'
      cost model says that it loses.
    matmul_dtype: of the operands of the layers' weight products in training: `compute` is compute_dtype; `fp8_current`
      and `fp8_delayed` round them to 8-bit floats (e4m3, gradients e5m2), each tensor scaled by its own largest number
      or by the largest of the steps before. Evaluation and what is exported compute in compute_dtype.
    offload: what is kept in the host's memory.
    context_attention: over `context`, `ring` sends keys and values round while blocks of scores are computed
      (arXiv:2310.01889); `ulysses` exchanges positions for heads and back (arXiv:2309.14509).
    kernels: implementations of ops to take whatever `jtrain_kernels.registry` would choose: (("attention", "cudnn"),).
    auto: zero_stage, remat, remat_save, microbatches and offload are picked by `jtrain.plan.search` so that the run
      fits with the least predicted time; what the config says of them is replaced, and config.txt holds what was
      picked.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    microbatches: int = 1
    remat: Literal["none", "full", "named"] = "none"
    remat_save: tuple[str, ...] = ()
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    reduce_dtype: Dtype = "float32"
    tensor_overlap: bool = False
    matmul_dtype: MatmulDtype = "compute"
    offload: OffloadSpec = OffloadSpec()
    context_attention: Literal["ring", "ulysses"] = "ring"
    kernels: tuple[tuple[str, str], ...] = ()
    auto: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"layout.zero_stage={self.zero_stage!r} must be 0, 1, 2 or 3.")
        if self.matmul_dtype not in ("compute", "fp8_current", "fp8_delayed"):
            raise ValueError(
                f"layout.matmul_dtype={self.matmul_dtype!r} must be `compute`, `fp8_current` or `fp8_delayed`."
            )
        if self.microbatches < 1:
            raise ValueError(f"layout.microbatches={self.microbatches} must be at least 1.")
        if (self.remat == "named") != bool(self.remat_save):
            raise ValueError(
                f"layout.remat={self.remat!r} with layout.remat_save={self.remat_save!r}: names are what remat=named "
                "keeps, and only that. Set both or neither."
            )
        if len(dict(self.kernels)) < len(self.kernels):
            raise ValueError(f"layout.kernels={self.kernels!r} names an op twice. Keep one implementation for each.")


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where one parameter, its gradient and its optimizer state live.

    data_dim, tensor_dim, expert_dim: index into `info.shape` of the dimension those axes may split, None if none.
    param_memory: where the parameter is between its uses. Where its optimizer state is, array by array, depends on what
      the optimizer keeps: `Layout.host_state`.
    """

    info: ParamInfo
    zero_stage: int
    data_dim: int | None
    tensor_dim: int | None
    param_memory: MemoryKind = "device"
    expert_dim: int | None = None

    def spec(self, *, over_data: bool) -> P:
        """The partition over `tensor` and `expert`, and if asked over `data`."""
        axes: list[str | None] = [None] * len(self.info.shape)
        if self.expert_dim is not None:
            axes[self.expert_dim] = "expert"
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
    """The layout of a whole model on a mesh.

    rings: how the devices along `data` lie in a torus, one number per dimension, the slowest first: collectives over
      `data` go along one after the other. Empty where they are one collective; `jtrain.gather.along_torus` fills it.
    context_order: which positions of a row the devices along `context` have: see `jtrain.data.place.context_order`.
    """

    spec: LayoutSpec
    mesh: MeshSpec
    params: tuple[ParamLayout, ...]
    rings: tuple[int, ...] = ()
    context_order: ContextOrder = "zigzag"

    def local_size(self, spec: P, shape: tuple[int, ...]) -> int:
        """Elements that one device holds of an array of `shape` under `spec`."""
        shards = math.prod(self.mesh.shape[axis] for axis in spec if axis is not None)
        return math.prod(shape) // shards

    def host_state(self, sizes: Mapping[tuple[str, str], int]) -> frozenset[tuple[str, str]]:
        """Which arrays of the optimizer's state are kept in host memory.

        Args:
          sizes: bytes of every array of the whole model, by path of its parameter and name (`mu`, `nu`, ...).
        """
        total = sum(sizes.values())
        matrices = {p.info.path for p in self.params if p.info.is_matrix}
        movable = {key: size for key, size in sizes.items() if key[0] in matrices}
        share = self.spec.offload.share("optimizer")
        budget = share * total
        if self.spec.offload.update == "device":
            return _moved("optimizer", share, total, largest_first(budget, movable), movable)
        together: dict[str, int] = {}  # the host's cores update all of a parameter's state, or none
        for (path, _), size in movable.items():
            together[path] = together.get(path, 0) + size
        chosen = _moved("optimizer", share, total, largest_first(budget, together), together)
        return frozenset(key for key in movable if key[0] in chosen)


def largest_first[K](budget_bytes: float, sizes: Mapping[K, int]) -> frozenset[K]:
    """Keys whose sizes together stay within the budget: the largest first, each that still fits."""
    left = budget_bytes + 1e-6 * sum(sizes.values())  # 0.3 of a sum is not exact
    chosen: list[K] = []
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= left:
            chosen.append(key)
            left -= size
    return frozenset(chosen)


def _moved[K](name: str, share: float, total: int, chosen: frozenset[K], sizes: Mapping[K, int]) -> frozenset[K]:
    """What is chosen.

    Raises:
      ValueError: a share is asked for, and nothing is chosen.
    """
    if share > 0 and not chosen and sizes:
        smallest = min(sizes.values()) / total
        raise ValueError(
            f"layout.offload.{name}={share:g} moves nothing: the smallest array is {smallest:.1%} of the bytes. "
            f"Set layout.offload.{name} to at least that, or to `none`."
        )
    return chosen


def make_layout(
    spec: LayoutSpec, mesh: MeshSpec, infos: tuple[ParamInfo, ...], *, context_order: ContextOrder = "zigzag"
) -> Layout:
    """Decides where every array of a model lives.

    Raises:
      ValueError: a dimension does not split evenly over its axis; an axis that nothing uses yet is over 1, or one that
        an option is for is 1; attention cannot be split over `context` so; or a share to offload is not resolved to a
        number.
    """
    _check_context(spec, mesh, infos, context_order)
    shares = {name: spec.offload.share(name) for name in ("optimizer", "params", "activations")}
    stacked = {info.path: info.size for info in infos if info.is_matrix and info.dims.startswith("Y")}
    total = sum(stacked.values())
    on_host = _moved("params", shares["params"], total, largest_first(shares["params"] * total, stacked), stacked)
    unused = {"stage": "no layout splits anything over it yet"}
    if not any(info.is_experts for info in infos):
        unused["expert"] = "this model has no experts (model.moe=None)"
    for axis, reason in unused.items():
        if mesh.shape[axis] != 1:
            raise ValueError(
                f"mesh.{axis}={mesh.shape[axis]}: {reason}, so its devices would repeat each other's work. Set "
                f"mesh.{axis}=1 and use mesh.data, mesh.context, mesh.tensor or mesh.replica."
            )
    if spec.tensor_overlap and mesh.tensor == 1:
        raise ValueError(
            "layout.tensor_overlap=True with mesh.tensor=1: nothing travels over `tensor` that could hide. Set "
            "mesh.tensor to 2 or more, or layout.tensor_overlap=False."
        )
    layouts: list[ParamLayout] = []
    for info in infos:
        dims: dict[str, int | None] = {"data": None, "tensor": None, "expert": None}
        if info.is_matrix:
            for index, letter in enumerate(info.dims):
                axis = SPLITS.get(letter)
                # Stage 0 splits nothing over data, so it asks nothing of D.
                if axis is None or (axis == "data" and spec.zero_stage == 0):
                    continue
                if axis == "expert" and not info.is_experts:
                    continue  # a router scores all experts on every device
                shard_size(FIELDS[letter], info.shape[index], mesh.shape, (axis,))
                dims[axis] = index
        memory: MemoryKind = "pinned_host" if info.path in on_host else "device"
        layouts.append(ParamLayout(info, spec.zero_stage, dims["data"], dims["tensor"], memory, dims["expert"]))
    return Layout(spec, mesh, tuple(layouts), context_order=context_order)


def _check_context(spec: LayoutSpec, mesh: MeshSpec, infos: tuple[ParamInfo, ...], order: ContextOrder) -> None:
    """Refuses what attention over `context` cannot do, or not evenly.

    Raises:
      ValueError: see there.
    """
    if mesh.context == 1:
        return
    if spec.context_attention == "ring":
        if order != "zigzag":
            raise ValueError(
                f"layout.context_attention=ring with data.context_order={order}: under a causal mask the last of "
                f"mesh.context={mesh.context} devices would have all of the work at the end. Set "
                "data.context_order=zigzag, or layout.context_attention=ulysses."
            )
        return
    size = {letter: n for info in infos for letter, n in zip(info.dims, info.shape, strict=True)}
    heads, kv_heads = size["N"] // mesh.tensor, size["K"] // mesh.tensor
    if heads % mesh.context or (kv_heads % mesh.context and mesh.context % kv_heads):
        over = f" / mesh.tensor={mesh.tensor}" if mesh.tensor > 1 else ""
        raise ValueError(
            f"layout.context_attention=ulysses gives each of mesh.context={mesh.context} devices a part of the heads, "
            f"but model.num_heads={size['N']}{over} is {heads}, and model.num_kv_heads={size['K']}{over} is "
            f"{kv_heads}. mesh.context must divide the former, and divide or be a multiple of the latter: change it, "
            "or set layout.context_attention=ring."
        )


def check_batch(spec: LayoutSpec, mesh: MeshSpec, *, global_batch: int, seq_len: int) -> int:
    """Sequences that one device computes at a time.

    Raises:
      ValueError: sequences or positions do not split evenly.
    """
    rows = shard_size("data.global_batch", global_batch, mesh.shape, BATCH_AXES)
    shard_size("data.seq_len", seq_len, mesh.shape, ("context", "tensor"))
    # Under ulysses only rows in zig-zag order have to, which the data says.
    if mesh.context > 1 and spec.context_attention == "ring" and seq_len % (2 * mesh.context):
        below = seq_len - seq_len % (2 * mesh.context)
        raise ValueError(
            f"data.seq_len={seq_len} over mesh.context={mesh.context}: each device has an early and a late part of a "
            f"row, so it must be a multiple of {2 * mesh.context}. Nearest: {below}, {below + 2 * mesh.context}."
        )
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
