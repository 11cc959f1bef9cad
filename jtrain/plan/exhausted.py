"""What a run says when a device's memory is exhausted: what lies in it, by name, and the settings that would fit."""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jtrain.optim import Optimizer
from jtrain.plan.fit import GIB, ways_out
from jtrain.plan.memory import MemoryPlan, memory
from jtrain.plan.report import Parts
from jtrain.step import BATCH_SPEC, TrainState, abstract_state

LISTED = 8
"""Arrays that the report names; the rest is one line."""

LESS = 0.9
"""What to offer instead takes at most this share of what was too much: the estimate itself errs by as much."""


class MemoryExhausted(ValueError):
    """A device had no memory left for the run; the message says what lay in it and what would fit."""


@contextlib.contextmanager
def explained(parts: Parts, optimizer: Optimizer, mesh: Mesh, *, available: int | None) -> Iterator[None]:
    """Turns the allocator's or the compiler's failure inside into a report of what the memory holds.

    Args:
      available: bytes that one device has for it, if known.

    Raises:
      MemoryExhausted: the largest arrays by name, what the step takes besides, and settings that take less.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        state = abstract_state(parts.layout, optimizer, mesh)
        shape, device = (parts.global_batch, parts.seq_len), mesh.local_devices[0]
        batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
        sizes: dict[str, Any] = dict(global_batch=shape[0], seq_len=shape[1], platform=device.platform)
        plan = memory(parts.model, parts.layout, parts.optimizer, **sizes)
        limit = int(LESS * min(plan.total_bytes, available or plan.total_bytes))
        ways = ways_out(parts.model, parts.layout, parts.optimizer, limit=limit, **sizes)
        raise MemoryExhausted(
            "\n".join(
                [
                    f"out of memory: {str(error).partition('\n')[0][:300]}",
                    *_holds(state, held_bytes(_names(state, batch), device)),
                    _takes(plan, available),
                    *_or(ways, limit),
                ]
            )
        ) from error


def is_exhausted(error: BaseException) -> bool:
    """Whether a runtime's error says that memory is used up, of an allocation or of a compilation.

    Statuses do not tell: XLA:CPU calls it INTERNAL where it only shows once results are read.
    """
    text = str(error)
    return "out of memory" in text.lower() or ("RESOURCE_EXHAUSTED" in text and "allocat" in text)


def held_bytes(names: Mapping[Any, list[str]], device: jax.Device) -> dict[str, int]:
    """Bytes of every array alive in the memory of `device`, by name; those that nobody named are `other arrays`.

    Arrays have no names of their own: they are told apart by shape, dtype and sharding. Where several of the state
    look alike all of them are alive, or none is, but while it is made; then the first names are taken.

    Args:
      names: what arrays of a `_kind` are called, in turn; the last name goes to any more of them.
    """
    left = {kind: collections.deque(called) for kind, called in names.items()}
    held: collections.Counter[str] = collections.Counter()
    for array in jax.live_arrays():
        shards = [s for s in array.addressable_shards if s.device == device] if not array.is_deleted() else []
        if not shards or array.sharding.memory_kind == "pinned_host":
            continue
        called = left.get(_kind(array))
        name = "other arrays" if not called else called[0] if len(called) == 1 else called.popleft()
        held[name] += sum(math.prod(shard.data.shape) * array.dtype.itemsize for shard in shards)
    return dict(held)


def _kind(array: Any) -> tuple[Any, ...]:
    sharding = array.sharding
    where = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None
    while where and where[-1] is None:  # as wide as the array or not, it is the same
        where = where[:-1]
    return tuple(array.shape), np.dtype(array.dtype), where, sharding.memory_kind


def _names(state: TrainState, batch: jax.ShapeDtypeStruct) -> dict[Any, list[str]]:
    names: dict[Any, list[str]] = {}
    for name, array in _arrays(state):
        names.setdefault(_kind(array), []).append(name)
    names.setdefault(_kind(batch), []).append("batches")
    return names


def _arrays(state: TrainState) -> list[tuple[str, Any]]:
    """Every array of a state in device memory with its path, as in a checkpoint."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), array)
        for path, array in jax.tree_util.tree_leaves_with_path(state)
        if array.sharding.memory_kind != "pinned_host"
    ]


def _holds(state: TrainState, held: Mapping[str, int]) -> list[str]:
    """The largest arrays on a device; of a state that the failed step was given, and took along, what it was."""
    given = {name: _local_bytes(array) for name, array in _arrays(state)}
    if any(name in held for name in given):
        title = f"Alive on each device, {_text(sum(held.values()))}, the largest first:"
    else:
        title = f"Of the state nothing is alive now; it takes {_text(sum(given.values()))} of each device:"
        held = {**held, **given}
    by_size = sorted(held.items(), key=lambda item: -item[1])
    rest = by_size[LISTED:]
    return [
        title,
        *(f"  {_text(size):>11}  {name}" for name, size in by_size[:LISTED]),
        *([f"  {_text(sum(size for _, size in rest)):>11}  {len(rest)} more"] if rest else []),
    ]


def _takes(plan: MemoryPlan, available: int | None) -> str:
    parts = ", ".join(f"{name} {_text(size)}" for name, size in plan.temporaries().items() if size)
    there = f", of {_text(available)} that were there" if available is not None else ""
    return (
        f"A step takes besides, by the plan, at its worst moment ({plan.moment}): {parts}. That makes "
        f"{_text(plan.total_bytes)}{there}."
    )


def _or(ways: list[str], limit: int) -> list[str]:
    if ways:
        return ["Any of these takes less:", *ways]
    return [f"No setting of the layout alone takes less than {_text(limit)}: set a smaller model or data.seq_len."]


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _text(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
