"""Parts of the layout that a forward pass needs: how weights are fetched, which axes split what, what a layer
saves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from jtrain.model import ops
from jtrain.model.adapters.adapted_kernel import join_adapters
from jtrain.model.layer_scan import Layer
from jtrain.model.sequence_groups import GROUP_ORDER

SAVEABLE = ("attention_q", "attention_k", "attention_v", "attention", "attention_out", "mlp_gate", "mlp_up")
"""Activations of a block that `layout.remat=named` may save for the backward pass instead of recomputing."""

LATENT = "attention_latent"
"""Another one, of latent attention: what queries, keys and values of all heads are made of."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The parts of the layout that a forward pass needs.

    fetch: gathers the parameters below a path from their shards and casts them to the compute dtype.
    tensor, expert: number of devices along these axes.
    stage: pipeline stages over which the vocabulary is split, besides `tensor`.
    tensor_overlap: True if collectives over `tensor` overlap with the layers' matmuls.
    sequence_groups: groups of sequences that a layer computes side by side.
    mlp_chunk: positions of each sequence whose hidden units exist at a time; None for all.
    context: placement of the positions along the `context` axis.
    remat: activations that a block saves for its backward pass: all (none), only its input (full), or its
      input and `remat_save` (named).
    regather: True if gathered weights are dropped after use and gathered again by the backward pass.
    streams: True if some of the layers' weights are fetched from host memory and dropped after use.
    offload: saved activations that go to host memory, a subset of LAYER_INPUT and SAVEABLE.
    lookup: embedding lookup in a table split by columns, returning [B, L, D] in the compute dtype, so that
      neither embedding nor unembedding is ever whole; None if `fetch` gathers them.
    adapter_scale: scale of the products of low rank of an adapter; None without one.
    adapter_dropout: share of their inputs that is dropped where a batch has `dropout_BL`.
    on_torus: True if the devices form a TPU torus. Layers then keep the residual stream contiguous by rows:
      XLA:TPU would give it the layout of `lookup`, whose narrow columns are its slowest dimension, and every
      layer would transpose it.
    """

    fetch: Callable[[str, Any], Any]
    tensor: int = 1
    tensor_overlap: bool = False
    sequence_groups: int = 1
    mlp_chunk: int | None = None
    context: ops.RowSplit = ops.WHOLE_ROWS
    remat: Literal["none", "full", "named"] = "none"
    remat_save: tuple[str, ...] = ()
    regather: bool = False
    streams: bool = False
    offload: tuple[str, ...] = ()
    lookup: Callable[[Array, Array], Array] | None = None
    expert: int = 1
    stage: int = 1
    adapter_scale: float | None = None
    adapter_dropout: float = 0.0
    on_torus: bool = False

    def weights_of_blocks(self, path: str, weights: Any, dropout_BL: Array | None) -> dict[str, Any]:
        """Fetched weights of blocks, each target of an adapter together with its two matrices.

        Args:
          dropout_BL: of the batch.
        """
        dropout = None if dropout_BL is None else (self.adapter_dropout, dropout_BL)
        return join_adapters(self.fetch(path, weights), self.adapter_scale, dropout)

    @property
    def vocabulary(self) -> dict[str, Any]:
        """Axes that split the vocabulary, the outermost first, and the number of devices along them."""
        axis = ("stage", "tensor") if self.stage > 1 else "tensor"
        return dict(axis=axis, shards=self.stage * self.tensor)


def row_major(x: Array) -> Array:
    """The same array, contiguous by rows."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def single_device(dtype: str) -> Placement:
    """Placement without a mesh: every parameter is whole and cast to `dtype`."""
    return Placement(fetch=lambda path, tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree))


def checkpoint_layer(layer: Layer, placement: Placement, *, scanned: bool) -> Layer:
    """`layer` under `jax.checkpoint`, which saves the activations that the placement names."""
    if placement.remat == "none" and not (placement.regather or placement.streams or placement.offload):
        return layer
    # With remat=none, a policy that refuses only the weights would still save values one step away from them
    # (results of the gather, reshapes), which are all layers' whole weights. Save the results of matmuls
    # instead.
    saved_names = (*SAVEABLE, LATENT) if placement.remat == "none" else placement.remat_save
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names, GROUP_ORDER, ops.AMAX)
    # Inside a loop XLA cannot merge the recomputation with the forward pass; unrolled it would, which undoes
    # remat.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
