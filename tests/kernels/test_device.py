"""Specifications of chips, found by name or by JAX's name of the kind."""

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
    """The longest matching kind wins: a v5e is not taken for a v5p."""
    assert device.from_device(Chip(platform, kind)) is device.from_name(name)


def test_nobody_guesses_a_peak() -> None:
    """A CPU has no peak, an unknown chip has no specification, and float32 has no peak that holds
    everywhere.
    """
    cpu = device.from_device(jax.devices()[0])
    assert cpu is not None
    assert cpu.peak_flops("bfloat16") is None
    assert device.from_device(Chip("gpu", "NVIDIA GeForce 256")) is None
    assert device.from_name("h200").peak_flops("bfloat16") == 989.4e12
    assert device.from_name("h200").peak_flops("float32") is None


def test_an_unknown_name_lists_those_that_exist() -> None:
    """The message suggests the nearest names."""
    with pytest.raises(
        ValueError, match=r"No device is called 'h20'\. Did you mean h200, gh200\? There are: cpu, "
    ):
        device.from_name("h20")
