"""Processes compare versions and configs at the start of a run."""

import dataclasses
import json
import re
import socket

import pytest

from jtrain.runtime.process_comparison import Peer, compare_processes, difference, this_process
from tests.processes import Ended, joined, program, run_together

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


def comparing(*words: str) -> list[Ended]:
    """Runs processes of one run, each with an argument of programs/compare_configs.py."""
    commands = [program(__file__, "compare_configs", word) for word in words]
    return run_together(commands, joined(len(words)))


@pytest.mark.parametrize("steps", ["5", pytest.param("7", marks=pytest.mark.slow)])
def test_real_processes_compare_their_configs(steps: str) -> None:
    """Alike, each knows the hosts of all; else both are refused, with the field and both values, and end with
    2.
    """
    configs = (json.dumps({"num_steps": value}) for value in ("5", steps))
    for ended in comparing(*configs):
        if steps == "5":
            assert (ended.code, json.loads(ended.output)) == (0, [socket.gethostname()] * 2), ended.errors
        else:
            assert (ended.code, ended.output) == (2, ""), ended.errors
            assert "num_steps: 5 there, 7 here\nStart all processes with the same command" in ended.errors
            assert "Traceback" not in ended.errors


@pytest.mark.slow
def test_a_process_that_dies_after_it_joined_is_named_by_all_others() -> None:
    """Before jax misses it: no abort of jax, and no wait in its shutdown. Code 1, so that supervisors
    restart.
    """
    first, _, third = comparing("{}", "dies", "{}")
    for ended in (first, third):
        assert (ended.code, ended.output) == (1, ""), ended.errors
        assert ended.errors.startswith(
            "error: process 1 of 3 joined the others, but did not tell versions and config"
        )
        assert ended.errors.endswith("Start all processes again.\n")
