"""Peaks that a machine measures of itself, and what of them belongs to one device of a run."""

import json
import math
from pathlib import Path

import jax
import pytest

from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.profile.capture import machine_peaks
from jtrain.profile.capture.device_peaks import DevicePeaks


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real products and copies, but small ones, so that a test takes no seconds."""
    monkeypatch.setattr(machine_peaks, "SIZES", (32, 64))
    monkeypatch.setattr(machine_peaks, "SPENT_S", 0.01)
    monkeypatch.setattr(machine_peaks, "COPIED_BYTES", 2**16)


def test_measured_peaks_are_kept_for_this_machine_and_dtype(tmp_path: Path) -> None:
    """One file for each; another dtype and a damaged file have none."""
    device = jax.devices()[0]
    assert machine_peaks.read(tmp_path, device, "float32") is None
    peaks = machine_peaks.measure(tmp_path, device, "float32")
    assert min(peaks.flops_per_s, peaks.bytes_per_s) > 1e6
    assert math.isfinite(peaks.flops_per_s + peaks.bytes_per_s)
    assert machine_peaks.read(tmp_path, device, "float32") == peaks
    assert machine_peaks.read(tmp_path, device, "bfloat16") is None
    (file,) = (tmp_path / "peaks").iterdir()
    assert json.loads(file.read_text())["machine"]["dtype"] == "float32"
    file.write_text(file.read_text()[:-20])
    assert machine_peaks.read(tmp_path, device, "float32") is None


def test_emulated_devices_divide_the_peaks_of_their_machine(tmp_path: Path) -> None:
    """Measured once; a later run, of another number of devices, reads the file and is quiet."""
    assert len(jax.devices()) == 8
    said: list[str] = []
    four = make_mesh(MeshSpec(data=4), jax.devices()[:4])
    peaks = DevicePeaks("float32", four, tmp_path, said.append)
    assert peaks.facts() == {"flops": None, "hbm_bytes_per_s": None, "measured": None}
    peaks.measure()
    assert [line for line in said if line.startswith("measuring")] == said != []
    machine = machine_peaks.read(tmp_path, jax.devices()[0], "float32")
    assert machine is not None
    assert peaks.facts() == {
        "flops": machine.flops_per_s / 4,
        "hbm_bytes_per_s": machine.bytes_per_s / 4,
        "measured": machine.measured,
    }
    said.clear()
    one = DevicePeaks("float32", make_mesh(MeshSpec(data=1), jax.devices()[:1]), tmp_path, said.append)
    assert one.measured == machine, "known before the first window"
    one.measure()
    assert one.measured == machine
    assert said == []


def test_a_machine_that_cannot_be_measured_has_no_peaks_and_the_run_goes_on(tmp_path: Path) -> None:
    """Without a cache nothing is measured; where it cannot be written, one line says so."""
    mesh = make_mesh(MeshSpec(data=1), jax.devices()[:1])
    said: list[str] = []
    without_cache = DevicePeaks("float32", mesh, None, said.append)
    without_cache.measure()
    assert (without_cache.measured, said) == (None, [])
    (tmp_path / "peaks").touch()
    refused = DevicePeaks("float32", mesh, tmp_path, said.append)
    refused.measure()
    assert refused.facts()["flops"] is None
    assert said[1].startswith("no peaks of this machine: FileExistsError")
