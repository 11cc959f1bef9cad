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
from jtrain.model.norm import Norm, NormSpec, unscaled_norm
from jtrain.model.param import aligned, vector, weight
from jtrain.model.rope import Positions, PositionTables, QueryTemperature, RopeSpec
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention (arXiv:2305.13245).

    num_heads: heads of queries, N; None takes the model's.
    num_kv_heads: heads of keys and values, K; None takes the model's.
    head_dim: size of each head, H; None takes the model's.
    rope: rotary positions; None for none.
    bias: `qkv` adds a learned vector to queries, keys and values, `all` to the output as well.
    qk_norm: norm of queries and keys: `head` over each head (Qwen3), `all` over all heads together (OLMo 2),
      `unscaled` over each head without a learned scale.
    norm_after_rope: True normalises after the rotation.
    value_norm: True normalises each head of the values, without a learned scale (Gemma 4).
    window: keys that a query sees, its own the last; None sees its whole document.
    scale: multiplies the scores; None is 1 / sqrt(H).
    soft_cap: bounds scores to +- this, by tanh (Gemma 2); None for no bound.
    chunk_size: positions of a document that see each other alone: 0 to chunk_size - 1, and so on (Llama 4);
      None for the whole document.
    temperature: factor of queries by their position; None for none.
    sink: True has a learned score per head that takes part in the softmax without a value (gpt-oss).
    value_head_dim: size of the heads of values; None is H.
    value_scale: multiplies values (MiMo-V2).
    gate: True multiplies the output of each head by the sigmoid of a projection of its own (Qwen3-Next).
    gate_activation: of the gate; `softplus` for Laguna.
    gate_per_head: True has one number for each head instead of H.
    gate_bias: True adds a learned number per head to the gate (Beam).
    output_norm: True normalises what the heads attended to, all heads together, before the output (BitNet).
    """

    name: ClassVar[str] = "attention"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: RopeSpec | None = RopeSpec()  # noqa: RUF009 - frozen
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: Literal["none", "head", "all", "unscaled"] = "none"
    norm_after_rope: bool = False
    value_norm: bool = False
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    chunk_size: int | None = None
    temperature: QueryTemperature | None = None
    sink: bool = False
    value_head_dim: int | None = None
    value_scale: float = 1.0
    gate: bool = False
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    gate_per_head: bool = False
    gate_bias: bool = False
    output_norm: bool = False

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
                "key head serves the same number of query heads. Set model.num_kv_heads to one of "
                f"{divisors}."
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UserError(
                f"chunk_size={self.chunk_size} of attention must be at least 1. Set None for no chunks."
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

    def rotation(self, sizes: ModelSizes) -> tuple[RopeSpec | Positions, int] | None:
        """Rotation that attention reads, and the size of the heads that it turns; None for nothing."""
        head_dim = self.head_dim or sizes.head_dim
        if self.temperature is not None or self.chunk_size is not None:
            return Positions(self.rope, self.temperature, self.chunk_size), head_dim
        return None if self.rope is None else (self.rope, head_dim)

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> tuple[Array, Array]:
        """Rotated keys [B, M, K, H], and values of their own head size: 2 B M K H elements if it is the same."""
        _, num_kv_heads, head_dim = self.head_sizes(sizes)
        k_BMKH = jnp.zeros((batch, max_len, num_kv_heads, head_dim), dtype)
        return k_BMKH, jnp.zeros((*k_BMKH.shape[:3], self.value_head_dim or head_dim), dtype)


class Attention(Mixer):
    """The layer of an `AttentionSpec`.

    Heads are split over `tensor`; each array here holds this device's heads.
    """

    def __init__(self, spec: AttentionSpec, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> None:
        num_heads, num_kv_heads, head_dim = spec.head_sizes(sizes)
        value_dim = spec.value_head_dim or head_dim
        d_model, std = sizes.d_model, sizes.d_model**-0.5
        self.q_DNH = weight("DNH", (d_model, num_heads, head_dim), std=std, layers=layers)
        self.k_DKH = weight("DKH", (d_model, num_kv_heads, head_dim), std=std, layers=layers)
        # Names stay those of the usual case, of which P is H.
        p = "H" if value_dim == head_dim else "P"
        self.v_DKH = weight(f"DK{p}", (d_model, num_kv_heads, value_dim), std=std, layers=layers)
        out_std = sizes.branch_std(num_heads * value_dim)
        self.o_NHD = weight(f"N{p}D", (num_heads, value_dim, d_model), std=out_std, layers=layers)
        if spec.sink:
            self.sink_N = vector("N", (num_heads,), ones=False, layers=layers)
        if spec.gate and spec.gate_per_head:
            self.gate_DN = weight("DN", (d_model, num_heads), std=std, layers=layers)
        elif spec.gate:
            self.gate_DNH = weight("DNH", (d_model, num_heads, value_dim), std=std, layers=layers)
        if spec.gate and spec.gate_bias:
            self.gate_bias_N = vector("N", (num_heads,), ones=False, layers=layers)
        if spec.bias != "none":
            self.q_bias_NH = vector("NH", (num_heads, head_dim), ones=False, layers=layers)
            self.k_bias_KH = vector("KH", (num_kv_heads, head_dim), ones=False, layers=layers)
            self.v_bias_KH = vector(f"K{p}", (num_kv_heads, value_dim), ones=False, layers=layers)
        if spec.bias == "all":
            self.o_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        norm_options: Any = dict(spec=norm, eps=sizes.norm_eps, layers=layers)
        match spec.qk_norm:
            case "head":
                self.q_norm = Norm("H", head_dim, **norm_options)
                self.k_norm = Norm("H", head_dim, **norm_options)
            case "all":
                if norm.kind != "rms":
                    raise UserError(
                        f"qk_norm=all in model.pattern with model.norm.kind={norm.kind}: over all heads "
                        "there is only the root mean square. Set model.norm.kind=rms, or qk_norm=head."
                    )
                self.q_norm = Norm("NH", (num_heads, head_dim), **norm_options)
                self.k_norm = Norm("KH", (num_kv_heads, head_dim), **norm_options)
            case "unscaled":
                self.q_norm = self.k_norm = unscaled_norm("H", head_dim, eps=sizes.norm_eps)
            case "none":
                pass
        if spec.value_norm:
            self.v_norm = unscaled_norm(p, value_dim, eps=sizes.norm_eps)
        if spec.output_norm:
            self.output_norm = Norm("NH", (num_heads, value_dim), **norm_options)
        self.spec, self.eps, self.chunk = spec, sizes.norm_eps, sizes.attention_chunk

    def project(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> tuple[Float[Array, "B L N H"], Float[Array, "B L K H"], Float[Array, "B L K P"], Array | None]:
        """Queries and keys, rotated to their positions, values, and the gate of the output."""
        kernels = [self.q_DNH[...], self.k_DKH[...], self.v_DKH[...]]
        if self.spec.gate:
            kernels.append((self.gate_DN if self.spec.gate_per_head else self.gate_DNH)[...])
        q_BLNH, k_BLKH, v_BLKH, *gate = tensor.project_in(x_BLD, *kernels)
        if self.spec.bias != "none":
            q_BLNH, k_BLKH, v_BLKH = (
                x + aligned(local_part(bias[...], x.shape[2]), x)
                for x, bias in zip(
                    (q_BLNH, k_BLKH, v_BLKH), (self.q_bias_NH, self.k_bias_KH, self.v_bias_KH), strict=True
                )
            )
        if self.spec.value_norm:
            v_BLKH = self.v_norm(v_BLKH)
        if self.spec.value_scale != 1:
            v_BLKH *= self.spec.value_scale
        # Before the rotation: a norm over H commutes with it only without its scale.
        if not self.spec.norm_after_rope:
            q_BLNH, k_BLKH = self._normed(q_BLNH, k_BLKH)
        q_BLNH, k_BLKH = _rotated(q_BLNH, rotation), _rotated(k_BLKH, rotation)
        if self.spec.norm_after_rope:
            q_BLNH, k_BLKH = self._normed(q_BLNH, k_BLKH)
        if isinstance(rotation, PositionTables) and rotation.query_factor_BL is not None:
            q_BLNH *= rotation.query_factor_BL[..., None, None].astype(q_BLNH.dtype)
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
        if isinstance(rotation, PositionTables) and rotation.chunk_BL is not None:
            segment_BL = self._in_chunks(segment_BL, rotation.chunk_BL, context.size)
        # Named after the rotation, so that a saved q or k is not rotated again.
        q_BLNH = checkpoint_name(q_BLNH, "attention_q")
        k_BLKH = checkpoint_name(k_BLKH, "attention_k")
        v_BLKH = checkpoint_name(v_BLKH, "attention_v")
        y_BLNH = ops.context_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            segment_BL,
            split=context,
            chunk=self.chunk,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
            sink_N=local_part(self.sink_N[...], q_BLNH.shape[2]) if self.spec.sink else None,
        )
        return self.project_out(y_BLNH, gate_BLNH, tensor)

    def _in_chunks(
        self, segment_BL: Int[Array, "B L"], chunk_BL: Int[Array, "B L"], context: int
    ) -> Int[Array, "B L"]:
        """Numbers of the chunks of documents, 0 for padding: chunks see no more of each other than documents
        do.
        """
        assert self.spec.chunk_size is not None
        # No document is longer than the row, of which each device along `context` has its part.
        per_document = -(-segment_BL.shape[1] * context // self.spec.chunk_size)
        return jnp.where(segment_BL > 0, segment_BL * per_document + chunk_BL, 0)

    def project_out(
        self,
        y_BLNH: Float[Array, "B L N H"],
        gate_BLNH: Float[Array, "B L N *H"] | None,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> Float[Array, "B _ D"]:
        """Output from what the heads attended to, and the gate that `project` returned."""
        if gate_BLNH is not None:
            if self.spec.gate_bias:
                bias_N = local_part(self.gate_bias_N[...], gate_BLNH.shape[2]).astype(gate_BLNH.dtype)
                gate_BLNH += bias_N.reshape(1, 1, -1, *[1] * (gate_BLNH.ndim - 3))
            activation = jax.nn.sigmoid if self.spec.gate_activation == "sigmoid" else jax.nn.softplus
            gate = activation(gate_BLNH.astype(jnp.float32)).astype(y_BLNH.dtype)
            y_BLNH *= gate[..., None] if self.spec.gate_per_head else gate
        if self.spec.output_norm:
            y_BLNH = self._over_all_heads(y_BLNH, self.output_norm)
        y_BLD = tensor.project_out(y_BLNH, self.o_NHD[...])
        # Once, at the positions that this device keeps of the sum.
        return y_BLD + aligned(self.o_bias_D[...], y_BLD) if self.spec.bias == "all" else y_BLD

    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: tuple[Float[Array, "B M K H"], Float[Array, "B M K P"]],
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
        sink_N = self.sink_N[...] if self.spec.sink else None
        y_BLNH = _attend(self.spec, q_BLNH, k_BMKH, v_BMKH, position_BL, sink_N)
        return self.project_out(y_BLNH, gate_BLNH), (k_BMKH, v_BMKH)


def _rotated(x_BLNH: Float[Array, "B L N H"], rotation: Rotation) -> Float[Array, "B L N H"]:
    if rotation is None or rotation[0] is None:
        return x_BLNH
    cos_BLR, sin_BLR = rotation[:2]
    rotated_dims = 2 * cos_BLR.shape[-1]
    if rotated_dims == x_BLNH.shape[-1]:
        return ops.rope(x_BLNH, cos_BLR, sin_BLR)
    rotated_BLNR = ops.rope(x_BLNH[..., :rotated_dims], cos_BLR, sin_BLR)
    return jnp.concatenate([rotated_BLNR, x_BLNH[..., rotated_dims:]], axis=-1)


def _attend(
    spec: AttentionSpec,
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    position_BL: Int[Array, "B L"],
    sink_N: Float[Array, " N"] | None,
) -> Float[Array, "B L N P"]:
    """Softmax attention over the positions in the cache up to each query's own, at most a window."""
    B, L, N, H = q_BLNH.shape
    (M, K), P = k_BMKH.shape[1:3], v_BMKP.shape[3]
    q_BLKGH = q_BLNH.reshape(B, L, K, N // K, H)
    s_BKGLM = jnp.einsum("blkgh,bmkh->bkglm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32) * H**-0.5
    s_BKGLM = ops.capped(s_BKGLM, spec.soft_cap)
    distance_BLM = position_BL[:, :, None] - jnp.arange(M)[None, None, :]
    visible_BLM = distance_BLM >= 0
    if spec.window is not None:
        visible_BLM &= distance_BLM < spec.window
    if spec.chunk_size is not None:
        first_key_BL = position_BL // spec.chunk_size * spec.chunk_size
        visible_BLM &= jnp.arange(M)[None, None, :] >= first_key_BL[:, :, None]
    s_BKGLM = jnp.where(visible_BLM[:, None, None], s_BKGLM, -jnp.inf)
    if sink_N is not None:
        sink_BKGL1 = jnp.broadcast_to(
            sink_N.astype(jnp.float32).reshape(1, K, -1, 1, 1), (*s_BKGLM.shape[:-1], 1)
        )
        s_BKGLM = jnp.concatenate([s_BKGLM, sink_BKGL1], axis=-1)
    # What the softmax gives a sink goes to no value.
    p_BKGLM = jax.nn.softmax(s_BKGLM, axis=-1)[..., :M]
    return jnp.einsum("bkglm,bmkp->blkgp", p_BKGLM.astype(v_BMKP.dtype), v_BMKP).reshape(B, L, N, P)
