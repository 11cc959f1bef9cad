"""Packages that commands load, found in a process of their own."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from tests.processes import program, run_together


class Loaded(NamedTuple):
    """Exit codes of commands, what they printed, and which of the packages asked for they have loaded."""

    codes: list[int]
    output: str
    packages: list[str]


def list_loaded(packages: Sequence[str], *commands: Sequence[str]) -> Loaded:
    """Runs commands, each a module and its arguments as `python -m` takes them, in one new process."""
    arguments = [",".join(packages), *map(json.dumps, commands)]
    [ended] = run_together([program(__file__, "list_loaded", *arguments)], [{}])
    assert ended.code == 0, ended.errors
    *output, last = ended.output.splitlines()
    codes, loaded = json.loads(last)
    return Loaded(codes, "\n".join(output), loaded)
