"""What every `python -m jtrain.*` shares: how jax is started, and what an exit code means.

Nothing here imports jax before a function needs it, so that a verb can parse its arguments first and `--help` answers
at once.
"""

import glob
import linecache
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path

ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA (under WSL too), AMD and TPU drivers."""

COHERENT_GPUS = ("GH200", "GB200", "GB300")
"""GPUs beside a Grace CPU whose memory they read and write over NVLink-C2C as their own, page by page."""

NUMA_NODES = Path("/sys/devices/system/node")

HOST_SHARE = 0.8
"""Of the host's memory, what unified memory may take; the data plane and the system need some."""


def run(main: Callable[[], int]) -> int:
    """Runs a verb and returns its exit code: a mistake of the user's is a message and 2, a bug keeps its traceback.

    A ValueError or OSError is the user's if a `raise` of jtrain raised it, because our own checks say what to mend, or
    if it names a file. Out of a library, or out of a line of ours that meant something else, it is a bug.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT; during training the loop catches it, saves, and returns 75
    except (ValueError, OSError) as error:
        if not _raised_by_us(error) and getattr(error, "filename", None) is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def start_jax(environ: MutableMapping[str, str], *, emulate_devices: int | None = None) -> None:
    """Chooses jax's platform and its compile cache; call it before anything computes.

    Without an accelerator's device file the platform is the CPU, said out loud to jax: with a TPU or CUDA plugin
    installed it would otherwise look for their hardware first, at length and on stderr. `JAX_PLATFORMS` and
    `JAX_COMPILATION_CACHE_DIR` win over both choices.

    Args:
      environ: os.environ.
      emulate_devices: run on this many CPU devices, whatever hardware is here.

    Raises:
      ValueError: emulate_devices is not positive.
    """
    if emulate_devices is not None:
        if emulate_devices < 1:
            raise ValueError(f"--emulate-devices {emulate_devices} must be at least 1.")
        # XLA reads the last of repeated flags, when its first client starts.
        flag = f"--xla_force_host_platform_device_count={emulate_devices}"
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}".strip()

    import jax  # lazy: 0.6 s

    from jtrain_kernels.host_memory import keep_freed_memory

    no_choice = not environ.get("JAX_PLATFORMS")
    if emulate_devices is not None or (no_choice and not any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)):
        jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_platforms == "cpu":
        keep_freed_memory()
    if jax.config.jax_compilation_cache_dir is None:
        user_cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(user_cache / "jtrain" / "xla"))
        # jax's own default leaves out what compiles in under a second: of `tiny`, everything but the step.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        # A program of another version of the code may be the same but for the names of its ops' scopes, which traces
        # are read by.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def compile_collectives_anew() -> None:
    """Takes no program out of the compile cache where CPUs communicate; once all processes have joined.

    With a program that was written to the cache and read again, devices were seen to wait for each other in different
    collectives until XLA ended the process; compiled anew it never was (jaxlib 0.12.0.1: bench/NOTES.md). It looks as
    if the order of collectives that do not depend on each other is lost on the way.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)


def use_unified_memory(environ: MutableMapping[str, str], *, topology: str | None = None) -> None:
    """Lets JAX allocate more than the GPU's memory, pages going over to the host's; before any device is asked for.

    XLA's allocator (`bfc`, its default) takes managed memory under TF_FORCE_UNIFIED_MEMORY, of which
    XLA_CLIENT_MEM_FRACTION, over 1, is the limit in units of the GPU's memory; nothing is reserved at the start, or all
    of it would be touched. What is set already wins. Source: jaxlib/xla_client.py; AlphaFold 3, docs/performance.md.

    Args:
      environ: os.environ.
      topology: the machine that a plan is for, such as `gh200:1`; nothing is set then.

    Raises:
      ValueError: these are not Grace systems; or what is set already contradicts.
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
            raise ValueError(
                f"{field}, but this is {name}: only beside a Grace CPU ({', '.join(COHERENT_GPUS)}) does a GPU reach "
                f"the host's memory at the speed of a link of its own; elsewhere pages would crawl over PCIe. {instead}"
            )
    if topology is not None:
        return
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in ("default", "bfc"):
        raise ValueError(
            f"{field} needs XLA's own allocator, but XLA_PYTHON_CLIENT_ALLOCATOR={allocator} is set. Unset it."
        )
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = next((name for name in names if environ.get(name)), None)
    if given is None:
        device_bytes = min(size for _, size in gpus)
        fraction = 1 + HOST_SHARE * host_memory_bytes() / len(gpus) / device_bytes
        environ[names[0]] = f"{fraction:.2f}"
    elif not _above_one(environ[given]):
        raise ValueError(
            f"{field}, but {given}={environ[given]} keeps JAX within the GPU's memory. Unset it, or set more than 1."
        )
    environ["TF_FORCE_UNIFIED_MEMORY"] = "1"
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _above_one(text: str) -> bool:
    try:
        return float(text) > 1
    except ValueError:
        return False


def nvidia_gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each NVIDIA GPU, as the driver's own tool says: JAX may not be asked yet."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:  # a driver without a GPU: there are none
        return []
    lines = done.stdout.splitlines()
    fields = [line.rpartition(",") for line in lines if line.strip()]
    return [(name.strip(), int(mib) << 20) for name, _, mib in fields]


def host_memory_bytes() -> int:
    """Memory beside the CPUs: on Grace systems the kernel counts the GPUs' memory as nodes of its own, without CPUs."""
    total = 0
    for node in NUMA_NODES.glob("node[0-9]*"):
        if (node / "cpulist").read_text().strip():
            line = next(line for line in (node / "meminfo").read_text().splitlines() if "MemTotal:" in line)
            total += int(line.split()[-2]) << 10
    return total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def join_processes(environ: MutableMapping[str, str]) -> None:
    """Joins the other processes of this run, if the environment says that there are any.

    `JTRAIN_COORDINATOR=host:port`, `JTRAIN_NUM_PROCESSES` and `JTRAIN_PROCESS_ID` name them, as launch/local.sh sets
    them; `JTRAIN_COORDINATOR=auto` leaves it to jax, which knows Slurm, Open MPI and TPU pods.

    Raises:
      ValueError: only some of the three are set, or one is no number.
    """
    coordinator = environ.get("JTRAIN_COORDINATOR")
    names = ("JTRAIN_NUM_PROCESSES", "JTRAIN_PROCESS_ID")
    if coordinator is None:
        if given := [name for name in names if name in environ]:
            raise ValueError(f"{given[0]} is set, but JTRAIN_COORDINATOR is not. Set it to host:port or to auto.")
        return

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for CPU processes; others do not look at it
    if coordinator == "auto":
        jax.distributed.initialize()
        return
    values = [environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        said = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise ValueError(f"JTRAIN_COORDINATOR={coordinator} needs two numbers beside it, but {said}. Set both.")
    jax.distributed.initialize(coordinator, int(values[0]), int(values[1]))


def _raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement in jtrain's own code raised `error`."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    spec = frame.f_globals.get("__spec__")  # knows the name of what `python -m` runs, whose __name__ is "__main__"
    module = spec.name if spec else frame.f_globals.get("__name__", "")
    statement = linecache.getline(frame.f_code.co_filename, line).lstrip()
    return module.startswith("jtrain") and statement.startswith("raise ")
