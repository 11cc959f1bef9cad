"""What a chip is, by its name or from what JAX calls it."""

import dataclasses

import jax
import pytest

from jtrain_kernels import device


@dataclasses.dataclass(frozen=True)
class Chip:
    platform: str
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA GH200 480GB", "gpu", "gh200"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v6 lite", "tpu", "v6e"),
    ],
)
def test_a_device_is_known_by_its_kind(kind: str, platform: str, name: str) -> None:
    """The longest name that fits: a v5e is no v5p."""
    assert device.from_device(Chip(platform, kind)) is device.from_name(name)


def test_nobody_guesses_a_peak() -> None:
    """A CPU has none, an unknown chip has no spec, and float32 no number that holds everywhere."""
    cpu = device.from_device(jax.devices()[0])
    assert cpu is not None
    assert cpu.peak_flops("bfloat16") is None
    assert device.from_device(Chip("gpu", "NVIDIA GeForce 256")) is None
    assert device.from_name("h200").peak_flops("bfloat16") == 989.4e12
    assert device.from_name("h200").peak_flops("float32") is None


def test_an_unknown_name_lists_those_that_exist() -> None:
    """With the nearest."""
    with pytest.raises(ValueError, match=r"No device is called 'h20'\. Did you mean h200\? There are: cpu, a100"):
        device.from_name("h20")
