"""Processes compare versions and configs at the start of a run."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
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
        (
            other(versions=dict(FIRST.versions, jtrain="0.2.0 (12)")),
            r"jtrain: 0\.2\.0 \(11\) there, 0\.2\.0 \(12\)",
        ),
        (
            other(config={"seed": "1", "num_steps": "5"}),
            r"process 2 on host b has a config .*\n  seed: 0 there, 1 here",
        ),
        (
            other(config={"seed": "0"}),
            r"num_steps: 5 there, None here\nStart all processes with the same command",
        ),
    ],
    ids=["jax", "source", "config", "field"],
)
def test_the_first_process_that_differs_is_named(peer: Peer, message: str) -> None:
    assert re.search(message, difference([FIRST, other(), peer]))


def test_one_process_is_alone() -> None:
    assert compare_processes(this_process({})) == [socket.gethostname()]


COMPARE = """
import json, os, signal, sys
from jtrain.cli.run import run
from jtrain.runtime import multihost, process_comparison
def main():
    multihost.join_processes(os.environ)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    own = process_comparison.this_process(json.loads(sys.argv[1]))
    print(json.dumps(process_comparison.compare_processes(own)))
    return 0
sys.exit(run(main))
"""


@contextlib.contextmanager
def comparing(folder: Path, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one run, each with an argument of `COMPARE`; they end with the context."""
    (folder / "compare.py").write_text(COMPARE)
    environ = os.environ | {
        "JTRAIN_COORDINATOR": f"localhost:{free_port()}",
        "JTRAIN_NUM_PROCESSES": str(len(words)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "compare.py"), word],
            env=environ | {"JTRAIN_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, word in enumerate(words)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("steps", ["5", pytest.param("7", marks=pytest.mark.slow)])
def test_real_processes_compare_their_configs(steps: str, tmp_path: Path) -> None:
    """Alike, each knows the hosts of all; else both are refused, with the field and both values, and end with
    2.
    """
    configs = (json.dumps({"num_steps": value}) for value in ("5", steps))
    with comparing(tmp_path, *configs) as processes:
        for process in processes:
            stdout, stderr = process.communicate(timeout=240)
            if steps == "5":
                assert (process.returncode, json.loads(stdout)) == (0, [socket.gethostname()] * 2), stderr
            else:
                assert (process.returncode, stdout) == (2, ""), stderr
                assert "num_steps: 5 there, 7 here\nStart all processes with the same command" in stderr
                assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_process_that_dies_after_it_joined_is_named_by_all_others(tmp_path: Path) -> None:
    """Before jax misses it: no abort of jax, and no wait in its shutdown. Code 1, so that supervisors
    restart.
    """
    with comparing(tmp_path, "{}", "dies", "{}") as processes:
        for process in (processes[0], processes[2]):
            stdout, stderr = process.communicate(timeout=240)
            assert (process.returncode, stdout) == (1, ""), stderr
            assert stderr.startswith(
                "error: process 1 of 3 joined the others, but did not tell versions and config"
            )
            assert stderr.endswith("Start all processes again.\n")
