"""Compilation targets for machines that are not present: topologies of TPUs, and target configs of GPUs.

GPUs are text protos of `stream_executor.GpuTargetConfigProto`, after openxla/xla's
`backends/gpu/target_config/specs`. The compiler's decisions depend on the capability, shared memory,
registers and memory size.
"""

import re

import jax

from jtrain_kernels.errors import UserError
from jtrain_kernels.installed import is_installed

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""

# An H200 has the same cores, with more and faster memory and a larger L2.
_H100 = dict(cores=132, l2=52_428_800, clock=1.98, major=9)

TARGETS = {
    "h100": _TARGET.format(
        name="NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_000_000_000, **_H100
    ),
    "h200": _TARGET.format(
        name="NVIDIA H200", bandwidth=4_800_000_000_000, memory=150_000_000_000, **(_H100 | {"l2": 62_914_560})
    ),
    "b200": _TARGET.format(
        name="NVIDIA B200", cores=148, bandwidth=8_000_000_000_000, memory=191_000_000_000, l2=132_644_864, clock=1.965,
        major=10,
    ),
}  # fmt: skip
"""Lower-case name of a GPU -> target config."""


def target_config(name: str) -> str:
    """Target config of the GPU called `name`, as XLA's text proto.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
    """
    if name not in TARGETS:
        raise UserError(f"no GPU target called {name!r}. There are: {', '.join(TARGETS)}.")
    return TARGETS[name]


TPUS = {
    "v4": ("v4:2x2x1", "v4:4x4x4"),
    "v5e": ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x8", "v5p:8x8x8"),
    "v6e": ("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:16x16"),
    "tpu7x": ("tpu7x:2x2x1", "tpu7x:4x4x4"),
}
"""TPU generation -> its common topologies, all known to libtpu."""

GPUS_PER_HOST = 8

INSTALL = "pip install 'jtrain[aot]'"


def topology_devices(topology: str) -> list[jax.Device]:
    """Compile-only devices of a topology.

    Args:
      topology: `v5p:4x4x8` for a slice of TPUs, `h200:8` for GPUs in hosts of eight.

    Raises:
      UserError: the topology does not exist (the message lists common ones), or its compiler is not
        installed.
    """
    from jax.experimental import topologies  # lazy: only a plan for another machine needs it

    kind, _, shape = topology.partition(":")
    if kind in TARGETS and re.fullmatch(r"[1-9]\d*", shape):
        _require("jax_plugins.xla_cuda13", topology)
        # Up to eight GPUs are one host; beyond that hosts are full.
        per_host = min(int(shape), GPUS_PER_HOST)
        if int(shape) % per_host:
            raise UserError(
                f"--topology {topology}: hosts have {per_host} GPUs each. Use a multiple of {per_host}."
            )
        # Topology of GPUs: slices x hosts x GPUs per host.
        grid = f"1x{int(shape) // per_host}x{per_host}"
        return list(
            topologies.get_topology_desc(
                platform="cuda", target_config=target_config(kind), topology=grid
            ).devices
        )
    if kind not in TPUS or not re.fullmatch(r"\d+x\d+(x\d+)?", shape):
        raise _unknown(topology)
    _require("libtpu", topology)
    try:
        # JAX sees the two cores of a live v4 chip as one device; later chips need no such option.
        chips = {"chip_config_name": "megacore"} if kind == "v4" else {}
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **chips).devices)
    except Exception as error:  # libtpu passes on any exception of its C++ code
        raise _unknown(topology, reason=str(error).partition("\n")[0][:200]) from error


def _require(module: str, topology: str) -> None:
    if not is_installed(module):
        raise UserError(
            f"--topology {topology} needs the compiler {module}, which is not installed: {INSTALL}"
        )


def _unknown(topology: str, reason: str = "") -> UserError:
    topologies = [name for topologies in TPUS.values() for name in topologies] + [
        f"{name}:8" for name in TARGETS
    ]
    detail = f" ({reason})" if reason else ""
    return UserError(
        f"--topology {topology}: there is no such machine{detail}. There are, among other sizes: "
        f"{', '.join(topologies)}."
    )
