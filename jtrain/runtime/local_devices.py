"""GPUs of a host that one of its processes takes, under Slurm and Open MPI."""

from collections.abc import Mapping

from jtrain.errors import UserError
from jtrain.runtime.accelerators import HIDDEN
from jtrain.runtime.platform import nvidia_gpus


def local_device_ids(environ: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs of this host that this process takes, by their number among those that it can see; None for all.

    The GPUs are divided among the host's processes. Left to itself, jax gives each process one GPU, also where it is
    alone on a host with eight. A scheduler that shows each process only its own GPUs has divided them already.

    Args:
      environ: variables of Slurm (of a step, as `srun` starts it) or Open MPI; without either, None is returned.

    Raises:
      UserError: the processes of this host are more than its GPUs, or do not divide them.
    """
    if (place := _place(environ)) is None:
        return None
    number, processes = place
    seen = _seen(environ)
    own = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # `2`, or `h100:2`
    if processes == 1 or seen == 1 or own == str(seen):
        return None
    if seen == 0:
        return [number]  # as jax does; a process on CPUs ignores it
    if seen % processes:
        raise UserError(
            f"{processes} processes on this host cannot share its {seen} GPUs evenly. Start one process per host "
            "(--ntasks-per-node=1), which takes all GPUs, or one per GPU "
            f"(--ntasks-per-node={seen})."
        )
    each = seen // processes
    return list(range(number * each, (number + 1) * each))


def _place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Number of this process on its host, and how many processes the host has; None where nobody says."""
    if "SLURM_LOCALID" in environ:
        counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
        return int(environ["SLURM_LOCALID"]), _tasks(counts, int(environ.get("SLURM_NODEID", "0")))
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    return None


def _tasks(counts: str, node: int) -> int:
    """Processes on a node, from Slurm's list of them: `8`, `8(x2)` or `8(x2),4`."""
    for part in counts.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    return 1


def _seen(environ: Mapping[str, str]) -> int:
    """Number of GPUs that CUDA shows to this process."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return 0 if visible in HIDDEN else len(visible.split(","))
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else len(nvidia_gpus())
