"""Recomputation of a microbatch on a neighbouring device, which finds devices that compute wrongly.

The same compiled program runs twice on the state and batch of a step: once as they lie, and once with every
device's sequences moved to the next device along a batch axis. It returns three words per device: the bits of
the loss, and the sums of bits of the layers' weight gradients before any reduction. Healthy devices give
equal words for equal sequences, because the program, its shapes and the order of its sums along other axes
are the same. Without a batch axis each device computes its own sequences twice, which finds what is not the
same each time.

Under a pipeline every stage computes its own layers on the embedding, all at the same time, and the loss is
that of the last stage's output.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import AXES
from jtrain.model import ops
from jtrain.model.fp8_scaling import unseen, with_fp8
from jtrain.model.layer_scan import scan_layers
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses
from jtrain.model.transformer import Transformer
from jtrain.step.checksums import sum_of_bits
from jtrain.step.pipeline_ends import Ends
from jtrain.step.pipelined import pipeline_placement
from jtrain.step.train_step import BATCH_SPEC, microbatches
from jtrain.step.xla_options import compiler_options, kernels_for
from jtrain.step.zero import (
    along_torus,
    own_heads,
    param_tree,
    placement_of,
    psum_batch,
    trained_part,
    with_whole,
)

WORDS = ("loss", "loss", "gradient")
"""Pass that each word of a signature comes from: the objective, the cross entropy, the layers' gradients."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed:
    """Weight with a probe: zeros [Y, 2] or [2] that get the bits of the weight's gradient as their own
    gradient.
    """

    probe: Any
    weight: Any


def roll_axis(mesh: Mesh) -> Literal["data", "replica"] | None:
    """Axis along which sequences move to the next device; None if neither has several devices.

    Sequences do not move along `expert`: devices along it compute each other's tokens, so a sum's order would
    change.
    """
    return "data" if mesh.shape["data"] > 1 else "replica" if mesh.shape["replica"] > 1 else None


def neighbours(mesh: Mesh) -> Int[np.ndarray, " devices"]:
    """Returns for each device, by number in `mesh.devices.flat`, the device that recomputes its sequences."""
    number = np.arange(mesh.size).reshape(mesh.devices.shape)
    axis = roll_axis(mesh)
    return number.ravel() if axis is None else np.roll(number, -1, axis=AXES.index(axis)).ravel()


def suspects(
    own: UInt32[np.ndarray, "devices words"], again: UInt32[np.ndarray, "devices words"], mesh: Mesh
) -> list[int]:
    """Returns the numbers of the devices that may compute wrongly; empty if all words agree.

    A difference lies with the device itself or its neighbour. A device that computes wrongly each time
    differs both times, so of three and more devices in a row it is named alone, together with those that it
    shares its layers with.

    Args:
      own, again: signatures of the sequences as they lie, and moved.
    """
    neighbour = neighbours(mesh)
    times = np.zeros(mesh.size, int)
    for device in np.flatnonzero((own != again[neighbour]).any(axis=1)):
        times[list({int(device), int(neighbour[device])})] += 1
    return np.flatnonzero(times == times.max()).tolist() if times.any() else []


def make_roll(mesh: Mesh) -> Callable[[Batch], Batch]:
    """Returns the jitted function that moves each device's sequences to its neighbour."""
    axis = roll_axis(mesh)
    if axis is None:
        return lambda batch: batch
    ring = [(i, (i + 1) % mesh.shape[axis]) for i in range(mesh.shape[axis])]
    roll = jax.shard_map(
        lambda batch: jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), batch),
        mesh=mesh,
        in_specs=BATCH_SPEC,
        out_specs=BATCH_SPEC,
        check_vma=False,
    )
    return jax.jit(roll)


def make_signature(
    model: Transformer, layout: Layout, mesh: Mesh
) -> Callable[[Params, dict[str, Any], Batch], UInt32[Array, "devices words"]]:
    """Returns the jitted `signature(params, scaling, batch)` of each device's first microbatch.

    It computes forward and backward of one microbatch without reducing gradients, in no more memory than the
    step. Every process gets the signatures of all devices.
    """
    layout = along_torus(layout, mesh)
    axes = tuple(axis for axis in AXES if mesh.shape[axis] > 1)

    def local(params: Params, scaling: dict[str, Any], batch: Batch) -> UInt32[Array, "devices words"]:
        words = _local_signature(model, layout, params, scaling, batch)[None]
        return jax.lax.all_gather(words, axes, axis=0, tiled=True) if axes else words

    params_spec = param_tree(layout, lambda p: p.param)
    specs = (params_spec, layout.per_layer, BATCH_SPEC)
    each = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def signature(params: Params, scaling: dict[str, Any], batch: Batch) -> UInt32[Array, "devices words"]:
        with kernels_for(layout, mesh):
            return each(params, scaling, batch)

    precision, groups = layout.precision, layout.spec.sequence_groups
    options = compiler_options(mesh, precision.matmul_dtype, layout.kernels, groups)
    return jax.jit(signature, out_shardings=NamedSharding(mesh, P()), compiler_options=options)


def _local_signature(
    model: Transformer, layout: Layout, params: Params, scaling: dict[str, Any], batch: Batch
) -> UInt32[Array, " words"]:
    infos = tuple(p.info for p in layout.params)
    placement = placement_of(layout) if layout.pipeline is None else pipeline_placement(layout)
    num_tokens = psum_batch(layout, jnp.sum(batch.target_BL != IGNORE))
    unit = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)
    params = own_heads(layout, params)
    trained = trained_part(layout, params)
    whole = with_whole(layout, trained, params)
    part = jax.tree.map(lambda x: x[0], microbatches(layout, batch))

    def fetch(path: str, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: fetch(f"{path}.{key}", value) for key, value in tree.items()}
        inner = tree.value if isinstance(tree, ops.Fp8Kernel) else tree
        if not isinstance(inner, _Probed):
            return placement.fetch(path, tree)
        weight = _tapped(placement.fetch(path, inner.weight), inner.probe)
        return weight if inner is tree else dataclasses.replace(tree, value=weight)

    def objective(probes: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
        weights = {**whole, "layers": jax.tree.map(_Probed, probes, whole["layers"])}
        if layout.precision.matmul_dtype != "compute":
            weights = with_fp8(weights, infos, scaling, unseen(scaling), unit)
        probed = dataclasses.replace(placement, fetch=fetch)
        if layout.pipeline is not None:
            first, last = (
                layout.pipeline.where(virtual)[0] for virtual in (0, layout.pipeline.num_virtual - 1)
            )
            return _own_layers(
                Ends(model, layout, probed, params, first, last), trained, weights["layers"], part, unit
            )
        total, nats = model.loss(weights, part, probed)
        return total * unit, nats

    probes = jax.tree.map(lambda x: jnp.zeros((x.shape[0], 2), jnp.float32), params["layers"])
    (total, nats), halves = jax.value_and_grad(objective, has_aux=True)(probes)
    gradient = jnp.uint32(0)
    for of_weight in jax.tree.leaves(halves):
        low, high = jnp.sum(of_weight.astype(jnp.uint32), axis=0, dtype=jnp.uint32)
        gradient += low + (high << 16)
    return jnp.stack([sum_of_bits(total), sum_of_bits(nats), gradient])


def _own_layers(
    ends: Ends, trained: Params, layers: Params, part: Batch, unit: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the output of this stage's layers, and the loss of the last stage's output.

    Args:
      layers: weights of this stage's layers, with probes.
    """
    model, outside = ends.model, {path: value for path, value in trained.items() if path != "layers"}
    losses = None if model.moe is None else RouterLosses(*jnp.zeros((2,)))
    x_BLD = ends.embed(outside, part.token_BL)
    unroll = 1 if model.scan_layers else len(jax.tree.leaves(layers)[0])
    layer, shared = model.layer(ends.placement), model.shared(part)
    x_BLD, _ = scan_layers(layer, (x_BLD, losses), layers, shared, unroll=unroll)
    nats, _, _ = ends.loss(outside, jax.lax.stop_gradient(x_BLD), part.target_BL, unit)
    return jnp.sum(x_BLD.astype(jnp.float32)) * unit, nats


@jax.custom_vjp
def _tapped(weight: Array, probe: Float[Array, "2"]) -> Array:
    """Returns the weight; the gradient of `probe` is the sum of bits of the weight's gradient, in two
    halves.
    """
    del probe
    return weight


def _tapped_backward(_: None, grad: Array) -> tuple[Array, Float[Array, "2"]]:
    word = sum_of_bits(grad)
    # A float32 holds 16 bits exactly, and also their sum over 256 layers.
    return jnp.zeros_like(grad), jnp.stack([word & 0xFFFF, word >> 16]).astype(jnp.float32)


_tapped.defvjp(lambda weight, probe: (weight, None), _tapped_backward)
