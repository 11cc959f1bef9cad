"""Checksums of the train state: per device and array, the wrap-around sum of its 32-bit words.

Sharded state has no second copy, so a flipped bit shows only if the bits that a step returned are compared
with those that the next step is given. A train step with checksums sums both: the state it was given, just
before the update overwrites it, and the state it returns. One flipped bit changes a sum by a power of two, so
it cannot stay unseen; of several flips in one array, those that cancel exactly can. The sums cost one read of
the state each and no memory.

Arrays in host memory are left out: their sums would take a second copy over the bus.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from jtrain.layout.mesh import AXES

METRIC = "checksums"
"""Metric of a step: uint32 [devices, 2, arrays], the sums of the state that it was given and that it
returned."""

GRADIENT_BITS = "gradient_bits"
"""Metric of a step: uint32 [devices], the sums of the gradients' words on every device. Two passes over one
step from one state have equal sums if the program repeats bit for bit, also where the loss and the rounded
norm hide a difference."""

# A fold adds 16 equal parts as vectors; fewer than 4096 elements are summed directly.
_FOLD, _SMALL = 16, 4096
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def summed_arrays(abstract: Any) -> list[tuple[str, Any]]:
    """Returns path and array of every array of a state in device memory, in the order of their sums."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
    return [(name, leaf) for name, leaf in named if leaf.sharding.memory_kind != "pinned_host"]


class StateSums:
    """Sums of the arrays of a state, for use while a train step is traced.

    Args:
      abstract: abstract state, whose shardings decide which part each device sums.
      grad_specs: partition of each gradient, None for those in host memory.
    """

    def __init__(self, abstract: Any, mesh: Mesh, grad_specs: Sequence[P | None]) -> None:
        self._mesh = mesh
        self._grad_specs = grad_specs
        leaves = jax.tree.leaves(abstract)
        self._summed = [leaf.sharding.memory_kind != "pinned_host" for leaf in leaves]
        self._specs = [
            leaf.sharding.spec for leaf, is_summed in zip(leaves, self._summed, strict=True) if is_summed
        ]

    def sum_before_update(self, state: Any, grads: Any) -> tuple[Any, Any, UInt32[Array, "devices arrays_1"]]:
        """Sums the state that the update is about to overwrite, and in the last column all gradients; returns
        state, gradients and sums.

        The update must use the returned state and gradients. The sums wait for the gradients, so that they
        see what happened to the state during the forward and backward pass, and the update waits for the
        sums: without that order XLA sums after the update has begun to overwrite the state, and copies all of
        it before (seen on GPUs and CPUs).
        """
        device_leaves, grads = jax.lax.optimization_barrier((self._device_leaves(state), grads))
        # The second barrier orders the update after the sums; the first one the sums after the gradients.
        sums, device_leaves = jax.lax.optimization_barrier(
            (
                jnp.concatenate([self._sums_of(device_leaves, self._specs), self._grad_bits(grads)], axis=1),
                device_leaves,
            )
        )
        leaves, tree = jax.tree.flatten(state)
        device_iter = iter(device_leaves)
        merged = [
            next(device_iter) if summed else leaf for leaf, summed in zip(leaves, self._summed, strict=True)
        ]
        return jax.tree.unflatten(tree, merged), grads, sums

    def metric(self, sums_before: Any, state: Any) -> dict[str, Array]:
        """Sums the state that the step returns; gives every process `METRIC` and `GRADIENT_BITS` of all
        devices.

        Args:
          sums_before: the sums from `sum_before_update`.
        """
        axes = tuple(axis for axis in AXES if self._mesh.shape[axis] > 1)

        def gather_sums(sums_before: Array, returned: Array) -> Array:
            # The gradients' column fills a place of the returned state too, so that one message carries all.
            stacked_sums = jnp.stack([sums_before, jnp.pad(returned, ((0, 0), (0, 1)))], axis=1)
            return jax.lax.all_gather(stacked_sums, axes, axis=0, tiled=True) if axes else stacked_sums

        gather_all = jax.shard_map(
            gather_sums, mesh=self._mesh, in_specs=(P(AXES), P(AXES)), out_specs=P(), check_vma=False
        )
        sums = gather_all(sums_before, self._sums_of(self._device_leaves(state), self._specs))
        return {METRIC: sums[:, :, :-1], GRADIENT_BITS: sums[:, 0, -1]}

    def _grad_bits(self, grads: Any) -> UInt32[Array, "devices 1"]:
        """Sum over all gradients in device memory: words wrap around, so one sum serves them all."""
        summed = [
            (grad, spec)
            for grad, spec in zip(jax.tree.leaves(grads), self._grad_specs, strict=True)
            if spec is not None
        ]
        sums = self._sums_of([grad for grad, _ in summed], [spec for _, spec in summed])
        return jnp.sum(sums, axis=1, keepdims=True, dtype=jnp.uint32)

    def _device_leaves(self, state: Any) -> list[Array]:
        return [leaf for leaf, summed in zip(jax.tree.leaves(state), self._summed, strict=True) if summed]

    def _sums_of(self, leaves: list[Array], specs: list[P]) -> UInt32[Array, "devices arrays"]:
        # Both give the same bits: addition modulo 2^32 may be regrouped.
        sum_words = _folded_sum if self._mesh.devices.flat[0].platform == "cpu" else sum_of_bits

        def local_sums(leaves: list[Array]) -> UInt32[Array, "1 arrays"]:
            with jax.named_scope("checksums"):
                # Without an array, as where all gradients are in host memory, there is no sum.
                return (
                    jnp.stack([sum_words(x) for x in leaves])[None]
                    if leaves
                    else jnp.zeros((1, 0), jnp.uint32)
                )

        sharded_sums: Callable[[list[Array]], Array] = jax.shard_map(
            local_sums, mesh=self._mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=False
        )
        return sharded_sums(leaves)


def sum_of_bits(x: Array) -> UInt32[Array, ""]:
    """Returns the wrap-around sum of an array's words, each of the array's element size."""
    return jnp.sum(_words(x), dtype=jnp.uint32)


def _words(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])


@functools.partial(jax.jit, inline=True)  # traced once for each shape: a state has many arrays of few shapes
def _folded_sum(x: Array) -> UInt32[Array, ""]:
    """Returns the same sum, far faster on CPUs.

    XLA:CPU first writes the words that a reduction of integers reads, and adds them one by one. Additions of
    whole parts use vectors and are split over the cores; they read the array itself if each part is cut out
    before its words are taken, because XLA writes down what several operations read.
    """
    x, total = x.reshape(-1), jnp.uint32(0)
    while x.size >= _SMALL:
        # The tail that does not fill 16 parts is summed at once; it has fewer than 16 elements.
        length = x.size // _FOLD
        total += sum_of_bits(x[length * _FOLD :])
        parts = (_words(jax.lax.slice(x, (part * length,), ((part + 1) * length,))) for part in range(_FOLD))
        x = functools.reduce(jax.lax.add, (words.astype(jnp.uint32) for words in parts))
    return total + sum_of_bits(x)


def copies(abstract: Any, mesh: Mesh) -> np.ndarray:
    """Returns int [devices, arrays]: number of the first device with the same part of the same array.

    Devices are numbered in the order of `mesh.devices.flat`.
    """
    return np.stack(
        [_first_holder(leaf, list(mesh.devices.flat)) for _, leaf in summed_arrays(abstract)], axis=1
    )


def _first_holder(leaf: Any, devices: Sequence[jax.Device]) -> np.ndarray:
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    first: dict[str, int] = {}
    return np.array([first.setdefault(str(parts[device]), index) for index, device in enumerate(devices)])


def differing_copies(
    sums: UInt32[np.ndarray, "devices arrays"], first: np.ndarray
) -> list[tuple[int, list[int], bool]]:
    """Finds copies whose sums differ.

    Args:
      first: from `copies`.

    Returns:
      (array, numbers of the devices that may be wrong, True if a majority of the copies outvotes them) for
      each part of an array whose copies differ.
    """
    if (sums == np.take_along_axis(sums, first, axis=0)).all():
        return []
    differing: list[tuple[int, list[int], bool]] = []
    for array in range(sums.shape[1]):
        # A group holds the same part of the array: its members must agree bit for bit.
        for holder in np.unique(first[:, array]):
            group = np.flatnonzero(first[:, array] == holder)
            values, counts = np.unique(sums[group, array], return_counts=True)
            if len(values) > 1:
                # With two copies none is in the majority: both are suspects.
                outvoted = bool(counts.max() > math.floor(len(group) / 2))
                majority_value = values[counts.argmax()]
                suspects = [
                    int(device) for device in group if not outvoted or sums[device, array] != majority_value
                ]
                differing.append((array, suspects, outvoted))
    return differing
