"""Processes of a run find each other: what a wrong address says, and who can reach the port."""

import ipaddress
import json
import os
import socket

import pytest

from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.multihost import join_processes
from tests.ports import free_port
from tests.processes import joined, program, run_together


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JTRAIN_NUM_PROCESSES": "2"}, r"JTRAIN_NUM_PROCESSES is set, but JTRAIN_COORDINATOR is not"),
        ({"JTRAIN_COORDINATOR": "localhost:1"}, r"JTRAIN_NUM_PROCESSES='', JTRAIN_PROCESS_ID=''\. Set both"),
        (
            {"JTRAIN_COORDINATOR": "localhost:1", "JTRAIN_NUM_PROCESSES": "2", "JTRAIN_PROCESS_ID": "x"},
            r"JTRAIN_PROCESS_ID='x'",
        ),
        (
            {"JTRAIN_COORDINATOR": "localhost:1", "JTRAIN_NUM_PROCESSES": "2", "JTRAIN_PROCESS_ID": "5"},
            r"JTRAIN_PROCESS_ID=5 of JTRAIN_NUM_PROCESSES=2 must be from 0 to 1\.",
        ),
    ],
)
def test_half_an_address_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_processes(environ)


def test_nothing_is_joined_where_nothing_is_said() -> None:
    join_processes({})


@pytest.mark.parametrize(
    ("coordinator", "process", "message"),
    [
        (
            "localhost",
            0,
            r"JTRAIN_COORDINATOR=localhost must be host:port, with a port from 1 to 65535, or auto",
        ),
        ("localhost:70000", 0, r"localhost:70000 must be host:port"),
        ("no.such.host.invalid:1234", 1, r"this host does not know the name no\.such\.host\.invalid"),
        ("192.0.2.77:1234", 0, r"process 0 runs on this host, which has no address 192\.0\.2\.77"),
    ],
)
def test_a_wrong_address_is_refused(
    coordinator: str, process: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multihost, "NAME_S", 0.1)
    environ = {
        "JTRAIN_COORDINATOR": coordinator,
        "JTRAIN_NUM_PROCESSES": "2",
        "JTRAIN_PROCESS_ID": str(process),
    }
    with pytest.raises(UserError, match=message):
        join_processes(environ)


def test_an_occupied_port_is_refused() -> None:
    """Before any process waits for others that would reach the other program."""
    with socket.create_server(("localhost", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        environ = {"JTRAIN_COORDINATOR": coordinator, "JTRAIN_NUM_PROCESSES": "2", "JTRAIN_PROCESS_ID": "0"}
        with pytest.raises(
            UserError, match=f"{coordinator}: another program listens at port .* Choose another port"
        ):
            join_processes(environ)


def test_nobody_at_the_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
        monkeypatch.setattr(multihost, "JOIN_S", 1)
        environ = {"JTRAIN_COORDINATOR": coordinator, "JTRAIN_NUM_PROCESSES": "2", "JTRAIN_PROCESS_ID": "1"}
        with pytest.raises(
            UserError, match=f"{coordinator}: nobody answers there after 1 s .*Check that process 0"
        ):
            join_processes(environ)


def is_loopback(address: str) -> bool:
    """True also for ::ffff:127.0.0.1, which a socket for both families shows; Python before 3.13 does not say
    so.
    """
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("::", False),
    ],
)
def test_what_counts_as_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_a_coordinator_that_jax_finds_listens_there_only() -> None:
    """As Slurm tells it, with one process on localhost, which sees all GPUs of the node."""
    slurm = {"JOB_ID": "17", "STEP_NODELIST": "localhost", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    env = {f"SLURM_{name}": value for name, value in slurm.items()}
    port = free_port()
    env |= {"JTRAIN_COORDINATOR": "auto", "JAX_COORDINATOR_PORT": str(port), "JAX_PLATFORMS": "cpu"}
    env |= {"SLURM_TASKS_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    [ended] = run_together([program(__file__, "listen_and_sum")], [env])
    assert ended.code == 0, ended.errors
    answers = json.loads(ended.output.splitlines()[-1])
    assert answers["visible"] == "all"
    assert answers["listening"]
    assert all(is_loopback(address) for address in answers["listening"]), answers


@pytest.mark.parametrize(
    ("coordinator", "addresses", "bind"),
    [
        ("node1:1234", ["10.0.0.1"], "node1:1234"),
        ("node1:1234", ["127.0.1.1", "10.0.0.1"], "node1:1234"),
        ("node1:1234", ["127.0.1.1"], None),
        ("127.0.0.1:1234", ["127.0.0.1"], "127.0.0.1:1234"),
        ("[::1]:1234", ["::1"], "[::1]:1234"),
    ],
)
def test_a_name_that_is_loopback_on_its_own_host_is_no_place_to_listen(
    coordinator: str, addresses: list[str], bind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then all interfaces are, which is said, with the variable that chooses one."""
    assert multihost.choose_bind_address(coordinator, addresses) == bind
    said = capsys.readouterr().out
    assert ("JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:1234" in said) == (bind is None)


def test_auto_without_a_scheduler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables to set instead."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(
        UserError, match=r"neither a step of Slurm \(srun\), .* here\. Set JTRAIN_COORDINATOR to host"
    ):
        join_processes({"JTRAIN_COORDINATOR": "auto"})


def test_a_scheduler_that_tells_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while jax asks is a message too."""
    for name, value in {
        "JOB_ID": "17",
        "STEP_NODELIST": "a",
        "NTASKS": "x",
        "PROCID": "0",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        UserError, match=r"JTRAIN_COORDINATOR=auto .*, but ValueError: .*'x'\. Set JTRAIN_COORDINATOR"
    ):
        join_processes({"JTRAIN_COORDINATOR": "auto"})


def test_processes_join() -> None:
    """Two real processes of two devices each see four, and a sum crosses between them; they listen on
    loopback only.
    """
    listened: list[str] = []
    for ended in run_together([program(__file__, "listen_and_sum", 2)] * 2, joined(2)):
        assert ended.code == 0, ended.errors
        answers = json.loads(ended.output.splitlines()[-1])  # above it gloo greets its peers
        assert (answers["processes"], answers["devices"], answers["sum"]) == (2, 4, 6.0)
        for address in answers["listening"]:
            assert is_loopback(address), f"{address}: other hosts can reach it"
        listened += answers["listening"]
    assert listened, "process 0 must listen somewhere"
