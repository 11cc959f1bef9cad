"""Multi-head latent attention: keys and values of all heads from one short vector per position.

Latents are computed at this device's positions, and what is gathered over `tensor` are the latents, not the
residual stream: their matrices are on every device, no product is repeated, and the gradient of such a matrix
is the sum over the devices' positions, like that of a norm's scale. Only the products that make heads of them
are split by heads.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.forward_placement import LATENT
from jtrain.model.mixer import Mixer, MixerSpec, Rotation
from jtrain.model.norm import Norm, NormSpec
from jtrain.model.param import aligned, vector, weight
from jtrain.model.rope import Positions, PositionTables, QueryTemperature, RopeSpec, YarnScaling, yarn_mscale
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, gather_sequence

type Latents = tuple[Float[Array, "B _ Q"], Float[Array, "B _ C"], Float[Array, "B _ U"]]
"""Of queries (the layer's input where they have none), of keys and values, and the key that has a position.
"""


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    kv_rank: size C of the latent of keys and values.
    q_rank: size Q of the latent of queries; None projects them from the layer's input.
    nope_head_dim: dims of a head that know no position, T.
    rope_head_dim: rotated dims of a head, U; their key is the same for all heads.
    value_head_dim: size P of a head's values.
    num_heads: N; None takes the model's.
    rope: rotary positions; None leaves the U dims as they are (Kimi Linear).
    mscale: coefficient by which YaRN sharpens scores for its longer context; 0 for not at all.
    bias: True adds a learned vector to the latents and to the output.
    temperature: factor of queries by their position; None for none (Mistral 4).
    gate: True multiplies the output of each head by the sigmoid of a number of its own (Ling 3).
    latent_eps: added to the mean square in the norms of the latents.
    """

    name: ClassVar[str] = "attention"
    kv_rank: int
    q_rank: int | None = None
    nope_head_dim: int = 128
    rope_head_dim: int = 64
    value_head_dim: int = 128
    num_heads: int | None = None
    rope: RopeSpec | None = RopeSpec()  # noqa: RUF009 - frozen
    mscale: float = 0.0
    bias: bool = False
    temperature: QueryTemperature | None = None
    gate: bool = False
    latent_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in ("kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"):
            if (size := getattr(self, field)) < 1:
                raise UserError(f"mixer.{field}={size} of latent attention must be at least 1.")
        if self.rope_head_dim % 2:
            raise UserError(
                f"mixer.rope_head_dim={self.rope_head_dim} is odd, but rotary positions rotate pairs of "
                f"dimensions. Set mixer.rope_head_dim={self.rope_head_dim + 1} or another even one."
            )

    @property
    def head_dim(self) -> int:
        """Size H of a head's queries and keys."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        yarn = self.rope.scaling if self.rope is not None else None
        sharper = yarn_mscale(yarn.factor, self.mscale) if isinstance(yarn, YarnScaling) else 1.0
        return self.head_dim**-0.5 * sharper**2

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "LatentAttention":
        """The layer."""
        return LatentAttention(self, sizes, norm, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "LatentAttentionSpec":
        """This mixer with its number of heads."""
        return dataclasses.replace(self, num_heads=self.num_heads or sizes.num_heads)

    def rotation(self, sizes: ModelSizes) -> tuple[RopeSpec | Positions, int] | None:
        """Rotation that it reads, and the dims that are turned; None for nothing."""
        del sizes
        if self.temperature is not None:
            return Positions(self.rope, self.temperature, None), self.rope_head_dim
        return None if self.rope is None else (self.rope, self.rope_head_dim)

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """FLOPs of a trained token's scores over T + U dims, and of their use over P."""
        return 3 * (self.num_heads or sizes.num_heads) * (self.head_dim + self.value_head_dim) * seq_len

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> tuple[Array, Array]:
        """Latents and rotated keys, [B, M, C] and [B, M, U]: B M (C + U) elements, whatever the heads."""
        del sizes
        return jnp.zeros((batch, max_len, self.kv_rank), dtype), jnp.zeros(
            (batch, max_len, self.rope_head_dim), dtype
        )


class LatentAttention(Mixer):
    """The layer of a `LatentAttentionSpec`.

    Heads are split over `tensor`; each array here holds this device's heads, and the latents' matrices whole.
    """

    def __init__(self, spec: LatentAttentionSpec, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> None:
        num_heads, d_model = spec.num_heads or sizes.num_heads, sizes.d_model
        std = d_model**-0.5
        if spec.q_rank is None:
            self.q_DNH = weight("DNH", (d_model, num_heads, spec.head_dim), std=std, layers=layers)
        else:
            self.q_DQ = weight("DQ", (d_model, spec.q_rank), std=std, layers=layers)
            self.q_norm = Norm("Q", spec.q_rank, spec=norm, eps=spec.latent_eps, layers=layers)
            shape = spec.q_rank, num_heads, spec.head_dim
            self.q_QNH = weight("QNH", shape, std=spec.q_rank**-0.5, layers=layers)
        self.kv_DC = weight("DC", (d_model, spec.kv_rank), std=std, layers=layers)
        self.kv_norm = Norm("C", spec.kv_rank, spec=norm, eps=spec.latent_eps, layers=layers)
        self.k_DU = weight("DU", (d_model, spec.rope_head_dim), std=std, layers=layers)
        # A head's keys without positions, and then its values: one product makes both.
        shape = spec.kv_rank, num_heads, spec.nope_head_dim + spec.value_head_dim
        self.kv_CNE = weight("CNE", shape, std=spec.kv_rank**-0.5, layers=layers)
        out_std = sizes.branch_std(num_heads * spec.value_head_dim)
        self.o_NPD = weight("NPD", (num_heads, spec.value_head_dim, d_model), std=out_std, layers=layers)
        if spec.bias:
            if spec.q_rank is not None:
                self.q_bias_Q = vector("Q", (spec.q_rank,), ones=False, layers=layers)
            self.kv_bias_C = vector("C", (spec.kv_rank,), ones=False, layers=layers)
            self.k_bias_U = vector("U", (spec.rope_head_dim,), ones=False, layers=layers)
            self.o_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        if spec.gate:
            self.gate_DN = weight("DN", (d_model, num_heads), std=std, layers=layers)
        self.spec, self.chunk = spec, sizes.attention_chunk

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions; inside, its heads at all positions along `tensor`.

        Keys and values of every head exist, the form of attention with the fewest FLOPs where all positions
        are
        queries: T + U + P per score instead of 2 C + U.
        """
        q_latent_BLQ, kv_latent_BLC, k_BLU = self.latents(x_BLD)
        q_BLNH = self.queries(q_latent_BLQ, rotation, tensor)
        k_BLU = _rotated(gather_sequence(k_BLU, tensor.size)[:, :, None], rotation)
        (kv_BLNE,) = tensor.project_in(kv_latent_BLC, self.kv_CNE[...])
        nope = self.spec.nope_head_dim
        k_BLNU = jnp.broadcast_to(k_BLU, (*kv_BLNE.shape[:3], k_BLU.shape[-1]))
        k_BLNH = jnp.concatenate([kv_BLNE[..., :nope], k_BLNU], axis=-1)
        # Named after the rotation, so that a saved q or k is not rotated again.
        q_BLNH = checkpoint_name(q_BLNH, "attention_q")
        k_BLNH = checkpoint_name(k_BLNH, "attention_k")
        v_BLNP = checkpoint_name(kv_BLNE[..., nope:], "attention_v")
        # Attention divides by sqrt(H).
        if (factor := self.spec.scale * self.spec.head_dim**0.5) != 1:
            q_BLNH *= factor
        y_BLNP = ops.context_attention(q_BLNH, k_BLNH, v_BLNP, segment_BL, split=context, chunk=self.chunk)
        return self.project_out(y_BLNP, x_BLD, tensor)

    def latents(self, x_BLD: Float[Array, "B L D"]) -> Latents:
        """Latents at the positions of x, and the key that is not yet rotated."""
        kernels = [self.kv_DC[...], self.k_DU[...]]
        kernels += [self.q_DQ[...]] if self.spec.q_rank is not None else []
        # No axis splits these: x is at this device's positions.
        kv_BLC, k_BLU, *q = TensorAxis().project_in(x_BLD, *kernels)
        if self.spec.bias:
            kv_BLC += aligned(self.kv_bias_C[...], kv_BLC)
            k_BLU += aligned(self.k_bias_U[...], k_BLU)
        kv_BLC, k_BLU = checkpoint_name(self.kv_norm(kv_BLC), LATENT), checkpoint_name(k_BLU, LATENT)
        if not q:
            return x_BLD, kv_BLC, k_BLU
        q_BLQ = q[0] + aligned(self.q_bias_Q[...], q[0]) if self.spec.bias else q[0]
        return checkpoint_name(self.q_norm(q_BLQ), LATENT), kv_BLC, k_BLU

    def queries(
        self,
        q_latent_BLQ: Float[Array, "B _ Q"],
        rotation: Rotation,
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> Float[Array, "B L N H"]:
        """Queries of this device's heads, the last U dims of each rotated to its position."""
        kernel = self.q_DNH if self.spec.q_rank is None else self.q_QNH
        (q_BLNH,) = tensor.project_in(q_latent_BLQ, kernel[...])
        nope = self.spec.nope_head_dim
        q_BLNH = jnp.concatenate([q_BLNH[..., :nope], _rotated(q_BLNH[..., nope:], rotation)], axis=-1)
        if isinstance(rotation, PositionTables) and rotation.query_factor_BL is not None:
            q_BLNH *= rotation.query_factor_BL[..., None, None].astype(q_BLNH.dtype)
        return q_BLNH

    def project_out(
        self,
        y_BLNP: Float[Array, "B L N P"],
        x_BLD: Float[Array, "B _ D"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
    ) -> Float[Array, "B _ D"]:
        """Output from what the heads attended to; a gate reads the layer's input."""
        if self.spec.gate:
            (gate_BLN,) = tensor.project_in(x_BLD, self.gate_DN[...])
            gate_BLN = jax.nn.sigmoid(gate_BLN.astype(jnp.float32)).astype(y_BLNP.dtype)
            y_BLNP *= gate_BLN[..., None]
        y_BLD = tensor.project_out(y_BLNP, self.o_NPD[...])
        # Once, at the positions that this device keeps of the sum.
        return y_BLD + aligned(self.o_bias_D[...], y_BLD) if self.spec.bias else y_BLD

    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: tuple[Float[Array, "B M C"], Float[Array, "B M U"]],
    ) -> tuple[Float[Array, "B L D"], tuple[Array, Array]]:
        """Output at the new positions, and all latents and rotated keys with theirs.

        Keys and values of heads are never made: their matrix is multiplied with the queries instead, and with
        what is read of the latents (arXiv:2405.04434, section 2.1.2). Padding writes beyond the last token,
        which no query sees and the next tokens overwrite.
        """
        del valid_BL
        q_latent_BLQ, kv_latent_BLC, k_BLU = self.latents(x_BLD)
        new = kv_latent_BLC, _rotated(k_BLU[:, :, None], rotation)[:, :, 0]
        latent_BMC, k_BMU = (
            jax.lax.dynamic_update_slice_in_dim(cached, array, position_BL[0, 0], axis=1)
            for cached, array in zip(cache, new, strict=True)
        )
        q_BLNH, nope = self.queries(q_latent_BLQ, rotation), self.spec.nope_head_dim
        k_CNT, v_CNP = self.kv_CNE[..., :nope], self.kv_CNE[..., nope:]
        q_BLNC = jnp.einsum("blnt,cnt->blnc", q_BLNH[..., :nope], k_CNT)
        s_BNLM = jnp.einsum("blnc,bmc->bnlm", q_BLNC, latent_BMC, preferred_element_type=jnp.float32)
        s_BNLM += jnp.einsum("blnu,bmu->bnlm", q_BLNH[..., nope:], k_BMU, preferred_element_type=jnp.float32)
        visible_BLM = position_BL[:, :, None] >= jnp.arange(latent_BMC.shape[1])[None, None, :]
        s_BNLM = jnp.where(visible_BLM[:, None], s_BNLM * self.spec.scale, -jnp.inf)
        p_BNLM = jax.nn.softmax(s_BNLM, axis=-1).astype(latent_BMC.dtype)
        y_BLNC = jnp.einsum("bnlm,bmc->blnc", p_BNLM, latent_BMC)
        y_BLNP = jnp.einsum("blnc,cnp->blnp", y_BLNC, v_CNP)
        return self.project_out(y_BLNP, x_BLD), (latent_BMC, k_BMU)


def _rotated(x_BLNU: Float[Array, "B L N U"], rotation: Rotation) -> Float[Array, "B L N U"]:
    return x_BLNU if rotation is None or rotation[0] is None else ops.rope(x_BLNU, *rotation[:2])
