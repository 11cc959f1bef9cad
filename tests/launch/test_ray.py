"""launch/ray/train.py on a real Ray cluster of two nodes, both on this machine."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.hosts import ROOT, environment
from tests.launch.kits import check_trained, documented, shrunk

# Ray's test cluster starts its daemons by a fork of this process, in which other tests may have started jax:
# each is replaced by exec at once, so jax's warning of deadlocks does not concern it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")]

COMMAND = [sys.executable, str(ROOT / "launch" / "ray" / "train.py"), "--nodes"]
GPUS = 8
TINY = ["--config=tiny", "--with", "debug", "--emulate-devices", "1"]


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """Variables with which a command finds a cluster of two nodes."""
    pytest.importorskip("ray", reason="needs the extra [ray]")
    from ray.cluster_utils import Cluster

    variables = environment(RAY_USAGE_STATS_ENABLED="0")
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers inherit the variables of the nodes.
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, variables[name])
        size: dict[str, Any] = {"num_cpus": 1, "num_gpus": GPUS, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        try:
            cluster.add_node(**size)
            yield variables | {"RAY_ADDRESS": str(cluster.address)}
        finally:
            cluster.shutdown()


def test_ray_starts_one_run_of_a_process_per_node(environ: dict[str, str], tmp_path: Path) -> None:
    """The documented command, word for word; Ray is told of GPUs that are not there."""
    (command,) = documented("launch/ray/train.py")
    words = [sys.executable, *shlex.split(command)[1:], *shrunk(GPUS, tmp_path / "run")]
    assert words[2:6] == ["--nodes", "2", "--gpus", str(GPUS)]
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    check_trained(tmp_path / "run", done.stdout, devices=2 * GPUS)


def test_more_nodes_than_there_are_and_a_bad_config_are_refused(
    environ: dict[str, str], tmp_path: Path
) -> None:
    few = [*COMMAND, "2", "--gpus", "16", *TINY, "--workdir", str(tmp_path / "run")]
    done = subprocess.run(few, env=environ, capture_output=True, text=True, timeout=570)
    assert done.returncode == 2
    assert "no 2 nodes with 16 free GPUs each" in done.stderr
    wrong = [*COMMAND, "2", "--config=tny", "--workdir", str(tmp_path / "run")]
    done = subprocess.run(wrong, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 2, "the code of the processes"


def test_a_signal_saves_and_a_kill_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM to the command reaches the training processes, which save (75); SIGKILL ends them as well."""
    long = [*TINY[:1], *TINY[3:], "--set", "num_steps=1000000", "--set", "mesh.data=2"]
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        workdir = tmp_path / number.name
        with subprocess.Popen(
            [*COMMAND, "2", *long, "--workdir", str(workdir)], env=environ, cwd=ROOT
        ) as run:
            metrics = workdir / "metrics.jsonl"
            until_s = time.monotonic() + 300
            while not (metrics.exists() and metrics.read_text().count("\n")):
                assert run.poll() is None
                assert time.monotonic() < until_s, "no step was logged"
                time.sleep(0.2)
            os.kill(run.pid, number)
            assert run.wait(300) == code
        until_s = time.monotonic() + 300
        while left := [one for one in psutil.process_iter(["cmdline"]) if is_of(one, workdir)]:
            assert time.monotonic() < until_s, left
            time.sleep(0.2)
        assert list((workdir / "checkpoints").iterdir())


def is_of(process: psutil.Process, workdir: Path) -> bool:
    return str(workdir) in (process.info["cmdline"] or ())
