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

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import AXES
from jtrain.model import ops
from jtrain.model.fp8_scaling import amax_probes, with_fp8
from jtrain.model.layer_scan import scan_layers
from jtrain.model.param import Params, map_params
from jtrain.model.router import RouterLosses
from jtrain.model.transformer import Transformer
from jtrain.step.checksums import sum_of_bits
from jtrain.step.objective import scale_of
from jtrain.step.pipeline_ends import Ends
from jtrain.step.pipeline_weights import pipeline_placement
from jtrain.step.torus_collectives import along_torus
from jtrain.step.train_step import BATCH_SPEC, microbatches
from jtrain.step.xla_options import Deterministic, compiler_options, kernels_for
from jtrain.step.zero import (
    attach_values,
    exchange_heads,
    param_tree,
    placement_of,
    trained_part,
)

WORDS = ("loss", "loss", "gradient")
"""Pass that each word of a signature comes from: the objective, the cross entropy, the layers' gradients."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed:
    """Weight with a probe: zeros [Y, 2] or [2] whose gradient is the bits of the weight's gradient."""

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
    # ppermute sends from i to i + 1, so device i's sequences are recomputed one place further on.
    number = np.arange(mesh.size).reshape(mesh.devices.shape)
    axis = roll_axis(mesh)
    return number.ravel() if axis is None else np.roll(number, -1, axis=AXES.index(axis)).ravel()


def suspects(
    own: UInt32[np.ndarray, "devices words"], moved: UInt32[np.ndarray, "devices words"], mesh: Mesh
) -> list[int]:
    """Returns the numbers of the devices that may compute wrongly; empty if all words agree.

    A difference lies with the device itself or its neighbour. A device that computes wrongly each time takes
    part in two differences, so of three and more devices in a row it alone is named, or it and those that
    compute the same layers with it.

    Args:
      own, moved: signatures of the sequences as they lie, and moved to the neighbour.
    """
    neighbour = neighbours(mesh)
    num_differences = np.zeros(mesh.size, int)
    # The same sequences: as they lay on `device`, and as its neighbour computed them.
    for device in np.flatnonzero((own != moved[neighbour]).any(axis=1)):
        # A set: without a batch axis the neighbour is the device itself, which counts once.
        num_differences[list({int(device), int(neighbour[device])})] += 1
    # The device that takes part in most differences is the suspect; equal counts leave several.
    return np.flatnonzero(num_differences == num_differences.max()).tolist() if num_differences.any() else []


def without_noise(
    own: UInt32[np.ndarray, "devices words"],
    moved: UInt32[np.ndarray, "devices words"],
    mesh: Mesh,
    *,
    bound: float,
) -> UInt32[np.ndarray, "devices words"]:
    """Returns `moved` with the words of `own` where they differ by noise: bits of this program do not repeat.

    The words of the losses are the bits of float32 numbers, so those have a distance; the gradient's word is
    a sum of bits and has none, so it is not compared.

    Args:
      bound: largest difference of two losses that is noise, as a share of the larger one.
    """
    neighbour = neighbours(mesh)
    own_loss, moved_loss = own.view(np.float32), moved[neighbour].view(np.float32)
    with np.errstate(invalid="ignore"):
        # NaN and infinity are near nothing but the same bits.
        is_noise = np.abs(own_loss - moved_loss) <= bound * np.maximum(np.abs(own_loss), np.abs(moved_loss))
    is_noise[:, WORDS.index("gradient")] = True
    adjusted = moved.copy()
    adjusted[neighbour] = np.where(is_noise, own, moved[neighbour])
    return adjusted


def make_roll(mesh: Mesh) -> Callable[[Batch], Batch]:
    """Returns the jitted function that moves each device's sequences to its neighbour."""
    axis = roll_axis(mesh)
    if axis is None:
        return lambda batch: batch
    # The same direction as `neighbours`.
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
    model: Transformer, layout: Layout, mesh: Mesh, *, deterministic: Deterministic = "auto"
) -> Callable[[Params, dict[str, Any], Batch], UInt32[Array, "devices words"]]:
    """Returns the jitted `signature(params, scaling, batch)` of each device's first microbatch.

    It computes forward and backward of one microbatch without reducing gradients, in no more memory than the
    step. Every process gets the signatures of all devices.
    """
    layout = along_torus(layout, mesh)
    axes = tuple(axis for axis in AXES if mesh.shape[axis] > 1)

    def local_signature(
        params: Params, scaling: dict[str, Any], batch: Batch
    ) -> UInt32[Array, "devices words"]:
        words = _local_signature(model, layout, params, scaling, batch)[None]
        return jax.lax.all_gather(words, axes, axis=0, tiled=True) if axes else words

    params_spec = param_tree(layout, lambda p: p.param_partition)
    specs = (params_spec, layout.per_layer, BATCH_SPEC)
    sharded_signature = jax.shard_map(
        local_signature, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )

    def signature(params: Params, scaling: dict[str, Any], batch: Batch) -> UInt32[Array, "devices words"]:
        with kernels_for(layout, mesh):
            return sharded_signature(params, scaling, batch)

    precision, groups = layout.precision, layout.spec.sequence_groups
    options = compiler_options(
        mesh, precision.matmul_dtype, layout.kernels, groups, deterministic=deterministic
    )
    return jax.jit(signature, out_shardings=NamedSharding(mesh, P()), compiler_options=options)


def _local_signature(
    model: Transformer, layout: Layout, params: Params, scaling: dict[str, Any], batch: Batch
) -> UInt32[Array, " words"]:
    infos = tuple(p.info for p in layout.params)
    placement = placement_of(layout) if layout.pipeline is None else pipeline_placement(layout)
    scale, _ = scale_of(layout, batch, has_router=model.router is not None)
    unit = scale.unit
    params = exchange_heads(layout, params)
    trained = trained_part(layout, params)
    forward_weights = attach_values(layout, trained, params)
    # One microbatch, so that the signature takes no more memory than the step.
    first_microbatch = jax.tree.map(lambda x: x[0], microbatches(layout, batch))

    def fetch(path: str, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: fetch(f"{path}.{key}", value) for key, value in tree.items()}
        inner = tree.value if isinstance(tree, ops.Fp8Kernel) else tree
        if not isinstance(inner, _Probed):
            return placement.fetch(path, tree)
        # Behind the fetch: the gradient must be seen before ZeRO's reduce-scatter mixes it with other
        # devices'.
        weight = _tapped(placement.fetch(path, inner.weight), inner.probe)
        return weight if inner is tree else dataclasses.replace(tree, value=weight)

    def objective(probes: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
        # Frozen weights have no gradient that could differ.
        layers = map_params(
            lambda info, weight, probe: weight if info.frozen else _Probed(probe, weight),
            layer_infos,
            forward_weights,
            {"layers": probes},
        )
        weights = {**forward_weights, **layers}
        if layout.precision.matmul_dtype != "compute":
            weights = with_fp8(weights, infos, scaling, amax_probes(scaling), unit)
        probed = dataclasses.replace(placement, fetch=fetch)
        if layout.pipeline is not None:
            # Workers that embed and that have the head; the others' parts of both are masked inside `Ends`.
            first, last = (
                layout.pipeline.where(virtual)[0] for virtual in (0, layout.pipeline.num_virtual - 1)
            )
            return _run_stage_layers(
                Ends(model, layout, probed, params, first, last),
                trained,
                weights["layers"],
                first_microbatch,
                unit,
            )
        total, nats = model.loss(weights, first_microbatch, probed, scale.targets_per_token)
        return total * unit, nats

    # Per layer, because a scan over layers gives each its own gradient: [Y, 2].
    layer_infos = tuple(info for info in infos if info.path.startswith("layers."))
    probes = map_params(
        lambda info, x: None if info.frozen else jnp.zeros((x.shape[0], 2), jnp.float32), layer_infos, params
    )["layers"]
    (total, nats), probe_grads = jax.value_and_grad(objective, has_aux=True)(probes)
    gradient = jnp.uint32(0)
    for halves_Y2 in jax.tree.leaves(probe_grads):
        # Undoes the halves of `_tapped`; sums wrap at 2^32, as the words themselves do.
        low, high = jnp.sum(halves_Y2.astype(jnp.uint32), axis=0, dtype=jnp.uint32)
        gradient += low + (high << 16)
    return jnp.stack([sum_of_bits(total), sum_of_bits(nats), gradient])


def _run_stage_layers(
    ends: Ends, trained: Params, layers: Params, part: Batch, unit: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the output of this stage's layers, and the loss of the last stage's output.

    Args:
      layers: weights of this stage's layers, with probes.
    """
    model, end_weights = ends.model, {path: value for path, value in trained.items() if path != "layers"}
    losses = None if model.router is None else RouterLosses.zeros(model.router)
    x_BLD = ends.embed(end_weights, part.token_BL)
    # Identity layers count: the stack holds every place of this stage.
    unroll = 1 if model.scan_layers else len(jax.tree.leaves(layers)[0])
    layer, shared = model.layer(ends.placement), model.shared(part)
    x_BLD, _ = scan_layers(layer, (x_BLD, losses), layers, shared, unroll=unroll)
    # The layers' gradients come from the sum of their output alone; the loss is only recorded.
    nats, _, _ = ends.loss(end_weights, jax.lax.stop_gradient(x_BLD), part.target_BL, unit)
    return jnp.sum(x_BLD.astype(jnp.float32)) * unit, nats


@jax.custom_vjp
def _tapped(weight: Array, probe: Float[Array, "2"]) -> Array:
    """Returns the weight; `probe` gets the sum of bits of its gradient, in two halves."""
    del probe
    return weight


def _tapped_backward(_: None, grad: Array) -> tuple[Array, Float[Array, "2"]]:
    word = sum_of_bits(grad)
    # A float32 holds 16 bits exactly, and also their sum over 256 layers.
    return jnp.zeros_like(grad), jnp.stack([word & 0xFFFF, word >> 16]).astype(jnp.float32)


_tapped.defvjp(lambda weight, probe: (weight, None), _tapped_backward)
