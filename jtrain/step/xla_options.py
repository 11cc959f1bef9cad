"""Compiler options and kernels of the train step per chip, the same for plans and for training."""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

from jax.sharding import Mesh

from jtrain.layout.layout import Layout
from jtrain.layout.precision import MatmulDtype
from jtrain_kernels import registry
from jtrain_kernels.device import from_device, live

_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
"""Options that let the sparse cores drive collectives while matmuls compute. Without them every collective of
a step is synchronous on these chips; they refuse v5e's option for it,
`xla_tpu_enable_async_collective_fusion`."""

_KEEP_SUMS_SPLIT = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
"""Options for all TPUs. This pass moves sums of gradients out of the loop over microbatches, so that
gradients sharded by ZeRO-2 are whole again (1.8 GiB more for Qwen3 8B's embeddings on 8 chips); with bfloat16
parameters it fails."""

OPTIONS = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES, "tpu7x": _SPARSE_CORES}
"""Name of a chip in `jtrain_kernels.device` -> its options; each generation refuses the options of others."""


_IN_8_BITS = {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}
"""Options for GPUs with 8-bit matmuls. XLA would merge matmuls of the same input below 32 MB into one. Their
weights have different scales, so the merged matmul would run in bfloat16: 10 of the 21 matmuls of a small
layer. And what is offered to Triton runs in bfloat16 if Triton loses: a llama8b layer on an H100 was 0.99
times as fast as in bfloat16, and is 1.35 times with all its 27 products in cuBLAS's 8-bit matmuls."""

_COPIES_IN_ORDER = {"xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"}
"""Option for GPUs with 8-bit matmuls or plain collectives over `tensor`, if nothing is in host memory.
XLA:GPU makes copies of slices asynchronous, and its scheduler takes each for 5 ms, even one of 16 kB for a
norm. A layer's backward pass ends in two of them, so nothing is left to schedule beside its collectives.
Waits for the network and the whole step of `llama8b`, compiled for 8 x H200: delayed scaling 45 of 1,504 ms
with these copies, 8 of 1,477 without; tensor=8 196 of 644, 173 of 623; data=4 with tensor=2 92 of 1,779, 74
of 1,771."""

_LAUNCH_EACH = {"xla_gpu_enable_command_buffer": ""}
"""Options for GPUs of a step that is traced. All kernels of a command buffer have its name in the trace: on
an H100 no microsecond of llama1b's step had a layer or a phase."""

_GROUPS_OVERLAP = {
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 3,
}
"""Options for GPUs whose layers compute groups of sequences. XLA would join the collectives of several groups
into one, which waits for all of them, and it would have one collective under way at a time, so that a group's
reduce-scatter holds up the all-gather of the next."""

_FETCH_TOGETHER = {"xla_gpu_experimental_parallel_async_compute_limit": 32}
"""Option for GPUs whose backward pass fetches activations or sums of gradients. XLA:GPU has two such copies
under way by default and waits for one before it starts the third: a third of the bytes of four names' fetches
were beside no matmul, and are now. Sums of a layer's seven matrices are seven copies there and seven back."""

type Deterministic = Literal["auto", "on", "off"]
"""`deterministic` of a run: XLA's order of sums on GPUs; `auto` leaves XLA's default, or XLA_FLAGS."""

_FETCHED_AHEAD = {"xla_tpu_pipeline_memory_host_transfers": False}
"""Option for TPUs that fetch activations from host memory. The loop over layers fetches one layer ahead by
itself. XLA:TPU would turn it round once more: it computes a layer outside the loop, and for that layer copies
the attention weights of all layers. Six layers of 16.8 MB took 98 MB more on a v5p with their inputs in host
memory than without (libtpu 0.0.52), and take 59 MB less now."""

_SCHEDULE_EXCHANGES = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 3,
}
"""Options for GPUs along `expert`. XLA:GPU schedules for the least memory by default: gathers of weights and
sums of gradients beside the expert exchange are then asynchronous or not by chance. With the default limit of
one collective under way, an exchange waits for a gather. Share of all bytes beside a matmul in one microbatch
of qwen3_30b_a3b with `grouped_swiglu=mosaic_gpu`, compiled for 8 x H200: 0.61 by default, 0.68 with the
scheduler, 0.79 with the limit as well; temporaries 1 % smaller."""


def compiler_options(
    mesh: Mesh,
    matmul_dtype: MatmulDtype = "compute",
    kernels: Iterable[tuple[str, str]] = (),
    sequence_groups: int = 1,
    *,
    traced: bool = False,
    deterministic: Deterministic = "auto",
    offloaded: Collection[str] = (),
    plain_tensor: bool = False,
) -> dict[str, Any]:
    """Returns `compiler_options` for `jax.jit`; empty except for several TPUs, and in the cases above.

    The options change which instructions overlap, never the results; `deterministic` alone changes the order
    of sums.

    Args:
      kernels: (op, implementation) that is forced. Some kernels need options of their own, wherever they may
        run.
      traced: the step is for a profile window.
      deterministic: on a GPU, `on` gives every sum one order, so that a step repeats bit for bit; without it
        scatters, such as the embedding's gradient, add in the order in which their threads come.
      offloaded: fields of `layout.offload` that keep something in host memory.
      plain_tensor: layers send over `tensor`, neither in pieces nor in groups of sequences.
    """
    device = mesh.devices.flat[0]
    kernel_options = registry.compiler_options(dict(kernels))
    if device.platform == "gpu":
        fp8_options = _IN_8_BITS if matmul_dtype != "compute" else {}
        # Not with arrays in host memory: copies of their slices are to be asynchronous.
        copy_order_options = (
            _COPIES_IN_ORDER if (plain_tensor or fp8_options) and mesh.size > 1 and not offloaded else {}
        )
        group_options = _GROUPS_OVERLAP if sequence_groups > 1 else {}
        expert_options = _SCHEDULE_EXCHANGES if mesh.shape["expert"] > 1 else {}
        copy_options = _FETCH_TOGETHER if {"activations", "gradients"} & set(offloaded) else {}
        # Later options win: what kernels need comes last.
        return (
            expert_options
            | group_options
            | copy_options
            | fp8_options
            | copy_order_options
            | (_LAUNCH_EACH if traced else {})
            | ({} if deterministic == "auto" else {"xla_gpu_deterministic_ops": deterministic == "on"})
            | kernel_options
        )
    # The options below are XLA:TPU's.
    if device.platform != "tpu":
        return kernel_options
    fetch_options = _FETCHED_AHEAD if "activations" in offloaded else {}
    # All other options are about collectives, which one device does not have.
    if mesh.size == 1:
        return fetch_options | kernel_options
    # An unknown generation gets none of the per-chip options, since chips refuse each other's.
    spec = from_device(device)
    return (
        _KEEP_SUMS_SPLIT
        | fetch_options
        | (OPTIONS.get(spec.name, {}) if spec is not None else {})
        | kernel_options
    )


def kernels_for(layout: Layout, mesh: Mesh) -> AbstractContextManager[None]:
    """Context in which ops trace for the mesh's devices, with the layout's forced kernels."""
    return registry.on(live(mesh.devices.flat[0]), forced=dict(layout.kernels))
