"""One layer of a decoder: a mixer of positions and a feed-forward layer, each the branch of a residual
stream.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model import ops
from jtrain.model.attention import AttentionSpec
from jtrain.model.mixer import Mixer, MixerSpec, Rotation
from jtrain.model.mlp import MLP, MLPSpec, in_chunks
from jtrain.model.moe import MoE
from jtrain.model.norm import Norm, NormSpec
from jtrain.model.param import scalar
from jtrain.model.router import MoESpec, RouterLosses
from jtrain.model.sequence_groups import check_groups
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, gather_sequence, local_sequence, scatter_sequence


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One layer.

    mixer: what mixes positions; None for a layer without.
    feed_forward: dense, or a mixture of experts; None for a layer without.
    norms: of what is normalised: `before` each branch its input, `after` its output (OLMo 2), `sandwich` both
      (Gemma 2), `sandwich_mlp` both for the feed-forward layer alone (A.X K1); `parallel` computes both
      branches from the same residual stream, each with a norm of its own (GPT-NeoX), `parallel_shared` with
      one norm for both (Cohere).
    residual_scale: multiplies what each branch adds (Granite).
    stream_scale: True multiplies the residual stream after the layer by a number that is read with the
      weights and not trained (Gemma 4).
    """

    mixer: MixerSpec | None = AttentionSpec()  # noqa: RUF009 - frozen
    feed_forward: MLPSpec | MoESpec | None = MLPSpec()  # noqa: RUF009 - frozen
    norms: Literal["before", "after", "sandwich", "sandwich_mlp", "parallel", "parallel_shared"] = "before"
    residual_scale: float = 1.0
    stream_scale: bool = False

    def __post_init__(self) -> None:
        if self.stream_scale and self.feed_forward is None:
            raise UserError(
                "stream_scale=True in model.pattern with feed_forward=None: the stream is multiplied after a "
                "feed-forward layer. Set stream_scale=False."
            )
        if self.in_parallel and (self.mixer is None or self.feed_forward is None):
            missing = "mixer" if self.mixer is None else "feed_forward"
            raise UserError(
                f"norms={self.norms} in model.pattern with {missing}=None: one branch has nothing beside "
                "it. Set norms=before."
            )

    @property
    def in_parallel(self) -> bool:
        """True if both branches start from the same residual stream."""
        return self.norms.startswith("parallel")


_AFTER_MLP = "after", "sandwich", "sandwich_mlp"


class Block(nnx.Module):
    """The layer of a `BlockSpec`: `x + attention(norm(x))`, then `x + mlp(norm(x))`, unless it says
    otherwise.
    """

    def __init__(self, spec: BlockSpec, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> None:
        def branch_norm() -> Norm:
            return norm.module("D", sizes.d_model, eps=sizes.norm_eps, layers=layers)

        if spec.mixer is not None:
            if spec.norms != "after":
                self.attention_norm = branch_norm()
            if spec.norms in ("after", "sandwich"):
                self.attention_post_norm = branch_norm()
            setattr(self, spec.mixer.name, spec.mixer.module(sizes, norm, layers=layers))
        if spec.feed_forward is not None:
            if spec.norms not in ("after", "parallel_shared"):
                self.mlp_norm = branch_norm()
            if spec.norms in _AFTER_MLP:
                self.mlp_post_norm = branch_norm()
            if isinstance(spec.feed_forward, MoESpec):
                self.mlp = MoE(spec.feed_forward, sizes, layers=layers)
            else:
                self.mlp = spec.feed_forward.module(sizes, layers=layers)
        if spec.stream_scale:
            self.stream_scale = scalar(1.0, layers=layers)
        self.spec = spec

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        *,
        tensor: TensorAxis,
        context: ops.RowSplit,
        expert: int = 1,
        mlp_chunk: int | None = None,
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Residual stream after the layer, and the router's losses (None for a dense layer)."""
        losses, stream_BLD = None, x_BLD
        if self.spec.mixer is not None:
            with jax.named_scope("attention"):
                x_BLD, h_BLD = self.attention_input(x_BLD)
                h_BLD = self.mixer(h_BLD, rotation, segment_BL, tensor, context)
                stream_BLD = self.add_attention(x_BLD, h_BLD)
        if self.spec.feed_forward is not None:
            with jax.named_scope("mlp"):
                # Segment 0 is padding. Segments are whole along `tensor`, the residual stream is not.
                valid_BL = local_sequence(segment_BL, tensor.size) > 0
                stream_BLD, h_BLD = self.mlp_input(stream_BLD, x_BLD)
                h_BLD, losses = self.feed_forward(
                    h_BLD, valid_BL, tensor=tensor, context=context.size, expert=expert, chunk=mlp_chunk
                )
                stream_BLD = self.add_mlp(stream_BLD, h_BLD)
        return stream_BLD, losses

    @property
    def mixer(self) -> Mixer:
        """Mixer of the block, which must have one."""
        assert self.spec.mixer is not None
        return getattr(self, self.spec.mixer.name)

    def attention_input(
        self, x_BLD: Float[Array, "B _ D"]
    ) -> tuple[Float[Array, "B _ D"], Float[Array, "B _ D"]]:
        """The residual stream, and the input of the mixer."""
        return self.attention_norm.branch(x_BLD) if self.spec.norms != "after" else (x_BLD, x_BLD)

    def add_attention(
        self, x_BLD: Float[Array, "B _ D"], h_BLD: Float[Array, "B _ D"]
    ) -> Float[Array, "B _ D"]:
        """The residual stream with the mixer's output."""
        if self.spec.norms in ("after", "sandwich"):
            h_BLD = self.attention_post_norm(h_BLD)
        # Where this is saved, the backward pass recomputes the mlp without attention.
        return checkpoint_name(x_BLD + self._scaled(h_BLD), "attention_out")

    def mlp_input(
        self, stream_BLD: Float[Array, "B _ D"], before_BLD: Float[Array, "B _ D"]
    ) -> tuple[Float[Array, "B _ D"], Float[Array, "B _ D"]]:
        """The residual stream, and the input of the feed-forward layer.

        Args:
          before_BLD: the residual stream before the mixer, from which parallel branches start.
        """
        match self.spec.norms:
            case "after":
                return stream_BLD, stream_BLD
            case "parallel":
                return stream_BLD, self.mlp_norm(before_BLD)
            case "parallel_shared":
                return stream_BLD, self.attention_norm(before_BLD)
            case _:
                return self.mlp_norm.branch(stream_BLD)

    def add_mlp(self, x_BLD: Float[Array, "B _ D"], h_BLD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        """The residual stream with the feed-forward layer's output."""
        if self.spec.norms in _AFTER_MLP:
            h_BLD = self.mlp_post_norm(h_BLD)
        y_BLD = x_BLD + self._scaled(h_BLD)
        if not self.spec.stream_scale:
            return y_BLD
        scale = jax.lax.stop_gradient(self.stream_scale[...])
        # All weights of a pipeline's identity layer are 0, and it hands on the stream as it is.
        return y_BLD * jnp.where(scale == 0, 1.0, scale).astype(y_BLD.dtype)

    def _scaled(self, h_BLD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        return h_BLD if self.spec.residual_scale == 1 else h_BLD * self.spec.residual_scale

    def feed_forward(
        self,
        x_BLD: Float[Array, "B _ D"],
        valid_BL: Bool[Array, "B _"],
        *,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: int = 1,
        expert: int = 1,
        chunk: int | None = None,
    ) -> tuple[Float[Array, "B _ D"], RouterLosses | None]:
        """Feed-forward output at this device's positions, and the router's losses (None for a dense layer).

        Inside, the device computes its block of F at all positions along `tensor`.

        Args:
          valid_BL: at the same positions as x; False for padding, which goes to no expert.
          chunk: positions of each sequence whose hidden units exist at a time in a dense layer; None for all.
        """
        if isinstance(self.mlp, MLP):
            # A dense mlp gathers and scatters inside its projections, where they can overlap with the
            # matmuls.
            return in_chunks(self.mlp, x_BLD, tensor, chunk), None
        routing, losses = self.mlp.route(x_BLD, valid_BL, tensor=tensor.size, context=context)
        # Experts see all positions along `tensor`: each device multiplies with its part of F.
        h_BLD = self.mlp(gather_sequence(x_BLD, tensor.size), routing, expert=expert)
        return scatter_sequence(h_BLD, tensor.size), losses


class Blocks(nnx.Module):
    """Several layers, one after another: `block_0`, `block_1` ..."""

    def __init__(
        self, specs: tuple[BlockSpec, ...], sizes: ModelSizes, norm: NormSpec, *, layers: int
    ) -> None:
        for index, spec in enumerate(specs):
            setattr(self, f"block_{index}", Block(spec, sizes, norm, layers=layers))
        self.count = len(specs)

    def __iter__(self) -> Iterator[Block]:
        return (getattr(self, f"block_{index}") for index in range(self.count))


def check_router_losses(blocks: Sequence[BlockSpec]) -> None:
    """Refuses mixtures whose losses have different coefficients.

    Raises:
      UserError: names the field and its values.
    """
    routers = [block.feed_forward for block in blocks if isinstance(block.feed_forward, MoESpec)]
    for field in ("balance_loss", "router_z_loss"):
        values = dict.fromkeys(getattr(router, field) for router in routers)
        if len(values) > 1:
            raise UserError(
                f"{field}={', '.join(map(str, values))} in the mixtures of model.pattern and model.first: "
                f"the losses of all layers are added before their coefficient. Set one {field} in all of "
                "them."
            )


def check_blocks(blocks: Sequence[BlockSpec], layout: LayoutSpec, mesh: MeshSpec) -> None:
    """Refuses blocks that a layout does not compute.

    Raises:
      UserError: names the option, the block's field and the way out.
    """
    if layout.mlp_chunk is not None and not any(isinstance(b.feed_forward, MLPSpec) for b in blocks):
        raise UserError(
            f"layout.mlp_chunk={layout.mlp_chunk} with a model without a dense feed-forward layer: experts "
            "have buffers of their own. Set layout.mlp_chunk=None."
        )
    is_ring = mesh.context > 1 and layout.context_attention == "ring"
    for block in dict.fromkeys(blocks):
        if layout.sequence_groups > 1:
            check_groups(block, layout.sequence_groups)
        # Mixers that stand beside each other are checked one by one.
        mixers = getattr(block.mixer, "mixers", (block.mixer,))
        windows = (getattr(mixer, "window", None) for mixer in mixers)
        window = next((window for window in windows if window is not None), None)
        if is_ring and window is not None:
            raise UserError(
                f"layout.context_attention=ring with window={window} in model.pattern: a ring's blocks have "
                "no distances. Set layout.context_attention=ulysses, or mesh.context=1."
            )
