"""Processes compare versions and configs at the start of a run."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.runtime.process_comparison import Peer, compare_processes, difference, this_process
from tests.ports import free_port

FIRST = Peer("a", {"jax": "0.12.0", "jtrain": "0.2.0 (11)", "libtpu": None}, {"seed": "0", "num_steps": "5"})


def other(**changes: object) -> Peer:
    return dataclasses.replace(FIRST, host="b", **changes)


def test_equal_processes_have_no_difference() -> None:
    assert difference([FIRST, other(), other()]) == ""
    assert this_process({}) == this_process({}), "a description of the same process is the same"
    assert re.fullmatch(r".* \([0-9a-f]{8}\)", this_process({}).versions["jtrain"] or "")


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (
            other(versions=dict(FIRST.versions, jax="0.11.3")),
            r"process 2 on host b has versions other than process 0 on host a .*\n"
            r"  jax: 0\.12\.0 there, 0\.11\.3 here\nInstall the same versions on all hosts\.",
        ),
        (other(versions=dict(FIRST.versions, jtrain="0.2.0 (12)")), r"jtrain: 0\.2\.0 \(11\) there, 0\.2\.0 \(12\)"),
        (
            other(config={"seed": "1", "num_steps": "5"}),
            r"process 2 on host b has a config .*\n  seed: 0 there, 1 here",
        ),
        (other(config={"seed": "0"}), r"num_steps: 5 there, None here\nStart all processes with the same command"),
    ],
    ids=["jax", "source", "config", "field"],
)
def test_the_first_process_that_differs_is_named(peer: Peer, message: str) -> None:
    assert re.search(message, difference([FIRST, other(), peer]))


def test_one_process_is_alone() -> None:
    assert compare_processes({}) == [socket.gethostname()]


COMPARE = """
import json, os, sys
from jtrain.runtime import cli, multihost, process_comparison
def main():
    multihost.join_processes(os.environ)
    print(json.dumps(process_comparison.compare_processes(json.loads(sys.argv[1]))))
    return 0
sys.exit(cli.run(main))
"""


@pytest.mark.parametrize("steps", ["5", pytest.param("7", marks=pytest.mark.slow)])
def test_real_processes_compare_their_configs(steps: str, tmp_path: Path) -> None:
    """Alike, each knows the hosts of all; else both are refused, with the field and both values, and end with 2."""
    (tmp_path / "compare.py").write_text(COMPARE)
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "compare.py"), json.dumps({"num_steps": value})],
            env=os.environ
            | {
                "JTRAIN_COORDINATOR": f"localhost:{port}",
                "JTRAIN_NUM_PROCESSES": "2",
                "JTRAIN_PROCESS_ID": str(number),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, value in enumerate(("5", steps))
    ]
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=240)
            if steps == "5":
                assert (process.returncode, json.loads(stdout)) == (0, [socket.gethostname()] * 2), stderr
            else:
                assert (process.returncode, stdout) == (2, ""), stderr
                assert "num_steps: 5 there, 7 here\nStart all processes with the same command" in stderr
                assert "Traceback" not in stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()
