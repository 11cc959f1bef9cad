"""Check of the nodes before a run: what it names, and exit codes by which a scheduler leaves a node out."""

import re
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jtrain.cli import node_check as verb
from jtrain.errors import UserError
from jtrain.runtime import node_check
from tests.launch.hosts import Running, environment
from tests.ports import free_port
from tests.processes import program, run_together
from tests.small_disk import small_disk


def started(number: int, coordinator: str, *arguments: str, ahead_s: int = 0, **variables: str) -> Running:
    """One of two processes on this host."""
    joined = {
        "JTRAIN_COORDINATOR": coordinator,
        "JTRAIN_NUM_PROCESSES": "2",
        "JTRAIN_PROCESS_ID": str(number),
    }
    return Running(
        program(__file__, "check_node", ahead_s, *arguments),
        environment(**joined, **variables),
        cwd=Path.cwd(),
    )


def test_a_node_with_a_full_disk_and_fewer_devices_is_named(tmp_path: Path) -> None:
    """It ends with 76, so that the job goes on without it, and the others with 75. A clock that is off is
    said.
    """
    coordinator = f"localhost:{free_port()}"
    with small_disk(tmp_path / "small", 4096) as small:
        good = started(0, coordinator, "--config=tiny", "--emulate-devices", "2")
        bad = started(1, coordinator, "--emulate-devices", "1", ahead_s=3000, TMPDIR=str(small))
        assert (good.end(), bad.end()) == (75, 76), good.output + bad.output
    host = socket.gethostname()
    fault = f"process 1 on {host}: {small}: No space left on device; has 1 devices, and process 0 has 2"
    for output in (good.output, bad.output):
        assert f"error: node check: {fault}" in output
    said = re.search(
        rf"the clock of process 1 on {host} is (\d+) s ahead of that of process 0\. Training", bad.output
    )
    assert said, bad.output
    assert 3000 <= int(said[1]) < 3300, "and what passed between the two readings on a busy machine"


def test_fewer_devices_than_another_process_has_is_a_fault() -> None:
    assert node_check.fewer_devices({0: 8, 1: 7, 2: 8}) == {1: "has 7 devices, and process 0 has 8"}
    assert node_check.fewer_devices({0: 8, 1: 8}) == {}


def test_a_wrong_matmul_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of a million is enough."""
    device = jax.devices()[3]
    assert node_check.matmul_fault(device) == ""
    matmul = jnp.matmul

    def flipped(*args: Any, **kwargs: Any) -> jax.Array:
        return matmul(*args, **kwargs).at[5, 7].add(1)

    monkeypatch.setattr(jnp, "matmul", flipped)
    assert node_check.matmul_fault(device) == f"{device}: 1 rows of a matmul's {node_check.SIZE} are wrong"


def test_a_wrong_sum_over_all_devices_is_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    node_check.check_all_reduce(wait_s=60.0)
    monkeypatch.setattr(jnp, "sum", lambda numbers: jnp.max(numbers))
    with pytest.raises(
        UserError, match=r"the sum of 1 to 8 over 8 devices is 8 and not 36\. .* look at the network"
    ):
        node_check.check_all_reduce(wait_s=60.0)


def test_a_sum_that_does_not_end_is_ended() -> None:
    """With exit code 2 and the variables to look at, though the main thread never returns."""
    [ended] = run_together([program(__file__, "sum_without_end")], [environment()])
    assert ended.code == 2
    assert "a sum over all devices has not ended after 0.1 s" in ended.errors
    assert "NCCL_SOCKET_IFNAME and NCCL_IB_HCA" in ended.errors


def test_help_says_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    assert "76 this node fails" in capsys.readouterr().out.replace("\n", " ")
