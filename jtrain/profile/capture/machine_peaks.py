"""Peaks of a machine whose maker publishes none: the best rates of its own matrix products and copies.

A published peak is what hardware could do; a measured one is what the same compiler reaches here with the work
it does best. It takes about 2 s and is kept in the user's cache, one file for each machine, dtype and version of
jaxlib.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.profile.clocks.cpufreq import cpu_model
from jtrain.runtime.atomic_io import write_whole

FOLDER = "peaks"
"""Subfolder of the user's cache."""

SIZES = (256, 512, 1024, 2048, 4096)
"""Rows of the square matrices: small ones fit the caches of a CPU, large ones fill a GPU."""

LONG_CALL_S = 0.05
"""Seconds of one product from which no larger one is tried."""

SPENT_S = 0.25
"""Seconds of repeated calls for each rate. The best of many short calls is free of other programs' work."""

COPIED_BYTES = 2**27
"""Bytes of the array that is read and written, 128 MiB: more than the caches of most CPUs hold."""


@dataclasses.dataclass(frozen=True)
class MachinePeaks:
    """Best measured rates of a machine, of all its cores on a CPU and of one device elsewhere.

    flops_per_s: of products of square matrices.
    bytes_per_s: of memory, read and written.
    measured: date and time of the measurement, UTC.
    """

    flops_per_s: float
    bytes_per_s: float
    measured: str

    def per_device(self, devices: int) -> "MachinePeaks":
        """Share of one of so many devices that divide the machine among them."""
        return dataclasses.replace(
            self, flops_per_s=self.flops_per_s / devices, bytes_per_s=self.bytes_per_s / devices
        )


def read(cache: Path, device: Any, dtype: str) -> MachinePeaks | None:
    """The peaks that were measured on this machine before; None without them.

    Args:
      cache: the user's cache.
      device: a live `jax.Device`.
      dtype: of the matrices.
    """
    try:
        return MachinePeaks(**json.loads(_file(cache, device, dtype).read_text())["peaks"])
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one of another version
        return None


def measure(cache: Path, device: Any, dtype: str) -> MachinePeaks:
    """Measures the peaks on `device` and keeps them in `cache`; call it while nothing else computes there.

    Raises:
      Exception: of many types: the device has no memory for it, or cannot multiply this dtype.
    """
    peaks = MachinePeaks(
        flops_per_s=_flops_per_s(device, dtype),
        bytes_per_s=_bytes_per_s(device),
        measured=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    file = _file(cache, device, dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": _machine(device, dtype), "peaks": dataclasses.asdict(peaks)}
    write_whole(file, json.dumps(content, indent=1) + "\n")
    return peaks


def _file(cache: Path, device: Any, dtype: str) -> Path:
    machine = json.dumps(_machine(device, dtype))
    return cache / FOLDER / f"{hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()}.json"


def _machine(device: Any, dtype: str) -> dict[str, str | int]:
    """What the rates depend on. The host's name stands for all that hosts of one kind do not share."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": dtype,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def _flops_per_s(device: Any, dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(device)
    product = jax.jit(jnp.matmul, out_shardings=place)
    best = 0.0
    for size in SIZES:
        # Unequal entries: equal ones toggle few bits, and a GPU then runs at a higher clock.
        fill = jax.jit(
            lambda size=size: jnp.sin(jnp.arange(size * size)).reshape(size, size).astype(dtype),
            out_shardings=place,
        )
        x = fill()
        call_s = _best_s(lambda x=x: product(x, x))
        best = max(best, 2 * size**3 / call_s)
        if call_s > LONG_CALL_S:
            break
    return best


def _bytes_per_s(device: Any) -> float:
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(device)
    # In place: into new memory a CPU would count the kernel's page faults.
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=place)
    x = jax.jit(lambda: jnp.zeros(COPIED_BYTES // 4, jnp.float32), out_shardings=place)()

    def call() -> Any:
        nonlocal x
        x = add_one(x)
        return x

    return 2 * COPIED_BYTES / _best_s(call)


def _best_s(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of the calls that `SPENT_S` has room for; the first one compiles, untimed."""
    import jax

    jax.block_until_ready(call())
    best_s, end_s = math.inf, time.perf_counter() + SPENT_S
    # At least one, however slow.
    while best_s == math.inf or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        jax.block_until_ready(call())
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
