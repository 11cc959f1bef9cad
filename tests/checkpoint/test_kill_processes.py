"""One or both of two processes are killed within a save: every durable checkpoint stays, and the next run
goes on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.checkpoint import removal
from tests.checkpoint.test_kill import check
from tests.ports import free_port

PROCESS = """
import os, signal, sys
from pathlib import Path
workdir, coordinator, index, instant, victims, until = sys.argv[1:]
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(index))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jtrain.checkpoint import Checkpoints, CheckpointSpec, array_writer, files, folders, hashed_io
from jtrain.runtime import atomic_io

checkpoints = Checkpoints(Path(workdir), CheckpointSpec(keep_last=2))

def die(when):
    if when:
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, when):
    wrapped = getattr(owner, name)
    def wrapper(*args, **kw):
        die(when(*args, **kw))
        return wrapped(*args, **kw)
    setattr(owner, name, wrapper)

if index in victims:
    written = []
    if instant == "mid-write":
        def third(disk, path, data):
            written.extend(["/3." in str(path)])
            return sum(written) == 3
        before(hashed_io.HashedIO, "write", third)
    elif instant == "after-its-part":
        write = array_writer.write_arrays
        array_writer.write_arrays = lambda path, *args, **kw: (write(path, *args, **kw), die("/3." in str(path)))[0]
    elif instant == "before-the-manifest":
        before(files, "seal", lambda path, **kw: kw["step"] == 3)
    elif instant == "before-the-rename":
        seal = files.seal
        files.seal = lambda path, **kw: (seal(path, **kw), die(kw["step"] == 3))
    elif instant == "after-the-rename":
        before(atomic_io, "sync_directory", lambda path: 3 in checkpoints.steps())
    elif instant == "reading-back":
        before(array_writer, "differing", lambda path, *_: path.name == "3")
    elif instant == "within-a-deletion":
        before(folders.shutil, "rmtree", lambda path, **kw: 3 in checkpoints.steps())

mesh = jax.make_mesh((4,), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def put(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

step = checkpoints.latest_step() or 0
while step < int(until):
    step += 1
    rng = np.random.default_rng(step)
    state = {
        "step": put(np.int32(step), whole),
        "params": {f"w{i}": put(rng.standard_normal((256, 256), np.float32), rows) for i in range(8)},
    }
    checkpoints.save(step, state, {"next": step}, f"config {step}")
    if step % 2:
        checkpoints.wait()
        print("durable", step, flush=True)
checkpoints.close()
print("closed", flush=True)
"""


def run(workdir: Path, instant: str, victims: str, *, until: int) -> tuple[int, bool]:
    """Runs two processes; returns the last durable step, and True if both ended by themselves.

    As soon as a victim is dead, the other process is killed too, as a supervisor would do.
    """
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    outputs = [workdir.parent / f"{workdir.name}-{until}-{index}.txt" for index in range(2)]
    with contextlib.ExitStack() as opened:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROCESS,
                    str(workdir),
                    coordinator,
                    str(index),
                    instant,
                    victims,
                    str(until),
                ],
                stdout=opened.enter_context(open(output, "w")),
                stderr=subprocess.STDOUT,
                env=environ,
            )
            for index, output in enumerate(outputs)
        ]
    while all(process.poll() is None for process in processes):
        time.sleep(0.02)
    if any(process.poll() for process in processes):
        for process in processes:
            process.kill()
    codes = [process.wait(timeout=180) for process in processes]
    text = "\n".join(output.read_text() for output in outputs)
    assert set(codes) <= {0, -signal.SIGKILL}, text
    durable = [int(line.split()[1]) for line in text.splitlines() if line.startswith("durable")]
    return max(durable, default=0), codes == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instant", "victims", "newest"),
    [
        ("mid-write", "0", 2),
        ("mid-write", "1", 2),
        ("mid-write", "01", 2),
        ("after-its-part", "1", 2),
        ("after-its-part", "01", 2),
        ("before-the-manifest", "0", 2),
        ("before-the-rename", "0", 2),
        ("after-the-rename", "0", 3),
        ("reading-back", "1", 3),
        ("reading-back", "01", 3),
        ("within-a-deletion", "0", 3),
    ],
)
def test_a_kill_within_a_save_of_two_processes_loses_nothing(
    tmp_path: Path, instant: str, victims: str, newest: int
) -> None:
    """Every checkpoint that is left is compared bit for bit; then two processes go on in the same workdir."""
    workdir = tmp_path / "run"
    durable, ended = run(workdir, instant, victims, until=5)
    assert not ended, "the kill must have happened, or this proves nothing"
    assert check(workdir, durable) == newest
    durable, ended = run(workdir, "never", "", until=6)
    assert ended
    assert check(workdir, durable) == 6
    assert removal.unread_names(workdir / "checkpoints") == ()
