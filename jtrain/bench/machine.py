"""Memory, driver, clocks, power, copy and matmul rates of a device; with --soak its clock under long work.

    python -m jtrain.bench machine --json machine.json
    python -m jtrain.bench machine --soak 60

Every other number of the device is read against these. Runs on any device; without NVML or its like there are
no rows of clocks.

Soaks need a GPU: random against zero inputs, steady against changing allocations. Each minute of matmuls is
watched as a run is, by the sampler in a process of its own; seconds lost to the clock are those of
`jtrain.profile.analysis.clock_loss`, b = 1. Zeros toggle no bits and draw less power, so they run at a higher
clock.
Allocations: weights are copied before each step as FSDP gathers them, into buffers of one size, or of sizes
  that change
from step to step (Chopper, arXiv 2512.08242, section 6).
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import gpu, make_filled, seconds
from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks import samples
from jtrain.profile.clocks.sampler import Sampler
from jtrain.profile.clocks.samples import energy_j
from jtrain.profile.clocks.select import choose, open_source
from jtrain.runtime.platform import host_memory_bytes

GIB = 2**30
COPIED, SIZE = 2**28, 8192
"""Numbers that are copied, and rows of the square matrices: 1.1 TFLOP each product, 1.4 ms at the peak."""
REHEARSED_COPIED, REHEARSED_SIZE = 2**16, 64

PRODUCTS = 32
"""In one call: long enough that launching it costs nothing."""


OPTIONS = (
    option("--calls", type=int, default=50, help="timed calls of each"),
    option("--soak", type=float, metavar="SECONDS", help="of each of four soaks, in place of the rates"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of memory, clocks, and the rates of a copy and of a bfloat16 matmul; or those of the soaks.

    Raises:
      UserError: soaks are asked for, and the first device is no GPU.
    """
    if args.soak is not None:
        yield from soak_rows(args.soak, rehearse=args.rehearse)
        return
    device = jax.devices()[0]
    kind = device.device_kind
    copied, size = (REHEARSED_COPIED, REHEARSED_SIZE) if args.rehearse else (COPIED, SIZE)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    yield row(f"{kind}: device memory that JAX may use", None if limit is None else limit / GIB, "GiB")
    yield row("host memory", host_memory_bytes() / GIB, "GiB")
    yield from _clocks(device, "idle")
    x = jax.ShapeDtypeStruct((copied,), jnp.bfloat16)
    copy_s = seconds(jax.jit(lambda x: x + 1), make_filled(x), calls=args.calls)
    yield row(
        # Two bytes per number, read and written.
        f"{kind}: copy of {copied * 2 / GIB:.2g} GiB, read and written",
        4 * copied / copy_s / 1e9,
        "GB/s",
    )
    square = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    matmul_s = seconds(jax.jit(jnp.matmul), *make_filled((square, square)), calls=args.calls)
    # Equal entries toggle few bits: soaks compare random with zero inputs.
    yield row(f"{kind}: matmul {size}^3 bf16, equal inputs", 2 * size**3 / matmul_s / 1e12, "TFLOP/s")
    yield from _clocks(device, "after matmuls")


def _clocks(device: jax.Device, when: str) -> Iterator[Row]:
    """Rows of what the driver says now; a printed line where it says nothing."""
    name, note = choose("auto", device.platform)
    if name == "none":
        print(note)
        return
    reading = open_source(name, [device.local_hardware_id or 0]).read(0, slow=True)
    for quantity, value, unit in (
        ("compute clock", reading.sm_mhz, "MHz"),
        ("memory clock", reading.mem_mhz, "MHz"),
        ("power", reading.power_w, "W"),
        ("temperature", reading.temperature_c, "C"),
    ):
        # nan is unequal to itself.
        if value == value:  # nan where the driver does not say
            yield row(f"{device.device_kind}: {quantity}, {when}", value, unit)


@dataclasses.dataclass(frozen=True)
class Soak:
    """Figures of one soak; None where the driver does not say. lost_s: seconds lost to clocks, by cause."""

    flops_per_s: float
    mean_mhz: float | None
    mean_w: float | None
    joules_per_tflop: float | None
    lost_s: dict[str, float]


def soak_rows(seconds: float, *, rehearse: bool) -> Iterator[Row]:
    """TFLOP/s, clock, power, energy and seconds lost of each soak, the second of a pair against the first."""
    gpu_device, spec = gpu("machine --soak", rehearse=rehearse, needs="a GPU's clocks")
    size = REHEARSED_SIZE if rehearse else SIZE
    # Random numbers toggle many bits; zeros none.
    random = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    peaks = Peaks(spec.peak_bf16_flops, spec.hbm_bytes_per_s, spec.peak_mhz, None)
    # Eight sizes, up to half as many rows more.
    extra_rows = range(0, size // 2, size // 16)
    for first, second, work in (
        ("zeros", "random numbers", [_multiply(jnp.zeros_like(random)), _multiply(random)]),
        ("one size", "sizes that change", [_gathered(random, [0]), _gathered(random, extra_rows)]),
    ):
        base, varied = (soak(calls, seconds, peaks, size) for calls in work)
        yield from _rows(f"{gpu_device.device_kind}: {second} against {first}", base, varied)


def soak(work: Callable[[int], Any], seconds: float, peaks: Peaks, size: int) -> Soak:
    """Calls `work` with 0, 1, ... for so long, after a warm-up of a tenth, and says what it came to."""
    # A warm-up, which also compiles.
    _repeat(work, 0.1 * seconds)
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own samples the clocks, so that this one's loop is not disturbed.
        with Sampler(Path(folder), source="auto", platform=jax.default_backend(), devices=[0]) as sampler:
            start_ns = time.time_ns()
            calls = _repeat(work, seconds)
            end_ns = time.time_ns()
            sampler.save(Path(folder), start_ns, end_ns)
        clock = samples.load(Path(folder))[0]
    return summarise(clock, calls * PRODUCTS * 2.0 * size**3, start_ns, end_ns, peaks)


def summarise(clock_samples: samples.Samples, flops: float, start_ns: int, end_ns: int, peaks: Peaks) -> Soak:
    """The figures of `flops` computed from start to end, on the clock that `clock_samples` says."""
    seconds = (end_ns - start_ns) * 1e-9
    mhz, watts = (float(clock_samples.mean(name, start_ns, end_ns)) for name in ("sm_mhz", "power_w"))
    reference = clock_loss.reference_mhz(peaks, {0: clock_samples})
    # Time beyond what the same work would have taken at the reference clock.
    lost_s = seconds * (1.0 - float(clock_loss.multipliers(mhz, 1.0, reference)))
    joules = energy_j(clock_samples, start_ns, end_ns)
    return Soak(
        flops_per_s=flops / seconds,
        mean_mhz=None if math.isnan(mhz) else mhz,
        mean_w=None if math.isnan(watts) else watts,
        joules_per_tflop=None if joules is None else joules / (flops * 1e-12),
        lost_s=clock_loss.split_by_cause(lost_s, clock_samples, start_ns, end_ns, reference),
    )


def _rows(what: str, base: Soak, varied: Soak) -> list[Row]:
    rows = [row(f"{what}, matmuls", varied.flops_per_s * 1e-12, "TFLOP/s", baseline=base.flops_per_s * 1e-12)]
    for name, unit in (("mean_mhz", "MHz"), ("mean_w", "W"), ("joules_per_tflop", "J/TFLOP")):
        rows.append(row(f"{what}, {name}", getattr(varied, name), unit, baseline=getattr(base, name)))
    for cause, lost_s in varied.lost_s.items():
        rows.append(row(f"{what}, lost to clocks by {cause}", lost_s, "s", baseline=base.lost_s[cause]))
    return rows


def _repeat(work: Callable[[int], Any], seconds: float) -> int:
    """Calls `work` for so long, two calls in flight so that the device never waits; returns the count."""
    end_s, calls, previous = time.monotonic() + seconds, 0, None
    while time.monotonic() < end_s:
        current = work(calls)
        if previous is not None:
            jax.block_until_ready(previous)
        previous, calls = current, calls + 1
    jax.block_until_ready(previous)
    return calls


@jax.jit
def repeat_products(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies x by w, `PRODUCTS` times in a row."""
    # Scaled, so that random numbers stay of one size however often they are multiplied.
    return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: (y @ w * w.shape[0] ** -0.5).astype(x.dtype), x)


def _multiply(x: jax.Array) -> Callable[[int], Any]:
    return lambda call: repeat_products(x, x)


def _gathered(x: jax.Array, extra_rows: Any) -> Callable[[int], Any]:
    """Copies the weight into a new buffer before each call, with so many rows more, in turn."""
    extra = list(extra_rows)
    gather = jax.jit(
        lambda w, more: jnp.concatenate([w, jnp.zeros((more, w.shape[1]), w.dtype)]), static_argnums=1
    )
    # A fixed order that is not sorted, so that sizes neither grow nor shrink steadily.
    order = np.random.default_rng(0).permutation(len(extra))

    def work(call: int) -> jax.Array:
        gathered = gather(x, extra[order[call % len(extra)]])
        # The product uses the first rows only: both kinds of soak multiply the same.
        return repeat_products(x, gathered[: x.shape[0]])

    return work
