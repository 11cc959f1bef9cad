"""Clock source of AMD GPUs, through amdsmi (part of ROCm).

One call, `amdsmi_get_gpu_metrics_info`, returns nearly everything, with "N/A" for what a card does not know.
The clocks of `amdsmi_get_clock_info` are 1 s averages and not used. Written against amdsmi 7.0.2; never run
on a card.
"""

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from jtrain.errors import UserError
from jtrain.profile.clocks.reading import NAN, ClockSource, Reading

THERMAL_RESIDENCIES = (
    "prochot_residency_acc",
    "socket_thm_residency_acc",
    "vr_thm_residency_acc",
    "hbm_thm_residency_acc",
)


class Amd(ClockSource):
    """Clock source for the GPUs that HIP_VISIBLE_DEVICES picks of ROCR_VISIBLE_DEVICES, in its order."""

    name = "amd"

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__()
        try:
            amdsmi: Any = importlib.import_module("amdsmi")
            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
        except Exception as error:  # the import raises KeyError if amdsmi's library is missing
            raise UserError(f"amdsmi does not start: {error!r}. Set profile.clocks=none.") from error
        self._smi = amdsmi
        names = _visible_names(len(handles))
        self._handles = {}
        for local, number in enumerate(devices):
            name = names[number] if number < len(names) else "none"
            if name.isdigit() and int(name) < len(handles):
                self._handles[local] = handles[int(name)]
            else:
                self.notes.add(
                    f"clocks: AMD: device {local} (visible as {name}) is not one of {len(handles)} GPUs."
                )
        self.devices = tuple(self._handles)
        clock = self._ask(
            "highest clock",
            lambda: amdsmi.amdsmi_get_clock_info(self._handles[self.devices[0]], amdsmi.AmdSmiClkType.GFX)[
                "max_clk"
            ],
        )
        self.max_mhz = float(clock) if isinstance(clock, int | float) else None
        # Per device: time (ns), ticks, power and thermal residencies of the reading before.
        self._residency: dict[int, tuple[float, float, float, float]] = {}
        self._violation_ns = {device: [0.0, 0.0] for device in self.devices}
        # The highest energy so far, by which impossible values are recognised.
        self._energy_j = dict.fromkeys(self.devices, 0.0)

    def _ask(self, quantity: str, call: Any) -> Any:
        return self.notes.ask(f"AMD: {quantity}", call, (self._smi.AmdSmiException, IndexError, KeyError))

    def read(self, device: int, slow: bool) -> Reading:
        """Reads clocks; with `slow` also power, energy, temperature and violations."""
        metrics = self._ask(
            "gpu_metrics", lambda: self._smi.amdsmi_get_gpu_metrics_info(self._handles[device])
        )
        if metrics is None:
            return Reading()
        # An MI300X has eight dies with a clock each; unused entries are "N/A" or 0.
        dies = [clock for clock in map(_number, metrics.get("current_gfxclks") or ()) if clock > 0]
        sm_mhz = sum(dies) / len(dies) if dies else _number(metrics.get("current_gfxclk"))
        mem_mhz = _number(metrics.get("current_uclk"))
        if not slow:
            return Reading(sm_mhz=sm_mhz, mem_mhz=mem_mhz)
        power_ns, thermal_ns = self._violations(device, metrics)
        return Reading(
            sm_mhz=sm_mhz,
            mem_mhz=mem_mhz,
            power_w=_number(metrics.get("current_socket_power")),
            temperature_c=_number(metrics.get("temperature_hotspot")),
            energy_j=self._energy(device),
            power_violation_ns=power_ns,
            thermal_violation_ns=thermal_ns,
        )

    def _energy(self, device: int) -> float:
        count = self._ask("energy counter", lambda: self._smi.amdsmi_get_energy_count(self._handles[device]))
        if count is None:
            return NAN
        energy_j = count["energy_accumulator"] * count["counter_resolution"] * 1e-6  # the resolution is in uJ
        if energy_j < self._energy_j[device]:  # amdsmi#38: the counter returns impossible values
            self.notes.add("clocks: AMD: the energy counter went backwards: those readings are dropped.")
            return NAN
        self._energy_j[device] = energy_j
        return energy_j

    def _violations(self, device: int, metrics: dict[str, Any]) -> tuple[int, int]:
        """Nanoseconds in which the power and thermal limits held the clock down, from firmware ticks."""
        # Residencies count the firmware's ticks while a limit held; `ticks` counts all ticks.
        ticks, power = _number(metrics.get("accumulation_counter")), _number(metrics.get("ppt_residency_acc"))
        thermal = sum(
            residency
            for residency in (_number(metrics.get(name)) for name in THERMAL_RESIDENCIES)
            if residency >= 0
        )
        if not (ticks >= 0 and power >= 0):
            self.notes.add("clocks: AMD: this card's metrics have no violation accumulators.")
            return -1, -1
        now_ns = time.monotonic_ns()
        previous = self._residency.get(device)
        self._residency[device] = now_ns, ticks, power, thermal
        # The length of a tick is not documented, so it is measured: ns over ticks since the reading before.
        if previous is not None and ticks > previous[1]:
            per_tick = (now_ns - previous[0]) / (ticks - previous[1])
            self._violation_ns[device][0] += per_tick * (power - previous[2])
            self._violation_ns[device][1] += per_tick * (thermal - previous[3])
        return int(self._violation_ns[device][0]), int(self._violation_ns[device][1])

    def close(self) -> None:
        """Closes amdsmi."""
        self._ask("shutdown", self._smi.amdsmi_shut_down)


def _visible_names(num_gpus: int) -> list[str]:
    """Numbers of the GPUs that this process sees, in its order, by both variables of ROCm."""
    names = [str(number) for number in range(num_gpus)]
    # ROCR hides devices below HIP, so HIP's numbers count within what ROCR shows.
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        # Set, even if empty: an empty list shows no GPU.
        if (visible := os.environ.get(variable)) is not None:
            by_number = dict(enumerate(names))
            # A UUID, or a number beyond the list, names no GPU that can be read here.
            names = [
                by_number.get(int(n), "none") if n.isdigit() else n
                for n in map(str.strip, visible.split(","))
                if n
            ]
    return names


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else NAN
