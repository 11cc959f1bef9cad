"""Host offload: arrays in host memory, and the streamed update of optimizer state kept there.

An offloaded leaf is a whole array in `pinned_host` memory. It is updated slice by slice: each slice is
fetched to the device, updated and written back. While a slice of one half of the leaf's arrays (for example
the first moments) is fetched, a slice of the other half (the second moments) is written, so that both
directions of the bus are busy; then the halves swap roles. Four slices are on the device at a time. The next
leaf starts while the last one finishes.

Everything runs inside a fully-manual `jax.shard_map`: each device streams its own shard, without
communication.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.layout.layout import MemoryKind

SLICE_ELEMENTS = 2**26
"""Upper bound of a slice, if the dimensions allow it: 256 MiB of float32, about 5 ms over PCIe 5."""

type SliceIndex = int | Int[Array, ""]
"""Number of a slice; traced inside a loop."""

type Arrays = dict[str, Array]
"""Arrays of one parameter by name: `param`, and its optimizer state."""


def sharding(mesh: Mesh, spec: PartitionSpec, memory_kind: MemoryKind) -> NamedSharding:
    """Returns a sharding in a given memory, also for compile-only devices.

    Compile-only GPUs list no memories, and `NamedSharding` then silently drops the memory kind. On an
    abstract mesh it keeps the kind, and a program may mix both meshes.

    Raises:
      UserError: the devices cannot reach host memory.
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
      kinds: memory kinds of a device; a compile-only GPU lists none.

    Raises:
      UserError: the device has no `pinned_host` memory; lists the memories that it has.
    """
    if "pinned_host" not in kinds and not (platform == "gpu" and not kinds):
        memories = ", ".join(sorted(kinds)) or "none"
        raise UserError(
            f"layout.offload: {name} ({platform}) has no memory `pinned_host` to offload to; it has "
            f"{memories}. Set layout.offload.optimizer, .params, .activations and .gradients to `none`."
        )


def to_device(x: Array) -> Array:
    """Copies an array to device memory, inside a traced function."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: Array) -> Array:
    """Copies an array to host memory, inside a traced function."""
    return jax.device_put(x, jax.memory.Space.Host)


def on_host_cores[R](fn: Callable[..., R], *args: Any) -> R:
    """Computes `fn(*args)` on the host's cores; leaves the result in host memory.

    XLA's host programs do not alias buffers: `args` and the result are all in host memory at the same time.
    """
    host_args = jax.tree.map(
        lambda arg: arg if jax.typeof(arg).memory_space is jax.memory.Space.Host else to_host(arg), args
    )
    host_fn: Any = compute_on(fn, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return host_fn(*host_args)


class Slices:
    """Slicing of one parameter and its optimizer state: by layer, then by rows of the next dimension.

    All arrays have the parameter's dimensions, except block scales, which have fewer rows. A slice takes the
    same share of the rows of each array.
    """

    def __init__(self, arrays: Mapping[str, Array], *, stacked: bool) -> None:
        self.stacked = stacked
        lengths = [x.shape[stacked] for x in arrays.values()]
        layer_elements = max(math.prod(x.shape[stacked:]) for x in arrays.values())
        divisors = [n for n in range(1, math.gcd(*lengths) + 1) if math.gcd(*lengths) % n == 0]
        # The fewest parts whose slices fit; if even the most parts do not, the slices are larger than the
        # bound.
        self.parts = next((n for n in divisors if layer_elements <= n * SLICE_ELEMENTS), divisors[-1])
        self.count = self.parts * (next(iter(arrays.values())).shape[0] if stacked else 1)

    def place(self, index: SliceIndex) -> tuple[SliceIndex, SliceIndex]:
        """Returns the layer of a slice and its part within the layer."""
        # No division in the program where the index is the layer itself.
        if self.parts == 1:
            return index, 0
        return index // self.parts, index % self.parts

    def take(self, x: Array, index: SliceIndex) -> Array:
        """Returns slice `index` of an array; a dimension of layers is kept, with length 1."""
        starts, sizes = self._window(x, index)
        return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)

    def put(self, x: Array, piece: Array, index: SliceIndex) -> Array:
        """Returns `x` with slice `index` replaced by `piece`."""
        return jax.lax.dynamic_update_slice(x, piece, self._window(x, index)[0], allow_negative_indices=False)

    def _window(self, x: Array, index: SliceIndex) -> tuple[list[SliceIndex], list[int]]:
        layer, part = self.place(index)
        rows = x.shape[self.stacked] // self.parts
        starts: list[SliceIndex] = [part * rows, *[0] * (x.ndim - self.stacked - 1)]
        sizes = [rows, *x.shape[self.stacked + 1 :]]
        return ([layer, *starts], [1, *sizes]) if self.stacked else (starts, sizes)


@dataclasses.dataclass(frozen=True)
class StreamedParam:
    """One parameter and its optimizer state for `stream_updates`; arrays by name.

    arrays: the parameter, its gradient and its state; those named in `on_host` (at least one) are in host
      memory and stay there.
    update: (slice index, slices of `arrays`) -> new slices; arrays without one, as the gradient, are only
      read.
    """

    arrays: Arrays
    on_host: frozenset[str]
    slices: Slices
    update: Callable[[SliceIndex, Arrays], Arrays]

    @property
    def halves(self) -> tuple[list[str], list[str]]:
        """Names of the arrays on the host, in two groups of about equal bytes."""
        groups: tuple[list[str], list[str]] = ([], [])
        sizes = [0, 0]
        bytes_of = {
            name: self.arrays[name].size * self.arrays[name].dtype.itemsize for name in sorted(self.on_host)
        }
        for name, size in sorted(bytes_of.items(), key=lambda item: -item[1]):
            # Largest first into the smaller half: with Adam's two moments, one in each.
            smaller = int(sizes[1] < sizes[0])
            groups[smaller].append(name)
            sizes[smaller] += size
        return groups

    def fetch_half(self, state: Arrays, half: int, index: SliceIndex) -> Arrays:
        """Copies a slice of one half of the host arrays to device memory."""
        return {name: to_device(self.slices.take(state[name], index)) for name in self.halves[half]}

    def write_half(self, state: Arrays, half: int, pending: Arrays, index: SliceIndex) -> Arrays:
        """Writes a new slice of one half of the host arrays back; returns the new `state`."""
        # Arrays that are only read, as the gradient, have no new slice.
        names = [name for name in self.halves[half] if name in pending]
        return state | {name: self.slices.put(state[name], to_host(pending[name]), index) for name in names}

    def update_slice(self, state: Arrays, fetched: Arrays, index: SliceIndex) -> tuple[Arrays, Arrays]:
        """Updates one slice; returns the new `state`, and the new slices of the host arrays."""
        device_names = [name for name in self.arrays if name not in self.on_host]
        pieces = {name: self.slices.take(state[name], index) for name in device_names}
        # A pass of its own: XLA:TPU would count what is not finite from the old parameters once more, and
        # copy all of them first, because they are updated in place.
        pending = jax.lax.optimization_barrier(self.update(index, pieces | fetched))
        state = state | {
            name: self.slices.put(state[name], pending[name], index)
            for name in device_names
            if name in pending
        }
        return state, {name: pending[name] for name in self.on_host if name in pending}

    def advance(self, index: Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        """Computes the next slice, fetched while the last one is written; returns state and new slices."""
        state, pending = carry
        # The barrier computes the next index before anything is written. Otherwise XLA:GPU schedules that
        # kernel, and the fetch that needs it, after the write.
        following, pending = (
            jax.lax.optimization_barrier((index + 1, pending)) if pending else (index + 1, pending)
        )
        fetched = self.fetch_half(state, 0, following)
        state = self.write_half(state, 1, pending, index)
        # Fetch before writing the same array. XLA does not know that the slices differ, and would copy the
        # whole array.
        state, fetched = jax.lax.optimization_barrier((state, fetched))
        fetched |= self.fetch_half(state, 1, following)
        state = self.write_half(state, 0, pending, index)
        return self.update_slice(state, fetched, following)


def stream_updates(leaves: Sequence[StreamedParam], after: Float[Array, ""]) -> list[Arrays]:
    """Updates all leaves, one after another, slice by slice; returns the new `arrays` of each.

    Args:
      after: norm, at least 0, that must be computed before the first fetch, so that no slice waits in device
        memory.
    """
    updated: list[Arrays] = []
    previous: tuple[StreamedParam, Arrays] | None = None
    pending: Any = after
    # Zero, as a norm is not negative. Compilers fetch across barriers, but not before they know which slice
    # to fetch.
    first_slice: SliceIndex = (after < 0).astype(jnp.int32)
    for leaf in leaves:
        on_host, pending = jax.lax.optimization_barrier(
            ({name: leaf.arrays[name] for name in leaf.on_host}, pending)
        )
        state = leaf.arrays | on_host
        # Fetch the first slices while the last ones of the previous leaf are written, as within a leaf.
        fetched = leaf.fetch_half(state, 0, first_slice)
        if previous is not None:
            previous_leaf, old_state = previous
            old_state, fetched = jax.lax.optimization_barrier(
                (previous_leaf.write_half(old_state, 1, pending, previous_leaf.slices.count - 1), fetched)
            )
            updated.append(previous_leaf.write_half(old_state, 0, pending, previous_leaf.slices.count - 1))
        fetched |= leaf.fetch_half(state, 1, first_slice)
        # Fetch before the loop writes the same array, as in `advance`: `first_slice` is a number only when
        # the program runs.
        state, fetched = jax.lax.optimization_barrier((state, fetched))
        state, pending = leaf.update_slice(state, fetched, 0)
        # Only the first leaf must wait for the norm; later ones follow the leaf before them.
        first_slice = 0
        if leaf.slices.count > 1:
            state, pending = jax.lax.fori_loop(0, leaf.slices.count - 1, leaf.advance, (state, pending))
        previous = leaf, state
    if previous is not None:
        previous_leaf, state = previous
        state = previous_leaf.write_half(state, 1, pending, previous_leaf.slices.count - 1)
        updated.append(previous_leaf.write_half(state, 0, pending, previous_leaf.slices.count - 1))
    return updated


def global_start(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[SliceIndex, ...]:
    """Returns the global index of the first element of this device's shard, which has `shape`."""
    axes = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(
        0 if axis is None else jax.lax.axis_index(axis) * jnp.int32(length)
        for axis, length in zip(axes, shape, strict=True)
    )
