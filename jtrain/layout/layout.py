"""Layout: sharding, memory and dtype of every parameter, gradient and optimizer array.

One table, `SPLITS`, decides which mesh axis splits which dimension. `tensor` always splits its dimensions,
and `expert` the experts of an MoE layer. Under a pipeline `stage` splits the layers Y, in the order of
`PipelineLayout.order`, and V together with `tensor`; gradients and optimizer state alike. `data` and
`context` together split D of the arrays that ZeRO shards (arXiv:1910.02054): optimizer state from stage 1,
gradients from stage 2, parameters from stage 3. Norm scales and biases are always replicated: they are a
ten-thousandth of a model, and gathering each would cost a collective.

Where `tensor` has more devices than the model has key heads, several devices share a head. Between steps D of
its kernels is split over `tensor` instead of K, so that nothing is stored twice;
`jtrain.step.zero.exchange_heads` gives each device the kernels of its head once per step.

Offloaded arrays are in `pinned_host` memory between uses. Only whole arrays are offloaded, so the state's
tree and the checkpoints do not depend on it. Norm scales stay on the device: the copies would cost more than
the memory they free.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec as P

from jtrain.errors import UserError
from jtrain.layout.conflicts import check_adapter, check_blocks, check_groups, check_mlp_chunk, check_stages
from jtrain.layout.dims import AdapterDropout, ParamInfo
from jtrain.layout.head_splits import check_context_heads, devices_per_key_head
from jtrain.layout.layout_spec import LayoutSpec as LayoutSpec
from jtrain.layout.mesh import ZERO_AXES, MeshSpec, local_shape, shard_size, unsplit_axes
from jtrain.layout.offload_spec import OFFLOADABLE, check_not_empty, largest_first
from jtrain.layout.offload_spec import OffloadSpec as OffloadSpec
from jtrain.layout.precision import CODES_PER_BYTE, PrecisionSpec
from jtrain.pipeline.pipeline_layout import PipelineLayout, place_layers
from jtrain.pipeline.spec import PipelineSpec

SPLITS = dict.fromkeys("NKFVAO", "tensor") | dict.fromkeys("DQC", "data") | {"X": "expert"}
"""Dimension letter -> mesh axis that may split it, the first one of a parameter; `data` stands for all
`ZERO_AXES`."""

VOCABULARY_AXES = ("stage", "tensor")
"""Axes that split V under a pipeline: every stage computes a part of the embedding and of the loss."""

FIELDS = {"N": "model.num_heads", "K": "model.num_kv_heads", "F": "model.d_ff", "V": "model.vocab_size"}
FIELDS |= {"D": "model.d_model", "X": "model.moe.num_experts", "Q": "mixer.q_rank", "C": "mixer.kv_rank"}
FIELDS |= {"A": "mixer.num_heads", "O": "mixer.num_key_heads"}
"""Dimension letter -> config field with its size, for messages."""

type ContextOrder = Literal["contiguous", "zigzag"]
"""Order of a row's positions over the axis `context`; `zigzag` gives each device an early and a late part, so
that causal attention costs all the same."""

type Kernels = tuple[tuple[str, str], ...]
"""Implementations by op that replace the choice of `jtrain_kernels.registry`: (("attention", "cudnn"),)."""

type MemoryKind = Literal["device", "pinned_host"]
"""Kind of memory, by XLA's name."""


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Layout of one parameter, its gradient and its optimizer state.

    info: the parameter in the state: under a pipeline, `ParamInfo.placed`.
    zero_dim, tensor_dim, expert_dim: index into `info.shape` of the dimension that ZeRO or the axis splits,
      or None.
    param_memory: memory of the parameter between uses. `Layout.host_state` decides the memory of its
      optimizer state.
    gradient_memory: memory of the sum of its gradients, between microbatches and until the update.
    shared_by: number of devices along `tensor` that compute the same key head; more than 1 only for kernels
      of K.
    staged: True under a pipeline: `stage` splits the layers (Y), and `stage` and `tensor` together the
      vocabulary (V).
    """

    info: ParamInfo
    zero_stage: int
    zero_dim: int | None
    tensor_dim: int | None
    param_memory: MemoryKind = "device"
    expert_dim: int | None = None
    shared_by: int = 1
    staged: bool = False
    gradient_memory: MemoryKind = "device"

    def spec(self, *, zero_sharded: bool) -> P:
        """Returns the partition over `stage`, `tensor` and `expert`, and `ZERO_AXES` if `zero_sharded`.

        With shared key heads K is shorter than `tensor`: each device's block then has one head, as in
        `local_shape`.
        """
        axes: list[str | tuple[str, ...] | None] = [None] * len(self.info.shape)
        if self.staged and self.info.is_stacked:
            axes[0] = "stage"
        if self.expert_dim is not None:
            axes[self.expert_dim] = "expert"
        if self.tensor_dim is not None:
            is_vocabulary = self.staged and self.info.dims[self.tensor_dim] == "V"
            axes[self.tensor_dim] = VOCABULARY_AXES if is_vocabulary else "tensor"
        if zero_sharded and self.zero_dim is not None:
            axes[self.zero_dim] = ZERO_AXES
        return P(*axes)

    def dtype(self, precision: PrecisionSpec) -> str:
        """Number format of the parameter between steps."""
        return self.info.dtype or precision.param_dtype

    @functools.cached_property
    def param_partition(self) -> P:
        """Partition of the parameter between steps."""
        if self.shared_by > 1:
            # Shared key heads lie split by D between steps, parameter and optimizer state alike.
            return self.optimizer_partition
        return self.spec(zero_sharded=self.zero_stage >= 3)

    @functools.cached_property
    def optimizer_partition(self) -> P:
        """Partition of the optimizer state, and of the gradient that the optimizer reads."""
        if self.shared_by > 1:
            # `tensor` splits D, not K: with fewer heads than devices each head would be stored several times.
            split = (*ZERO_AXES, "tensor") if self.zero_stage >= 1 else "tensor"
            axis_by_letter = {"D": split, "Y": "stage" if self.staged else None}
            return P(*(axis_by_letter.get(letter) for letter in self.info.dims))
        return self.spec(zero_sharded=self.zero_stage >= 1)

    @functools.cached_property
    def accumulator_partition(self) -> P:
        """Partition of the gradient while microbatches accumulate."""
        return self.spec(zero_sharded=self.zero_stage >= 2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a whole model on a mesh.

    rings: length of each torus dimension that the devices along `ZERO_AXES` run through, the slowest first;
      ZeRO's collectives go along one dimension after another. Empty for a single collective;
      `step.torus_collectives.along_torus` sets it.
    context_order: assignment of a row's positions to devices along `context`
      (`jtrain.data.constructor.context_order`).
    precision: number formats, which decide the bytes of every array.
    kernels: implementations of ops that replace the registry's choice, from `Run.kernels`.
    pipeline: placement of the layers on stages; None with mesh.stage=1.
    pipeline_spec: settings of pipelines, kept where `pipeline` is None, so that `relaid` knows them.
    adapter_scale: scale of the products of an adapter's matrices; None without one.
    adapter_dropout: of their inputs in a train step; None for none.
    """

    spec: LayoutSpec
    mesh: MeshSpec
    params: tuple[ParamLayout, ...]
    rings: tuple[int, ...] = ()
    context_order: ContextOrder = "zigzag"
    precision: PrecisionSpec = dataclasses.field(default_factory=PrecisionSpec)
    kernels: Kernels = ()
    pipeline: PipelineLayout | None = None
    pipeline_spec: PipelineSpec = PipelineSpec()  # noqa: RUF009 - frozen
    adapter_scale: float | None = None
    adapter_dropout: AdapterDropout | None = None

    def relaid(self, spec: LayoutSpec, mesh: MeshSpec, pipeline: PipelineSpec | None = None) -> "Layout":
        """Lays the same model out with other settings; raises UserError as `make_layout`."""
        return make_layout(
            spec,
            mesh,
            self.infos,
            context_order=self.context_order,
            precision=self.precision,
            kernels=self.kernels,
            pipeline=pipeline or self.pipeline_spec,
            adapter_scale=self.adapter_scale,
            adapter_dropout=self.adapter_dropout,
        )

    @functools.cached_property
    def trained(self) -> tuple[ParamLayout, ...]:
        """The parameters that steps change: they alone have gradients and optimizer state."""
        return tuple(p for p in self.params if not p.info.frozen)

    @functools.cached_property
    def has_blocks(self) -> bool:
        """True if frozen matrices are in blocks, whose numbers are made a layer at a time."""
        return any(p.info.dtype in CODES_PER_BYTE for p in self.params)

    @property
    def gathers_weights(self) -> bool:
        """True if no device holds whole parameters, so that they are gathered for each use: ZeRO-3."""
        return self.spec.zero_stage == 3 and self.mesh.zero_shards > 1

    @property
    def updates_on_host(self) -> bool:
        """True if the host's cores update the optimizer state that is in host memory."""
        return self.spec.offload.update == "host"

    @property
    def layer_order(self) -> tuple[int, ...] | None:
        """Layer of the model at each place of the state, -1 for none; None if in the model's order."""
        return None if self.pipeline is None or self.pipeline.in_order else self.pipeline.order

    @property
    def per_layer(self) -> P:
        """Partition of state with one entry per layer, such as the scales of 8-bit matmuls."""
        return P("stage") if self.pipeline else P()

    @property
    def infos(self) -> tuple[ParamInfo, ...]:
        """The model's parameters, independent of stages."""
        return tuple(p.info.logical for p in self.params)

    def local_size(self, spec: P, shape: tuple[int, ...]) -> int:
        """Returns the number of elements that one device holds of an array of `shape` under `spec`."""
        return math.prod(local_shape(spec, shape, self.mesh.shape))

    def host_state(self, sizes: Mapping[tuple[str, str], int]) -> frozenset[tuple[str, str]]:
        """Chooses the optimizer arrays to keep in host memory.

        Args:
          sizes: bytes of every optimizer array, by path of its parameter and name (`mu`, `nu`, ...).
        """
        total = sum(sizes.values())
        # Norm scales stay: copying them costs more time than their memory is worth.
        matrices = {p.info.path for p in self.params if p.info.is_matrix}
        movable = {key: size for key, size in sizes.items() if key[0] in matrices}
        share = self.spec.offload.share("optimizer")
        # A share of all state, although only matrices can move: 1.0 then moves all of them.
        budget = share * total
        if self.spec.offload.update == "device":
            return check_not_empty("optimizer", share, total, largest_first(budget, movable), movable)
        bytes_by_path: dict[str, int] = {}  # the host's cores update all state of a parameter or none
        for (path, _), size in movable.items():
            bytes_by_path[path] = bytes_by_path.get(path, 0) + size
        chosen = check_not_empty(
            "optimizer", share, total, largest_first(budget, bytes_by_path), bytes_by_path
        )
        return frozenset(key for key in movable if key[0] in chosen)


def make_layout(
    spec: LayoutSpec,
    mesh: MeshSpec,
    infos: tuple[ParamInfo, ...],
    *,
    context_order: ContextOrder = "zigzag",
    precision: PrecisionSpec = PrecisionSpec(),  # noqa: B008, frozen
    kernels: Kernels = (),
    pipeline: PipelineSpec = PipelineSpec(),  # noqa: B008, frozen
    adapter_scale: float | None = None,
    adapter_dropout: AdapterDropout | None = None,
    is_part: bool = False,
) -> Layout:
    """Lays a model out: decides sharding and memory of every array.

    Args:
      is_part: True for some layers of a model, whose experts may be in others.

    Raises:
      UserError: a dimension does not split evenly over its axis; an unused axis is larger than 1; an option
        needs an axis that is 1; attention cannot be split over `context` so; more stages than layers; or a
        share is `as_needed`.
    """
    stage_layout = _placed_layers(pipeline, mesh, infos) if mesh.stage > 1 else None
    if stage_layout is not None:
        check_stages(spec, stage_layout, precision)
        # From here on the stacks are in placed order, longer than the model where identity layers pad them.
        infos = tuple(info.placed(stage_layout.order) for info in infos)
    shared_by = devices_per_key_head(mesh, infos)
    check_context_heads(mesh, infos, attention=spec.context_attention, order=context_order)
    # Raises for `as_needed`: a plan must have chosen a share before anything is laid out.
    shares = {name: spec.offload.share(name) for name in OFFLOADABLE}
    # Shared kernels are exchanged once per step, all layers at once, so they stay on the device.
    layers = [info for info in infos if info.is_matrix and info.is_stacked]
    stacked = {info.path: info.size for info in layers if _devices_per_head(info, shared_by) == 1}
    total = sum(stacked.values())
    on_host = check_not_empty(
        "params", shares["params"], total, largest_first(shares["params"] * total, stacked), stacked
    )
    if mesh.expert != 1 and not is_part and not any(info.is_experts for info in infos):
        raise UserError(
            f"mesh.expert={mesh.expert}: this model has no experts (model.moe=None), so its devices would "
            "repeat each other's work. Set mesh.expert=1 and use mesh.data, mesh.context, mesh.tensor or "
            "mesh.replica."
        )
    if spec.tensor_overlap and mesh.tensor == 1:
        raise UserError(
            "layout.tensor_overlap=True with mesh.tensor=1: there are no collectives over `tensor` to "
            "overlap. Set mesh.tensor to 2 or more, or layout.tensor_overlap=False."
        )
    if spec.sequence_groups > 1:
        check_groups(spec, mesh, infos, precision)
    if spec.mlp_chunk is not None:
        check_mlp_chunk(spec, precision)
    if adapter_scale is not None:
        added = [info for info in infos if info.is_adapter]
        check_adapter(spec, precision, added, shared_by, adapter_dropout)
    layouts: list[ParamLayout] = []
    split_over = dict.fromkeys("DQC", mesh.zero_axes) | {
        "V": VOCABULARY_AXES if stage_layout else ("tensor",)
    }
    for info in infos:
        dims: dict[str, int | None] = dict.fromkeys(("data", "tensor", "expert"))
        # Only kernels of key and value heads are shared; query heads always split evenly, vectors are whole.
        devices_per_head = _devices_per_head(info, shared_by)
        if info.is_matrix:
            for index, letter in enumerate(info.dims):
                axis = SPLITS.get(letter)
                if letter == "R" and info.is_adapter and info.shape[index] % mesh.zero_shards == 0:
                    axis = "data"
                if axis is None or (axis == "data" and spec.zero_stage == 0):  # stage 0 asks nothing of D
                    continue
                if axis == "expert" and not info.is_experts:
                    continue  # a router scores all experts on every device
                if dims[axis] is not None:
                    continue  # D and Q: the first is enough
                # K was checked by `devices_per_key_head`, which allows fewer heads than devices.
                if letter not in "KR":
                    shard_size(FIELDS[letter], info.shape[index], mesh.shape, split_over.get(letter, (axis,)))
                dims[axis] = index
        if devices_per_head > 1:
            axes = (*mesh.zero_axes, "tensor") if spec.zero_stage else ("tensor",)
            shard_size(FIELDS["D"], info.shape[info.dims.index("D")], mesh.shape, axes)
        memory: MemoryKind = "pinned_host" if info.path in on_host else "device"
        placing: Any = dict(
            expert_dim=dims["expert"], shared_by=devices_per_head, staged=stage_layout is not None
        )
        layouts.append(ParamLayout(info, spec.zero_stage, dims["data"], dims["tensor"], memory, **placing))
    if shares["gradients"] > 0:
        layouts = _with_gradients_on_host(spec, mesh, layouts)
    for p in layouts:
        if p.info.dtype in CODES_PER_BYTE:
            check_blocks(p.info, p.param_partition, mesh, on_host)
    shared_fields: Any = dict(
        context_order=context_order,
        precision=precision,
        kernels=kernels,
        adapter_scale=adapter_scale,
        adapter_dropout=adapter_dropout,
    )
    return Layout(spec, mesh, tuple(layouts), pipeline=stage_layout, pipeline_spec=pipeline, **shared_fields)


def _devices_per_head(info: ParamInfo, shared_by: dict[str, int]) -> int:
    """Number of devices along `tensor` that have the same part of a kernel of key or value heads."""
    return shared_by.get(info.path.rpartition(".")[0], 1) if "K" in info.dims and info.is_matrix else 1


def _with_gradients_on_host(
    spec: LayoutSpec, mesh: MeshSpec, layouts: list[ParamLayout]
) -> list[ParamLayout]:
    """Chooses the layers' gradients to keep in host memory, of those that need no sum at the step's end."""
    # Only gradients of stacked layers are summed layer by layer, and only those can stream.
    layers = [p for p in layouts if p.info.is_matrix and p.info.is_stacked and not p.info.frozen]
    # Final once a layer is summed: nothing is left to reduce at the end of the step.
    offloadable = [
        p
        for p in layers
        if p.accumulator_partition == p.optimizer_partition
        and p.shared_by == 1
        and not unsplit_axes(p.optimizer_partition, mesh.shape)
    ]
    # The share counts all layers' gradients, also those that must stay on the device.
    share = spec.offload.share("gradients")
    if not (offloadable and spec.sums_within_layers(mesh)):
        raise UserError(
            f"layout.offload.gradients={share:g} with layout.zero_stage={spec.zero_stage}, "
            f"mesh.replica={mesh.replica} and mesh.data={mesh.data}: gradients of layers would be summed "
            "over devices at the end of a step, all layers at once. Set layout.zero_stage=2 or 3 and "
            "mesh.replica=1, or layout.offload.gradients=none."
        )
    total = sum(p.info.size for p in layers)
    sizes = {p.info.path: p.info.size for p in offloadable}
    chosen = check_not_empty("gradients", share, total, largest_first(share * total, sizes), sizes)
    return [
        dataclasses.replace(p, gradient_memory="pinned_host") if p.info.path in chosen else p for p in layouts
    ]


def _placed_layers(spec: PipelineSpec, mesh: MeshSpec, infos: tuple[ParamInfo, ...]) -> PipelineLayout:
    """Places the layers on stages; refuses a model without stacked layers."""
    # One length: all stacked parameters belong to the same layers.
    stacks = {info.shape[0] for info in infos if info.is_stacked}
    if len(stacks) != 1:
        raise UserError(
            f"mesh.stage={mesh.stage} cuts a model between its layers, but this one has no single stack of "
            "them. Set mesh.stage=1 and use mesh.data, mesh.context, mesh.tensor or mesh.replica."
        )
    # `layers.block_2.mlp.up_DF`: blocks of one repetition are numbered.
    blocks = {info.path.split(".")[1] for info in infos if info.path.startswith("layers.block_")}
    return place_layers(spec, stages=mesh.stage, num_layers=stacks.pop(), blocks=len(blocks) or None)
