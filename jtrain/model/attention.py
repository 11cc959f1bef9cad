"""Causal self-attention with grouped key and value heads."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.mixer import Mixer, MixerSpec, Rotation
from jtrain.model.norm import Norm, NormSpec
from jtrain.model.param import aligned, vector, weight
from jtrain.model.rope import RopeSpec
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention (arXiv:2305.13245).

    num_heads, num_kv_heads, head_dim: N, K and H; None takes the model's.
    rope: rotary positions; None for none.
    bias: `qkv` adds a learned vector to queries, keys and values, `all` to the output as well.
    qk_norm: norm of queries and keys: `head` over each head (Qwen3), `all` over all heads together (OLMo 2),
      `unscaled` over each head without a learned scale.
    norm_after_rope: True normalises after the rotation.
    window: keys that a query sees, its own the last; None sees its whole document.
    scale: multiplies the scores; None is 1 / sqrt(H).
    gate: True multiplies the output of each head by the sigmoid of a projection of its own (Qwen3-Next).
    """

    name: ClassVar[str] = "attention"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: RopeSpec | None = RopeSpec()  # noqa: RUF009 - frozen
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: Literal["none", "head", "all", "unscaled"] = "none"
    norm_after_rope: bool = False
    window: int | None = None
    scale: float | None = None
    gate: bool = False

    def head_sizes(self, sizes: ModelSizes) -> tuple[int, int, int]:
        """N, K and H: its own, or the model's.

        Raises:
          UserError: key heads that do not divide the heads, or heads whose pairs of dims cannot be rotated.
        """
        num_heads, num_kv_heads = self.num_heads or sizes.num_heads, self.num_kv_heads or sizes.num_kv_heads
        head_dim = self.head_dim or sizes.head_dim
        if num_heads % num_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
            raise UserError(
                f"model.num_heads={num_heads} is not a multiple of model.num_kv_heads={num_kv_heads}: each "
                f"key head serves the same number of query heads. Set model.num_kv_heads to one of {divisors}."
            )
        if head_dim % 2 and self.rope is not None:
            raise UserError(
                f"model.head_dim={head_dim} is odd, but rotary positions rotate pairs of dimensions. Set "
                f"model.head_dim={head_dim + 1} or another even one."
            )
        return num_heads, num_kv_heads, head_dim

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "Attention":
        """The layer."""
        return Attention(self, sizes, norm, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "AttentionSpec":
        """This mixer with all of its head sizes."""
        num_heads, num_kv_heads, head_dim = self.head_sizes(sizes)
        return dataclasses.replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    def rotation(self, sizes: ModelSizes) -> tuple[RopeSpec, int] | None:
        """Rotary positions, and the size of the heads that they rotate; None for attention without."""
        return None if self.rope is None else (self.rope, self.head_dim or sizes.head_dim)

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> tuple[Array, Array]:
        """Rotated keys and values, [B, M, K, H] each: 2 B M K H elements."""
        _, num_kv_heads, head_dim = self.head_sizes(sizes)
        shape = batch, max_len, num_kv_heads, head_dim
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


class Attention(Mixer):
    """The layer of an `AttentionSpec`.

    Heads are split over `tensor`; each array here holds this device's heads.
    """

    def __init__(self, spec: AttentionSpec, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> None:
        num_heads, num_kv_heads, head_dim = spec.head_sizes(sizes)
        d_model, std = sizes.d_model, sizes.d_model**-0.5
        self.q_DNH = weight("DNH", (d_model, num_heads, head_dim), std=std, layers=layers)
        self.k_DKH = weight("DKH", (d_model, num_kv_heads, head_dim), std=std, layers=layers)
        self.v_DKH = weight("DKH", (d_model, num_kv_heads, head_dim), std=std, layers=layers)
        out_std = sizes.branch_std(num_heads * head_dim)
        self.o_NHD = weight("NHD", (num_heads, head_dim, d_model), std=out_std, layers=layers)
        if spec.gate:
            self.gate_DNH = weight("DNH", (d_model, num_heads, head_dim), std=std, layers=layers)
        if spec.bias != "none":
            self.q_bias_NH = vector("NH", (num_heads, head_dim), ones=False, layers=layers)
            self.k_bias_KH = vector("KH", (num_kv_heads, head_dim), ones=False, layers=layers)
            self.v_bias_KH = vector("KH", (num_kv_heads, head_dim), ones=False, layers=layers)
        if spec.bias == "all":
            self.o_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        norm_options: Any = dict(spec=norm, eps=sizes.norm_eps, layers=layers)
        match spec.qk_norm:
            case "head":
                self.q_norm = Norm("H", head_dim, **norm_options)
                self.k_norm = Norm("H", head_dim, **norm_options)
            case "all":
                self.q_norm = Norm("NH", (num_heads, head_dim), **norm_options)
                self.k_norm = Norm("KH", (num_kv_heads, head_dim), **norm_options)
            case "unscaled":
                self.q_norm = self.k_norm = Norm("H", head_dim, **norm_options | {"spec": _UNSCALED})
            case "none":
                pass
        self.spec, self.eps, self.chunk = spec, sizes.norm_eps, sizes.attention_chunk

    def project(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> tuple[Float[Array, "B L N H"], Float[Array, "B L K H"], Float[Array, "B L K H"], Array | None]:
        """Queries and keys, rotated to their positions, values, and the gate of the output."""
        kernels = [self.q_DNH[...], self.k_DKH[...], self.v_DKH[...]]
        kernels += [self.gate_DNH[...]] if self.spec.gate else []
        q_BLNH, k_BLKH, v_BLKH, *gate = tensor.project_in(x_BLD, *kernels)
        if self.spec.bias != "none":
            q_BLNH, k_BLKH, v_BLKH = (
                x + aligned(local_part(bias[...], x.shape[2]), x)
                for x, bias in zip(
                    (q_BLNH, k_BLKH, v_BLKH), (self.q_bias_NH, self.k_bias_KH, self.v_bias_KH), strict=True
                )
            )
        # Before the rotation: a norm over H commutes with it only without its scale.
        if not self.spec.norm_after_rope:
            q_BLNH, k_BLKH = self._normed(q_BLNH, k_BLKH)
        q_BLNH, k_BLKH = _rotated(q_BLNH, rotation), _rotated(k_BLKH, rotation)
        if self.spec.norm_after_rope:
            q_BLNH, k_BLKH = self._normed(q_BLNH, k_BLKH)
        if self.spec.scale is not None:
            # Attention itself divides by sqrt(H); usually the ratio is a power of two, which rounds nothing.
            q_BLNH *= self.spec.scale * q_BLNH.shape[-1] ** 0.5
        return q_BLNH, k_BLKH, v_BLKH, gate[0] if gate else None

    def _normed(self, q_BLNH: Array, k_BLKH: Array) -> tuple[Array, Array]:
        match self.spec.qk_norm:
            case "none":
                return q_BLNH, k_BLKH
            case "all":
                return self._over_all_heads(q_BLNH, self.q_norm), self._over_all_heads(k_BLKH, self.k_norm)
            case "head" | "unscaled":
                return self.q_norm(q_BLNH), self.k_norm(k_BLKH)

    def _over_all_heads(self, x_BLNH: Float[Array, "B L N H"], norm: Norm) -> Float[Array, "B L N H"]:
        """Root mean square over the heads of all devices along `tensor`."""
        x32, scale_NH = x_BLNH.astype(jnp.float32), norm.scale(x_BLNH)
        heads, size = x_BLNH.shape[2:]
        square_BL11 = jnp.sum(x32 * x32, axis=(2, 3), keepdims=True)
        count = heads * size
        # A key head that several devices share counts once for each of them, in sum and in number.
        if scale_NH.shape[0] != heads:
            square_BL11, count = jax.lax.psum(square_BL11, "tensor"), count * jax.lax.axis_size("tensor")
        inverse_BL11 = jax.lax.rsqrt(square_BL11 / count + self.eps)
        return (x32 * inverse_BL11 * aligned(local_part(scale_NH, heads), x32)).astype(x_BLNH.dtype)

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions; inside, its heads at all positions along `tensor`."""
        q_BLNH, k_BLKH, v_BLKH, gate_BLNH = self.project(x_BLD, rotation, tensor)
        # Named after the rotation, so that a saved q or k is not rotated again.
        q_BLNH = checkpoint_name(q_BLNH, "attention_q")
        k_BLKH = checkpoint_name(k_BLKH, "attention_k")
        v_BLKH = checkpoint_name(v_BLKH, "attention_v")
        y_BLNH = ops.context_attention(
            q_BLNH, k_BLKH, v_BLKH, segment_BL, split=context, chunk=self.chunk, window=self.spec.window
        )
        return self.project_out(y_BLNH, gate_BLNH, tensor)

    def project_out(
        self,
        y_BLNH: Float[Array, "B L N H"],
        gate_BLNH: Float[Array, "B L N H"] | None,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> Float[Array, "B _ D"]:
        """Output from what the heads attended to, and the gate that `project` returned."""
        if gate_BLNH is not None:
            y_BLNH *= jax.nn.sigmoid(gate_BLNH.astype(jnp.float32)).astype(y_BLNH.dtype)
        y_BLD = tensor.project_out(y_BLNH, self.o_NHD[...])
        # Once, at the positions that this device keeps of the sum.
        return y_BLD + aligned(self.o_bias_D[...], y_BLD) if self.spec.bias == "all" else y_BLD

    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: tuple[Float[Array, "B M K H"], Float[Array, "B M K H"]],
    ) -> tuple[Float[Array, "B L D"], tuple[Array, Array]]:
        """Output at the new positions, and all keys and values with theirs.

        Padding writes keys beyond the last token, which no query sees and the next tokens overwrite.
        """
        q_BLNH, k_BLKH, v_BLKH, gate_BLNH = self.project(x_BLD, rotation)
        # Keys are rotated before they are stored: positions never change.
        k_BMKH, v_BMKH = (
            jax.lax.dynamic_update_slice_in_dim(cached, new, position_BL[0, 0], axis=1)
            for cached, new in zip(cache, (k_BLKH, v_BLKH), strict=True)
        )
        y_BLNH = _attend(q_BLNH, k_BMKH, v_BMKH, position_BL, window=self.spec.window)
        return self.project_out(y_BLNH, gate_BLNH), (k_BMKH, v_BMKH)


_UNSCALED = NormSpec(scale="none")


def _rotated(x_BLNH: Float[Array, "B L N H"], rotation: Rotation) -> Float[Array, "B L N H"]:
    if rotation is None:
        return x_BLNH
    rotated_dims = 2 * rotation[0].shape[-1]
    if rotated_dims == x_BLNH.shape[-1]:
        return ops.rope(x_BLNH, *rotation)
    rotated_BLNR = ops.rope(x_BLNH[..., :rotated_dims], *rotation)
    return jnp.concatenate([rotated_BLNR, x_BLNH[..., rotated_dims:]], axis=-1)


def _attend(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKH: Float[Array, "B M K H"],
    position_BL: Int[Array, "B L"],
    *,
    window: int | None,
) -> Float[Array, "B L N H"]:
    """Attention of queries at `position_BL` to all keys up to the same position; softmax in float32."""
    *batch_dims, heads, size = q_BLNH.shape
    kv_heads = k_BMKH.shape[2]
    q_BLKGH = q_BLNH.reshape(*batch_dims, kv_heads, heads // kv_heads, size)
    s_BKGLM = (
        jnp.einsum("blkgh,bmkh->bkglm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32) * size**-0.5
    )
    distance_BLM = position_BL[:, :, None] - jnp.arange(k_BMKH.shape[1])[None, None, :]
    visible_BLM = distance_BLM >= 0
    if window is not None:
        visible_BLM &= distance_BLM < window
    p_BKGLM = jax.nn.softmax(jnp.where(visible_BLM[:, None, None], s_BKGLM, -jnp.inf), axis=-1)
    return jnp.einsum("bkglm,bmkh->blkgh", p_BKGLM.astype(v_BMKH.dtype), v_BMKH).reshape(q_BLNH.shape)
