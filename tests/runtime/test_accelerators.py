"""GPUs and TPUs by their device files: `--device`, and those that a run leaves unused."""

from pathlib import Path
from typing import Literal

import pytest

from jtrain.errors import UserError
from jtrain.runtime import accelerators, platform
from jtrain.runtime.accelerators import find_device, platform_of, unused_warning


def root_with(tmp_path: Path, *files: str) -> Path:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0x1ae0\n" if name.endswith("vendor") else "")
    return tmp_path


GOOGLE = "sys/bus/pci/devices/0000:00:04.0/vendor"


def test_amd_gpus_that_a_variable_hides_are_meant_to_be_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "has_plugin", lambda _: True)
    root = root_with(tmp_path, "dev/kfd")
    assert "a GPU is here (/dev/kfd)" in (unused_warning({"HIP_VISIBLE_DEVICES": "0"}, root=root) or "")
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        for value in ("", "-1"):
            assert unused_warning({variable: value}, root=root) is None
    root_with(tmp_path, "dev/nvidia0")
    assert unused_warning({"HIP_VISIBLE_DEVICES": ""}, root=root), "the variable hides no GPU of NVIDIA"


@pytest.mark.parametrize(
    ("files", "environ", "gpu", "tpu"),
    [
        ((), {}, None, None),
        (("dev/nvidiactl",), {}, None, None),
        (("dev/nvidia1", "dev/nvidia0"), {}, "/dev/nvidia0", None),
        (("usr/lib/wsl/lib/nvidia-smi",), {}, "/usr/lib/wsl/lib/nvidia-smi", None),
        (("dev/kfd",), {}, None, None),
        (("dev/accel0",), {}, None, "/dev/accel0"),
        (("dev/vfio/0",), {}, None, None),
        (("dev/vfio/0", GOOGLE), {}, None, "/dev/vfio/0"),
        ((), {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, None, "TPU_ACCELERATOR_TYPE=v5litepod-8"),
        ((), {"TPU_ACCELERATOR_TYPE": "WARNING: could not determine it"}, None, None),
    ],
    ids=str,
)
def test_device_files_tell_what_is_here(
    files: tuple[str, ...], environ: dict[str, str], gpu: str | None, tpu: str | None, tmp_path: Path
) -> None:
    root = root_with(tmp_path, *files)
    assert (find_device("gpu", environ, root=root), find_device("tpu", environ, root=root)) == (gpu, tpu)


def test_a_gpu_that_jax_has_no_cuda_for_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the plugin is there without CUDA, as [aot] installs it; a GPU hidden on purpose is not."""
    root = root_with(tmp_path, "dev/nvidia0")
    for lacks in (
        "jax's CUDA plugin is not installed",
        "jax's CUDA plugin is installed without CUDA's libraries",
    ):
        monkeypatch.setattr(accelerators, "find_missing_software", lambda _, lacks=lacks: lacks)
        line = unused_warning({}, root=root) or ""
        assert line.startswith(
            f"WARNING: a GPU is here (/dev/nvidia0), but this run computes on the CPU: {lacks}. "
        )
        assert f"run pip install -e '{Path(__file__).parents[2]}[cuda]'; --device cpu says" in line
        assert unused_warning({"CUDA_VISIBLE_DEVICES": "-1"}, root=root) is None
        with pytest.raises(UserError, match=rf"--device gpu: {lacks}\. Run pip install .*\[cuda\]'\.$"):
            platform_of("gpu", {}, root=root)
    monkeypatch.setattr(accelerators, "find_missing_software", lambda _: "")
    assert "jax.devices('gpu')\", which says why" in (unused_warning({}, root=root) or "")
    assert platform_of("gpu", {}, root=root) == "cuda"


def test_a_tpu_without_libtpu_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_with(tmp_path, "dev/accel0")
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda _: None)
    line = unused_warning({"CUDA_VISIBLE_DEVICES": "-1"}, root=root) or ""
    assert "a TPU is here (/dev/accel0), but this run computes on the CPU: libtpu is not installed" in line
    assert "[tpu]'" in line


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_a_device_that_is_not_here_is_refused(device: Literal["gpu", "tpu"], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"--device {device}: this host has no {device.upper()} \(no /dev/.*--device"
    ):
        platform_of(device, {}, root=tmp_path)


def test_emulated_devices_are_cpus() -> None:
    with pytest.raises(UserError, match=r"--device gpu with --emulate-devices 2: emulated devices are CPUs"):
        platform.start_jax({}, emulate_devices=2, device="gpu")


def test_nothing_is_said_of_a_host_without_accelerators(tmp_path: Path) -> None:
    assert unused_warning({}, root=tmp_path) is None
