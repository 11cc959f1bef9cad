"""Clock source of NVIDIA GPUs, through nvidia-ml-py; what a call refuses is unknown, with one note.

The power call is a 1 s average on Ampere and later, so field 186 (instantaneous power) is tried first. NVML
ignores CUDA_VISIBLE_DEVICES. MIG slices have no clocks or counters of their own.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from jtrain.errors import UserError
from jtrain.profile.clocks.reading import NAN, ClockSource, Reading

FIELD_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, mW
POLICY_POWER, POLICY_THERMAL = 0, 1  # NVML_PERF_POLICY_*
CLOCK_SM, CLOCK_MEM = 1, 2  # NVML_CLOCK_*


class Nvml(ClockSource):
    """Clock source for the GPUs in CUDA_VISIBLE_DEVICES, in its order."""

    name = "nvml"

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__()
        pynvml: Any = importlib.import_module("pynvml")
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise UserError(f"NVML does not start: {error}. Set profile.clocks=none.") from error
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # Entries are numbers or GPU- UUIDs; without the variable NVML's own numbering holds.
        names = None if visible is None else [name.strip() for name in visible.split(",")]
        self._handles = {}
        for local, number in enumerate(devices):
            name = str(number) if names is None else names[number] if number < len(names) else ""
            handle = self._ask(
                f"device {local} (CUDA_VISIBLE_DEVICES={name})", lambda name=name: self._handle(name)
            )
            if handle is not None:
                self._handles[local] = handle
        self.devices = tuple(self._handles)
        # One card stands for all: a run's devices are of one kind.
        first = next(iter(self._handles.values()), None)
        max_mhz = first and self._ask(
            "highest clock", lambda: pynvml.nvmlDeviceGetMaxClockInfo(first, CLOCK_SM)
        )
        self.max_mhz = float(max_mhz) if max_mhz else None

    def _handle(self, name: str) -> object:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("GPU-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        # An empty name comes here too: CUDA_VISIBLE_DEVICES lists fewer GPUs than the run uses.
        raise UserError("a MIG slice or an unknown name has no clocks of its own")

    def _ask(self, quantity: str, call: Callable[[], object]) -> Any:
        return self.notes.ask(f"NVML: {quantity}", call, (self._nvml.NVMLError, ValueError))

    def read(self, device: int, slow: bool) -> Reading:
        """Reads clocks and reasons; with `slow` also power, energy, temperature and violations."""
        nvml, handle = self._nvml, self._handles[device]

        def number(quantity: str, call: Callable[[], float], scale: float = 1.0) -> float:
            answer = self._ask(quantity, call)
            return NAN if answer is None else scale * float(answer)

        def count(quantity: str, call: Callable[[], int]) -> int:
            answer = self._ask(quantity, call)
            return -1 if answer is None else int(answer)

        sm_mhz = number("compute clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, CLOCK_SM))
        mem_mhz = number("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, CLOCK_MEM))
        reasons = count("reasons", lambda: self._reasons(handle))
        if not slow:
            return Reading(sm_mhz=sm_mhz, mem_mhz=mem_mhz, reasons=reasons)
        # Field 186 is tried at every slow reading: an old driver refuses it each time, but leaves one note.
        power = self._ask("power now (field 186)", lambda: self._power_now_w(handle))
        if power is None:
            power = number("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3)
        return Reading(
            sm_mhz=sm_mhz,
            mem_mhz=mem_mhz,
            reasons=reasons,
            power_w=float(power),
            temperature_c=number("temperature", lambda: self._temperature_c(handle)),
            energy_j=number("energy counter", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1e-3),
            power_violation_ns=count(
                "power violations",
                lambda: nvml.nvmlDeviceGetViolationStatus(handle, POLICY_POWER).violationTime,
            ),
            thermal_violation_ns=count(
                "thermal violations",
                lambda: nvml.nvmlDeviceGetViolationStatus(handle, POLICY_THERMAL).violationTime,
            ),
        )

    def _reasons(self, handle: object) -> int:
        try:
            return self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except self._nvml.NVMLError_FunctionNotFound:  # drivers before 535 have the old name only
            return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _temperature_c(self, handle: object) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetTemperatureV(handle, self._nvml.NVML_TEMPERATURE_GPU))
        except self._nvml.NVMLError_FunctionNotFound:  # drivers before 565
            return float(self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU))

    def _power_now_w(self, handle: object) -> float:
        # This call succeeds as a whole and has a status of its own in each field.
        (field,) = self._nvml.nvmlDeviceGetFieldValues(handle, [FIELD_POWER_INSTANT])
        if field.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(field.nvmlReturn)
        # uiVal, because field 186 is an unsigned integer of mW.
        return field.value.uiVal * 1e-3

    def close(self) -> None:
        """Closes NVML."""
        self._ask("shutdown", self._nvml.nvmlShutdown)
