"""Choice of the clock source.

| source | clock | reasons for a low clock | power, energy |
|---|---|---|---|
| nvml | NVML, every 20 ms | reasons, violation counters | every 100 ms |
| amd | gpu_metrics, every 20 ms | violation accumulators | every 100 ms |
| tpu | throttle score, every 1 s | - | - |
| cpu | timed chain of dependent instructions, every 1 s (0.3 ms) | stolen time, thermal throttling | RAPL |
| scripted | a JSON file, for exact tests | the same file | the same file |

NVIDIA's CUPTI samples at higher rates but locks the clocks meanwhile (pytorch PR 188019), so it is not used.
"""

import ctypes
import glob
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jtrain.errors import UserError
from jtrain.profile.clocks.amdsmi import Amd
from jtrain.profile.clocks.cpufreq import Cpu
from jtrain.profile.clocks.nvml import Nvml
from jtrain.profile.clocks.reading import ClockSource
from jtrain.profile.clocks.scripted import Scripted
from jtrain.profile.clocks.tpu import Tpu


def _has_library(name: str) -> bool:
    try:
        # Only loading it tells: a container may have the Python package without the driver's library.
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing_part(source: str) -> str | None:
    """Reason why `source` cannot be read here, with what to do; None if it looks readable. Costs 1 ms."""
    if source.startswith("scripted:"):
        path = Path(source.removeprefix("scripted:"))
        return (
            None
            if path.is_file()
            else f"{path} does not exist. Give profile.clocks=scripted:PATH an existing file."
        )
    if source == "nvml":
        if importlib.util.find_spec("pynvml") is None:
            return "nvidia-ml-py is not installed. Install jtrain[cuda], or set profile.clocks=none."
        if not _has_library("libnvidia-ml.so.1"):
            return "libnvidia-ml.so.1, part of NVIDIA's driver, is not installed. Set profile.clocks=none."
    if source == "amd" and importlib.util.find_spec("amdsmi") is None:
        return (
            "amdsmi is not installed. Install it from ROCm (/opt/rocm/share/amd_smi), or set "
            "profile.clocks=none."
        )
    if source == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            return "libtpu is not installed. Install jtrain[tpu], or set profile.clocks=none."
        if not glob.glob("/dev/accel[0-9]*") and not glob.glob("/dev/vfio/[0-9]*"):
            return "no TPU is attached (/dev/accel*, /dev/vfio/*). Set profile.clocks=none."
    if source == "cpu" and not Path("/proc/stat").exists():
        return "/proc/stat does not exist. Set profile.clocks=none."
    return None


def choose(source: str, platform: str) -> tuple[str, str]:
    """Returns (source to open, note); for "auto" without a readable source, ("none", note with the reasons).

    Args:
      source: `ProfileSpec.clocks`.

    Raises:
      UserError: the source was asked for by name and cannot be read here.
    """
    if source == "none":
        return "none", "clocks: not sampled (profile.clocks=none)."
    if source != "auto":
        reason = missing_part(source)
        if reason:
            raise UserError(f"profile.clocks={source}: {reason}")
        return source, ""
    # jax says "gpu" for either vendor; "cuda" and "rocm" are its names for one of them.
    candidates = {"gpu": ("nvml", "amd"), "cuda": ("nvml",), "rocm": ("amd",), "tpu": ("tpu",)}.get(
        platform, ("cpu",)
    )
    reasons = []
    for candidate in candidates:
        reason = missing_part(candidate)
        if reason is None:
            return candidate, ""
        # The first sentence is the reason; the advice after it would be wrong for a choice by "auto".
        reasons.append(f"{candidate}: {reason.split('. ')[0]}")
    return "none", f"clocks: not sampled: {'; '.join(reasons)}."


def open_source(source: str, devices: Sequence[int]) -> ClockSource:
    """Opens a source that `choose` returned.

    Args:
      devices: for each device of the run, its number among the devices that the driver shows to this process.

    Raises:
      UserError: the driver cannot be initialised.
    """
    if source.startswith("scripted:"):
        return Scripted(Path(source.removeprefix("scripted:")))
    if source == "cpu":
        return Cpu()
    return {"nvml": Nvml, "amd": Amd, "tpu": Tpu}[source](devices)
