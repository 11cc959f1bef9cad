"""Stand-in for the part of amdsmi 7.0.2 that jtrain uses, with its names and types."""

import enum


class AmdSmiException(Exception): ...


class AmdSmiClkType(enum.IntEnum):
    GFX = 0


ticks, energy = 1000, [5.0e6, 6.0e6, 1.0e6]


def amdsmi_init() -> None: ...


def amdsmi_shut_down() -> None: ...


def amdsmi_get_processor_handles() -> list[str]:
    return ["a", "b"]


def amdsmi_get_clock_info(handle: str, kind: AmdSmiClkType) -> dict[str, int]:
    return {"clk": 100, "max_clk": 2100}


def amdsmi_get_energy_count(handle: str) -> dict[str, float]:
    return {"energy_accumulator": energy.pop(0), "counter_resolution": 2.0, "timestamp": 0}


def amdsmi_get_gpu_metrics_info(handle: str) -> dict[str, object]:
    global ticks
    if handle == "b":
        raise AmdSmiException("Error code:\n\t2 | not supported")
    ticks += 100
    return {
        "current_gfxclks": [2000, 1900, "N/A"],
        "current_gfxclk": "N/A",
        "current_uclk": 1300,
        "current_socket_power": 700,
        "temperature_hotspot": "N/A",
        "accumulation_counter": ticks,
        "ppt_residency_acc": ticks // 2,
        "socket_thm_residency_acc": ticks // 4,
        "vr_thm_residency_acc": "N/A",
    }
