"""Compiler options that a step needs on some chips, for plans and for training alike."""

from jax.sharding import Mesh

from jtrain_kernels.device import from_device

_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
"""The sparse cores drive the collectives, beside the matmuls. Without these options every collective of a step is
synchronous on these chips; `xla_tpu_enable_async_collective_fusion`, which v5e has for it, they refuse."""

OPTIONS = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES, "tpu7x": _SPARSE_CORES}
"""Name of a chip in `jtrain_kernels.device` -> its options; generations refuse each other's, so there is no default."""


def compiler_options(mesh: Mesh) -> dict[str, bool]:
    """What `jax.jit` is given for a step on these devices; empty for one device, and for chips not in the table.

    The options change which instructions run beside which, never what is computed.
    """
    device = mesh.devices.flat[0]
    spec = from_device(device) if device.platform == "tpu" and mesh.size > 1 else None
    return dict(OPTIONS.get(spec.name, {})) if spec is not None else {}
