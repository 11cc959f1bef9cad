"""The probe of one shared workdir, with two real processes."""

import json
from pathlib import Path

from tests.processes import joined, program, run_together


def test_two_processes_agree_about_what_they_share(tmp_path: Path) -> None:
    """One folder passes; two folders, and one that the second process cannot write, are refused in both."""
    one, apart = tmp_path / "one", [tmp_path / "a", tmp_path / "b"]
    folders = [(one, apart[0], one), (one, apart[1], "/proc/self/none")]
    commands = [program(__file__, "check_shared", *paths) for paths in folders]
    for ended in run_together(commands, [environ | {"XLA_FLAGS": ""} for environ in joined(2)]):
        assert ended.code == 0, ended.errors
        shared, unshared, unwritable = json.loads(ended.output.splitlines()[-1])
        assert shared == ""
        assert "is not one shared folder: process 0 on host " in unshared
        assert "and process 1 on host " in unshared
        assert "Set --workdir to a folder that all hosts share" in unshared
        assert "cannot be written to by process 1 on host " in unwritable
        assert "/proc/self" in unwritable
    assert [list(folder.iterdir()) for folder in (one, *apart)] == [[], [], []], "no file of the probe stays"
