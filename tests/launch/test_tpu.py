"""launch/tpu/ with a stub of gcloud, which runs the remote commands as real processes on test hosts."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import ROOT, Host, Running, environment, hosts
from tests.launch.kits import check_trained, documented, shrunk

POD, QUEUED = (ROOT / "launch" / "tpu" / f"{name}.sh" for name in ("pod", "queued_resource"))
STUBS = Path(__file__).parent / "stubs"

RECORDER = """#!/bin/sh
{ echo "$*"; env | grep -E '^(JTRAIN|MEGASCALE)_' | sort; } >>said
code=$(head -n 1 codes 2>/dev/null)
sed -i 1d codes 2>/dev/null
exit "${code:-0}"
"""
"""In the place of a worker's Python: notes how it was called, and ends with the codes that the test chose, then
with 0."""


class Tpus:
    """TPU slices of two hosts each.

    Args:
      nodes: the workers, slice by slice.
      folder: where the stub keeps what it knows.
    """

    def __init__(self, nodes: list[Host], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.state = folder / "state"
        self.names = [f"mine-{number}" for number in range(len(nodes) // 2)] if len(nodes) > 2 else ["mine"]
        tpus: dict[str, list[dict[str, object]]] = {name: [] for name in self.names}
        self.disks = []
        for number, host in enumerate(nodes):
            disk = folder / f"disk-node{number}"  # as this machine sees it
            self.disks.append(disk)
            tpus[self.names[number // 2]].append(
                {"address": host.address, "enter": host.enter, "disk": str(host.disk)}
            )
        known = {"tpus": tpus, "log": str(folder / "asked.jsonl"), "state": str(self.state)}
        (folder / "cluster.json").write_text(json.dumps(known))
        self.python = folder / "python"
        self.python.write_text(RECORDER)
        self.python.chmod(0o755)

    def start(self, script: Path, *arguments: str, python: str | None = None, **variables: str) -> Running:
        """Starts a script of launch/tpu/."""
        programs = [str(STUBS)]
        if not self.nodes[0].enter:  # an address of 127.0.0.0/8 is not among those that `hostname -I` prints
            program = self.folder / "hostname"
            program.write_text('#!/bin/sh\necho "$WORKER"\n')
            program.chmod(0o755)
            programs.append(str(self.folder))
        environ = environment(
            ZONE="zone-a", POLL_S="0.1", PATH=":".join([*programs, os.environ["PATH"]]),
            STUB_CLUSTER=str(self.folder / "cluster.json"),
        )  # fmt: skip
        return Running(
            [str(script), *arguments], environ | {"PYTHON": python or str(self.python)} | variables, cwd=ROOT
        )

    def said(self) -> list[str]:
        """What the recorder of each worker has noted."""
        return [(disk / "said").read_text() if (disk / "said").exists() else "" for disk in self.disks]

    def asked(self, verb: str) -> list[list[str]]:
        """Flags of each call of gcloud with that verb."""
        lines = map(json.loads, (self.folder / "asked.jsonl").read_text().splitlines())
        return [words[5:] for words in lines if words[4] == verb]


@pytest.fixture
def tpus(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tpus]:
    """One slice of two hosts, or as many hosts as the test's parameter says."""
    with hosts(getattr(request, "param", 2), tmp_path) as nodes:
        yield Tpus(nodes, tmp_path)


@pytest.mark.parametrize("tpus", [2, 4], indirect=True, ids=["one slice", "two slices"])
def test_each_worker_has_its_number_and_the_arguments_arrive(tpus: Tpus) -> None:
    """Several slices are one run, and libtpu is told of them."""
    run = tpus.start(POD, "--config=tiny", "--set", "data.path='a b'", NAMES=" ".join(tpus.names))
    assert run.end() == 0, run.output
    count, slices = len(tpus.nodes), len(tpus.names)
    first = tpus.nodes[0].address
    for number, said in enumerate(tpus.said()):
        command, *variables = said.splitlines()
        assert command == "-m jtrain.launch --supervise --config=tiny --set data.path='a b'"
        want = [
            f"JTRAIN_COORDINATOR={first}:8476",
            f"JTRAIN_NUM_PROCESSES={count}",
            f"JTRAIN_PROCESS_ID={number}",
        ]
        if slices > 1:
            want += [f"MEGASCALE_COORDINATOR_ADDRESS={first}", f"MEGASCALE_NUM_SLICES={slices}"]
            want += [f"MEGASCALE_SLICE_ID={number // 2}"]
        assert variables == want


def test_a_slice_that_is_not_there_and_a_missing_name_are_said(tpus: Tpus) -> None:
    run = tpus.start(POD, "--config=tiny", NAMES="other")
    assert run.end() == 1
    assert "NOT_FOUND: other" in run.output
    run = tpus.start(POD, "--config=tiny")
    assert run.end() != 0
    assert "set NAMES to the TPUs" in run.output


@pytest.mark.slow
def test_workers_join_and_a_mesh_that_does_not_fit_is_refused(tpus: Tpus) -> None:
    """Two real processes of one device each, which count two devices, not four; the exit code comes through
    gcloud.
    """
    options = [
        "--config=tiny",
        "--emulate-devices",
        "1",
        "--set",
        "mesh.data=4",
        "--workdir",
        str(tpus.folder / "run"),
    ]
    run = tpus.start(POD, *options, python=sys.executable, NAMES="mine")
    assert run.end() == 2, run.output
    assert len(re.findall("2 (?:devices )?are here", run.output)) == 2, run.output


@pytest.mark.parametrize(
    "tpus", [pytest.param(2, marks=pytest.mark.slow), 4], indirect=True, ids=["one slice", "two slices"]
)
def test_a_queued_resource_is_waited_for_and_asked_for_again(tpus: Tpus) -> None:
    """Preempted during the run: given back, asked for again, and the same command starts anew until it is
    done.
    """
    (tpus.disks[0] / "codes").write_text("75\n")
    tpus.state.write_text("PROVISIONING\nACTIVE\nSUSPENDING\nSUSPENDED\n")
    settings = dict(TYPE="v5p-16", RUNTIME="v2-alpha-tpuv5", SLICES=str(len(tpus.names)), OPTIONS="--spot")
    run = tpus.start(QUEUED, "mine", "--config=tiny", SETUP="echo ready >>setup", **settings)
    assert run.end() == 0, run.output
    for disk, said in zip(tpus.disks, tpus.said(), strict=True):
        assert said.count("-m jtrain.launch --supervise --config=tiny") == 2
        assert (disk / "setup").read_text() == "ready\nready\n"
    (create,) = tpus.asked("create")
    nodes = ["--node-id=mine"] if len(tpus.names) == 1 else ["--node-count=2", "--node-prefix=mine"]
    what = ["--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5"]
    assert create == ["mine", "--zone=zone-a", *what, *nodes, "--spot"]
    assert tpus.asked("delete") == [["mine", "--zone=zone-a", "--force", "--quiet"]]
    assert "give the slices back: gcloud compute tpus queued-resources delete mine" in run.output


@pytest.mark.parametrize(("code", "asked_again"), [(2, False), (75, False), (1, False), (76, True)])
def test_what_ends_a_queued_resources_run(tpus: Tpus, code: int, asked_again: bool) -> None:
    """A refusal, a stop that was asked for and a bug end it; after faulty hardware other hosts are asked
    for.
    """
    (tpus.disks[1] / "codes").write_text(f"{code}\n")
    tpus.state.write_text("ACTIVE\n")
    run = tpus.start(QUEUED, "mine", "--config=tiny", TYPE="v5p-16", RUNTIME="v2-alpha-tpuv5")
    assert run.end() == (0 if asked_again else code), run.output
    assert len(tpus.asked("create")) == asked_again


@pytest.mark.parametrize("times", [1, 5])
def test_what_is_away_is_tried_four_times_in_a_row(tpus: Tpus, times: int) -> None:
    """On the same slices: nothing is given back. Afterwards the code is the user's to see."""
    (tpus.disks[1] / "codes").write_text("77\n" * times)
    tpus.state.write_text("ACTIVE\n")
    run = tpus.start(QUEUED, "mine", "--config=tiny", TYPE="v5p-16", RUNTIME="v2-alpha-tpuv5")
    assert run.end() == (0 if times == 1 else 77), run.output
    assert [said.count("--config=tiny") for said in tpus.said()] == [min(times, 4) + 1] * 2
    assert not tpus.asked("delete")


@pytest.mark.parametrize("tpus", [4], indirect=True, ids=["two slices"])
def test_a_faulty_host_is_told_before_what_is_away(tpus: Tpus) -> None:
    for disk, code in zip((tpus.disks[0], tpus.disks[2]), (76, 77), strict=True):
        (disk / "codes").write_text(f"{code}\n")
    run = tpus.start(POD, "--config=tiny", NAMES=" ".join(tpus.names))
    assert run.end() == 76, run.output


@pytest.mark.slow
@pytest.mark.parametrize("tpus", [4], indirect=True, ids=["two slices"])
@pytest.mark.parametrize("script", [QUEUED, POD], ids=["queued_resource", "pod"])
def test_a_documented_command_trains(tpus: Tpus, script: Path) -> None:
    """Word for word, on two slices of 8 chips on 2 hosts."""
    (command,) = documented(f"launch/tpu/{script.name}")
    words = shlex.split(command)
    start = words.index(f"launch/tpu/{script.name}")
    variables = dict(word.split("=", 1) for word in words[:start])
    assert variables.get("TYPE", "v5p-16") == "v5p-16", "16 cores are 8 chips"
    if script == QUEUED:
        tpus.state.write_text("ACTIVE\n")
    workdir = tpus.folder / "run"
    run = tpus.start(script, *words[start + 1 :], *shrunk(4, workdir), python=sys.executable, **variables)
    assert run.end() == 0, run.output
    check_trained(workdir, run.output, devices=16)


@pytest.mark.slow
@pytest.mark.parametrize("tpus", [2, 4], indirect=True, ids=["one slice", "two slices"])
def test_workers_train_stop_on_a_signal_and_go_on(tpus: Tpus) -> None:
    """SIGTERM to the script on the user's machine: all workers save, 75; the same command goes on."""
    workdir = tpus.folder / "run"
    options = ["--config=tiny", "--emulate-devices", "1", "--set", f"mesh.data={len(tpus.nodes)}"]
    options += ["--set", "model.num_layers=1", "--set", "num_steps=40", "--set", "eval.every_steps=None"]
    options += ["--set", "metrics.log_every_steps=1", "--workdir", str(workdir)]
    run = tpus.start(POD, *options, python=sys.executable, NAMES=" ".join(tpus.names))
    run.wait_for(lambda: "step 6/40" in run.output)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 75, run.output
    assert "after a good save" in run.output
    again = tpus.start(POD, *options, python=sys.executable, NAMES=" ".join(tpus.names))
    assert again.end() == 0, again.output
    assert (workdir / "checkpoints" / "40").is_dir()
