"""The decoder-only transformer: embedding, a scanned stack of blocks, norm, cross entropy.

Everything here sees one device's block of each array: it runs inside a fully-manual `jax.shard_map`, where
the only communication is explicit. Over `tensor`, the residual stream is split by sequence: see
`tensor_parallel.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.layout.dims import Batch, ParamInfo
from jtrain.model import ops
from jtrain.model.attention import Attention, AttentionSizes
from jtrain.model.forward_placement import Placement, checkpoint_layer, row_major, single_device
from jtrain.model.layer_scan import Layer, LayerCarry, scan_layers
from jtrain.model.mlp import SwiGLU
from jtrain.model.moe import MoE
from jtrain.model.norm import RMSNorm
from jtrain.model.param import Params, param_infos, weight
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec, RouterLosses
from jtrain.model.sequence_groups import layer_in_groups
from jtrain.model.tensor_parallel import TensorAxis, gather_sequence, local_sequence, scatter_sequence
from jtrain.model.unembedding import loss_in_parts, token_nats_in_parts, unembedding_loss


class Block(nnx.Module):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`; with `moe` the mlp has experts."""

    def __init__(self, sizes: AttentionSizes, *, d_ff: int, moe: MoESpec | None, layers: int) -> None:
        d_model, eps = sizes.d_model, sizes.norm_eps
        self.attention_norm = RMSNorm("D", d_model, eps=eps, layers=layers)
        self.attention = Attention(sizes, layers=layers)
        self.mlp_norm = RMSNorm("D", d_model, eps=eps, layers=layers)
        if moe is None:
            self.mlp = SwiGLU(d_model=d_model, d_ff=d_ff, layers=layers)
        else:
            self.mlp = MoE(d_model=d_model, d_ff=d_ff, spec=moe, layers=layers)

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        cos_BLR: Float[Array, "B L R"],
        sin_BLR: Float[Array, "B L R"],
        segment_BL: Int[Array, "B L"],
        *,
        tensor: TensorAxis,
        context: ops.RowSplit,
        expert: int = 1,
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        with jax.named_scope("attention"):
            x_BLD, h_BLD = self.attention_norm.branch(x_BLD)
            h_BLD = self.attention(h_BLD, cos_BLR, sin_BLR, segment_BL, tensor, context)
            # Where this is saved, the backward pass recomputes the mlp without attention.
            x_BLD = checkpoint_name(x_BLD + h_BLD, "attention_out")
        with jax.named_scope("mlp"):
            # Segment 0 is padding. Segments are whole along `tensor`, the residual stream is not.
            valid_BL = local_sequence(segment_BL, tensor.size) > 0
            x_BLD, h_BLD = self.mlp_norm.branch(x_BLD)
            h_BLD, losses = self.feed_forward(
                h_BLD, valid_BL, tensor=tensor, context=context.size, expert=expert
            )
            return x_BLD + h_BLD, losses

    def feed_forward(
        self,
        x_BLD: Float[Array, "B _ D"],
        valid_BL: Bool[Array, "B _"],
        *,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: int = 1,
        expert: int = 1,
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Feed-forward output at this device's positions, and the router's losses (None for a dense layer).

        Inside, the device computes its block of F at all positions along `tensor`.

        Args:
          valid_BL: at the same positions as x; False for padding, which goes to no expert.
        """
        if isinstance(self.mlp, SwiGLU):
            # A dense mlp gathers and scatters inside its projections, where they can overlap with the
            # matmuls.
            return self.mlp(x_BLD, tensor), None
        routing, losses = self.mlp.route(x_BLD, valid_BL, tensor=tensor.size, context=context)
        # Experts see all positions along `tensor`: each device multiplies with its part of F.
        h_BLD = self.mlp(gather_sequence(x_BLD, tensor.size), routing, expert=expert)
        return scatter_sequence(h_BLD, tensor.size), losses


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Transformer(nnx.Module):
    """Llama-style decoder: its sizes and modules, and pure functions of its parameters. Allocates nothing.

    Args:
      num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff, vocab_size: sizes Y, D, N, K, H, F, V.
      moe: mixture of experts of hidden width `d_ff` that replaces every feed-forward layer; None for a dense
        model.
      rope: rotary positions.
      norm_eps: added to the mean square in every norm.
      qk_norm: True normalises queries and keys per head (Qwen3).
      tie_embeddings: True if the unembedding is the transposed embedding.
      z_loss: coefficient of the squared log-partition in the training objective (arXiv:2204.02311, section
        5); the reported loss excludes it.
      scan_layers: compile one layer and loop over it; False unrolls, which compiles longer.
      loss_chunk_tokens: tokens whose logits exist at a time; `auto` takes the chunk predicted to be fastest.
      attention_chunk: queries whose scores exist at a time.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    moe: MoESpec | None = None
    rope: RopeSpec = RopeSpec()  # noqa: RUF009 - frozen
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False
    z_loss: float = 0.0
    scan_layers: bool = True
    loss_chunk_tokens: int | Literal["auto"] = 1024
    attention_chunk: int = 512

    def __post_init__(self) -> None:
        self._check_sizes()
        sizes = AttentionSizes(
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            qk_norm=self.qk_norm,
            chunk=self.attention_chunk,
        )
        # Logits of a normed hidden state then have variance 1 at the start.
        std = self.d_model**-0.5
        self.embed_VD = weight("VD", (self.vocab_size, self.d_model), std=std)
        self.layers = Block(sizes, d_ff=self.d_ff, moe=self.moe, layers=self.num_layers)
        self.final_norm = RMSNorm("D", self.d_model, eps=self.norm_eps)
        # A tied model has one table: its gradient is the sum of both uses.
        if not self.tie_embeddings:
            self.unembed_DV = weight("DV", (self.d_model, self.vocab_size), std=std)

    def _check_sizes(self) -> None:
        fields = ["num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size"]
        fields += ["attention_chunk"] + ["loss_chunk_tokens"] * (self.loss_chunk_tokens != "auto")
        for field in fields:
            size = getattr(self, field)
            # A float from a config would fail much later, in a shape; True would be taken for 1.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"model.{field}={size} must be at least 1, as a whole number.")
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}: each key head serves the same number of query "
                f"heads. Set model.num_kv_heads to one of {', '.join(map(str, divisors))}."
            )
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim={self.head_dim} is odd, but rotary positions rotate pairs of dimensions. "
                f"Set model.head_dim={self.head_dim + 1} or another even one."
            )

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter, sorted by path."""
        return param_infos(self)

    @property
    def active_d_ff(self) -> int:
        """Hidden width of the feed-forward layers that one token passes through, summed over its experts."""
        return self.d_ff if self.moe is None else self.d_ff * (self.moe.top_k + self.moe.shared_experts)

    def hidden(self, params: Params, batch: Batch, placement: Placement) -> Float[Array, "B _ D"]:
        """Hidden states after the last norm, [B, L / tensor, D] in the compute dtype.

        Raises:
          UserError: layers are unrolled, but their weights or activations are offloaded to host memory.
        """
        return self._forward(params, batch, placement)[0]

    def _forward(
        self, params: Params, batch: Batch, placement: Placement
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Result of `hidden`, and the router losses summed over layers (None for a dense model)."""
        x_BLD = self.embed(params, batch.token_BL, placement)
        x_BLD, losses = self.through_layers(params["layers"], x_BLD, batch, placement)
        return self.normed(params, x_BLD, placement), losses

    def through_layers(
        self, weights: Params, x_BLD: Float[Array, "B _ D"], batch: Batch, placement: Placement
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Residual stream after all layers, and the sum of their router losses (None if dense)."""
        # Unrolled layers are one iteration of the same scan: one path for both.
        layer, unroll = self.layer(placement), 1 if self.scan_layers else self.num_layers
        shared = self.shared(batch)
        with jax.named_scope("layers"):
            losses = None if self.moe is None else RouterLosses(*jnp.zeros((2,)))
            return scan_layers(
                layer, (x_BLD, losses), weights, shared, unroll=unroll, offload=placement.offload
            )

    def embed(
        self, params: Params, token_BL: Int[Array, "B L"], placement: Placement
    ) -> Float[Array, "B _ D"]:
        """Embedding rows of this device's positions; 0 for tokens of another stage's vocabulary."""
        with jax.named_scope("embed"):
            # The table's columns are split: each device looks up its own, and none gathers the table.
            if placement.lookup is not None:
                return _embed(params["embed_VD"], token_BL, placement, placement.lookup)
            return _embed(
                placement.fetch("embed_VD", params["embed_VD"]), token_BL, placement, ops.embedding_lookup
            )

    def shared(self, batch: Batch) -> tuple[Array, Array, Array]:
        """Values that every layer reads: cosine and sine of the rotations, and the documents' numbers."""
        with jax.named_scope("rope"):
            # Once per microbatch and outside the loop: all layers rotate alike.
            return *self.rope.tables(batch.position_BL, self.head_dim), batch.segment_BL

    def layer(self, placement: Placement) -> Layer:
        """One layer as a function of (residual stream, router losses so far), its weights, and `shared`."""
        # The structure without values: weights of a layer are merged in while it is traced.
        block_def, _ = nnx.split(self.layers)
        axis = TensorAxis(placement.tensor, placement.tensor_overlap)

        def layer(carry: LayerCarry, weights: Params, shared: tuple[Array, Array, Array]) -> LayerCarry:
            x_BLD, losses_so_far = carry
            block = nnx.merge(block_def, placement.fetch("layers", weights))
            # See `Placement.on_torus`: without it every layer transposes the residual stream.
            x_BLD = row_major(x_BLD) if placement.on_torus else x_BLD
            if (groups := placement.sequence_groups) > 1:
                group_options: Any = dict(groups=groups, tensor=placement.tensor, context=placement.context)
                return layer_in_groups(block, x_BLD, *shared, **group_options), losses_so_far
            x_BLD, losses = block(
                x_BLD, *shared, tensor=axis, context=placement.context, expert=placement.expert
            )
            # Summed in the carry, so that a scan stacks nothing; None for a dense model adds to None.
            return x_BLD, jax.tree.map(jnp.add, losses_so_far, losses)

        return checkpoint_layer(layer, placement, scanned=self.scan_layers)

    def normed(
        self, params: Params, x_BLD: Float[Array, "B _ D"], placement: Placement
    ) -> Float[Array, "B _ D"]:
        """The last norm."""
        with jax.named_scope("final_norm"):
            norm = nnx.merge(
                nnx.split(self.final_norm)[0], placement.fetch("final_norm", params["final_norm"])
            )
            return norm(x_BLD)

    def unembed(self, params: Params, placement: Placement) -> Float[Array, "D V"]:
        """This device's columns of the unembedding matrix, V / tensor, in the compute dtype."""
        if self.tie_embeddings:
            return placement.fetch("embed_VD", params["embed_VD"]).T
        return placement.fetch("unembed_DV", params["unembed_DV"])

    def loss(
        self, params: Params, batch: Batch, placement: Placement
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sums over this device's tokens, float32: the objective, and the cross entropy in nats.

        The objective includes the z-loss and, for a mixture of experts, the router losses averaged over
        layers. The caller divides by the number of valid targets of the whole global batch, so that any split
        of the batch gives the same loss. Only the objective is differentiable.
        """
        x_BLD, losses = self._forward(params, batch, placement)
        total, nats = self.cross_entropy(params, x_BLD, batch.target_BL, placement)
        if self.moe is None or losses is None:
            return total, nats
        router_loss = self.moe.balance_loss * losses.balance + self.moe.router_z_loss * losses.z
        # The router losses are means over layers, so a coefficient means the same at any depth.
        return total + router_loss / self.num_layers, nats

    def cross_entropy(
        self, params: Params, x_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"], placement: Placement
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Result of `loss` from what `normed` returns, without the router losses."""
        with jax.named_scope("loss"):
            # `auto` leaves the choice to the op, which knows the device.
            chunk = self.loss_chunk_tokens if isinstance(self.loss_chunk_tokens, int) else None
            sizes: Any = dict(placement.vocabulary, chunk_tokens=chunk, z_loss=self.z_loss)
            if placement.lookup is not None:
                path = "embed_VD" if self.tie_embeddings else "unembed_DV"
                fetch = functools.partial(placement.fetch, path)
                return loss_in_parts(x_BLD, params[path], target_BL, fetch, tied=self.tie_embeddings, **sizes)
            return unembedding_loss(x_BLD, self.unembed(params, placement), target_BL, **sizes)

    def token_nats(self, params: Params, batch: Batch, placement: Placement) -> Float[Array, "B _"]:
        """Cross entropy of each of this device's tokens, [B, L / tensor], in nats; 0 without a target."""
        return self.nats_of(params, self.hidden(params, batch, placement), batch.target_BL, placement)

    def nats_of(
        self, params: Params, x_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"], placement: Placement
    ) -> Float[Array, "B _"]:
        """Result of `token_nats` from what `normed` returns."""
        chunk = self.loss_chunk_tokens if isinstance(self.loss_chunk_tokens, int) else None
        vocabulary, tied = placement.vocabulary, self.tie_embeddings
        with jax.named_scope("loss"):
            if placement.lookup is None:
                unembed, axis = (
                    self.unembed(params, placement),
                    vocabulary["axis"] if vocabulary["shards"] > 1 else None,
                )
                return ops.token_cross_entropy(x_BLD, unembed, target_BL, chunk_tokens=chunk, axis=axis)
            path = "embed_VD" if tied else "unembed_DV"
            fetch = functools.partial(placement.fetch, path)
            return token_nats_in_parts(
                x_BLD, params[path], target_BL, fetch, tied=tied, chunk_tokens=chunk, **vocabulary
            )

    @property
    def loss_chunk(self) -> int:
        """Tokens whose logits exist at a time.

        Raises:
          UserError: loss_chunk_tokens is still `auto`.
        """
        if not isinstance(self.loss_chunk_tokens, int):
            raise UserError(
                "model.loss_chunk_tokens=auto has to be chosen first: the best value depends on the "
                "devices. `jtrain.plan` and `jtrain.launch` choose it; elsewhere set a number."
            )
        return self.loss_chunk_tokens

    def logits(self, params: Params, batch: Batch, *, dtype: str = "float32") -> Float[Array, "B L V"]:
        """All logits, float32, on one device without a mesh; for parity tests."""
        placement = single_device(dtype)
        x_BLD = self.hidden(params, batch, placement)
        return ops.linear(x_BLD, self.unembed(params, placement)).astype(jnp.float32)


def _embed(
    table_VD: Float[Array, "_ _"],
    token_BL: Int[Array, "B L"],
    placement: Placement,
    lookup: Callable[[Array, Array], Array],
) -> Float[Array, "B _ D"]:
    """Embedding rows of the tokens; each device adds the rows of its block of the vocabulary."""
    # Stage is the outer axis: a pipeline splits V over stages first, then over `tensor`.
    axis, shards = placement.vocabulary.values()
    if shards == 1:
        return lookup(table_VD, token_BL)
    rows = table_VD.shape[0]
    local_BL = token_BL - jax.lax.axis_index(axis) * rows
    mine_BL = (local_BL >= 0) & (local_BL < rows)
    # Row 0 for tokens of other devices, masked below: exactly one device has a term for each token.
    x_BLD = lookup(table_VD, jnp.where(mine_BL, local_BL, 0))
    return scatter_sequence(jnp.where(mine_BL[..., None], x_BLD, 0), placement.tensor)
