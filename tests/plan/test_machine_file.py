"""Machines from a TOML file, and its refusals."""

import re
from pathlib import Path

import pytest

from jtrain.cli import plan as plan
from jtrain.errors import UserError
from jtrain.plan.machine_file import load_fabric, load_machine
from jtrain_kernels.device import from_name


def written(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def test_a_chip_of_the_table_keeps_what_the_file_does_not_say(tmp_path: Path) -> None:
    """Half the network's rate where two devices share it, a price, a power limit; the rest is the data
    sheet's.
    """
    text = """
    count = 16
    usd_per_hour = 2.5
    [chip]
    name = "h100"
    power_w = 500
    [host]
    memory_gb = 1000
    network_gbit_per_s = 400
    oversubscription = 2
    """
    machine, price = load_machine(written(tmp_path, text), count=None)
    spec = machine.device
    assert (machine.count, price, spec.power_w) == (16, 2.5, 500)
    assert spec.host.network_bytes_per_s == 25e9
    assert (spec.peak_bf16_flops, spec.linked) == (from_name("h100").peak_bf16_flops, 8)
    assert machine.host_bytes_per_device == 100 * 10**9
    assert load_machine(written(tmp_path, text), count=32)[0].count == 32


def test_the_network_of_a_file_is_at_line_rate_and_knows_its_oversubscription(tmp_path: Path) -> None:
    """A plan divides the rate; a fabric has the rate and the switches' figures, the rest by default."""
    text = """
    count = 16
    [chip]
    name = "h100"
    [host]
    network_gbit_per_s = 800
    oversubscription = 2
    cpu = "amd"
    [network]
    rails = 4
    uplinks = 12
    latency_us = 75
    buffer_mb = 32
    sharp = true
    """
    fabric = load_fabric(written(tmp_path, text), count=64)
    network = fabric.network
    assert (fabric.count, fabric.adapter_bytes_per_s, network.oversubscription) == (64, 100e9, 2.0)
    assert (fabric.rails, fabric.uplinks, fabric.adapters_per_leaf) == (4, 12, 64)
    assert fabric.uplink_bytes_per_s == pytest.approx(64 * 100e9 / 2 / 12)
    assert (network.cpu, network.latency_us, network.buffer_bytes, network.sharp) == ("amd", 75.0, 32e6, True)
    assert (network.routing, network.hosts_per_leaf) == ("adaptive", 32)
    assert load_machine(written(tmp_path, text), count=64)[0].device.host.network_bytes_per_s == 50e9
    with pytest.raises(
        UserError, match=r"my\.toml: network\.rails=3 does not divide the 8 adapters of a host"
    ):
        load_fabric(written(tmp_path, text.replace("rails = 4", "rails = 3")), count=None)


def test_a_new_chip_is_what_the_file_says(tmp_path: Path) -> None:
    """Peaks, memory and links of a chip that nobody has yet."""
    text = """
    count = 8
    [chip]
    name = "x100"
    bf16_tflops = 500.0
    memory_gb = 64
    memory_gb_per_s = 2000
    [links]
    devices = 4
    gb_per_s = 100
    [host]
    devices = 4
    pcie_gb_per_s = 32
    """
    spec = load_machine(written(tmp_path, text), count=None)[0].device
    assert (spec.name, spec.peak_bf16_flops, spec.hbm_bytes) == ("x100", 500e12, 64 * 10**9)
    assert (spec.hbm_bytes_per_s, spec.linked, spec.link_bytes_per_s) == (2e12, 4, 1e11)
    assert (spec.host.devices, spec.host.link_bytes_per_s, spec.host.network_bytes_per_s) == (4, 32e9, None)


NEW = 'count = 8\n[chip]\nname = "x100"\nbf16_tflops = 500.0\nmemory_gb = 64\nmemory_gb_per_s = 2000\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 8", r"my\.toml: chip\.name is missing\. Set it to one of cpu, a100"),
        (
            '[chip]\nname = "h1000"',
            r"bf16_tflops, chip\.memory_gb, chip\.memory_gb_per_s missing.*Did you mean h100",
        ),
        ('[chip]\nname = "h100"', r"my\.toml: count is missing\. Set it, or give --count"),
        (
            '[chip]\nname = "h100"\nmemory_gbs = 1',
            r"unknown key chip\.memory_gbs\. Did you mean chip\.memory_gb",
        ),
        ('[chip]\nname = "h100"\npower_w = "500"', r"chip\.power_w='500' must be a number above 0"),
        ('count = 1.5\n[chip]\nname = "h100"', r"count=1\.5 must be a whole number above 0"),
        ('count = 12\n[chip]\nname = "h100"', r"--count 12: a host has 8 x h100"),
        ("[chip]\nname = 3", r"chip\.name=3 must be a name"),
        ("count = = 8", r"my\.toml: it is not TOML: Invalid value"),
        (
            '[chip]\nname = "h100"\n[network]\nrouting = "ecmp"',
            r"network\.routing='ecmp' must be adaptive or hashed",
        ),
        ('[chip]\nname = "h100"\n[network]\nefficiency = 1.5', r"network\.efficiency=1\.5 must be at most 1"),
        ('[chip]\nname = "h100"\n[network]\nsharp = 1', r"network\.sharp=1 must be true or false"),
        ('[chip]\nname = "h100"\n[host]\ncpu = "arm"', r"host\.cpu='arm' must be intel or amd"),
        (f"{NEW}[links]\ndevices = 8", r"links\.gb_per_s is missing for links\.devices=8\. Set it"),
        (f"{NEW}[links]\ngb_per_s = 100", r"links\.devices is missing, which links\.gb_per_s is between"),
        (
            f"{NEW}[host]\noversubscription = 2",
            r"host\.network_gbit_per_s is missing, which host\.oversubscription",
        ),
        ('count = 8\n[chip]\nname = "cpu"', r"cpu has no published peak\. Set chip\.bf16_tflops"),
    ],
)
def test_a_file_that_is_wrong_is_one_message(text: str, message: str, tmp_path: Path) -> None:
    """Names the file and the key."""
    with pytest.raises(ValueError, match=message):
        load_machine(written(tmp_path, text), count=None)


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    """As for a folder or a file without permission."""
    with pytest.raises(ValueError, match=r"none\.toml: No such file or directory\. Give a TOML file"):
        load_machine(tmp_path / "none.toml", count=None)


def test_another_chip_than_the_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two answers to one question would leave it open which counts."""
    path = written(tmp_path, 'count = 1\n[chip]\nname = "h200"')
    assert plan.main(["--config=tiny", "--machine", str(path), "--device", "h100"]) == 2
    assert "with --device h100: both name a machine. Leave one out" in capsys.readouterr().err


def test_what_a_plan_on_such_a_machine_offers_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options replace what the file says: more memory of a host, and another network."""
    path = written(tmp_path, 'count = 1\n[chip]\nname = "h200"\n[host]\nmemory_gb = 16')
    words = ["--config=llama8b", "--machine", str(path), "--set", "layout.offload.optimizer=1.0"]
    assert plan.main(words) == 2
    [more] = re.findall(r"--host-memory \w+", capsys.readouterr().err)
    assert plan.main([*words, *more.split()]) == 0
    path = written(tmp_path, f"{NEW}[host]\ndevices = 4")
    assert plan.main(["--config=tiny", "--machine", str(path)]) == 2
    assert "--network" in capsys.readouterr().err
    assert plan.main(["--config=tiny", "--machine", str(path), "--network", "100"]) == 0


def test_a_plan_on_a_machine_of_ones_own_has_its_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's price per device and hour is in the money, and its memory in the verdict."""
    text = 'count = 1\nusd_per_hour = 2.5\n[chip]\nname = "h200"\nmemory_gb = 100'
    assert (
        plan.main(["--config=tiny", "--machine", str(written(tmp_path, text)), "--set", "mesh.data=1"]) == 0
    )
    text = capsys.readouterr().out
    assert "device hours; $" in text
    assert "93.13" in text


def test_unified_memory_holds_what_the_device_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """An 8B with float32 moments on one GH200 of 96 GB: pages move over C2C once a step; without, it does not
    fit.
    """
    words = [
        "--config=llama8b",
        "--device",
        "gh200",
        "--count",
        "1",
        "--set",
        "data.global_batch=8",
        "--host-memory",
        "480GB",
    ]
    unified = ["--set", "layout.offload.unified_memory=True"]
    assert plan.main(words) == 2
    assert "llama8b does not fit 1 x gh200" in capsys.readouterr().err
    assert plan.main([*words, *unified]) == 0
    found = capsys.readouterr().out
    assert "fits: " in found
    assert "host copies" in found
