"""launch/sky.yaml: its `run` script on test hosts, with the variables that SkyPilot sets."""

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.hosts import ROOT, Host, Running, environment, hosts
from tests.launch.kits import check_trained, documented, shrunk

FILE = ROOT / "launch" / "sky.yaml"
TASK: dict[str, Any] = yaml.safe_load(FILE.read_text())
SHOW = """#!/bin/sh
echo "$JTRAIN_COORDINATOR $JTRAIN_NUM_PROCESSES $JTRAIN_PROCESS_ID"
for argument in "$@"; do echo "$argument"; done
"""


def started(nodes: list[Host], **variables: str) -> list[Running]:
    """The task's `run` on each host."""
    ips = "\n".join(host.address for host in nodes)
    return [
        host.start(
            ["bash", "-c", TASK["run"]],
            environment(
                SKYPILOT_NODE_IPS=ips, SKYPILOT_NUM_NODES=str(len(nodes)), SKYPILOT_NODE_RANK=str(rank)
            )
            | TASK["envs"]
            | variables,
        )
        for rank, host in enumerate(nodes)
    ]


def test_the_task_is_short_and_comes_again_where_that_helps() -> None:
    """On 75, 76 and 143, and after a preemption; after other failures, 77 among them, a few times."""
    assert len(FILE.read_text().splitlines()) <= 60
    recovery = TASK["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75, 76, 143]}
    assert "--constraint constraints.txt" in TASK["setup"]
    assert TASK["run"].rstrip().endswith('-m jtrain.launch --supervise --workdir="$WORKDIR" "$@"')


def test_each_node_has_its_number_and_the_arguments_arrive(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(SHOW)
    program.chmod(0o755)
    arguments = "--config=tiny --set data.path=\"'a b'\""
    with hosts(2, tmp_path) as nodes:
        runs = started(nodes, ARGUMENTS=arguments, PYTHON=str(program), WORKDIR="/w")
        assert [run.end() for run in runs] == [0, 0]
        for rank, run in enumerate(runs):
            assert run.lines == [
                f"{nodes[0].address}:1234 2 {rank}",
                *(
                    "-m",
                    "jtrain.launch",
                    "--supervise",
                    "--workdir=/w",
                    "--config=tiny",
                    "--set",
                    "data.path='a b'",
                ),
            ]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["its own", "documented"])
def test_its_nodes_train(which: str, tmp_path: Path) -> None:
    """With the task's own arguments, and with those of its documentation."""
    (command,) = documented("launch/sky.yaml")
    words = shlex.split(command)
    given = dict(word.split("=", 1) for option, word in itertools.pairwise(words) if option == "--env")
    arguments = TASK["envs"]["ARGUMENTS"] if which == "its own" else given["ARGUMENTS"]
    (devices,) = [int(one.partition(":")[2]) for one in [TASK["resources"]["accelerators"]]]
    options = shlex.join(shrunk(devices, tmp_path / "run"))
    with hosts(TASK["num_nodes"], tmp_path) as nodes:
        runs = started(nodes, ARGUMENTS=f"{arguments} {options}", PYTHON=sys.executable)
        assert [run.end() for run in runs] == [0] * len(nodes), [run.output for run in runs]
    check_trained(tmp_path / "run", runs[0].output, devices=devices * len(nodes))
