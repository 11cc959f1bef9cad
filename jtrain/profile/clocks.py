"""Where clocks and power are read from: one protocol, and the choice among its sources.

| source | clock | why it is low | power, energy |
|---|---|---|---|
| nvml | NVIDIA's, at 20 ms | reasons, violation counters | every 100 ms |
| amd | gpu_metrics, at 20 ms | violation accumulators | every 100 ms |
| tpu | its throttle score, at 1 s | - | - |
| cpu | a chain of dependent instructions, at 1 s: it costs 0.3 ms | stolen time, thermal throttling | RAPL |
| scripted | a JSON file, for exact tests | the same | the same |

NVIDIA's CUPTI also samples, at higher rates, but locks the clocks meanwhile (pytorch PR 188019): never used here.
"""

import ctypes
import dataclasses
import glob
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jtrain_kernels.device import DeviceSpec

SOURCES = ("auto", "nvml", "amd", "tpu", "cpu", "none")
"""And `scripted:PATH`."""

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look at one device; -1 (integers) and nan are unknown or not due, as in `samples.Samples`."""

    sm_mhz: float = NAN
    mem_mhz: float = NAN
    power_w: float = NAN
    temperature_c: float = NAN
    energy_j: float = NAN
    reasons: int = -1
    power_violation_ns: int = -1
    thermal_violation_ns: int = -1


@runtime_checkable
class Source(Protocol):
    """Reads devices. Only the sampler's process opens one.

    devices: what is read, as the run counts its devices; (-1,) if one reading is for all.
    period_s, fast_period_s: between two looks at the clocks, in general and during a trace window.
    slow_period_s: between two looks at power, energy, temperature and violations, which cost more and move less.
    ref_mhz, max_mhz: of each device, where the source knows: what its own clock means at full speed, and the highest.
    """

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> Sequence[int]: ...

    @property
    def period_s(self) -> float: ...

    @property
    def fast_period_s(self) -> float: ...

    @property
    def slow_period_s(self) -> float: ...

    @property
    def ref_mhz(self) -> float | None: ...

    @property
    def max_mhz(self) -> float | None: ...

    @property
    def notes(self) -> "Notes": ...

    def read(self, device: int, slow: bool) -> Reading:
        """One device now; with `slow` also what is read at the slow period."""
        ...

    def close(self) -> None:
        """Lets go of the driver."""
        ...


class Notes:
    """What was refused, each thing once: a driver may refuse any call, and the rest goes on."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Notes a line that is not there yet."""
        if line not in self.lines:
            self.lines.append(line)

    def ask[T](self, what: str, call: Callable[[], T], refusal: type[Exception] | tuple[type[Exception], ...]) -> Any:
        """The answer; None if it is refused, with one note. Asked again next time: a refusal may pass."""
        try:
            return call()
        except refusal as error:
            self.add(f"clocks: {what} refused: {' '.join(str(error).split()) or type(error).__name__}.")
            return None


def _library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def absent(source: str) -> str | None:
    """Why `source` cannot be read here, in one line that says what to do; None if it looks readable. Costs 1 ms."""
    if source.startswith("scripted:"):
        path = Path(source.removeprefix("scripted:"))
        return None if path.is_file() else f"{path} is not there. Give profile.clocks=scripted:PATH an existing file."
    if source == "nvml":
        if importlib.util.find_spec("pynvml") is None:
            return "nvidia-ml-py is not installed. Install jtrain[cuda], or set profile.clocks=none."
        if not _library("libnvidia-ml.so.1"):
            return "libnvidia-ml.so.1, which NVIDIA's driver brings, is not there. Set profile.clocks=none."
    if source == "amd" and importlib.util.find_spec("amdsmi") is None:
        return "amdsmi is not installed. It comes with ROCm (/opt/rocm/share/amd_smi), or set profile.clocks=none."
    if source == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            return "libtpu is not installed. Install jtrain[tpu], or set profile.clocks=none."
        if not glob.glob("/dev/accel[0-9]*") and not glob.glob("/dev/vfio/[0-9]*"):
            return "no TPU is attached (/dev/accel*, /dev/vfio/*). Set profile.clocks=none."
    if source == "cpu" and not Path("/proc/stat").exists():
        return "/proc is not there. Set profile.clocks=none."
    return None


def choose(source: str, platform: str) -> tuple[str, str]:
    """The source to open, and a note; source "none" with a note where "auto" finds none.

    Raises:
      ValueError: no such source, or one asked for by name that is not here.
    """
    if source not in SOURCES and not source.startswith("scripted:"):
        raise ValueError(f"profile.clocks={source} is no source. There are: {', '.join(SOURCES)}, scripted:PATH.")
    if source == "none":
        return "none", "clocks: not sampled (profile.clocks=none)."
    if source != "auto":
        why = absent(source)
        if why:
            raise ValueError(f"profile.clocks={source}: {why}")
        return source, ""
    candidates = {"gpu": ("nvml", "amd"), "cuda": ("nvml",), "rocm": ("amd",), "tpu": ("tpu",)}.get(platform, ("cpu",))
    reasons = []
    for candidate in candidates:
        why = absent(candidate)
        if why is None:
            return candidate, ""
        reasons.append(f"{candidate}: {why.split('. ')[0]}")
    return "none", f"clocks: not sampled: {'; '.join(reasons)}."


def open_source(source: str, devices: Sequence[int]) -> Source:
    """Opens a source that `choose` gave.

    devices: of each device of the run, its number among those that the driver shows this process.

    Raises:
      ValueError: the driver refuses altogether.
    """
    if source.startswith("scripted:"):
        from jtrain.profile.scripted import Scripted

        return Scripted(Path(source.removeprefix("scripted:")))
    if source == "nvml":
        from jtrain.profile.nvml import Nvml

        return Nvml(devices)
    if source == "amd":
        from jtrain.profile.amd import Amd

        return Amd(devices)
    if source == "tpu":
        from jtrain.profile.tpu_clock import Tpu

        return Tpu(devices)
    from jtrain.profile.cpu_clock import Cpu

    return Cpu()


_FLOPS_PER_CORE_CYCLE = {"A100": 2048, "H100": 4096, "H200": 4096, "GH200": 4096, "B200": 8192, "MI300X": 2048}
"""Dense bfloat16, of one multiprocessor or compute unit: 132 * 4096 * 1830 MHz = 989.4 TFLOP/s."""


def spec_mhz(spec: DeviceSpec) -> float | None:
    """The clock at which a maker quotes its peak: A100 1410, H100 and H200 1830, B200 1856, MI300X 2100 MHz.

    It is not the highest clock of an H100 (1980). None where nobody says what a core does per cycle.
    """
    per_cycle = _FLOPS_PER_CORE_CYCLE.get(spec.kind)
    if per_cycle is None or spec.num_cores is None or spec.peak_bf16_flops is None:
        return None
    return spec.peak_bf16_flops / (spec.num_cores * per_cycle) / 1e6
