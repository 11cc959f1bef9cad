"""Hardware specifications of chips, for the planner, MFU, the choice of kernels and absent hardware.

Peaks are the makers' figures for dense matrix products, per JAX device; sparse peaks are never used.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from jtrain_kernels.errors import UserError, did_you_mean

type Platform = Literal["cpu", "gpu", "tpu"]
"""Platform of a device, by jax's name."""


@dataclasses.dataclass(frozen=True)
class Host:
    """Host of a device; None where no figure is published.

    devices: devices of one host, which share its memory.
    link_bytes_per_s: bandwidth of each device to the host's memory, one direction.
    network_bytes_per_s: bandwidth of each device beyond the links between devices (to other hosts of GPUs,
      other slices of TPUs), one direction: the device's share of the maker's network adapters.
    """

    devices: int = 1
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """Specification of one device.

    kind: part of the device's `device_kind` in JAX.
    peak_bf16_flops, peak_fp8_flops: dense FLOP/s; None where no figure is published, as for a CPU.
    hbm_bytes: memory of the device; None where it is the host's.
    hbm_bytes_per_s: bandwidth to that memory.
    link_bytes_per_s: bandwidth to neighbouring devices, one direction, all links together.
    num_cores: multiprocessors, compute units or TensorCores (two on a v4 or v5p, which XLA drives as one).
    compute_capability: NVIDIA's (major, minor); None for other makers.
    linked: maximum number of devices joined by links; further devices are reached over the network.
    torus_dims: dimensions of the torus of links; None where a switch joins all devices.
    power_w: maximum power of the device with its memory, without host and cooling.
    scratch_bytes: on-chip memory that a kernel manages itself: a thread block's shared memory, a TensorCore's
      VMEM.
    """

    name: str
    platform: Platform
    kind: str
    peak_bf16_flops: float | None
    peak_fp8_flops: float | None
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    link_bytes_per_s: float | None
    num_cores: int | None = None
    compute_capability: tuple[int, int] | None = None
    host: Host = Host()
    linked: int = 1
    torus_dims: int | None = None
    power_w: float | None = None
    scratch_bytes: int | None = None

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of matrix products with operands of `dtype`; None if unknown.

        float32 is unknown: its peak depends on how many bits a backend keeps, and no MFU is better than a
        wrong one.
        """
        if dtype == "bfloat16":
            return self.peak_bf16_flops
        return self.peak_fp8_flops if dtype.startswith("float8") else None

    @property
    def peak_mhz(self) -> float | None:
        """Clock at which the vendor quotes the peak: A100 1410, H100 and H200 1830, B200 1856, MI300X 2100.

        This is not the highest clock: an H100 reaches 1980 MHz. None if the FLOPs per core and cycle are
        unknown.
        """
        per_cycle = _FLOPS_PER_CORE_CYCLE.get(self.kind)
        if per_cycle is None or self.num_cores is None or self.peak_bf16_flops is None:
            return None
        return self.peak_bf16_flops / (self.num_cores * per_cycle) / 1e6


_GB = 10**9
_GIB = 2**30
_MIB = 2**20
_HOPPER_SHARED = 227 * 1024
_FLOPS_PER_CORE_CYCLE = {
    "A100": 2048,
    "H100": 4096,
    "H200": 4096,
    "GH200": 4096,
    "B200": 8192,
    "MI300X": 2048,
}
"""Dense bfloat16 FLOPs per cycle of one multiprocessor or compute unit. H100: 132 * 4096 * 1830 MHz = 989.4
TFLOP/s."""

# PCIe 4.0 x16 and 5.0 x16: 32 and 64 GB/s each way. A network adapter per GPU: ConnectX-6 (200 Gbit/s, DGX A100)
# and ConnectX-7 (400 Gbit/s, DGX H100, H200 and B200).
_PCIE4, _PCIE5 = Host(8, 32e9, 25e9), Host(8, 64e9, 50e9)
DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec("cpu", "cpu", "cpu", None, None, None, None, None),
        # NVIDIA A100 data sheet (SXM, dense).
        DeviceSpec(
            "a100", "gpu", "A100", 312e12, None, 80 * _GB, 2.039e12, 300e9, 108, (8, 0),
            host=_PCIE4, linked=8, power_w=400.0, scratch_bytes=163 * 1024,
        ),
        # NVIDIA H100 data sheet (SXM, dense).
        DeviceSpec(
            "h100", "gpu", "H100", 989.4e12, 1978.9e12, 80 * _GB, 3.35e12, 450e9, 132, (9, 0),
            host=_PCIE5, linked=8, power_w=700.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA H200 data sheet (SXM, dense).
        DeviceSpec(
            "h200", "gpu", "H200", 989.4e12, 1978.9e12, 141 * _GB, 4.8e12, 450e9, 132, (9, 0),
            host=_PCIE5, linked=8, power_w=700.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA GH200 data sheet: NVLink-C2C to the host has 900 GB/s both ways together; power with its CPU.
        DeviceSpec(
            "gh200", "gpu", "GH200", 989.4e12, 1978.9e12, 96 * _GB, 4e12, None, 132, (9, 0),
            host=Host(1, 450e9), power_w=1000.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA B200 data sheet (SXM, dense).
        DeviceSpec(
            "b200", "gpu", "B200", 2250e12, 4500e12, 180 * _GB, 8e12, 900e9, 148, (10, 0),
            host=_PCIE5, linked=8, power_w=1000.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA B300 data sheet, half of the peaks with sparsity; ConnectX-8 (800 Gbit/s).
        DeviceSpec(
            "b300", "gpu", "B300", 2250e12, 4500e12, 288 * _GB, 8e12, 900e9, 160, (10, 3),
            host=Host(8, 64e9, 100e9), linked=8, power_w=1100.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA GB200 NVL72 data sheet, half of the peaks with sparsity: 72 GPUs a rack; a host is a compute tray of 4
        # GPUs, of which two share C2C of 900 GB/s both ways; ConnectX-7.
        DeviceSpec(
            "gb200", "gpu", "GB200", 2500e12, 5000e12, 186 * _GB, 8e12, 900e9, 148, (10, 0),
            host=Host(4, 225e9, 50e9), linked=72, power_w=1200.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA GB300 NVL72 data sheet, half of the peaks with sparsity; hosts as of gb200; ConnectX-8.
        DeviceSpec(
            "gb300", "gpu", "GB300", 2500e12, 5000e12, 279 * _GB, 8e12, 900e9, 160, (10, 3),
            host=Host(4, 225e9, 100e9), linked=72, power_w=1400.0, scratch_bytes=_HOPPER_SHARED,
        ),
        # NVIDIA Ada architecture white paper (dense, float32 accumulation).
        DeviceSpec(
            "rtx4090", "gpu", "RTX 4090", 165.2e12, 330.3e12, 24 * _GB, 1.008e12, None, 128, (8, 9),
            host=Host(8, 32e9), power_w=450.0, scratch_bytes=99 * 1024,
        ),
        # NVIDIA RTX Blackwell architecture white paper (dense, float32 accumulation).
        DeviceSpec(
            "rtx5090", "gpu", "RTX 5090", 209.5e12, 419e12, 32 * _GB, 1.792e12, None, 170, (12, 0),
            host=Host(8, 64e9), power_w=575.0, scratch_bytes=99 * 1024,
        ),
        # NVIDIA L40S data sheet, half of the peaks with sparsity.
        DeviceSpec(
            "l40s", "gpu", "L40S", 362.05e12, 733e12, 48 * _GB, 8.64e11, None, 142, (8, 9),
            host=Host(8, 32e9), power_w=350.0, scratch_bytes=99 * 1024,
        ),
        # AMD Instinct MI300X data sheet.
        DeviceSpec(
            "mi300x", "gpu", "MI300X", 1307.4e12, 2614.9e12, 192 * _GB, 5.3e12, 448e9, 304,
            host=Host(8, 64e9), linked=8, power_w=750.0, scratch_bytes=64 * 1024,
        ),
        # AMD Instinct MI325X data sheet: seven links of 128 GB/s both ways.
        DeviceSpec(
            "mi325x", "gpu", "MI325X", 1307.4e12, 2614.9e12, 256 * _GB, 6e12, 448e9, 304,
            host=Host(8, 64e9), linked=8, power_w=1000.0, scratch_bytes=64 * 1024,
        ),
        # AMD Instinct MI355X data sheet: seven links of 153.6 GB/s both ways.
        DeviceSpec(
            "mi355x", "gpu", "MI355X", 2516.6e12, 5033.2e12, 288 * _GB, 8e12, 537.6e9, 256,
            host=Host(8, 64e9), linked=8, power_w=1400.0, scratch_bytes=160 * 1024,
        ),
        # AWS Neuron documentation, Trainium2, and EC2's figures of trn2.48xlarge (16 chips, 3.2 Tbit/s).
        DeviceSpec(
            # JAX counts pairs of the eight NeuronCores as devices. A chip has 667e12, 1299e12, 96 GiB,
            # 2.9e12, 1.28e12 both ways. Its programs are planned as those of a GPU: nothing of its compiler
            # was read.
            "trn2", "gpu", "trn2", 166.75e12, 324.75e12, 24 * _GIB, 7.25e11, 160e9,
            host=Host(64, None, 6.25e9), linked=64, torus_dims=2,
        ),
        # Google Cloud's TPU v4 page; power: arXiv:2304.01433, table 4.
        DeviceSpec(
            "v4", "tpu", "TPU v4", 275e12, None, 32 * _GIB, 1.2288e12, 6 * 4.5e10,
            host=Host(4, 16e9, 6.25e9), linked=4096, torus_dims=3, power_w=192.0, num_cores=2, scratch_bytes=16 * _MIB,
        ),
        # Google Cloud's TPU v5e page.
        DeviceSpec(
            "v5e", "tpu", "TPU v5 lite", 197e12, None, 16 * _GIB, 8.1e11, 4 * 4.5e10,
            host=Host(8, 15e9, 3.125e9), linked=256, torus_dims=2, num_cores=1, scratch_bytes=128 * _MIB,
        ),
        # Google Cloud's TPU v5p page.
        DeviceSpec(
            "v5p", "tpu", "TPU v5", 459e12, None, 95 * _GIB, 2.765e12, 6 * 9e10,
            host=Host(4, 15e9, 6.25e9), linked=8960, torus_dims=3, num_cores=2, scratch_bytes=64 * _MIB,
        ),
        # Google Cloud's TPU v6e page.
        DeviceSpec(
            "v6e", "tpu", "TPU v6 lite", 918e12, None, 32 * _GIB, 1.64e12, 4 * 9e10,
            host=Host(8, 32e9, 3.125e9), linked=256, torus_dims=2, num_cores=1, scratch_bytes=128 * _MIB,
        ),
        # Google Cloud's TPU7x page.
        DeviceSpec(
            # JAX counts each half of a chip as a device. A whole chip has 2307e12, 4614e12, 192 GB, 7.37e12,
            # six links of 1200 GB/s both ways together.
            "tpu7x", "tpu", "TPU7x", 1153.5e12, 2307e12, 96 * _GB, 3.685e12, 3 * 1e11,
            host=Host(8), linked=2 * 9216, torus_dims=3, num_cores=1, scratch_bytes=64 * _MIB,
        ),
    )
}  # fmt: skip
"""Specification of every known device, by name; figures that are not published are None.

Sources of several entries: the scratch memory of NVIDIA GPUs is the CUDA programming guide's table of compute
capabilities (opt-in, per block), that of AMD's the CDNA 3 white paper (LDS), that of TPUs
jax/_src/tpu_info.py. Power is the data sheet's maximum. TPUs: Google Cloud's system architecture pages; links
between chips as in the scaling book, times the links of a chip; links to the host 16 GB/s for v4, 15 for v5
and 32 for v6e, and 25 GB/s of network per host (scaling book, part 2).
"""

ENTRY_POINTS = "jtrain_kernels"
"""Group of entry points through which other distributions provide chips and kernels; each names a module."""


@functools.cache
def known() -> Mapping[str, DeviceSpec]:
    """`DEVICES`, and the devices of other distributions: the tuple `DEVICES` of each entry point's module."""
    modules = [entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    # Later entries win, so a distribution can correct a chip of this table.
    return DEVICES | {spec.name: spec for module in modules for spec in getattr(module, "DEVICES", ())}


@runtime_checkable
class Device(Protocol):
    """Attributes of a `jax.Device` that identify it."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


ALIASES = {
    "v5lite": "v5e", "v5litepod": "v5e", "v6lite": "v6e", "trillium": "v6e", "v7x": "tpu7x", "7x": "tpu7x",
    "ironwood": "tpu7x",
}  # fmt: skip
"""Common alias -> name."""


def from_name(name: str) -> DeviceSpec:
    """Device called `name`: a key of `DEVICES`, an alias, or JAX's name of the kind; case is ignored.

    Raises:
      UserError: no such device; the message lists the names.
    """
    plain = name.strip().lower()
    # JAX's `device_kind` of a GPU starts with the maker's name.
    kinds = {f"{maker}{spec.kind}".lower(): spec for spec in known().values() for maker in ("", "NVIDIA ")}
    spec = known().get(ALIASES.get(plain, plain), kinds.get(plain))
    if spec is not None:
        return spec
    raise UserError(
        f"No device is called {name!r}. {did_you_mean(name, known())}There are: {', '.join(known())}."
    )


def from_device(device: Device) -> DeviceSpec | None:
    """Specification of a live or compile-only device, by its kind; None if it is not known."""
    if device.platform == "cpu":
        return DEVICES["cpu"]
    # The longest match, because "TPU v5" is part of "TPU v5 lite".
    matches = [
        spec for spec in known().values() if spec.platform != "cpu" and spec.kind in device.device_kind
    ]
    return max(matches, key=lambda spec: len(spec.kind), default=None)


def live(device: Device) -> DeviceSpec:
    """Specification of a live device; an unknown one gets the device's own attributes, without peaks."""
    spec = from_device(device)
    if spec is not None:
        return spec
    # Every backend that is no TPU is treated as a GPU's, such as ROCm's.
    platform: Platform = "tpu" if device.platform == "tpu" else "gpu"
    # "9.0" on NVIDIA; AMD's text (gfx942) has no point.
    capability = str(getattr(device, "compute_capability", "")).split(".")
    return DeviceSpec(
        device.device_kind, platform, device.device_kind, None, None, None, None, None,
        num_cores=getattr(device, "core_count", None),
        compute_capability=(int(capability[0]), int(capability[1])) if len(capability) == 2 else None,
    )  # fmt: skip
