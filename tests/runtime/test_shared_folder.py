"""The probe of one shared workdir, with two real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

PROCESS = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jtrain.errors import UserError
from jtrain.runtime.workdir_lock import check_shared
said = []
for folder in sys.argv[3:]:
    try:
        check_shared(Path(folder), patience_s=0.5)
        said.append("")
    except UserError as error:
        said.append(str(error))
print(json.dumps(said), flush=True)
"""


def test_two_processes_agree_about_what_they_share(tmp_path: Path) -> None:
    """One folder passes; two folders, and one that the second process cannot write, are refused in both."""
    coordinator = f"localhost:{free_port()}"
    one, apart = tmp_path / "one", [tmp_path / "a", tmp_path / "b"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, coordinator, str(index), *map(str, folders)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""},
        )
        for index, folders in enumerate([(one, apart[0], one), (one, apart[1], "/proc/self/none")])
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        shared, unshared, unwritable = json.loads(output.splitlines()[-1])
        assert shared == ""
        assert "is not one shared folder: process 0 on host " in unshared
        assert "and process 1 on host " in unshared
        assert "Set --workdir to a folder that all hosts share" in unshared
        assert "cannot be written to by process 1 on host " in unwritable
        assert "/proc/self" in unwritable
    assert [list(folder.iterdir()) for folder in (one, *apart)] == [[], [], []], "no file of the probe stays"
