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


def gpu(name: str, *, rehearse: bool, needs: str = "a GPU", more: str = "") -> tuple[jax.Device, DeviceSpec]:
    """The first device and its specification; in a rehearsal any device.

    Args:
      name: of the benchmark. needs: what it measures on. more: another way out, for the message.

    Raises:
      UserError: the device is no GPU: a CPU's number would be taken for one.
    """
    here = jax.devices()[0]
    if here.platform != "gpu" and not rehearse:
        raise UserError(
            f"{name} needs {needs}, but the device here is {here.device_kind!r}. Run the same command on "
            f"one{more}."
        )
    return here, device.live(here)


def seconds(function: Callable[..., Any], *arguments: Any, calls: int) -> float:
    """Seconds of one call: the median of three runs of `calls` calls each, after one call that is not timed.

    Calls are dispatched one after the other, and the clock stops once the last result is there. The device
    works without pause only if a call takes it longer than Python needs to dispatch one: 49 us for the
    smallest program beside one H100 (2026-11-22, JAX 0.11.2), where a copy of 64 MiB reached 2265 GB/s alone
    and 2778 with ten in a program. For shorter work put several calls into one program.
    """
    jax.block_until_ready(function(*arguments))
    runs: list[float] = []
    for _ in range(3):
        start_s, result = time.perf_counter(), None
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        runs.append((time.perf_counter() - start_s) / calls)
    return statistics.median(runs)


def filled(shapes: Any) -> Any:
    """Arrays of these shapes, each one of its own, filled with 0.5."""
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), shapes)


def difference(got: Any, want: Any) -> float:
    """Largest difference of two trees of floating-point arrays, each relative to the largest element
    wanted.
    """

    def one(got: Any, want: Any) -> Any:
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.max(jnp.abs(got - want)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30)

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jax.jit(one)(*pair)) for pair in pairs if jnp.issubdtype(pair[1].dtype, jnp.floating))
