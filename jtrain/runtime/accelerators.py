"""Accelerators of this host: the one that a run is to use, one that it leaves unused, and each process's
GPUs.
"""

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from jtrain.errors import UserError

type Accelerator = Literal["gpu", "tpu"]
"""Kind of accelerator."""

type DeviceChoice = Literal["cpu", "gpu", "tpu"]
"""Value of `--device`."""

DEVICES: tuple[DeviceChoice, ...] = ("cpu", "gpu", "tpu")

_FILES = {
    "gpu": ("dev/nvidia[0-9]*", "usr/lib/wsl/lib/nvidia-smi", "dev/kfd"),
    "tpu": ("dev/accel[0-9]*", "dev/vfio/[0-9]*"),
}
"""Files of the drivers of NVIDIA (under WSL too), AMD and TPUs. An AMD GPU counts if jax's plugin for it is
installed; vfio files count beside a PCI device of Google, because other devices have them too."""

_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
"""Set on TPU hosts. Where libtpu finds no TPU, it writes a sentence into them."""

_GOOGLE = "0x1ae0"
"""Vendor of TPUs on the PCI bus."""

HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES under which CUDA sees no GPU; the first two of ROCm's variables too."""

_ROCM_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that hide AMD GPUs: HIP obeys CUDA's too."""


def find_device(kind: Accelerator, environ: Mapping[str, str], *, root: Path = Path("/")) -> str | None:
    """Returns the file or variable that shows a GPU or TPU of this host; None if there is none.

    Args:
      environ: os.environ.
      root: the root of the file system.
    """
    for pattern in _FILES[kind]:
        files = sorted(root.glob(pattern))
        # kfd counts with jax's plugin only; vfio serves other cards as well.
        counts = "kfd" not in pattern or has_plugin("xla_rocm")
        counts &= "vfio" not in pattern or _has_google_device(root)
        if files and counts:
            return f"/{files[0].relative_to(root)}"
    if kind == "tpu":
        values = {name: environ.get(name, "") for name in _TPU_VARIABLES}
        # libtpu writes a sentence, with spaces, into these variables on a machine without TPUs.
        return next((f"{name}={value}" for name, value in values.items() if value and " " not in value), None)
    return None


def platform_of(device: DeviceChoice, environ: Mapping[str, str], *, root: Path = Path("/")) -> str:
    """Returns jax's name of the platform that `--device` forces.

    Raises:
      UserError: this host has no such device, or the package that jax needs for it is not installed.
    """
    if device == "cpu":
        return "cpu"
    # Before jax starts: its own error names neither the file nor the package that is missing.
    if find_device(device, environ, root=root) is None:
        patterns = ", ".join(f"/{pattern}" for pattern in _FILES[device])
        raise UserError(
            f"--device {device}: this host has no {device.upper()} (no {patterns}). In a container, give it "
            "the devices; else leave --device out, or give --device cpu."
        )
    if missing_software := find_missing_software(device):
        raise UserError(f"--device {device}: {missing_software}. Run {_install(device)}.")
    # CUDA wins where both plugins are installed.
    return {"tpu": "tpu"}.get(
        device, "rocm" if has_plugin("xla_rocm") and not has_plugin("xla_cuda") else "cuda"
    )


def unused_warning(environ: Mapping[str, str], *, root: Path = Path("/")) -> str | None:
    """Returns a warning about a GPU or TPU of this host that a run on CPUs leaves unused; None if there is
    none.

    Call it where jax has chosen the CPU by itself.

    Args:
      environ: os.environ.
      root: the root of the file system.
    """
    kinds: tuple[Accelerator, ...] = ("gpu", "tpu")
    for kind in kinds:
        path = find_device(kind, environ, root=root)
        # The user has hidden the GPUs: that is a choice, and no mistake to warn of.
        variables = {"/dev/kfd": _ROCM_VARIABLES}.get(path or "", ("CUDA_VISIBLE_DEVICES",))
        hidden = kind == "gpu" and any(environ.get(variable, "all") in HIDDEN for variable in variables)
        if hidden or path is None:
            continue
        missing_software = find_missing_software(kind)
        advice = (
            f"run {_install(kind)}"
            if missing_software
            else f"run python -c \"import jax; jax.devices('{kind}')\", which says why"
        )
        return (
            f"WARNING: a {kind.upper()} is here ({path}), but this run computes on the CPU: "
            f"{missing_software or 'jax found none'}. To use it, {advice}; --device cpu says that the CPU is "
            "meant."
        )
    return None


def nvidia_gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each NVIDIA GPU, from nvidia-smi, since JAX must not be initialised yet."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    if answer.returncode:  # a driver is installed, but no GPU
        return []
    lines = answer.stdout.splitlines()
    # From the right: a GPU's name may hold a comma.
    fields = [line.rpartition(",") for line in lines if line.strip()]
    return [(name.strip(), int(mib) << 20) for name, _, mib in fields]


def local_device_ids(environ: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs of this host that this process takes, by their number among those that it can see;
    None for all.

    The GPUs are divided among the host's processes. Left to itself, jax gives each process one GPU, also
    where it is alone on a host with eight. A scheduler that shows each process only its own GPUs has divided
    them already.

    Args:
      environ: variables of Slurm (of a step, as `srun` starts it) or Open MPI; without either, None is
        returned.

    Raises:
      UserError: the processes of this host are more than its GPUs, or do not divide them.
    """
    if (local_rank := _local_rank(environ)) is None:
        return None
    number, processes = local_rank
    visible_gpus = _count_visible_gpus(environ)
    gpus_per_task = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # `2`, or `h100:2`
    # One process takes all; a process that sees one GPU, or as
    # many as its share, was given them by the scheduler.
    if processes == 1 or visible_gpus == 1 or gpus_per_task == str(visible_gpus):
        return None
    if visible_gpus == 0:
        return [number]  # as jax does; a process on CPUs ignores it
    # Uneven shares would give the processes different numbers of devices, which no mesh fits.
    if visible_gpus % processes:
        raise UserError(
            f"{processes} processes on this host cannot share its {visible_gpus} GPUs evenly. Start one "
            "process per host (--ntasks-per-node=1), which takes all GPUs, or one per GPU "
            f"(--ntasks-per-node={visible_gpus})."
        )
    gpus_per_process = visible_gpus // processes
    # By number within what this process sees, which is the same list in all processes of the host.
    return list(range(number * gpus_per_process, (number + 1) * gpus_per_process))


def find_missing_software(kind: Accelerator) -> str:
    """Says what jax lacks for a kind of device; "" if it lacks nothing."""
    if kind == "tpu":
        return "" if importlib.util.find_spec("libtpu") else "libtpu is not installed"
    if has_plugin("xla_rocm"):
        return ""
    if not has_plugin("xla_cuda"):
        return "jax's CUDA plugin is not installed"
    return "" if _has_cuda() else "jax's CUDA plugin is installed without CUDA's libraries"


def has_plugin(prefix: str) -> bool:
    """True if a plugin of jax is installed whose module begins with `prefix`."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    # By the names in the namespace package: nothing is imported.
    return any(path.name.startswith(prefix) for folder in folders for path in Path(folder).iterdir())


def _has_cuda() -> bool:
    """True if CUDA's libraries are there, as packages or in their usual folder."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return any(Path("/usr/local/cuda/lib64").glob("libcublas.so*"))


def _install(kind: Accelerator) -> str:
    """Returns the command that installs what jax needs for a kind of device: from this checkout, if it is
    one.
    """
    extra = {"gpu": "cuda", "tpu": "tpu"}[kind]
    checkout = Path(__file__).parents[2]
    package = f"-e '{checkout}[{extra}]'" if (checkout / "pyproject.toml").is_file() else f"'jtrain[{extra}]'"
    return f"pip install {package}"


def _has_google_device(root: Path) -> bool:
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    return any(path.read_text().strip() == _GOOGLE for path in vendors)


def _local_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Number of this process on its host, and how many processes the host has; None where nobody says."""
    if "SLURM_LOCALID" in environ:
        # The step's list first: an allocation may have more tasks per node than the step that runs now.
        counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
        return int(environ["SLURM_LOCALID"]), _tasks(counts, int(environ.get("SLURM_NODEID", "0")))
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    return None


def _tasks(counts: str, node: int) -> int:
    """Processes on a node, from Slurm's list of them: `8`, `8(x2)` or `8(x2),4`."""
    for part in counts.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        # Counts down over the nodes of each part until this node's own is reached.
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    return 1


def _count_visible_gpus(environ: Mapping[str, str]) -> int:
    """Number of GPUs that CUDA shows to this process."""
    # Set, even if empty: CUDA obeys it before anything that Slurm says.
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return 0 if visible in HIDDEN else len(visible.split(","))
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else len(nvidia_gpus())
