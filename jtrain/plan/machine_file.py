"""A machine of one's own, from a TOML file.

    count = 64
    usd_per_hour = 2.5             # price of one device

    [chip]
    name = "h100"                  # of the table, or a new name
    bf16_tflops = 800.0            # dense
    fp8_tflops = 1600.0
    memory_gb = 80.0
    memory_gb_per_s = 3350.0
    power_w = 500.0

    [links]                        # between devices that need no network
    devices = 8
    gb_per_s = 450.0               # of each device, one direction

    [host]
    devices = 8
    memory_gb = 2000.0
    pcie_gb_per_s = 64.0           # of each device, one direction
    network_gbit_per_s = 400.0     # of each device
    oversubscription = 2.0         # of the network: all at once, devices get half of their rate
    cpu = "intel"                  # or "amd"

    [network]                      # read by `jtrain plan network` and `jtrain plan ecmp` alone
    rails = 8                      # leaf switches that a host is connected to
    hosts_per_leaf = 32
    uplinks = 32                   # links of equal cost from a leaf to the spine
    routing = "hashed"             # ECMP; or "adaptive"
    efficiency = 0.92              # of the line rate that long messages reach
    latency_us = 75.0              # as the network's plugin tells NCCL; AWS EFA: 75
    buffer_mb = 16.0               # of one switch port
    sharp = true                   # switches reduce (NVIDIA SHARP)
    traffic_class = 106            # of NCCL's messages, NCCL_IB_TC

A chip of the table keeps its own figures where the file has none. A new chip needs bf16_tflops, memory_gb and
memory_gb_per_s, and is planned as an NVIDIA GPU.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.plan.estimate.machine import Machine, checked_count
from jtrain.plan.fabric.fabric import Fabric, Network, make_fabric
from jtrain_kernels.device import DeviceSpec, Host, known
from jtrain_kernels.errors import did_you_mean

_NUMBERS = (
    "usd_per_hour",
    "chip.bf16_tflops",
    "chip.fp8_tflops",
    "chip.memory_gb",
    "chip.memory_gb_per_s",
    "chip.power_w",
    "links.gb_per_s",
    "host.memory_gb",
    "host.pcie_gb_per_s",
    "host.network_gbit_per_s",
    "host.oversubscription",
    "network.efficiency",
    "network.latency_us",
    "network.buffer_mb",
)
_INTEGERS = (
    "count",
    "links.devices",
    "host.devices",
    "network.rails",
    "network.hosts_per_leaf",
    "network.uplinks",
    "network.traffic_class",
)
_CHOICES = {"host.cpu": ("intel", "amd"), "network.routing": ("adaptive", "hashed")}
# A fraction, and one byte.
_MAXIMA = {"network.efficiency": 1, "network.traffic_class": 255}
_KEYS = ("chip.name", "network.sharp", *_INTEGERS, *_CHOICES, *_NUMBERS)
_REQUIRED = ("chip.bf16_tflops", "chip.memory_gb", "chip.memory_gb_per_s")


def load_machine(path: Path, *, count: int | None) -> tuple[Machine, float | None]:
    """The machine of a file, and the price of one device per hour; None where the file has none.

    Args:
      count: number of devices that replaces the file's.

    Raises:
      UserError: there is no such file, it is not TOML, or a key is unknown, missing or of the wrong type;
        names file and key.
    """
    fields = _fields(path)
    # The network's rate is still the line rate here.
    spec, number = _device_and_count(path, fields, count)
    network = spec.host.network_bytes_per_s
    if network is not None:  # all at once, devices get their share of the uplinks
        host = dataclasses.replace(
            spec.host, network_bytes_per_s=network / fields.get("host.oversubscription", 1.0)
        )
        spec = dataclasses.replace(spec, host=host)
    # Unknown memory stays None: then nothing is offloaded.
    memory_gb = fields.get("host.memory_gb")
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    return Machine(spec, number, memory_bytes), fields.get("usd_per_hour")


def load_fabric(path: Path, *, count: int | None) -> Fabric:
    """The network of a file's machine, for `plan network` and `plan ecmp`; `count` as in `load_machine`.

    Raises:
      UserError: as `load_machine`, or the devices are no whole domains or hosts, or reach no network.
    """
    fields = _fields(path)
    spec, number = _device_and_count(path, fields, count)
    # Keys that have the same name and unit in `Network`.
    keys = ("rails", "hosts_per_leaf", "uplinks", "routing", "sharp", "traffic_class")
    changes: dict[str, Any] = {key: fields[f"network.{key}"] for key in keys if f"network.{key}" in fields}
    scales = {
        "oversubscription": ("host.oversubscription", 1.0),
        "efficiency": ("network.efficiency", 1.0),
        "latency_us": ("network.latency_us", 1.0),
        "buffer_bytes": ("network.buffer_mb", 1e6),
    }
    changes |= {field: fields[key] * scale for field, (key, scale) in scales.items() if key in fields}
    if "host.cpu" in fields:
        changes["cpu"] = fields["host.cpu"]
    try:
        # Oversubscription is the spine's here, so the adapters keep their line rate.
        return make_fabric(spec, number, Network(**changes))
    except UserError as error:
        raise UserError(f"--machine {path}: {error}") from error


def _device_and_count(path: Path, fields: dict[str, Any], count: int | None) -> tuple[DeviceSpec, int]:
    """The chip of a file with links and host, whose network is at line rate, and the number of devices."""
    name = fields.get("chip.name")
    if name is None:
        raise UserError(
            f"--machine {path}: chip.name is missing. Set it to one of {', '.join(known())}, or a new name."
        )
    # A name outside the table is a new chip, which needs figures of its own.
    spec = known().get(name)
    if spec is None and (missing := [key for key in _REQUIRED if key not in fields]):
        raise UserError(
            f"--machine {path}: {', '.join(missing)} missing for chip.name={name!r}, which is not in the "
            f"table. {did_you_mean(name, known())}Set them, or the name of a chip of the table: "
            f"{', '.join(known())}."
        )
    # Every figure is None until the file's are put in below.
    spec = spec or DeviceSpec(name, "gpu", name, None, None, None, None, None)
    if spec.peak_bf16_flops is None and "chip.bf16_tflops" not in fields:
        raise UserError(f"--machine {path}: {name} has no published peak. Set chip.bf16_tflops.")
    # The command line wins over the file.
    number = count if count is not None else fields.get("count")
    if number is None:
        raise UserError(f"--machine {path}: count is missing. Set it, or give --count.")
    # Only now are the links complete: some figures are the table's, some the file's.
    spec = _with_fields(spec, fields)
    if spec.linked > 1 and spec.link_bytes_per_s is None:
        raise UserError(
            f"--machine {path}: links.gb_per_s is missing for links.devices={spec.linked}. Set it."
        )
    if spec.linked == 1 and "links.gb_per_s" in fields:
        raise UserError(
            f"--machine {path}: links.devices is missing, which links.gb_per_s is between. Set it."
        )
    if "host.oversubscription" in fields and spec.host.network_bytes_per_s is None:
        raise UserError(
            f"--machine {path}: host.network_gbit_per_s is missing, which host.oversubscription divides. Set "
            "it."
        )
    return spec, checked_count(spec, number)


def _with_fields(spec: DeviceSpec, fields: dict[str, Any]) -> DeviceSpec:
    """A chip with the figures of a file."""
    scales = {
        "peak_bf16_flops": ("chip.bf16_tflops", 1e12),
        "peak_fp8_flops": ("chip.fp8_tflops", 1e12),
        "hbm_bytes": ("chip.memory_gb", 1e9),
        "hbm_bytes_per_s": ("chip.memory_gb_per_s", 1e9),
        "power_w": ("chip.power_w", 1.0),
        "link_bytes_per_s": ("links.gb_per_s", 1e9),
    }
    changes: dict[str, Any] = {
        field: fields[key] * scale for field, (key, scale) in scales.items() if key in fields
    }
    if "hbm_bytes" in changes:
        # Bytes are whole, but 80.0 GB is a float.
        changes["hbm_bytes"] = int(changes["hbm_bytes"])
    if "links.devices" in fields:
        changes["linked"] = fields["links.devices"]
    host_changes: dict[str, Any] = {"devices": fields["host.devices"]} if "host.devices" in fields else {}
    if "host.pcie_gb_per_s" in fields:
        host_changes["link_bytes_per_s"] = fields["host.pcie_gb_per_s"] * 1e9
    if "host.network_gbit_per_s" in fields:
        # Gbit/s to bytes/s.
        host_changes["network_bytes_per_s"] = fields["host.network_gbit_per_s"] * 1e9 / 8
    host_spec: Host = dataclasses.replace(spec.host, **host_changes)
    return dataclasses.replace(spec, **changes, host=host_spec)


def _fields(path: Path) -> dict[str, Any]:
    """Key, such as `host.devices`, -> value of a file, all of the right type."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--machine {path}: {error.strerror}. Give a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--machine {path}: it is not TOML: {error}.") from error
    fields: dict[str, Any] = {}
    # Sections become keys with a dot; TOML has one level of them here.
    for name, value in document.items():
        section_fields = (
            {f"{name}.{key}": section_value for key, section_value in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        fields |= section_fields
    for key, value in fields.items():
        if key not in _KEYS:
            raise UserError(
                f"--machine {path}: unknown key {key}. {did_you_mean(key, _KEYS)}There are: "
                f"{', '.join(_KEYS)}."
            )
        if key == "chip.name":
            is_valid, expected = isinstance(value, str), "a name"
        elif key == "network.sharp":
            is_valid, expected = isinstance(value, bool), "true or false"
        elif key in _CHOICES:
            is_valid, expected = value in _CHOICES[key], " or ".join(_CHOICES[key])
        elif key in _NUMBERS:
            # True is an int to Python.
            is_valid = (
                isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
            )
            expected = "a number above 0"
        else:
            is_valid, expected = (
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                "a whole number above 0",
            )
        if is_valid and value > _MAXIMA.get(key, value):
            is_valid, expected = False, f"at most {_MAXIMA[key]}"
        if not is_valid:
            raise UserError(f"--machine {path}: {key}={value!r} must be {expected}.")
    return fields
