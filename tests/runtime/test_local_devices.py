"""GPUs that each process of a host takes under Slurm and Open MPI, by the variables that these set."""

import json
import os

import pytest

from jtrain.errors import UserError
from jtrain.runtime.accelerators import local_device_ids
from tests.processes import program, run_together

EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}


def slurm(local: int, tasks: str, node: int = 0, **more: str) -> dict[str, str]:
    names = {"SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    return EIGHT | names | more


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, None),
        (slurm(0, "1"), None),
        (slurm(0, "1(x2)", node=1), None),
        (slurm(3, "8(x2)", node=1), [3]),
        (slurm(1, "4"), [2, 3]),
        (slurm(1, "8(x2),2", node=2), [4, 5, 6, 7]),
        (slurm(5, "8", CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_PER_TASK="1"), None),
        (slurm(1, "2", CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="h100:2"), None),
        (slurm(2, "4", CUDA_VISIBLE_DEVICES="-1"), [2]),
        ({"SLURM_LOCALID": "2", "SLURM_TASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}, [2]),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} | EIGHT, [4, 5, 6, 7]),
    ],
    ids=str,
)
def test_the_gpus_of_a_host_are_shared_by_its_processes(
    environ: dict[str, str], ids: list[int] | None
) -> None:
    """None is all that CUDA shows: to the only process of a host, or to one that Slurm shows only its own."""
    assert local_device_ids(environ) == ids


def test_processes_that_do_not_divide_the_gpus_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"3 processes on this host cannot share its 8 GPUs evenly.*per-node=8"
    ):
        local_device_ids(slurm(0, "3"))


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 8])
def test_slurm_shows_one_process_all_gpus_of_its_node_and_eight_one_each(tasks: int) -> None:
    """Real processes with the variables that `srun` sets on a node with 8 GPUs: what jax is left with."""
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(tasks),
    }
    common |= {"JTRAIN_COORDINATOR": "auto", "JAX_PLATFORMS": "cpu"}
    environs = [common | slurm(task, str(tasks)) | {"SLURM_PROCID": str(task)} for task in range(tasks)]
    processes = run_together([program(__file__, "listen_and_sum")] * tasks, environs)
    answers = [json.loads(ended.output.splitlines()[-1]) for ended in processes]
    assert [answer["processes"] for answer in answers] == [tasks] * tasks
    shown = [answer["visible"] for answer in answers]
    visible = [EIGHT["CUDA_VISIBLE_DEVICES"] if ids == "all" else ids for ids in shown]
    assert [len(ids.split(",")) for ids in visible] == [8 // tasks] * tasks
    assert sorted(number for ids in visible for number in ids.split(",")) == [
        str(number) for number in range(8)
    ]
