"""launch/slurm.sbatch on test hosts: stubs of srun and scontrol start real processes with Slurm's
variables.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Running, descendants, hosts
from tests.launch.kits import check_trained, documented, shrunk
from tests.launch.slurm import SLURM_SCRIPT, STUBS, Slurm

RECORDER = """#!/bin/sh
if [ "$2" = jtrain.node_check ]; then kind=check; else kind=train; fi
printf '%s\\n' "$*" >"$RECORDS/$kind-$SLURM_PROCID.args"
env >"$RECORDS/$kind-$SLURM_PROCID.env"
eval "code=\\${${kind}_$SLURM_NODEID:-0}"
if [ "$code" != 0 ]; then echo "error: $kind of $SLURMD_NODENAME ended with $code" >&2; fi
exit "$code"
"""
"""In the place of Python: notes how it was called, and ends with the code that the test chose for its
node."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    """Three nodes, and a recorder in the place of Python."""
    with hosts(3, tmp_path) as nodes:
        program = tmp_path / "python"
        program.write_text(RECORDER)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        yield Slurm(nodes, tmp_path)


def submit(
    cluster: Slurm,
    *arguments: str,
    nodes: int = 2,
    options: dict[str, str] | None = None,
    codes: dict[str, int] | None = None,
) -> tuple[Running, int]:
    """Runs the script to its end; returns the job and its exit code."""
    variables = {name: str(code) for name, code in (codes or {}).items()} | {"RECORDS": str(cluster.folder)}
    python = str(cluster.folder / "python")
    job = cluster.sbatch(
        SLURM_SCRIPT, *arguments, nodes=nodes, options=options, **variables | {"PYTHON": python}
    )
    return job, job.end()


@pytest.mark.parametrize("per_node", [1, 2])
def test_each_node_has_its_processes_and_the_arguments_arrive(cluster: Slurm, per_node: int) -> None:
    """One process per node, or one per GPU; srun is told the cores; each process has a log of its own."""
    options = {"ntasks-per-node": str(per_node), "cpus-per-task": "7"}
    job, code = submit(cluster, "--config=tiny", "--set", "data.path='a b'", options=options)
    assert code == 0, job.output
    ranks = range(2 * per_node)
    for rank in ranks:
        said = (cluster.folder / f"train-{rank}.args").read_text()
        assert said == "-m jtrain.launch --supervise --config=tiny --set data.path='a b'\n"
        assert (
            (cluster.folder / f"check-{rank}.args")
            .read_text()
            .startswith("-m jtrain.node_check --config=tiny")
        )
        lines = (cluster.folder / f"train-{rank}.env").read_text().splitlines()
        environ = {name: value for name, _, value in (line.partition("=") for line in lines)}
        assert environ["JTRAIN_COORDINATOR"] == "auto"
        assert (environ["SLURM_PROCID"], environ["SLURM_LOCALID"]) == (str(rank), str(rank % per_node))
        assert environ["SLURM_CPUS_PER_TASK"] == "7"
    assert list(cluster.logs()) == [f"{rank}.log" for rank in ranks]
    assert not cluster.requeued()


@pytest.mark.parametrize(
    ("codes", "code", "again", "without"),
    [
        ({"train_0": 75, "train_1": 75}, 75, True, []),
        ({"train_0": 143, "train_1": 143}, 143, True, []),
        ({"train_0": 75, "train_1": 76}, 76, True, [1]),
        ({"train_0": 77, "train_1": 77}, 77, True, []),
        ({"check_0": 76, "check_1": 75}, 76, True, [0]),
        ({"train_0": 2, "train_1": 2}, 2, False, []),
        ({"check_0": 2, "check_1": 2}, 2, False, []),
        ({"train_0": 137, "train_1": 137}, 137, False, []),
    ],
    ids=str,
)
def test_a_job_is_queued_again_where_that_helps(
    cluster: Slurm, codes: dict[str, int], code: int, again: bool, without: list[int]
) -> None:
    """On 75, 76, 77 and 143, and on 76 without the node; all else would only repeat itself."""
    job, ended = submit(cluster, "--config=tiny", codes=codes)
    assert ended == code, job.output
    assert (cluster.folder / "train-0.args").exists() == ("train_0" in codes), (
        "nothing trains on a faulty node"
    )
    assert f"error: {min(codes)[:5]}" in job.output, "the reason stands in the job's own output"
    assert cluster.requeued() == again
    assert cluster.excluded == {cluster.hosts[node].name for node in without}


def test_what_is_away_is_tried_four_times_in_a_row(cluster: Slurm) -> None:
    """The supervisors of each have tried for an hour; an attempt with another end begins the count anew."""
    away, saved = ({"train_0": code, "train_1": code} for code in (77, 75))
    for codes in (away, saved, away, away, away, away):
        submit(cluster, "--config=tiny", codes=codes)
        assert cluster.requeued(), codes
    job, code = submit(cluster, "--config=tiny", codes=away)
    assert code == 77, job.output
    assert not cluster.requeued()


SMALL = (
    *("--config=tiny", "--emulate-devices", "1", "--set", "precision.compute_dtype=float32"),
    *("--set", "model.num_layers=1", "--set", "data.seq_len=64", "--set", "metrics.log_every_steps=1"),
    *("--set", "checkpoint.every_steps=5", "--set", "eval.every_steps=None"),
)


def losses(workdir: Path) -> dict[int, float]:
    """Loss of each step that a run has logged."""
    file = workdir / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return {line["step"]: line["loss_nats"] for line in lines if "loss_nats" in line}


@pytest.mark.slow
def test_two_hosts_train(tmp_path: Path) -> None:
    """Both kinds of host: each is checked, joins over the network of the hosts, and trains."""
    with hosts(2, tmp_path) as nodes:
        slurm = Slurm(nodes, tmp_path)
        options = [*SMALL, "--set", "mesh.data=2", "--set", "num_steps=6", "--workdir", str(tmp_path / "run")]
        job = slurm.sbatch(SLURM_SCRIPT, *options, nodes=2)
        assert job.end() == 0, (job.output, slurm.logs())
    found = losses(tmp_path / "run")
    assert sorted(found) == list(range(1, 7))
    assert found[6] < found[1] - 0.1, "the loss must move"
    log = slurm.logs()["0.log"]
    assert "node check: 2 devices of 2 processes are fine" in log
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("command", documented("launch/slurm.sbatch")[:2])
def test_a_documented_job_trains(command: str, tmp_path: Path) -> None:
    """Word for word: one process per node, or one per GPU. The third line differs by its container alone."""
    sbatch, *words = shlex.split(command)
    assert sbatch == "sbatch"
    script = words.index("launch/slurm.sbatch")
    options = dict(word.removeprefix("--").split("=") for word in words[:script])
    nodes, per_node = int(options.pop("nodes")), int(options.get("ntasks-per-node", 1))
    gpus = int(re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", SLURM_SCRIPT.read_text(), re.MULTILINE)[0])
    workdir = tmp_path / "run"
    with hosts(nodes, tmp_path) as known:
        slurm = Slurm(known, tmp_path)
        arguments = [*words[script + 1 :], *shrunk(gpus // per_node, workdir)]
        job = slurm.sbatch(SLURM_SCRIPT, *arguments, nodes=nodes, options=options)
        assert job.end() == 0, (job.output, slurm.logs())
        check_trained(workdir, slurm.logs()["0.log"], devices=gpus * nodes)


def test_the_third_documented_job_is_the_first_in_a_container() -> None:
    first, _, third = documented("launch/slurm.sbatch")
    assert third.partition(" ")[2] == first


def pids(job: Running, *words: str) -> list[int]:
    """Processes of a job whose command line has all these words."""
    found = {}
    for pid in descendants(job.process.pid):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return [pid for pid, line in found.items() if set(words) <= set(line)]


def rank(pid: int) -> str:
    """SLURM_PROCID of a process."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(
        value for name, _, value in (one.partition("=") for one in variables) if name == "SLURM_PROCID"
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_hosts_lose_a_process_are_preempted_and_go_on(count: int, tmp_path: Path) -> None:
    """One process is killed: all start again from the last save. SIGTERM: all save, and the job is queued
    again.

    The losses are those of a job that nobody disturbed, bit for bit.
    """
    options = [*SMALL, "--set", f"mesh.data={count}", "--set", "num_steps=60"]
    with hosts(count, tmp_path) as nodes:
        slurm = Slurm(nodes, tmp_path)
        run = tmp_path / "run"
        job = slurm.sbatch(SLURM_SCRIPT, *options, "--workdir", str(run), nodes=count)
        job.wait_for(lambda: max(losses(run), default=0) >= 12)
        trainers = [pid for pid in pids(job, "-m", "jtrain.launch") if pid not in pids(job, "--supervise")]
        (victim,) = [pid for pid in trainers if rank(pid) == "1"]
        os.kill(victim, signal.SIGKILL)
        job.wait_for(lambda: sum("restart 1 of" in text for text in slurm.logs().values()) == count)
        before = max(losses(run))
        job.wait_for(lambda: max(losses(run)) >= before + 10)
        (srun,) = pids(job, str(STUBS / "srun"))
        os.kill(srun, signal.SIGTERM)
        assert job.end() == 75, (job.output, slurm.logs())
        assert slurm.requeued()
        assert slurm.excluded == set()
        assert max(losses(run)) < 60
        again = slurm.sbatch(SLURM_SCRIPT, *options, "--workdir", str(run), nodes=count)
        assert again.end() == 0, (again.output, slurm.logs(1))
        calm = slurm.sbatch(SLURM_SCRIPT, *options, "--workdir", str(tmp_path / "calm"), nodes=count)
        assert calm.end() == 0, (calm.output, slurm.logs())
    assert f"process 1 on {os.uname().nodename if not nodes[0].enter else 'node1'}" in slurm.logs()["1.log"]
    want = losses(tmp_path / "calm")
    assert want[60] < want[1] - 0.5, "the loss must move, or equality proves nothing"
    assert losses(run) == want
