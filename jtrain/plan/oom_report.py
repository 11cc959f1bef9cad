"""Report of a run that exhausts a device's memory: its largest arrays, and settings that would fit."""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jtrain.errors import UserError
from jtrain.optim import Optimizer
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.job import Job
from jtrain.plan.smaller_settings import GIB, as_text, fitting_settings, option_lines, settings_of
from jtrain.step.state import TrainState, abstract_state
from jtrain.step.train_step import BATCH_SPEC

MAX_ARRAYS = 8
"""Number of arrays that the report names; the others share one line."""

RETRY_FRACTION = 0.9
"""Settings are offered if they need at most this fraction of the exhausted memory: the estimate errs by the
rest."""


class MemoryExhausted(UserError):
    """A device had no memory left; the message names the largest arrays and settings that would fit."""


@contextlib.contextmanager
def explain_exhaustion(
    job: Job, optimizer: Optimizer, mesh: Mesh, *, available: int | None
) -> Iterator[None]:
    """Turns an out-of-memory error of the allocator or the compiler into a report of what the memory holds.

    Args:
      available: bytes that the run may use on one device; None if unknown.

    Raises:
      MemoryExhausted: lists the largest arrays by name, the step's temporaries, and settings that need less.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        # Abstract arrays: the device has no memory left for real ones.
        state = abstract_state(job.layout, optimizer, mesh)
        shape, device = (job.global_batch, job.seq_len), mesh.local_devices[0]
        batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
        plan = memory(job)
        # Below both what the plan needs and what the device has.
        limit = int(RETRY_FRACTION * min(plan.total_bytes, available or plan.total_bytes))
        # Numbers, because `as_needed` would keep everything on the device: by the plan it fits.
        options = option_lines(
            fitting_settings(job, limit=limit, share=1.0), as_text(settings_of(job.layout, job.global_batch))
        )
        raise MemoryExhausted(
            "\n".join(
                [
                    f"out of memory: {str(error).partition('\n')[0][:300]}",
                    *_held_lines(state, held_bytes(_names(state, batch), device)),
                    _plan_line(plan, available),
                    *_advice_lines(options, limit),
                ]
            )
        ) from error


def is_exhausted(error: BaseException) -> bool:
    """True if a runtime's error means that memory is exhausted, in an allocation or in a compilation.

    The text decides, not the status: XLA:CPU reports INTERNAL if the failure shows only when results are
    read.
    """
    # RESOURCE_EXHAUSTED may be of another resource; only with an allocation it is of memory.
    text = str(error)
    return "out of memory" in text.lower() or ("RESOURCE_EXHAUSTED" in text and "allocat" in text)


def held_bytes(names: Mapping[Any, list[str]], device: jax.Device) -> dict[str, int]:
    """Bytes of every live array in the memory of `device`, by name; arrays without a name are `other arrays`.

    JAX arrays have no names, so they are recognised by shape, dtype and sharding. Arrays of the state that
    look alike are either all alive or all gone, except while the state is made: then the first names are
    used.

    Args:
      names: `_kind` of array -> names for the arrays found, in turn; the last one is used for all further
        arrays.
    """
    unused_names = {kind: collections.deque(array_names) for kind, array_names in names.items()}
    held: collections.Counter[str] = collections.Counter()
    for array in jax.live_arrays():
        shards = [s for s in array.addressable_shards if s.device == device] if not array.is_deleted() else []
        # Arrays in host memory take nothing of the device.
        if not shards or array.sharding.memory_kind == "pinned_host":
            continue
        # None if no array of the run looks like it.
        queue = unused_names.get(_kind(array))
        name = "other arrays" if not queue else queue[0] if len(queue) == 1 else queue.popleft()
        held[name] += sum(math.prod(shard.data.shape) * array.dtype.itemsize for shard in shards)
    return dict(held)


def _kind(array: Any) -> tuple[Any, ...]:
    """Shape, dtype, partition and memory of an array: the properties that recognise it."""
    sharding = array.sharding
    partition = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None
    while partition and partition[-1] is None:  # P("data") and P("data", None) are the same sharding
        partition = partition[:-1]
    return tuple(array.shape), np.dtype(array.dtype), partition, sharding.memory_kind


def _names(state: TrainState, batch: jax.ShapeDtypeStruct) -> dict[Any, list[str]]:
    names: dict[Any, list[str]] = {}
    for name, array in _arrays(state):
        names.setdefault(_kind(array), []).append(name)
    # Last, so that it names every further array of a batch's shape.
    names.setdefault(_kind(batch), []).append("batches")
    return names


def _arrays(state: TrainState) -> list[tuple[str, Any]]:
    """Every array of a state in device memory with its path, as in a checkpoint."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), array)
        for path, array in jax.tree_util.tree_leaves_with_path(state)
        if array.sharding.memory_kind != "pinned_host"
    ]


def _held_lines(state: TrainState, held: Mapping[str, int]) -> list[str]:
    """Lines with the largest arrays on a device, counting a state that was donated to the failed step."""
    # Bytes of one shard, because the report is of one device.
    state_bytes = {name: _local_bytes(array) for name, array in _arrays(state)}
    if any(name in held for name in state_bytes):
        title = f"Alive on each device, {_size_text(sum(held.values()))}, the largest first:"
    else:
        title = (
            f"The state is no longer alive; it takes {_size_text(sum(state_bytes.values()))} of each device:"
        )
        # The step took the state by donation, so no live array has it.
        held = {**held, **state_bytes}
    by_size = sorted(held.items(), key=lambda item: -item[1])
    smaller_arrays = by_size[MAX_ARRAYS:]
    return [
        title,
        *(f"  {_size_text(size):>11}  {name}" for name, size in by_size[:MAX_ARRAYS]),
        *(
            [f"  {_size_text(sum(size for _, size in smaller_arrays)):>11}  {len(smaller_arrays)} more"]
            if smaller_arrays
            else []
        ),
    ]


def _plan_line(plan: MemoryPlan, available: int | None) -> str:
    parts = ", ".join(f"{name} {_size_text(size)}" for name, size in plan.temporaries().items() if size)
    available_text = f", of {_size_text(available)} available" if available is not None else ""
    return (
        f"By the plan, a step needs in addition, at its peak ({plan.moment}): {parts}. In total that is "
        f"{_size_text(plan.total_bytes)}{available_text}."
    )


def _advice_lines(options: list[str], limit: int) -> list[str]:
    if options:
        return ["Any of these settings needs less:", *options]
    return [
        f"No layout setting alone needs less than {_size_text(limit)}: set a smaller model or data.seq_len."
    ]


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _size_text(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
