"""The device of a live benchmark, seconds of a call on it, and how far its results are from others."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.errors import UserError
from jtrain_kernels import device
from jtrain_kernels.device import DeviceSpec


def gpu(
    name: str, *, rehearse: bool, needs: str = "a GPU", way_out: str = ""
) -> tuple[jax.Device, DeviceSpec]:
    """The first device and its specification; in a rehearsal any device.

    Args:
      name: of the benchmark. needs: what it measures on. way_out: another way out, for the message.

    Raises:
      UserError: the device is no GPU: a CPU's number would be taken for one.
    """
    # The first one: benchmarks of one device ignore the others.
    first_device = jax.devices()[0]
    if first_device.platform != "gpu" and not rehearse:
        raise UserError(
            f"{name} needs {needs}, but the device here is {first_device.device_kind!r}. Run the same "
            f"command on one{way_out}."
        )
    return first_device, device.live(first_device)


def seconds(function: Callable[..., Any], *arguments: Any, calls: int) -> float:
    """Seconds of one call: the median of three runs of `calls` calls each, after one call that is not timed.

    Calls are dispatched one after the other, and the clock stops once the last result is there. The device
    works without pause only if a call takes it longer than Python needs to dispatch one: 49 us for the
    smallest program beside one H100 (2026-11-22, JAX 0.11.2), where a copy of 64 MiB reached 2265 GB/s alone
    and 2778 with ten in a program. For shorter work put several calls into one program.
    """
    # Compiles, and fills caches; it is not timed.
    jax.block_until_ready(function(*arguments))
    runs: list[float] = []
    # Three runs and their median: a single interruption of the machine changes nothing.
    for _ in range(3):
        start_s, result = time.perf_counter(), None
        for _ in range(calls):
            result = function(*arguments)
        # Inside the clock: dispatch returns before the device has computed.
        jax.block_until_ready(result)
        runs.append((time.perf_counter() - start_s) / calls)
    return statistics.median(runs)


def make_filled(shapes: Any) -> Any:
    """Arrays of these shapes, each one of its own, filled with 0.5."""
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), shapes)


def difference(got: Any, want: Any) -> float:
    """Largest difference of two trees of float arrays, each relative to the largest element wanted."""

    def relative_difference(got: Any, want: Any) -> Any:
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        # 1e-30 in place of 0: two arrays of zeros do not differ.
        return jnp.max(jnp.abs(got - want)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30)

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    # Integer arrays, such as segment ids, have no rounding to compare.
    return max(
        float(jax.jit(relative_difference)(*pair))
        for pair in pairs
        if jnp.issubdtype(pair[1].dtype, jnp.floating)
    )
