"""The machine that a plan is made for: a number of devices of one kind, and the hosts that they are in."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtrain.errors import UserError
from jtrain.runtime.platform import HOST_SHARE
from jtrain_kernels.device import DEVICES, Device, DeviceSpec, from_name, live

if TYPE_CHECKING:
    from jtrain.layout.layout_spec import LayoutSpec  # imports jax, which tables of a network do without


@dataclasses.dataclass(frozen=True)
class Machine:
    """`count` devices of one kind.

    host_memory_bytes: memory of one host, shared by the host's devices; None if it is unknown.
    has_this_install: True if its kernels are those that are installed here, as for live and compile-only
      devices. A machine that is only named has the optional packages of its chip's extra.
    """

    device: DeviceSpec
    count: int
    host_memory_bytes: int | None = None
    has_this_install: bool = False

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device, in bytes."""
        assert self.device.hbm_bytes is not None
        return self.device.hbm_bytes

    @property
    def devices_per_host(self) -> int:
        """Devices of this machine that share one host."""
        return min(self.count, self.device.host.devices)

    @property
    def host_bytes_per_device(self) -> int | None:
        """One device's share of what offloading may use of its host's memory; None if that memory is
        unknown.
        """
        if self.host_memory_bytes is None:
            return None
        return int(self.host_memory_bytes * HOST_SHARE) // self.devices_per_host

    def room_bytes(self, spec: "LayoutSpec") -> int:
        """Bytes that a step may take on one device; with `layout.offload.unified_memory` also its share of
        the host.
        """
        # Unified memory pages what does not fit to the host, so a step may take both.
        return self.hbm_bytes + ((self.host_bytes_per_device or 0) if spec.offload.unified_memory else 0)

    def changed(self, *, host_memory_bytes: int | None, network_bytes_per_s: float | None) -> "Machine":
        """The machine with other figures, where they are given: memory of a host, one device's share of the
        network.
        """
        device = self.device
        if network_bytes_per_s is not None:
            # The device table is shared, so the changed figure goes into a copy.
            device = dataclasses.replace(
                device, host=dataclasses.replace(device.host, network_bytes_per_s=network_bytes_per_s)
            )
        memory_bytes = self.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
        return dataclasses.replace(self, device=device, host_memory_bytes=memory_bytes)

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name}"


def machine_of(devices: Sequence[Device]) -> Machine:
    """The machine that `devices` make up, live or compile-only; its peaks may be unknown."""
    return Machine(live(devices[0]), len(devices), has_this_install=True)


def make_machine(
    name: str, count: int, *, host_memory_bytes: int | None = None, network_bytes_per_s: float | None = None
) -> Machine:
    """The machine that a command line names.

    Args:
      network_bytes_per_s: speed of one device's share of the network between hosts; replaces the maker's
        figure.

    Raises:
      UserError: the device is unknown or has no published peaks, or the count is zero or not a whole number
        of hosts.
    """
    spec = from_name(name)
    if spec.peak_bf16_flops is None or spec.hbm_bytes is None or spec.hbm_bytes_per_s is None:
        supported_names = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops is not None]
        raise UserError(
            f"--device {name}: its peaks are not published, so no step time can be predicted. Choose one of: "
            f"{', '.join(supported_names)}. For memory alone, run python -m jtrain.launch --config=... "
            "--dry-run."
        )
    machine = Machine(spec, checked_count(spec, count))
    return machine.changed(host_memory_bytes=host_memory_bytes, network_bytes_per_s=network_bytes_per_s)


def checked_count(spec: DeviceSpec, count: int) -> int:
    """Returns a number of devices that is whole hosts, or a part of one.

    Raises:
      UserError: it is neither.
    """
    if count < 1:
        raise UserError(f"--count {count} must be at least 1.")
    per_host = spec.host.devices
    # Part of one host is a machine too; several hosts are only whole ones.
    if count > per_host and count % per_host:
        fewer_devices = count - count % per_host
        raise UserError(
            f"--count {count}: a host has {per_host} x {spec.name}. Use {fewer_devices}, "
            f"{fewer_devices + per_host}, or fewer than {per_host}."
        )
    return count
