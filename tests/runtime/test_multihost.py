"""Processes of a run find each other: what a wrong address says, and who can reach the port."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.multihost import join_processes
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JTRAIN_NUM_PROCESSES": "2"}, r"JTRAIN_NUM_PROCESSES is set, but JTRAIN_COORDINATOR is not"),
        ({"JTRAIN_COORDINATOR": "localhost:1"}, r"JTRAIN_NUM_PROCESSES='', JTRAIN_PROCESS_ID=''\. Set both"),
        (
            {"JTRAIN_COORDINATOR": "localhost:1", "JTRAIN_NUM_PROCESSES": "2", "JTRAIN_PROCESS_ID": "x"},
            r"JTRAIN_PROCESS_ID='x'",
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


LISTENING = """
import json, os, psutil
def listening():
    connections = psutil.Process().net_connections("inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
"""


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
    code = (
        LISTENING
        + """
from jtrain.runtime import multihost
multihost.join_processes(os.environ)
from jax._src import xla_bridge
print(xla_bridge.CUDA_VISIBLE_DEVICES.value)
print(json.dumps(listening()))
"""
    )
    slurm = {"JOB_ID": "17", "STEP_NODELIST": "localhost", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    env = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    port = free_port()
    env |= {"JTRAIN_COORDINATOR": "auto", "JAX_COORDINATOR_PORT": str(port), "JAX_PLATFORMS": "cpu"}
    env |= {"SLURM_TASKS_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, visible, last = done.stdout.splitlines()
    assert visible == "all"
    listened = json.loads(last)
    assert listened
    assert all(is_loopback(address) for address in listened), listened


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
    assert multihost._found_bind_address(coordinator, addresses) == bind
    said = capsys.readouterr().out
    assert ("JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:1234" in said) == (bind is None)


def test_auto_without_a_scheduler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables to set instead."""
    monkeypatch.setattr("jax._src.clusters.ClusterEnv._cluster_types", [])
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


def test_processes_join(tmp_path: Path) -> None:
    """Two real processes of two devices each see four, and a sum crosses between them; they listen on
    loopback only.
    """
    code = """
import os
from jtrain.runtime import multihost, platform
platform.start_jax(os.environ, emulate_devices=2)
multihost.join_processes(os.environ)
import jax, jax.numpy as jnp
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
x = jax.make_array_from_callback((4,), sharding, lambda i: jnp.arange(4.0)[i])
total = float(jax.jit(jnp.sum)(x))
print(json.dumps([jax.process_count(), jax.device_count(), total, listening()]))
"""
    code = LISTENING + code
    port = free_port()
    (tmp_path / "join.py").write_text(code)
    env = os.environ | {"JTRAIN_COORDINATOR": f"localhost:{port}", "JTRAIN_NUM_PROCESSES": "2"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "join.py")],
            env=env | {"JTRAIN_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    listened: list[str] = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=120)
            *found, addresses = json.loads(stdout.splitlines()[-1])  # above it gloo greets its peers
            assert found == [2, 4, 6.0], stderr
            for address in addresses:
                assert is_loopback(address), f"{address}: other hosts can reach it"
            listened += addresses
        assert listened, "process 0 must listen somewhere"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
