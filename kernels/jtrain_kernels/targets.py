"""GPUs as XLA's compiler sees them, for compiling where there is none.

Text protos of `stream_executor.GpuTargetConfigProto`, after openxla/xla's `backends/gpu/target_config/specs`. What
matters is what the compiler decides by: the capability, shared memory, registers and memory size.
"""

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
"""Lower-case name of a GPU -> its target config."""


def target_config(name: str) -> str:
    """The text proto that XLA compiles by for a GPU called `name`.

    Raises:
      ValueError: lists the names that there are.
    """
    if name not in TARGETS:
        raise ValueError(f"no GPU target called {name!r}. There are: {', '.join(TARGETS)}.")
    return TARGETS[name]
