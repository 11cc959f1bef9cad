"""Causal self-attention with grouped key and value heads."""

import dataclasses

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain.model import ops
from jtrain.model.norm import RMSNorm
from jtrain.model.param import weight
from jtrain.model.tensor_parallel import TensorAxis


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Sizes D, N, K and H of an attention layer, and its fixed numbers.

    chunk: queries whose scores exist at a time.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qk_norm: bool
    chunk: int


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions; `qk_norm` as in Qwen3.

    Heads are split over `tensor`; each array here holds this device's heads.
    """

    def __init__(self, sizes: AttentionSizes, *, layers: int) -> None:
        d_model, head_dim, std = sizes.d_model, sizes.head_dim, sizes.d_model**-0.5
        self.q_DNH = weight("DNH", (d_model, sizes.num_heads, head_dim), std=std, layers=layers)
        self.k_DKH = weight("DKH", (d_model, sizes.num_kv_heads, head_dim), std=std, layers=layers)
        self.v_DKH = weight("DKH", (d_model, sizes.num_kv_heads, head_dim), std=std, layers=layers)
        # Each layer adds two branches to the residual stream: 1 / sqrt(2 Y) keeps its variance at any depth.
        out_std = (sizes.num_heads * head_dim * 2 * layers) ** -0.5
        self.o_NHD = weight("NHD", (sizes.num_heads, head_dim, d_model), std=out_std, layers=layers)
        if sizes.qk_norm:
            self.q_norm = RMSNorm("H", head_dim, eps=sizes.norm_eps, layers=layers)
            self.k_norm = RMSNorm("H", head_dim, eps=sizes.norm_eps, layers=layers)
        self.qk_norm = sizes.qk_norm
        self.chunk = sizes.chunk

    def project(
        self,
        x_BLD: Float[Array, "B _ D"],
        cos_BLR: Float[Array, "B L R"],
        sin_BLR: Float[Array, "B L R"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> tuple[Float[Array, "B L N H"], Float[Array, "B L K H"], Float[Array, "B L K H"]]:
        """Queries and keys, rotated to their positions, and values."""
        q_BLNH, k_BLKH, v_BLKH = tensor.project_in(x_BLD, self.q_DNH[...], self.k_DKH[...], self.v_DKH[...])
        # Before the rotation: a norm over H commutes with it only without its scale.
        if self.qk_norm:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        return ops.rope(q_BLNH, cos_BLR, sin_BLR), ops.rope(k_BLKH, cos_BLR, sin_BLR), v_BLKH

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        cos_BLR: Float[Array, "B L R"],
        sin_BLR: Float[Array, "B L R"],
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions; inside, its heads at all positions along `tensor`."""
        q_BLNH, k_BLKH, v_BLKH = self.project(x_BLD, cos_BLR, sin_BLR, tensor)
        # Named after the rotation, so that a saved q or k is not rotated again.
        q_BLNH = checkpoint_name(q_BLNH, "attention_q")
        k_BLKH = checkpoint_name(k_BLKH, "attention_k")
        v_BLKH = checkpoint_name(v_BLKH, "attention_v")
        y_BLNH = ops.context_attention(q_BLNH, k_BLKH, v_BLKH, segment_BL, split=context, chunk=self.chunk)
        return tensor.project_out(y_BLNH, self.o_NHD[...])
