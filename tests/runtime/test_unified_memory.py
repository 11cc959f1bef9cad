"""Unified memory: settings for JAX on Grace systems, and refusals everywhere else."""

import json
import os
from pathlib import Path

import pytest

from jtrain.runtime.platform import HOST_SHARE, host_memory_bytes, use_unified_memory
from tests.cli.test_launch import python
from tests.processes import program

GH200 = "NVIDIA GH200 480GB"
HBM_MIB = 97871

START = program(__file__, "unified_memory")[1]


def driver(folder: Path, *lines: str) -> dict[str, str]:
    """Environment with a stand-in executable for nvidia-smi that prints the given GPUs."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    tool.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_grace_hopper_gets_its_memory_and_most_of_the_hosts(tmp_path: Path) -> None:
    """Options with which jaxlib would start its GPU client, read in a process that sets them first."""
    done = python(START, env=driver(tmp_path, f"{GH200}, {HBM_MIB}"))
    assert done.returncode == 0, done.stderr
    options, unified = json.loads(done.stdout)
    want = 1 + HOST_SHARE * host_memory_bytes() / (HBM_MIB << 20)
    assert want > 1.01, "or the fraction would show nothing"
    assert options["memory_fraction"] == pytest.approx(want, abs=0.01)
    assert options["preallocate"] is False
    assert unified == "1"


def test_the_hosts_memory_is_shared_by_its_gpus_and_what_is_set_wins(tmp_path: Path) -> None:
    """Four GB200 of one host get a quarter of its memory each; a limit that is already set stays."""
    four = driver(tmp_path, *["NVIDIA GB200, 189471"] * 4)
    options, _ = json.loads(python(START, env=four).stdout)
    want = 1 + HOST_SHARE * host_memory_bytes() / 4 / (189471 << 20)
    assert options["memory_fraction"] == pytest.approx(want, abs=0.01)
    options, _ = json.loads(python(START, env=four | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "3.2"}).stdout)
    assert options["memory_fraction"] == 3.2


def test_a_gpu_on_pcie_is_refused_by_name(tmp_path: Path) -> None:
    """An H200 would move pages over PCIe; one such GPU among others is refused too."""
    done = python(START, env=driver(tmp_path, f"{GH200}, {HBM_MIB}", "NVIDIA H200, 143771"))
    assert "unified_memory=True, but this is NVIDIA H200: only GPUs with a Grace CPU" in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("topology", ("h200:8", "v5p:2x2x1", "b200:8"))
def test_a_plan_for_another_machine_is_refused(topology: str) -> None:
    """The topology's name decides."""
    environ: dict[str, str] = {}
    with pytest.raises(
        ValueError, match=rf"this is {topology.partition(':')[0].upper()}: .* Set it to False"
    ):
        use_unified_memory(environ, topology=topology)
    use_unified_memory(environ, topology="gh200:1")
    assert environ == {}


def test_a_cpu_and_a_machine_without_gpus_are_refused(tmp_path: Path) -> None:
    """The CPU platform, and a machine without a driver, are refused; on the command line with exit code 2."""
    with pytest.raises(
        ValueError, match=r"this is the platform cpu: only GPUs with a Grace CPU \(GH200, GB200, GB300\)"
    ):
        use_unified_memory({})
    done = python(START, env={"PATH": str(tmp_path)})
    assert "this is a machine without NVIDIA GPUs" in done.stderr
    flags = ("--emulate-devices=1", "--set", "layout.offload.unified_memory=True", "--dry-run")
    done = python("-m", "jtrain.launch", "--config=tiny", *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: layout.offload.unified_memory=True, but this is the platform cpu")


def test_settings_that_would_undo_it_are_refused(tmp_path: Path) -> None:
    """Another allocator does not use managed memory, and a fraction up to 1 stays within the GPU's memory."""
    grace = driver(tmp_path, f"{GH200}, {HBM_MIB}")
    done = python(START, env=grace | {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"})
    assert "needs XLA's own allocator, but XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async is set" in done.stderr
    done = python(START, env=grace | {"XLA_CLIENT_MEM_FRACTION": "0.9"})
    assert "XLA_CLIENT_MEM_FRACTION=0.9 keeps JAX within the GPU's memory" in done.stderr


def test_memory_beside_gpus_is_not_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Grace Hopper the kernel lists the GPU's memory as a NUMA node without CPUs."""
    for name, cpus, kib in (("node0", "0-71\n", 501_000_000), ("node1", "\n", 98_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
        (tmp_path / name / "meminfo").write_text(
            f"Node {name[-1]} MemTotal:       {kib} kB\nNode 0 MemFree: 1 kB\n"
        )
    monkeypatch.setattr("jtrain.runtime.platform.NUMA_NODES", tmp_path)
    assert host_memory_bytes() == 501_000_000 * 1024
