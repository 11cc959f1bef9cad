"""JAX platform, compile cache and unified memory, configured before anything computes."""

import ctypes
import glob
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.errors import UserError
from jtrain.runtime.accelerators import DeviceChoice, nvidia_gpus, platform_of

if TYPE_CHECKING:
    import jax

ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA (under WSL too), AMD and TPU drivers."""


COHERENT_GPUS = ("GH200", "GB200", "GB300")
"""GPUs next to a Grace CPU, whose memory they access page by page over NVLink-C2C like their own."""


NUMA_NODES = Path("/sys/devices/system/node")


HOST_SHARE = 0.8
"""Share of a host's memory for arrays of the run, offloaded or in unified memory; the data plane, checkpoints
and the system need the rest."""


def user_cache(environ: Mapping[str, str]) -> Path:
    """Folder for what is made once for a user and a machine: compiled programs, measured peaks, local folders of
    runs in stores.
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jtrain"


def start_jax(
    environ: MutableMapping[str, str],
    *,
    emulate_devices: int | None = None,
    device: DeviceChoice | None = None,
    root: Path = Path("/"),
) -> None:
    """Chooses jax's platform and its compile cache; call it before anything computes.

    Without an accelerator's device file the platform is set to the CPU. Otherwise jax, with a TPU or CUDA
    plugin installed, would first spend time looking for that hardware and print warnings. `JAX_PLATFORMS` and
    `JAX_COMPILATION_CACHE_DIR` override these choices.

    Args:
      environ: os.environ.
      emulate_devices: run on this many emulated CPU devices, whatever the hardware.
      device: run on this kind of device; None leaves the choice to jax.
      root: the root of the file system, where device files are.

    Raises:
      UserError: emulate_devices is not positive or contradicts `device`, or there is no such device.
    """
    if emulate_devices is not None:
        if device not in (None, "cpu"):
            raise UserError(
                f"--device {device} with --emulate-devices {emulate_devices}: emulated devices are CPUs. "
                "Leave one out."
            )
        if emulate_devices < 1:
            raise UserError(f"--emulate-devices {emulate_devices} must be at least 1.")
        # XLA uses the last of repeated flags, and reads them when its first client starts.
        flag = f"--xla_force_host_platform_device_count={emulate_devices}"
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}".strip()

    # Before the import: jax reads JAX_PLATFORMS when it is loaded.
    if emulate_devices is not None or device is not None:
        # For processes that this one starts, too; and to tell a choice from what jax finds.
        environ["JAX_PLATFORMS"] = platform_of(device or "cpu", environ, root=root)

    import jax  # lazy: 0.6 s

    if emulate_devices is not None or device is not None:
        # Again through the config: jax may have been imported already, by a test or a notebook.
        jax.config.update("jax_platforms", environ["JAX_PLATFORMS"])
    elif not environ.get("JAX_PLATFORMS") and not any(glob.glob(pattern) for pattern in ACCELERATOR_FILES):
        jax.config.update("jax_platforms", "cpu")
    # Before a device exists, as `keep_freed_memory` says.
    if jax.config.jax_platforms == "cpu":
        keep_freed_memory()
    # None unless JAX_COMPILATION_CACHE_DIR or the user's own code has set it.
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache(environ) / "xla"))
        # jax's default skips programs that compile in under a second: for `tiny`, all but the step.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        # Programs of two versions of the code may differ only in the scope
        # names of their ops, and trace analysis needs the right ones.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def present_devices() -> "list[jax.Device]":
    """Returns all devices of the run's processes, and starts jax's backend.

    Raises:
      UserError: jax cannot start, or processes have different numbers of devices.
    """
    import jax

    try:
        devices = jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # a driver that does not answer, a TPU that another process has
        chosen = jax.config.jax_platforms or "any device"
        raise UserError(
            f"jax cannot start on {chosen}: {str(error) or 'it finds none'}. Mend that, or choose another "
            "device (--device cpu|gpu|tpu)."
        ) from error
    numbers = [device.process_index for device in devices]
    counts = {number: numbers.count(number) for number in dict.fromkeys(numbers)}
    # A process without any device is in no count.
    if len(set(counts.values())) > 1 or len(counts) < jax.process_count():
        counts_text = ", ".join(
            f"process {number} has {counts.get(number, 0)}" for number in range(jax.process_count())
        )
        raise UserError(
            f"all processes of a run must have the same number of {devices[0].platform} devices, but "
            f"{counts_text}. Give each as many, or leave out the hosts that have fewer."
        )
    return devices


def devices_line(devices: "Sequence[jax.Device]", hosts: Sequence[str]) -> str:
    """Returns the first line of a run: platform, kind and number of the devices, processes and hosts.

    Args:
      hosts: host of each process.
    """
    names = list(dict.fromkeys(hosts))
    first_names = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    first = devices[0]
    return (
        f"{first.platform}: {len(devices)} x {first.device_kind}, {len(hosts)} "
        f"process{'es' * (len(hosts) > 1)} on {len(names)} host{'s' * (len(names) > 1)} ({first_names})"
    )


def compile_collectives_anew() -> None:
    """Disables the compile cache if CPU devices communicate; call it after all processes have joined.

    With programs read from the cache, devices were seen waiting for each other in different collectives until
    XLA ended the process; with freshly compiled programs this never happened (jaxlib 0.12.0.1:
    bench/NOTES.md). Apparently the order of independent collectives is lost in the cache.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)


def use_unified_memory(environ: MutableMapping[str, str], *, topology: str | None = None) -> None:
    """Lets JAX allocate more than the GPU's memory, with pages moving to the host; call it before devices are
    used.

    With TF_FORCE_UNIFIED_MEMORY, XLA's default allocator (`bfc`) uses managed memory, limited to
    XLA_CLIENT_MEM_FRACTION (above 1) times the GPU's memory. Preallocation is disabled, since it would touch
    all pages. Variables that are already set are kept. Source: jaxlib/xla_client.py; AlphaFold 3,
    docs/performance.md.

    Args:
      environ: os.environ.
      topology: the machine that a plan is for, such as `gh200:1`; it is only checked, and nothing is set.

    Raises:
      UserError: the machine is not a Grace system, or a variable that is already set contradicts.
    """
    import jax

    field = "layout.offload.unified_memory=True"
    instead = "Set it to False, and layout.offload.optimizer, .params or .activations to a share instead."
    if topology is not None:
        gpus = [(topology.partition(":")[0].upper(), 0)]
    elif jax.config.jax_platforms not in (None, "", "cuda", "gpu", "cuda,cpu"):
        gpus = [(f"the platform {jax.config.jax_platforms}", 0)]
    else:
        gpus = nvidia_gpus() or [("a machine without NVIDIA GPUs", 0)]
    for name, _ in gpus:
        if not any(coherent in name for coherent in COHERENT_GPUS):
            raise UserError(
                f"{field}, but this is {name}: only GPUs with a Grace CPU ({', '.join(COHERENT_GPUS)}) "
                "access the host's memory over NVLink-C2C; elsewhere pages would move over the slower PCIe. "
                f"{instead}"
            )
    if topology is not None:
        return
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in ("default", "bfc"):
        raise UserError(
            f"{field} needs XLA's own allocator, but XLA_PYTHON_CLIENT_ALLOCATOR={allocator} is set. Unset "
            "it."
        )
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    set_variable = next((name for name in names if environ.get(name)), None)
    if set_variable is None:
        # The smallest GPU decides: the fraction is one for all.
        device_bytes = min(size for _, size in gpus)
        # 1 for the GPU's own memory, plus its share of the host's.
        fraction = 1 + HOST_SHARE * host_memory_bytes() / len(gpus) / device_bytes
        environ[names[0]] = f"{fraction:.2f}"
    elif not _above_one(environ[set_variable]):
        raise UserError(
            f"{field}, but {set_variable}={environ[set_variable]} keeps JAX within the GPU's memory. Unset "
            "it, or set it above 1."
        )
    environ["TF_FORCE_UNIFIED_MEMORY"] = "1"
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _above_one(text: str) -> bool:
    try:
        return float(text) > 1
    except ValueError:
        return False


def host_memory_bytes() -> int:
    """Memory of the NUMA nodes with CPUs; on Grace systems the GPUs' memory is separate nodes without
    CPUs.
    """
    total = 0
    for node in NUMA_NODES.glob("node[0-9]*"):
        if (node / "cpulist").read_text().strip():
            # The line reads `Node 0 MemTotal:  131072 kB`: the last field but one, in KiB.
            line = next(line for line in (node / "meminfo").read_text().splitlines() if "MemTotal:" in line)
            total += int(line.split()[-2]) << 10
    return total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes() -> int | None:
    """Bytes of this process that are in RAM, shared pages included; None where there is no /proc to tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            # The second field of statm counts resident pages.
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Constants of glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Lets XLA:CPU reuse the same pages for the temporaries of every step. Call it once, before JAX looks for
    devices.

    A later call has no effect: XLA's threads start with its devices, each takes an arena of its own from the
    allocator, and those arenas are unmapped when they become empty.

    XLA:CPU allocates a step's temporaries in every step. glibc maps and unmaps buffers of that size, so each
    page is faulted in and zeroed again: 100,000 faults per step and 12 % of its CPU time for 400 MiB of
    temporaries. After this call the process keeps its peak memory until it ends.

    Returns:
      True if the C library is glibc and accepted the settings; otherwise nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena, because only the first grows beyond 64 MiB; no mmap; no trimming.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))
    accepted = [mallopt(name, value) for name, value in settings]
    return all(accepted)
