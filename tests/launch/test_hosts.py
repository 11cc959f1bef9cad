"""The test hosts are apart, and launch/local.sh on each of them is one run, or a refusal."""

import re
import socket
import time
from pathlib import Path

import pytest

from tests.launch.hosts import ROOT, Host, Running, environment, hosts, kind
from tests.launch.kits import check_trained, shrunk
from tests.processes import program


def test_hosts_of_namespaces_share_no_network_and_no_disk(tmp_path: Path) -> None:
    """Loopback of one host, and this machine's network, are closed to another; so is its disk."""
    if kind() != "network namespaces":
        # Then hosts are addresses of one machine, and pytest's header says it.
        assert "no namespaces here" in kind()
        return
    with hosts(2, tmp_path) as (first, second), socket.create_server(("127.0.0.1", 0)) as here:
        port = here.getsockname()[1]
        assert first.start(program(__file__, "connect", "127.0.0.1", port), environment()).end() == 1
        server = first.start(program(__file__, "accept_one"), environment())
        server.wait_for(lambda: server.lines == ["up"])
        assert second.start(program(__file__, "connect", "127.0.0.1", 7000), environment()).end() == 1
        assert second.start(program(__file__, "connect", first.name, 7000), environment()).end() == 0
        assert server.end() == 0
        assert first.start(["touch", str(first.disk / "mine")], environment()).end() == 0
        daemon = first.start(
            ["setsid", "--fork", "tail", "--follow", str(first.disk / "mine")], environment()
        )
        daemon.process.wait()
        seen = second.start(["ls", str(second.disk)], environment())
        assert (seen.end(), seen.output) == (0, "")
    # A daemon ends with its host: it has been killed, which may take a moment. One that stays meets pytest's
    # own limit.
    while any(
        "tail" in line and str(tmp_path) in line
        for line in map(text_of, Path("/proc").glob("[0-9]*/cmdline"))
    ):
        time.sleep(0.01)  # it is no child of this process, so nothing tells of its end


def text_of(file: Path) -> str:
    """Text of a file of /proc, whose process may have ended."""
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def local_sh(host: Host, number: int, processes: int, coordinator: str, *arguments: str) -> Running:
    """launch/local.sh on one host of several, with the three variables of launch/README.md."""
    joined = {"JTRAIN_NUM_PROCESSES": str(processes), "JTRAIN_PROCESS_ID": str(number)}
    environ = environment(JTRAIN_COORDINATOR=coordinator, **joined)
    return host.start([str(ROOT / "launch" / "local.sh"), *arguments], environ)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "devices"), [(0, 1), (1, 8)])
def test_the_scripts_own_examples_train(example: int, devices: int, tmp_path: Path) -> None:
    """Word for word: one process of this machine, and two of four emulated devices."""
    script = ROOT / "launch" / "local.sh"
    words = re.findall(r"^#   launch/local\.sh (.*)$", script.read_text(), re.MULTILINE)[example].split()
    processes = 2 if "-n" in words else 1
    run = Running(
        [str(script), *words, *shrunk(devices // processes, tmp_path / "run")], environment(), cwd=ROOT
    )
    assert run.end() == 0, run.output
    if devices > 1:
        check_trained(tmp_path / "run", run.output, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_folder_that_is_not_shared_is_refused_on_every_host(count: int, tmp_path: Path) -> None:
    """Each host has a folder of that name on its own disk: exit code 2 after a minute, and the way out."""
    with hosts(count, tmp_path) as nodes:
        with socket.socket() as free:
            free.bind(("", 0))
            coordinator = f"{nodes[0].name}:{free.getsockname()[1]}"
        options = ("--config=tiny", "--emulate-devices", "1", "--set", f"mesh.data={count}")
        runs = [
            local_sh(host, number, count, coordinator, *options, "--workdir", str(host.disk / "run"))
            for number, host in enumerate(nodes)
        ]
        codes = [run.end() for run in runs]
        for run in runs:
            assert "is not one shared folder: process 0 on host " in run.output
            assert "Set --workdir to a folder that all hosts share" in run.output
        if nodes[0].enter:
            assert f"process {count - 1} on host node{count - 1}" in runs[0].output
        assert codes == [2] * count
