"""Peaks of a run's devices: those that their maker publishes, else those that this machine reached."""

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jtrain.profile.capture import machine_peaks
from jtrain.profile.capture.machine_peaks import MachinePeaks
from jtrain.runtime import multihost
from jtrain_kernels.device import live


class DevicePeaks:
    """Peaks of one device of a run, in one dtype of matrix products.

    published_flops, published_mhz: FLOP/s by the maker, and the clock of that figure; None where none is
      published, as for a CPU.
    measured: of one device, where no figure is published and this machine has been measured; in process 0
      before the first trace window, in every process after it.

    Args:
      cache: the user's cache, where measured peaks are kept; None measures nothing.
      say: receives a line about a measurement.
    """

    def __init__(self, dtype: str, mesh: Mesh, cache: Path | None, say: Callable[[str], None]) -> None:
        self._device: jax.Device = mesh.local_devices[0]
        self._dtype = dtype
        self._cache = cache
        self._say = say
        self._chip = live(self._device)
        self.published_flops, self.published_mhz = self._chip.peak_flops(dtype), self._chip.peak_mhz
        # Emulated devices, and processes on one host, divide one CPU among them.
        self._sharers = _devices_of_host(mesh) if self._device.platform == "cpu" else 1
        self.measured: MachinePeaks | None = None
        if self._is_wanted and multihost.process_index() == 0 and cache is not None:
            self.measured = self._of_device(machine_peaks.read(cache, self._device, dtype))

    @property
    def _is_wanted(self) -> bool:
        return self.published_flops is None or self._chip.hbm_bytes_per_s is None

    def _of_device(self, peaks: MachinePeaks | None) -> MachinePeaks | None:
        return None if peaks is None else peaks.per_device(self._sharers)

    def measure(self) -> None:
        """Measures the peaks on process 0, unless they are known; all processes call it between two steps."""
        if not self._is_wanted or self._cache is None:
            return
        if multihost.process_index() == 0 and self.measured is None:
            self._say("measuring this machine's own peaks, about 2 s: its maker publishes none")
            try:
                peaks = machine_peaks.measure(self._cache, self._device, self._dtype)
            except (
                Exception
            ) as error:  # the compiler and the disk raise many types; the run goes on without peaks
                self._say(f"no peaks of this machine: {type(error).__name__}: {error}")
            else:
                self.measured = self._of_device(peaks)
        # As text: arrays of the devices would round the date.
        fields = None if self.measured is None else dataclasses.asdict(self.measured)
        fields = json.loads(multihost.gather_texts(json.dumps(fields))[0])
        self.measured = None if fields is None else MachinePeaks(**fields)

    def facts(self) -> dict[str, Any]:
        """The fields of `Peaks` that are not about clocks."""
        measured = self.measured
        of_products = None if measured is None or self.published_flops is not None else measured
        of_copies = None if measured is None or self._chip.hbm_bytes_per_s is not None else measured
        return {
            "flops": self.published_flops if of_products is None else of_products.flops_per_s,
            "hbm_bytes_per_s": self._chip.hbm_bytes_per_s if of_copies is None else of_copies.bytes_per_s,
            "measured": None if of_products is None else of_products.measured,
        }


def _devices_of_host(mesh: Mesh) -> int:
    """Number of the run's devices on this host; a call of all processes."""
    hosts = multihost.gather_texts(socket.gethostname())
    return len(mesh.local_devices) * hosts.count(socket.gethostname())
