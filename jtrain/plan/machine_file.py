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

A chip of the table keeps its own figures where the file has none. A new chip needs bf16_tflops, memory_gb and
memory_gb_per_s, and is planned as an NVIDIA GPU.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.plan.estimate.machine import Machine, checked_count
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
)
_KEYS = ("count", "chip.name", "links.devices", "host.devices", *_NUMBERS)
_NEEDED = ("chip.bf16_tflops", "chip.memory_gb", "chip.memory_gb_per_s")


def load_machine(path: Path, *, count: int | None) -> tuple[Machine, float | None]:
    """The machine of a file, and the price of one device per hour; None where the file has none.

    Args:
      count: number of devices that replaces the file's.

    Raises:
      UserError: there is no such file, it is not TOML, or a key is unknown, missing or of the wrong type; names file
        and key.
    """
    fields = _fields(path)
    name = fields.get("chip.name")
    if name is None:
        raise UserError(
            f"--machine {path}: chip.name is missing. Set it to one of {', '.join(known())}, or a new name."
        )
    spec = known().get(name)
    if spec is None and (missing := [key for key in _NEEDED if key not in fields]):
        raise UserError(
            f"--machine {path}: {', '.join(missing)} missing for chip.name={name!r}, which is not in the table. "
            f"{did_you_mean(name, known())}Set them, or the name of a chip of the table: {', '.join(known())}."
        )
    spec = spec or DeviceSpec(name, "gpu", name, None, None, None, None, None)
    if spec.peak_bf16_flops is None and "chip.bf16_tflops" not in fields:
        raise UserError(f"--machine {path}: {name} has no published peak. Set chip.bf16_tflops.")
    number = count if count is not None else fields.get("count")
    if number is None:
        raise UserError(f"--machine {path}: count is missing. Set it, or give --count.")
    spec = _changed(spec, fields)
    if spec.linked > 1 and spec.link_bytes_per_s is None:
        raise UserError(f"--machine {path}: links.gb_per_s is missing for links.devices={spec.linked}. Set it.")
    if spec.linked == 1 and "links.gb_per_s" in fields:
        raise UserError(f"--machine {path}: links.devices is missing, which links.gb_per_s is between. Set it.")
    if "host.oversubscription" in fields and spec.host.network_bytes_per_s is None:
        raise UserError(
            f"--machine {path}: host.network_gbit_per_s is missing, which host.oversubscription divides. Set it."
        )
    memory_gb = fields.get("host.memory_gb")
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    return Machine(spec, checked_count(spec, number), memory_bytes), fields.get("usd_per_hour")


def _changed(spec: DeviceSpec, fields: dict[str, Any]) -> DeviceSpec:
    """A chip with the figures of a file."""
    scales = {
        "peak_bf16_flops": ("chip.bf16_tflops", 1e12),
        "peak_fp8_flops": ("chip.fp8_tflops", 1e12),
        "hbm_bytes": ("chip.memory_gb", 1e9),
        "hbm_bytes_per_s": ("chip.memory_gb_per_s", 1e9),
        "power_w": ("chip.power_w", 1.0),
        "link_bytes_per_s": ("links.gb_per_s", 1e9),
    }
    changes: dict[str, Any] = {to: fields[key] * scale for to, (key, scale) in scales.items() if key in fields}
    if "hbm_bytes" in changes:
        changes["hbm_bytes"] = int(changes["hbm_bytes"])
    if "links.devices" in fields:
        changes["linked"] = fields["links.devices"]
    host: dict[str, Any] = {"devices": fields["host.devices"]} if "host.devices" in fields else {}
    if "host.pcie_gb_per_s" in fields:
        host["link_bytes_per_s"] = fields["host.pcie_gb_per_s"] * 1e9
    network = spec.host.network_bytes_per_s
    if "host.network_gbit_per_s" in fields:
        network = fields["host.network_gbit_per_s"] * 1e9 / 8
    if network is not None:
        host["network_bytes_per_s"] = network / fields.get("host.oversubscription", 1.0)
    of_host: Host = dataclasses.replace(spec.host, **host)
    return dataclasses.replace(spec, **changes, host=of_host)


def _fields(path: Path) -> dict[str, Any]:
    """Key, such as `host.devices`, -> value of a file, all of the right type."""
    try:
        read = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--machine {path}: {error.strerror}. Give a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--machine {path}: it is not TOML: {error}.") from error
    fields: dict[str, Any] = {}
    for name, value in read.items():
        more = {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
        fields |= more
    for key, value in fields.items():
        if key not in _KEYS:
            raise UserError(
                f"--machine {path}: unknown key {key}. {did_you_mean(key, _KEYS)}There are: {', '.join(_KEYS)}."
            )
        if key == "chip.name":
            good, wanted = isinstance(value, str), "a name"
        elif key in _NUMBERS:
            good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
            wanted = "a number above 0"
        else:
            good, wanted = (
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                "a whole number above 0",
            )
        if not good:
            raise UserError(f"--machine {path}: {key}={value!r} must be {wanted}.")
    return fields
