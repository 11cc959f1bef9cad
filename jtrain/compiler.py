"""What a step is compiled with on some chips, for plans and for training alike: options, and kernels."""

from contextlib import AbstractContextManager
from typing import Any

from jax.sharding import Mesh

from jtrain.layout import Layout, MatmulDtype
from jtrain_kernels import registry
from jtrain_kernels.device import from_device, live

_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
"""The sparse cores drive the collectives, beside the matmuls. Without these options every collective of a step is
synchronous on these chips; `xla_tpu_enable_async_collective_fusion`, which v5e has for it, they refuse."""

_KEEP_SUMS_SPLIT = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
"""Of any TPU. The pass takes sums of gradients out of the loop over microbatches, so that what ZeRO-2 splits is whole
again (of a Qwen3 8B's embeddings over 8 chips 1.8 GiB more), and it fails where parameters are bfloat16."""

OPTIONS = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES, "tpu7x": _SPARSE_CORES}
"""Name of a chip in `jtrain_kernels.device` -> its own options; generations refuse each other's."""


_KEEP_PRODUCTS_APART = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Of GPUs that multiply in 8 bits. Products of one x below 32 MB would be joined into one, whose kernels side by side
have no common scale: then it is of bfloat16, 10 of the 21 products of a small layer."""


def compiler_options(mesh: Mesh, matmul_dtype: MatmulDtype = "compute") -> dict[str, Any]:
    """What `jax.jit` is given for a step on these devices; empty but for several TPUs and GPUs that multiply in 8 bits.

    The options change which instructions run beside which, never what is computed.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu" and matmul_dtype != "compute":
        return dict(_KEEP_PRODUCTS_APART)
    if device.platform != "tpu" or mesh.size == 1:
        return {}
    spec = from_device(device)
    return _KEEP_SUMS_SPLIT | (OPTIONS.get(spec.name, {}) if spec is not None else {})


def kernels_for(layout: Layout, mesh: Mesh) -> AbstractContextManager[None]:
    """Ops traced within are for the mesh's devices, be they here or not, with the kernels that the layout forces."""
    return registry.on(live(mesh.devices.flat[0]), forced=dict(layout.spec.kernels))
