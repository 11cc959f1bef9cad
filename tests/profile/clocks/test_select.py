"""Clock sources: the quantities that each reads; a refused call costs only its own quantity."""

import ctypes
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.profile.clocks import cpufreq, samples, tpu
from jtrain.profile.clocks.amdsmi import Amd
from jtrain.profile.clocks.nvml import Nvml
from jtrain.profile.clocks.reading import Notes, Reading
from jtrain.profile.clocks.sampler import Sampler
from jtrain.profile.clocks.scripted import Scripted
from jtrain_kernels import device
from tests.processes import program

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-in for NVML, loaded into this process, where nvidia-ml-py finds it by its soname."""
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    name = "-Wl,-soname,libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", name, str(HERE / "fake_nvml.c"), "-o", str(path)], check=True
    )
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes GPUs visible, which the other tests hide."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


ALL = Reading(
    sm_mhz=1001.0,
    mem_mhz=2001.0,
    power_w=650.0,
    temperature_c=61.0,
    energy_j=5.0,
    reasons=0x24,
    power_violation_ns=7,
    thermal_violation_ns=8,
)


def test_nvml_reads_everything_through_nvidias_own_binding(library: Path) -> None:
    """Converts MHz, mW, mJ, ns to MHz, W, J, ns; a fast reading has clocks and reasons only."""
    source = Nvml([0, 1])
    assert source.read(1, slow=True) == ALL
    cheap = source.read(1, slow=False)
    assert (cheap.sm_mhz, cheap.reasons, cheap.power_violation_ns) == (1001.0, 0x24, -1)
    assert math.isnan(cheap.power_w)
    assert source.max_mhz == 1980.0
    assert source.notes.lines == []
    assert samples.REASONS[0x4], samples.REASONS[0x20]
    source.close()


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_mhz", "mem_mhz"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"reasons"}),
        ("nvmlDeviceGetTemperatureV", {"temperature_c"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"energy_j"}),
        ("nvmlDeviceGetViolationStatus", {"power_violation_ns", "thermal_violation_ns"}),
        ("nvmlDeviceGetMaxClockInfo", set()),
    ],
)
def test_a_refused_call_costs_its_own_quantity(
    library: Path, monkeypatch: pytest.MonkeyPatch, call: str, unknown: set[str]
) -> None:
    """One note per quantity however often it is read; all other quantities are read."""
    monkeypatch.setenv("FAKE_NVML_REFUSE", call)
    source = Nvml([0, 1])
    found = [source.read(1, slow=True) for _ in range(5)][-1]
    for name, value in vars(ALL).items():
        got = getattr(found, name)
        assert (math.isnan(got) or got == -1) if name in unknown else got == value
    assert len(source.notes.lines) == max(len(unknown), 1)
    assert all(line.endswith("refused: Not Supported.") for line in source.notes.lines)


@pytest.mark.parametrize("call", ["nvmlDeviceGetFieldValues", "@186"])
def test_power_falls_to_the_average_with_a_note(
    library: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The fallback call, an average over a second, gives 600 W."""
    monkeypatch.setenv("FAKE_NVML_REFUSE", call)
    source = Nvml([0])
    assert source.read(0, slow=True).power_w == pytest.approx(600.0)
    assert source.notes.lines == ["clocks: NVML: power now (field 186) refused: Not Supported."]


def test_nvml_counts_devices_as_cuda_does(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices follow CUDA_VISIBLE_DEVICES, by number or UUID; a MIG slice has no clocks, the others are
    read.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-2,MIG-3,7")
    source = Nvml([0, 1, 2, 3])
    assert source.devices == (0, 1)
    assert [source.read(index, slow=False).sm_mhz for index in source.devices] == [1001.0, 1002.0]
    assert [line.split(" refused")[0] for line in source.notes.lines] == [
        "clocks: NVML: device 2 (CUDA_VISIBLE_DEVICES=MIG-3)",
        "clocks: NVML: device 3 (CUDA_VISIBLE_DEVICES=7)",
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    one_process_per_gpu = Nvml([2])
    assert one_process_per_gpu.read(0, slow=False).sm_mhz == 1002.0


def test_nvml_that_does_not_start_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to set."""
    monkeypatch.setenv("FAKE_NVML_REFUSE", "nvmlInitWithFlags")
    with pytest.raises(ValueError, match=r"NVML does not start: Not Supported\. Set profile\.clocks=none\."):
        Nvml([0])


def test_the_sampler_samples_nvml(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end: the child loads the library by name, and "auto" on a GPU finds it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    start = time.time_ns()
    with Sampler(tmp_path / "live", source="auto", platform="gpu", devices=[0, 1]) as running:
        while (found := running.means(start, time.time_ns())).power_w != (650.0, 650.0):
            assert time.time_ns() < start + 60 * 10**9, running.note
            time.sleep(0.02)
    assert found.sm_mhz == (1000.0, 1001.0)


def test_without_nvidias_driver_nvml_is_refused() -> None:
    """Runs in a separate process in which the stand-in is not loaded."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        program(__file__, "choose_sources"),
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "clocks: not sampled: nvml: libnvidia-ml.so.1" in done.stdout
    assert done.stderr.strip().splitlines()[-1].endswith("is not installed. Set profile.clocks=none.")


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for amdsmi whose counters begin anew."""
    name = "tests.profile.clocks.amdsmi_stand_in"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "amdsmi", importlib.import_module(name))


@pytest.mark.usefixtures("amdsmi")
def test_amd_reads_gpu_metrics() -> None:
    """Clock is the mean of the dies, N/A is unknown, residencies become ns, shrinking energy is dropped with
    a note.
    """
    source = Amd([0, 1])
    assert (source.devices, source.max_mhz) == ((0, 1), 2100.0)
    first, second, third = (source.read(0, slow=True) for _ in range(3))
    assert (first.sm_mhz, first.mem_mhz, first.power_w, first.energy_j) == (1950.0, 1300.0, 700.0, 10.0)
    assert math.isnan(first.temperature_c)
    assert second.power_violation_ns > 0
    assert second.power_violation_ns == pytest.approx(2 * second.thermal_violation_ns, abs=2)
    assert math.isnan(third.energy_j)
    assert math.isnan(source.read(1, slow=True).sm_mhz)
    assert source.notes.lines == [
        "clocks: AMD: the energy counter went backwards: those readings are dropped.",
        "clocks: AMD: gpu_metrics refused: Error code: 2 | not supported.",
    ]
    source.close()


@pytest.mark.usefixtures("amdsmi")
def test_hip_counts_the_gpus_that_rocr_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ROCR_VISIBLE_DEVICES=1,0 the second GPU is HIP's number 0."""
    for variables, clocks in (
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, 1950.0),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, math.nan),
        ({"HIP_VISIBLE_DEVICES": "0"}, 1950.0),
        ({"ROCR_VISIBLE_DEVICES": "1"}, math.nan),
        ({"HIP_VISIBLE_DEVICES": ""}, math.nan),
        ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, math.nan),
    ):
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            assert Amd([0]).read(0, slow=False).sm_mhz == pytest.approx(clocks, nan_ok=True), variables


def test_the_cpus_chain_is_relative_to_its_best() -> None:
    """The clock is never above its best, and not absurdly below, whatever else runs."""
    source = cpufreq.Cpu()
    found = [source.read(-1, slow=True) for _ in range(5)]
    assert source.ref_mhz is not None
    assert all(0.02 * source.ref_mhz < one.sm_mhz <= source.ref_mhz for one in found)
    assert all(one.reasons in (0, samples.STOLEN) for one in found)
    assert "relative to its own best" in source.notes.lines[0]


def test_the_cpus_energy_goes_on_where_the_kernels_counter_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAPL's counter of a package starts again at its range, at 100 W every 11 to 44 minutes."""
    counter, energy_range = tmp_path / "energy_uj", tmp_path / "max_energy_range_uj"
    monkeypatch.setattr(cpufreq, "RAPL", counter)
    energy_range.write_text("65532610987\n")
    source = cpufreq.Cpu()
    assert math.isnan(source.read(-1, slow=True).energy_j), "no counter, as in most virtual machines"
    joules: list[float] = []
    for energy_uj in (65_530_610_987, 65_532_610_987, 3_000_000, 4_000_000):
        counter.write_text(f"{energy_uj}\n")
        joules.append(source.read(-1, slow=True).energy_j)
    assert [round(after - before, 3) for before, after in itertools.pairwise(joules)] == [2.0, 3.0, 1.0]


def test_a_tpus_score_is_tenths() -> None:
    """As in libtpu's documentation, '1-3' is TPU 1 throttled by 30 %; anything else is unknown."""
    assert tpu.parse(["0-0", "1-3", "2", "x-1", "3-y"]) == {0: 0, 1: 3}


@pytest.mark.aot
def test_libtpu_without_a_tpu_gives_unknown_clocks_and_a_note() -> None:
    """Uses the real metric, for which libtpu has no data here."""
    source = tpu.Tpu([0])
    assert math.isnan(source.read(0, slow=True).sm_mhz)
    assert source.notes.lines[-1] == "clocks: tpu_throttle_score has no entry for TPU 0."


def test_a_script_plays_by_its_times(tmp_path: Path) -> None:
    """A point holds until the next point of its device."""
    path = tmp_path / "clocks.json"
    points = [{"time_s": 2, "sm_mhz": 500}, {"time_s": 0, "sm_mhz": 1000, "reasons": 4}]
    path.write_text(json.dumps({"points": points}))
    script = Scripted(path)
    assert script.devices == (-1,)
    assert [script.reading_at(-1, time_s).sm_mhz for time_s in (0.0, 1.99, 2.0, 9.0)] == [
        1000,
        1000,
        500,
        500,
    ]
    assert math.isnan(script.reading_at(-1, -1.0).sm_mhz)


def test_a_note_is_one_line_and_once() -> None:
    """A driver's message of several lines becomes one line."""
    notes = Notes()

    def refuse() -> int:
        raise OSError("two\nlines")

    assert [notes.ask("the clock", refuse, OSError) for _ in range(3)] == [None] * 3
    assert notes.lines == ["clocks: the clock refused: two lines."]


@pytest.mark.parametrize(
    ("name", "mhz"), [("a100", 1410), ("h100", 1830), ("h200", 1830), ("b200", 1856), ("mi300x", 2100)]
)
def test_a_published_peak_belongs_to_a_clock(name: str, mhz: float) -> None:
    """Cores times FLOPs per cycle times this clock give the vendor's peak to 0.1 %."""
    assert device.from_name(name).peak_mhz == pytest.approx(mhz, rel=1e-3)
    assert device.from_name("v5p").peak_mhz is None
