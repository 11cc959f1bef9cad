"""What one device is: its name, memory and driver, clocks and power before and after work, copy and matmul rates.

    python -m jtrain.bench machine --json machine.json

Every other number of the device is read against these. Runs on any device; without NVML or its like there are no rows
of clocks.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench.elementwise import seconds
from jtrain.profile.clocks.select import choose, open_source
from jtrain.runtime.platform import host_memory_bytes

GIB = 2**30
COPIED, SIZE = 2**28, 8192
REHEARSED_COPIED, REHEARSED_SIZE = 2**16, 64


OPTIONS = (
    option("--calls", type=int, default=50, help="timed calls of each"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of memory, clocks, and the rates of a copy and of a bfloat16 matmul."""
    device = jax.devices()[0]
    kind = device.device_kind
    copied, size = (REHEARSED_COPIED, REHEARSED_SIZE) if args.rehearse else (COPIED, SIZE)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    yield row(f"{kind}: device memory that JAX may use", None if limit is None else limit / GIB, "GiB")
    yield row("host memory", host_memory_bytes() / GIB, "GiB")
    yield from _clocks(device, "idle")
    x = jax.ShapeDtypeStruct((copied,), jnp.bfloat16)
    copy_s = seconds(jax.jit(lambda x: x + 1), (x,), args.calls)
    yield row(f"{kind}: copy of {copied * 2 / GIB:.2g} GiB, read and written", 4 * copied / copy_s / 1e9, "GB/s")
    square = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    matmul_s = seconds(jax.jit(jnp.matmul), (square, square), args.calls)
    # Equal entries toggle few bits: gpu_clocks compares random with zero inputs.
    yield row(f"{kind}: matmul {size}^3 bf16, equal inputs", 2 * size**3 / matmul_s / 1e12, "TFLOP/s")
    yield from _clocks(device, "after matmuls")


def _clocks(device: jax.Device, when: str) -> Iterator[Row]:
    """Rows of what the driver says now; a printed line where it says nothing."""
    name, note = choose("auto", device.platform)
    if name == "none":
        print(note)
        return
    reading = open_source(name, [device.local_hardware_id or 0]).read(0, slow=True)
    for what, value, unit in (
        ("compute clock", reading.sm_mhz, "MHz"),
        ("memory clock", reading.mem_mhz, "MHz"),
        ("power", reading.power_w, "W"),
        ("temperature", reading.temperature_c, "C"),
    ):
        if value == value:  # nan where the driver does not say
            yield row(f"{device.device_kind}: {what}, {when}", value, unit)
