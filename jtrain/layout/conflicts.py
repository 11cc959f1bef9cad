"""Options of a layout that exclude each other, and options that a model does not have."""

import math
from collections.abc import Collection

from jax.sharding import PartitionSpec

from jtrain.errors import UserError
from jtrain.layout.dims import ADAPTER, AdapterDropout, ParamInfo
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec, axis_names, local_shape
from jtrain.layout.precision import BLOCK, CODES_PER_BYTE, PrecisionSpec
from jtrain.pipeline.pipeline_layout import PipelineLayout


def check_stages(spec: LayoutSpec, pipeline: PipelineLayout, precision: PrecisionSpec) -> None:
    """Refuses options that a pipelined step does not have."""
    offload = spec.offload
    if (dtype := precision.grad_accum_dtype) != "float32":
        raise UserError(
            f"precision.grad_accum_dtype={dtype} with mesh.stage={pipeline.stages}: stages sum gradients in "
            "float32. Set precision.grad_accum_dtype=float32, or mesh.stage=1."
        )
    if offload.share("gradients") > 0:
        raise UserError(
            f"layout.offload.gradients={offload.gradients} with mesh.stage={pipeline.stages}: stages sum "
            "gradients on the device. Set layout.offload.gradients=none, or mesh.stage=1."
        )
    if offload.share("activations") > 0:
        raise UserError(
            f"layout.offload.activations={offload.activations} with mesh.stage={pipeline.stages}: what the "
            "layers of a stage keep does not stream through host memory. Set "
            "layout.offload.activations=none, or mesh.stage=1."
        )
    if offload.share("params") > 0 and pipeline.spec.gather == "step":
        raise UserError(
            f"layout.offload.params={offload.params} with pipeline.gather=step: all weights of a stage would "
            "be on the device for the whole step. Set pipeline.gather=tick, or layout.offload.params=none."
        )


def check_adapter(
    spec: LayoutSpec,
    precision: PrecisionSpec,
    infos: list[ParamInfo],
    shared_by: dict[str, int],
    dropout: AdapterDropout | None,
) -> None:
    """Refuses layouts whose matmuls have no second, narrow one beside them, and dropout of experts.

    Args:
      infos: of the adapter.
    """
    experts = next((info for info in infos if info.is_experts), None)
    if dropout is not None and experts is not None:
        raise UserError(
            f"adapter.dropout={dropout.rate} with adapter.targets that name experts "
            f"({experts.path.rpartition(ADAPTER)[0]}): peft has no dropout for experts of one tensor. Set "
            "adapter.dropout=0.0, or leave experts out of adapter.targets."
        )
    if dropout is not None and spec.mlp_chunk is not None:
        raise UserError(
            f"adapter.dropout={dropout.rate} with layout.mlp_chunk={spec.mlp_chunk}: masks are of all "
            "positions of a device. Set adapter.dropout=0.0, or layout.mlp_chunk=None."
        )
    if spec.tensor_overlap:
        raise UserError(
            "layout.tensor_overlap=True with adapter: a matmul that overlaps with its collective has no "
            "adapter beside it. Set layout.tensor_overlap=False."
        )
    if spec.sequence_groups > 1:
        raise UserError(
            f"layout.sequence_groups={spec.sequence_groups} with adapter: groups of sequences have no "
            "adapter. Set layout.sequence_groups=1."
        )
    if precision.matmul_dtype != "compute":
        raise UserError(
            f"precision.matmul_dtype={precision.matmul_dtype} with adapter: frozen weights and adapters "
            "multiply in precision.compute_dtype. Set precision.matmul_dtype=compute."
        )
    for info in infos:
        mixer = info.path.rpartition(".")[0].rpartition(".")[0]
        if "K" in info.dims and shared_by.get(mixer, 1) > 1:
            raise UserError(
                f"adapter.targets names {info.path.rpartition(ADAPTER)[0]}, and mesh.tensor has "
                f"{shared_by[mixer]} devices for each key head: an adapter is not split inside of a head. "
                "Set "
                "mesh.tensor to model.num_kv_heads or less, or leave keys and values out of adapter.targets."
            )


def check_blocks(info: ParamInfo, partition: PartitionSpec, mesh: MeshSpec, on_host: Collection[str]) -> None:
    """Refuses a frozen matrix whose inputs, or a device's part of them, are no whole blocks.

    Args:
      on_host: paths of parameters in host memory.
    """
    assert info.dtype is not None
    field = f"adapter.base_dtype={info.dtype}"
    if info.path in on_host:
        raise UserError(
            f"layout.offload.params with {field}: blocks stay in device memory. Set "
            "layout.offload.params=none, or adapter.base_dtype=bfloat16."
        )
    lead = len(info.dims) - len(info.dims.removeprefix("Y").removeprefix("X"))
    ins = slice(lead, lead + info.num_inputs)
    sizes, local = info.shape[ins], local_shape(partition, info.shape, mesh.shape)[ins]
    for lengths in (sizes, local):
        if math.prod(lengths) % BLOCK == 0 and lengths[-1] % CODES_PER_BYTE[info.dtype] == 0:
            continue
        count = " x ".join(map(str, sizes))
        if lengths is sizes:
            raise UserError(
                f"{field}: {info.path} has {count} inputs ({info.dims[ins]}), which blocks of {BLOCK} do "
                "not divide. Set adapter.base_dtype=bfloat16."
            )
        axes = " and ".join(
            name for entry in partition[ins] for name in axis_names(entry) if mesh.shape[name] > 1
        )
        raise UserError(
            f"{field}: a device has {math.prod(local)} of {count} inputs ({info.dims[ins]}) of {info.path}, "
            f"which blocks of {BLOCK} do not divide. Use fewer devices along {axes}, or set "
            "adapter.base_dtype=bfloat16."
        )


def check_mlp_chunk(spec: LayoutSpec, precision: PrecisionSpec) -> None:
    """Refuses chunks of positions where one scale is of all positions."""
    if precision.matmul_dtype != "compute":
        raise UserError(
            f"layout.mlp_chunk={spec.mlp_chunk} with precision.matmul_dtype={precision.matmul_dtype}: 8-bit "
            "matmuls have one scale for all positions. Set layout.mlp_chunk=None."
        )


def check_groups(
    spec: LayoutSpec, mesh: MeshSpec, infos: tuple[ParamInfo, ...], precision: PrecisionSpec
) -> None:
    """Refuses groups of sequences where there is nothing to overlap, or where sequences belong together."""
    dtype = precision.matmul_dtype
    for conflict, applies in (
        (f"mesh.tensor={mesh.tensor}: there are no collectives over `tensor` to overlap", mesh.tensor == 1),
        ("layout.tensor_overlap=True: it overlaps the same collectives another way", spec.tensor_overlap),
        (
            f"precision.matmul_dtype={dtype}: 8-bit matmuls have one scale for all sequences",
            dtype != "compute",
        ),
        ("model.moe: a router balances all sequences together", any(info.is_experts for info in infos)),
    ):
        if applies:
            groups = f"layout.sequence_groups={spec.sequence_groups}"
            raise UserError(f"{groups} with {conflict}. Set layout.sequence_groups=1, or change the other.")
