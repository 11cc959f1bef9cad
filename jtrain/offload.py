"""Host memory: what lives there, and the update of optimizer state that does.

A leaf that is offloaded is a whole array in `pinned_host` memory. Its update goes through it slice by slice: fetched to
the device, updated there, written back. While a slice of one half of the leaf's arrays (the first moments, say) is
fetched, one of the other half (the second moments) is written, so that both directions of the bus are busy; then they
change places. Four slices are on the device at a time. Leaves follow each other in the same way.

All of it runs inside a fully-manual `jax.shard_map`: each device streams its own shard and nothing is communicated.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jtrain.layout import MemoryKind

SLICE_ELEMENTS = 2**26
"""Largest slice that is fetched at once, if its dimensions allow: 256 MiB of float32, 5 ms of PCIe 5."""

type Index = int | Int[Array, ""]

type Arrays = dict[str, Array]
"""By name: `param`, and those of the optimizer's state."""


def sharding(mesh: Mesh, spec: PartitionSpec, memory_kind: MemoryKind) -> NamedSharding:
    """A sharding in that memory, also for devices to compile for but not to run on.

    Compile-only GPUs list no memories, and `NamedSharding` then drops the kind without a word; on an abstract mesh it
    does not, and a program may mix both.

    Raises:
      ValueError: the devices have no host memory that they can reach.
    """
    if memory_kind == "device":
        return NamedSharding(mesh, spec)
    device: jax.Device = mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    check_host_memory(kinds, device.platform, device.device_kind)
    abstract: AbstractMesh = mesh.abstract_mesh
    return NamedSharding(mesh if kinds else abstract, spec, memory_kind=memory_kind)


def check_host_memory(kinds: set[str], platform: str, name: str) -> None:
    """Refuses to offload where the backend has no host memory.

    Args:
      kinds: memories of a device; a compile-only GPU lists none.

    Raises:
      ValueError: what the device has instead.
    """
    if "pinned_host" not in kinds and not (platform == "gpu" and not kinds):
        there = ", ".join(sorted(kinds)) or "none that it names"
        raise ValueError(
            f"layout.offload: {name} ({platform}) has no memory `pinned_host` to offload to; it has {there}. Set "
            "layout.offload.optimizer, .params and .activations to `none`."
        )


def to_device(x: Array) -> Array:
    """A copy in device memory; traced."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: Array) -> Array:
    """A copy in host memory; traced."""
    return jax.device_put(x, jax.memory.Space.Host)


def on_host_cores[R](fn: Callable[..., R], *args: Any) -> R:
    """`fn(*args)` computed by the host's cores; what is not in host memory is copied there, and the result stays there.

    XLA's host programs do not alias: all of `args` and of the result exist in host memory at a time.
    """
    there = jax.tree.map(lambda x: x if jax.typeof(x).memory_space is jax.memory.Space.Host else to_host(x), args)
    on_cores: Any = compute_on(fn, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return on_cores(*there)


class Slices:
    """How one parameter and its optimizer state are cut: layer by layer, and by rows of their next dimension.

    Every array has the parameter's dimensions, but for a scale per block, which has fewer rows: a slice is the same
    share of the rows of all of them.
    """

    def __init__(self, arrays: Mapping[str, Array], *, stacked: bool) -> None:
        self.stacked = stacked
        lengths = [x.shape[stacked] for x in arrays.values()]
        layer_elements = max(math.prod(x.shape[stacked:]) for x in arrays.values())
        ways = [n for n in range(1, math.gcd(*lengths) + 1) if math.gcd(*lengths) % n == 0]
        self.parts = next((n for n in ways if layer_elements <= n * SLICE_ELEMENTS), ways[-1])
        self.count = self.parts * (next(iter(arrays.values())).shape[0] if stacked else 1)

    def place(self, index: Index) -> tuple[Index, Index]:
        """Layer and part of a slice."""
        if self.parts == 1:
            return index, 0
        return index // self.parts, index % self.parts

    def take(self, x: Array, index: Index) -> Array:
        """Slice `index`; with its layers' dimension of length 1, if it has one."""
        starts, sizes = self._window(x, index)
        return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)

    def put(self, x: Array, piece: Array, index: Index) -> Array:
        """`x` with slice `index` replaced."""
        return jax.lax.dynamic_update_slice(x, piece, self._window(x, index)[0], allow_negative_indices=False)

    def _window(self, x: Array, index: Index) -> tuple[list[Index], list[int]]:
        layer, part = self.place(index)
        rows = x.shape[self.stacked] // self.parts
        starts: list[Index] = [part * rows, *[0] * (x.ndim - self.stacked - 1)]
        sizes = [rows, *x.shape[self.stacked + 1 :]]
        return ([layer, *starts], [1, *sizes]) if self.stacked else (starts, sizes)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and its optimizer state, as `streamed` takes them; arrays by name.

    constant: read only, in device memory: the gradient.
    arrays: read and written; those named by `on_host`, at least one, are in host memory, and stay there.
    update: gives new slices of `arrays` from the slice's index and its slices of `constant` and `arrays`.
    """

    constant: Mapping[str, Array]
    arrays: Arrays
    on_host: frozenset[str]
    slices: Slices
    update: Callable[[Index, Arrays], Arrays]

    @property
    def halves(self) -> tuple[list[str], list[str]]:
        """Names of what is on the host, in two groups of about as many bytes."""
        groups: tuple[list[str], list[str]] = ([], [])
        sizes = [0, 0]
        bytes_of = {name: self.arrays[name].size * self.arrays[name].dtype.itemsize for name in sorted(self.on_host)}
        for name, size in sorted(bytes_of.items(), key=lambda item: -item[1]):
            smaller = int(sizes[1] < sizes[0])
            groups[smaller].append(name)
            sizes[smaller] += size
        return groups

    def fetched(self, state: Arrays, half: int, index: Index) -> Arrays:
        """A slice of one half of what is on the host, in device memory."""
        return {name: to_device(self.slices.take(state[name], index)) for name in self.halves[half]}

    def written(self, state: Arrays, half: int, new: Arrays, index: Index) -> Arrays:
        """`state` with a slice of one half of what is on the host replaced."""
        return state | {name: self.slices.put(state[name], to_host(new[name]), index) for name in self.halves[half]}

    def computed(self, state: Arrays, fetched: Arrays, index: Index) -> tuple[Arrays, Arrays]:
        """`state` with a slice of what is on the device updated, and the new slices of what is on the host."""
        here = [name for name in self.arrays if name not in self.on_host]
        pieces = {name: self.slices.take(x, index) for name, x in self.constant.items()}
        pieces |= {name: self.slices.take(state[name], index) for name in here}
        new = self.update(index, pieces | fetched)
        state = state | {name: self.slices.put(state[name], new[name], index) for name in here}
        return state, {name: new[name] for name in self.on_host}

    def advanced(self, index: Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        """State and new slices of the next index: fetches those while the given ones are written."""
        state, new = carry
        # The next index is computed before anything is written: XLA:GPU would put that kernel, and with it the fetch,
        # behind the write.
        following, new = jax.lax.optimization_barrier((index + 1, new))
        fetched = self.fetched(state, 0, following)
        state = self.written(state, 1, new, index)
        # Fetched before the same array is written: not knowing that slices differ, XLA copies all of it otherwise.
        state, fetched = jax.lax.optimization_barrier((state, fetched))
        fetched |= self.fetched(state, 1, following)
        state = self.written(state, 0, new, index)
        return self.computed(state, fetched, following)


def streamed(leaves: Sequence[Leaf], after: Any) -> list[Arrays]:
    """Each leaf's `arrays` after the update of every slice, one leaf after another.

    Args:
      after: nothing is fetched before this is computed, so that no slice waits in device memory.
    """
    done: list[Arrays] = []
    before: tuple[Leaf, Arrays] | None = None
    new = after
    for leaf in leaves:
        on_host, new = jax.lax.optimization_barrier(({name: leaf.arrays[name] for name in leaf.on_host}, new))
        state = leaf.arrays | on_host
        # As within a leaf: its first slices come while the last ones of the leaf before are written.
        fetched = leaf.fetched(state, 0, 0)
        if before is not None:
            old, rest = before
            rest, fetched = jax.lax.optimization_barrier((old.written(rest, 1, new, old.slices.count - 1), fetched))
            done.append(old.written(rest, 0, new, old.slices.count - 1))
        fetched |= leaf.fetched(state, 1, 0)
        state, new = leaf.computed(state, fetched, 0)
        if leaf.slices.count > 1:
            state, new = jax.lax.fori_loop(0, leaf.slices.count - 1, leaf.advanced, (state, new))
        before = leaf, state
    if before is not None:
        old, state = before
        state = old.written(state, 1, new, old.slices.count - 1)
        done.append(old.written(state, 0, new, old.slices.count - 1))
    return done


def global_start(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Index in the global array of the first element of this device's shard; `shape` is the shard's."""
    axes = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(
        0 if axis is None else jax.lax.axis_index(axis) * jnp.int32(length)
        for axis, length in zip(axes, shape, strict=True)
    )
