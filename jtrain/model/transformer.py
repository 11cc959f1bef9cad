"""The decoder-only transformer: embedding, a scanned stack of blocks, norm, cross entropy.

Everything here sees one device's block of each array: it runs inside a fully-manual `jax.shard_map`, where
the only communication is explicit. Over `tensor`, the residual stream is split by sequence: see
`tensor_parallel.py`.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.layout.dims import Batch, ParamInfo
from jtrain.model import ops
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import Block, Blocks, BlockSpec, check_router_losses
from jtrain.model.embedding import embedding_rows, normalized
from jtrain.model.forward_placement import Placement, checkpoint_layer, row_major, single_device
from jtrain.model.layer_scan import Layer, LayerCarry, scan_layers
from jtrain.model.mixer import Rotation
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.param import Params, param_infos, weight
from jtrain.model.rope import Positions, RopeSpec
from jtrain.model.router import MoESpec, RouterLosses
from jtrain.model.sequence_groups import block_in_groups
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis
from jtrain.model.unembedding import Unembedding

type SharedValues = tuple[tuple[Any, ...], Array, Array | None]
"""Cosine and sine of each rotation of the model, the documents' numbers, and `Batch.dropout_BL`."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Transformer(nnx.Module):
    """Decoder: its sizes and modules, and pure functions of its parameters. Allocates nothing.

    Layers are those of `first`, and then those of `pattern` again and again; the last repetition may end
    early. Without a `pattern` all layers are alike: attention with `rope` and `qk_norm`, and a feed-forward
    layer of width `d_ff`, or `moe`.

    Example: 26 layers with a pattern of five blocks with a window and one without are four periods, which are
    compiled once and looped over, and two blocks with a window.

    Args:
      num_layers: layers, Y.
      d_model: width of the residual stream between layers, D.
      num_heads: heads of queries in each layer, N.
      num_kv_heads: heads of keys and values in each layer, K; each serves N / K heads of queries.
      head_dim: size of each head, H; N * H may differ from D.
      d_ff: hidden width of the feed-forward layers, F.
      vocab_size: token ids, V: rows of the embedding.
      moe: mixture of experts that replaces every feed-forward layer; None for a dense model.
      rope: rotary positions.
      norm_eps: added to the mean square in every norm.
      qk_norm: True normalises queries and keys per head (Qwen3).
      pattern: the blocks that repeat, each with what `moe`, `rope` and `qk_norm` say otherwise.
      first: blocks before the first of the pattern, as the dense ones of DeepSeek-V3.
      norm: kind of all norms.
      embedding_scale: multiplies embeddings (Gemma: sqrt(D)).
      embedding_norm: True normalises embeddings, without a learned scale (nanochat).
      logit_scale: multiplies logits (Granite, Cohere).
      logit_soft_cap: bounds logits after their scale to +- this, by tanh (Gemma 2); None for none.
      tie_embeddings: True if the unembedding is the transposed embedding.
      z_loss: coefficient of the squared log-partition in the training objective (arXiv:2204.02311, section
        5); the reported loss excludes it.
      scan_layers: compile one period and loop over it; False unrolls, which compiles longer.
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
    pattern: tuple[BlockSpec, ...] = ()
    first: tuple[BlockSpec, ...] = ()
    norm: NormSpec = NormSpec()  # noqa: RUF009 - frozen
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    tie_embeddings: bool = False
    z_loss: float = 0.0
    scan_layers: bool = True
    loss_chunk_tokens: int | Literal["auto"] = 1024
    attention_chunk: int = 512

    def __post_init__(self) -> None:
        self._check_sizes()
        sizes = self.sizes
        # Logits of a normed hidden state then have variance 1 at the start.
        std = self.d_model**-0.5
        self.embed_VD = weight("VD", (self.vocab_size, self.d_model), std=std)
        period = self.period
        if self.first:
            self.first_layers = Blocks(self.first, sizes, self.norm, layers=0)
        if len(period) == 1:
            self.layers = Block(period[0], sizes, self.norm, layers=self.num_periods)
        else:
            self.layers = Blocks(period, sizes, self.norm, layers=self.num_periods)
        if self.last:
            self.last_layers = Blocks(self.last, sizes, self.norm, layers=0)
        self.final_norm = self.norm.module("D", self.d_model, eps=self.norm_eps)
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
        if self.pattern:
            for field, unset in (("moe", None), ("rope", RopeSpec()), ("qk_norm", False)):
                if (value := getattr(self, field)) != unset:
                    raise UserError(
                        f"model.{field}={value} with model.pattern, whose blocks have each their own. Set "
                        f"it in the blocks, and model.{field}={unset}."
                    )
        elif self.first:
            raise UserError("model.first without model.pattern: set model.pattern to the blocks after them.")
        if self.num_periods < 1:
            raise UserError(
                f"model.num_layers={self.num_layers} is fewer than the {len(self.first)} blocks of "
                f"model.first and one period of {len(self.period)} blocks of model.pattern. Add layers, or "
                "shorten one."
            )
        check_router_losses((*self.first, *self.period))

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that blocks take where they have none of their own."""
        return ModelSizes(
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            d_ff=self.d_ff,
            norm_eps=self.norm_eps,
            attention_chunk=self.attention_chunk,
        )

    @property
    def period(self) -> tuple[BlockSpec, ...]:
        """Blocks that are compiled once and looped over."""
        if self.pattern:
            return self.pattern
        attention = AttentionSpec(rope=self.rope, qk_norm="head" if self.qk_norm else "none")
        return (BlockSpec(attention, MLPSpec() if self.moe is None else self.moe),)

    @property
    def num_periods(self) -> int:
        """Iterations of the loop over layers; the number of layers where all are alike."""
        return (self.num_layers - len(self.first)) // len(self.period)

    @property
    def last(self) -> tuple[BlockSpec, ...]:
        """Blocks of the pattern after its last whole repetition."""
        return self.period[: (self.num_layers - len(self.first)) % len(self.period)]

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Every layer, in order."""
        return self.first + self.period * self.num_periods + self.last

    @property
    def router(self) -> MoESpec | None:
        """Mixture of experts of this model, whose coefficients its losses have; None for a dense model."""
        return next((b.feed_forward for b in self.blocks if isinstance(b.feed_forward, MoESpec)), None)

    @property
    def num_routers(self) -> int:
        """Layers with a mixture of experts."""
        return sum(isinstance(block.feed_forward, MoESpec) for block in self.blocks)

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter, sorted by path."""
        return param_infos(self)

    def hidden(self, params: Params, batch: Batch, placement: Placement) -> Float[Array, "B _ D"]:
        """Hidden states after the last norm, [B, L / tensor, D] in the compute dtype.

        Raises:
          UserError: layers are unrolled, but their weights or activations are offloaded to host memory.
        """
        return self.forward(params, batch, placement)[0]

    def forward(
        self, params: Params, batch: Batch, placement: Placement
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Result of `hidden`, and the router losses summed over layers (None for a dense model)."""
        x_BLD = self.embed(params, batch.token_BL, placement)
        x_BLD, losses = self.through_layers(params, x_BLD, batch, placement)
        return self.normed(params, x_BLD, placement), losses

    def through_layers(
        self, params: Params, x_BLD: Float[Array, "B _ D"], batch: Batch, placement: Placement
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Residual stream after all layers, and the sum of their router losses (None if dense)."""
        # Unrolled layers are one iteration of the same scan: one path for both.
        layer, weights = self.layer(placement), params["layers"]
        unroll, shared = 1 if self.scan_layers else self.num_periods, self.shared(batch)
        with jax.named_scope("layers"):
            carry = x_BLD, None if self.router is None else RouterLosses.zeros(self.router)
            carry = self.through_single("first_layers", params, carry, shared, placement)
            carry = scan_layers(layer, carry, weights, shared, unroll=unroll, offload=placement.offload)
            return self.through_single("last_layers", params, carry, shared, placement)

    def through_single(
        self, path: str, params: Params, carry: LayerCarry, shared: "SharedValues", placement: Placement
    ) -> LayerCarry:
        """The carry after `first_layers` or `last_layers`, if any; what they keep stays on the device."""
        if path not in params:
            return carry
        placement = dataclasses.replace(placement, offload=())
        layers = self._run(getattr(self, path), path, placement)
        return checkpoint_layer(layers, placement, scanned=False)(carry, params[path], shared)

    def embed(
        self, params: Params, token_BL: Int[Array, "B L"], placement: Placement
    ) -> Float[Array, "B _ D"]:
        """Embedding rows of this device's positions; 0 for tokens of another stage's vocabulary."""
        with jax.named_scope("embed"):
            # The table's columns are split: each device looks up its own, and none gathers the table.
            if placement.lookup is not None:
                x_BLD = embedding_rows(params["embed_VD"], token_BL, placement, placement.lookup)
            else:
                table_VD = placement.fetch("embed_VD", params["embed_VD"])
                x_BLD = embedding_rows(table_VD, token_BL, placement, ops.embedding_lookup)
            x_BLD = x_BLD if self.embedding_scale == 1 else x_BLD * self.embedding_scale
            return normalized(x_BLD, placement, self.norm_eps) if self.embedding_norm else x_BLD

    @property
    def _rotations(self) -> tuple[tuple[RopeSpec | Positions, int], ...]:
        """The different rotations of the layers: rope, and size of the heads."""
        mixers = (block.mixer for block in (*self.first, *self.period) if block.mixer is not None)
        rotations = (mixer.rotation(self.sizes) for mixer in mixers)
        return tuple(dict.fromkeys(rotation for rotation in rotations if rotation is not None))

    def shared(self, batch: Batch) -> "SharedValues":
        """Values that every layer reads: cosine and sine of the rotations, and the documents' numbers."""
        with jax.named_scope("rope"):
            # Once per microbatch and outside the loop: layers with the same rope rotate alike.
            tables = tuple(rope.tables(batch.position_BL, size) for rope, size in self._rotations)
            return tables, batch.segment_BL, batch.dropout_BL

    def rotation(self, block: Block, shared: "SharedValues") -> Rotation:
        """Cosine and sine that a block reads."""
        mixer = block.spec.mixer
        rotation = mixer.rotation(self.sizes) if mixer is not None else None
        return None if rotation is None else shared[0][self._rotations.index(rotation)]

    def layer(self, placement: Placement) -> Layer:
        """One period as a function of (residual stream, router losses so far), its weights, and `shared`."""
        return checkpoint_layer(
            self._run(self.layers, "layers", placement), placement, scanned=self.scan_layers
        )

    def _run(self, blocks: Block | Blocks, path: str, placement: Placement) -> Layer:
        """`layer` of any blocks."""
        # The structure without values: weights of a layer are merged in while it is traced.
        definition, _ = nnx.split(blocks)
        axis = TensorAxis(placement.tensor, placement.tensor_overlap)

        def run(carry: LayerCarry, weights: Params, shared: "SharedValues") -> LayerCarry:
            x_BLD, losses_so_far = carry
            merged = nnx.merge(definition, placement.weights_of_blocks(path, weights, shared[2]))
            # See `Placement.on_torus`: without it every layer transposes the residual stream.
            x_BLD = row_major(x_BLD) if placement.on_torus else x_BLD
            for block in (merged,) if isinstance(merged, Block) else merged:
                rotation = self.rotation(block, shared)
                if (groups := placement.sequence_groups) > 1:
                    options: Any = dict(groups=groups, tensor=placement.tensor, context=placement.context)
                    x_BLD = block_in_groups(block, x_BLD, rotation, shared[1], **options)
                    continue
                x_BLD, losses = block(
                    x_BLD,
                    rotation,
                    shared[1],
                    tensor=axis,
                    context=placement.context,
                    expert=placement.expert,
                    mlp_chunk=placement.mlp_chunk,
                )
                # Summed in the carry, so that a scan stacks nothing.
                if losses is not None:
                    losses_so_far = jax.tree.map(jnp.add, losses_so_far, losses)
            return x_BLD, losses_so_far

        return run

    def normed(
        self, params: Params, x_BLD: Float[Array, "B _ D"], placement: Placement
    ) -> Float[Array, "B _ D"]:
        """The last norm."""
        with jax.named_scope("final_norm"):
            norm = nnx.merge(
                nnx.split(self.final_norm)[0], placement.fetch("final_norm", params.get("final_norm", {}))
            )
            x_BLD = norm(x_BLD)
            # Logits are linear in it, before their cap.
            return x_BLD if self.logit_scale == 1 else x_BLD * self.logit_scale

    def unembed(self, params: Params, placement: Placement) -> Float[Array, "D V"]:
        """This device's columns of the unembedding matrix, V / tensor, in the compute dtype."""
        if self.tie_embeddings:
            return placement.fetch("embed_VD", params["embed_VD"]).T
        return placement.fetch("unembed_DV", params["unembed_DV"])

    def loss(
        self, params: Params, batch: Batch, placement: Placement, targets_per_token: Array | None = None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sums over this device's tokens, float32: the objective, and the cross entropy in nats.

        The objective includes the z-loss and, for a mixture of experts, the router losses averaged over
        layers. The caller divides by the number of valid targets of the whole global batch, so that any split
        of the batch gives the same loss. Routers see masked prompts too: `targets_per_token` makes a mean
        over all tokens of their losses; None if all are targets. Only the objective is differentiable.
        """
        x_BLD, losses = self.forward(params, batch, placement)
        soft = {} if batch.soft is None else {"soft": batch.soft}  # a user's own loss need not know of it
        total, nats = self.cross_entropy(params, x_BLD, batch.target_BL, placement, batch.weight_BL, **soft)
        if self.router is None or losses is None:
            return total, nats
        return total + losses.mean(self.router, self.num_routers, targets_per_token), nats

    def cross_entropy(
        self,
        params: Params,
        x_BLD: Float[Array, "B _ D"],
        target_BL: Int[Array, "B L"],
        placement: Placement,
        weight_BL: Float[Array, "B L"] | None = None,
        *,
        soft: ops.SoftTargets | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Result of `loss` from what `normed` returns, without the router losses."""
        with jax.named_scope("loss"):
            unembedding = self._unembedding(params, placement)
            return unembedding.loss(x_BLD, target_BL, z_loss=self.z_loss, weight_BL=weight_BL, soft=soft)

    def token_nats(self, params: Params, batch: Batch, placement: Placement) -> Float[Array, "B _"]:
        """Cross entropy of each of this device's tokens, [B, L / tensor], in nats; 0 without a target."""
        return self.nats_of(params, self.hidden(params, batch, placement), batch.target_BL, placement)

    def nats_of(
        self, params: Params, x_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"], placement: Placement
    ) -> Float[Array, "B _"]:
        """Result of `token_nats` from what `normed` returns."""
        with jax.named_scope("loss"):
            return self._unembedding(params, placement).token_nats(x_BLD, target_BL)

    def top_k_of(
        self, params: Params, x_BLD: Float[Array, "B _ D"], k: int, placement: Placement
    ) -> ops.SoftTargets:
        """`Unembedding.top_k` of what `normed` returns."""
        with jax.named_scope("loss"):
            return self._unembedding(params, placement).top_k(x_BLD, k)

    def _unembedding(self, params: Params, placement: Placement) -> Unembedding:
        # `auto` leaves the choice to the op, which knows the device.
        chunk = None if self.loss_chunk_tokens == "auto" else self.loss_chunk_tokens
        settings: Any = dict(placement.vocabulary, chunk_tokens=chunk, soft_cap=self.logit_soft_cap)
        if placement.lookup is None:
            return Unembedding(self.unembed(params, placement), None, tied=False, **settings)
        path = "embed_VD" if self.tie_embeddings else "unembed_DV"
        fetch = functools.partial(placement.fetch, path)
        return Unembedding(params[path], fetch, self.tie_embeddings, **settings)

    def logits(self, params: Params, batch: Batch, *, dtype: str = "float32") -> Float[Array, "B L V"]:
        """All logits, float32, on one device without a mesh; for parity tests."""
        placement = single_device(dtype)
        logits_BLV = ops.linear(self.hidden(params, batch, placement), self.unembed(params, placement))
        return ops.capped(logits_BLV.astype(jnp.float32), self.logit_soft_cap)
