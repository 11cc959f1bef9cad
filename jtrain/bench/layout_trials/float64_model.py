"""The model of the float64 reference, with no code of jtrain: forward pass, loss and gradients.

Written from the papers and from the documentation of the settings, whole arrays on one device, every expert
computed for every token. It reads arrays by the names that checkpoints have, and descriptions of blocks by
their fields.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FAR = 50.0
"""Times that a kink of an activation counts for: float32 errs less before it than in a router's logits."""

ATTENTION_FIELDS = frozenset(
    [
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rope",
        "bias",
        "qk_norm",
        "norm_after_rope",
        "window",
        "scale",
        "gate",
    ]
)
"""Fields of attention that the formula here knows."""
MLP_FIELDS = frozenset(["d_ff", "activation", "gated", "bias"])
"""Fields of a dense layer that the formula here knows."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Settings of a model that its arrays do not show.

    first, pattern, last: descriptions of layers; the pattern's arrays are stacked, one entry per repetition.
    layers: function of (spec, weights, x, position, segment) for mixers and dense layers that this file has
      no formula of.
    """

    first: tuple[Any, ...]
    pattern: tuple[Any, ...]
    last: tuple[Any, ...]
    norm: Any
    num_routers: int
    norm_eps: float = 1e-5
    tied: bool = False
    z_loss: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    embedding_norm: bool = False
    logit_soft_cap: float | None = None
    layers: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Values that every layer reads."""

    position: Any
    segment: Any


@functools.cache
def differentiate(model: Model) -> Callable[..., Any]:
    """Function of (parameters, batch) that gives (objective, (loss, nats, closest)) and its gradients."""
    return jax.jit(jax.value_and_grad(functools.partial(_objective, model), has_aux=True))


def _objective(model: Model, p: Any, batch: Any) -> Any:
    target = batch["target_BL"]
    has_target = target >= 0
    # A batch without any target has a loss of 0, not nan.
    count = jnp.maximum(has_target.sum(), 1)
    logits, router, closest = logits_of(model, p, batch)
    partition = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
    nats = jnp.where(has_target, partition - picked, 0.0)
    penalty = jnp.where(has_target, model.z_loss * partition**2, 0.0)
    loss = nats.sum() / count
    # Routers read prompts too: their losses are a mean over all tokens but padding.
    num_read = jnp.maximum((batch["segment_BL"] != 0).sum(), 1)
    return loss + penalty.sum() / count + router / num_read, (loss, nats, closest)


def logits_of(model: Model, p: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Logits [B, L, V], the sum of the routers' losses, and how close any choice or kink was to going the
    other way.
    """
    x, router, closest = _hidden(model, p, batch)
    unembed = p["embed_VD"].T if model.tied else p["unembed_DV"]
    logits = x @ unembed * model.logit_scale
    if model.logit_soft_cap is not None:
        logits = model.logit_soft_cap * jnp.tanh(logits / model.logit_soft_cap)
    return logits, router, closest


def _hidden(model: Model, p: Any, batch: Any) -> Any:
    rows = PackedRows(batch["position_BL"], batch["segment_BL"])
    embedded = p["embed_VD"][batch["token_BL"]] * model.embedding_scale
    if model.embedding_norm:
        embedded = _norm(model, {}, embedded, spec=_Unscaled())
    # Activations, sum of the routers' losses, and how close any choice or kink was to going the other way.
    carry = (embedded, jnp.zeros(()), jnp.full((), jnp.inf))
    for index, spec in enumerate(model.first):
        carry = _block(model, spec, _below(p, f"first_layers.block_{index}."), rows, carry)
    stacked = _below(p, "layers.")

    def period(carry: Any, w: Any) -> Any:
        for index, spec in enumerate(model.pattern):
            # A pattern of one block is not numbered.
            of_block = w if len(model.pattern) == 1 else _below(w, f"block_{index}.")
            carry = _block(model, spec, of_block, rows, carry)
        return carry, None

    carry, _ = jax.lax.scan(period, carry, stacked)
    for index, spec in enumerate(model.last):
        carry = _block(model, spec, _below(p, f"last_layers.block_{index}."), rows, carry)
    x, router, closest = carry
    return _norm(model, _below(p, "final_norm."), x), router, closest


def _below(p: Any, prefix: str) -> Any:
    return {path.removeprefix(prefix): value for path, value in p.items() if path.startswith(prefix)}


def _block(model: Model, spec: Any, w: Any, rows: PackedRows, carry: Any) -> Any:
    x, router, closest = carry
    norms_input = spec.norms != "after"
    parallel = spec.norms.startswith("parallel")

    def branch(name: str, x: Any, compute: Callable[[Any], Any]) -> Any:
        of_input = "attention" if spec.norms == "parallel_shared" else name
        y = compute(_norm(model, _below(w, f"{of_input}_norm."), x) if norms_input else x)
        names_of_output_norm = (
            ("after", "sandwich") if name == "attention" else ("after", "sandwich", "sandwich_mlp")
        )
        y = _norm(model, _below(w, f"{name}_post_norm."), y) if spec.norms in names_of_output_norm else y
        return spec.residual_scale * y

    stream = x
    if spec.mixer is not None:
        stream = x + branch("attention", x, lambda h: _mixer(model, spec.mixer, w, h, rows))
    if spec.feed_forward is not None:
        losses = []

        def feed_forward(h: Any) -> Any:
            y, *branch_losses = _feed_forward(model, spec.feed_forward, _below(w, "mlp."), h, rows)
            losses.extend(branch_losses)
            return y

        # Parallel branches both read the layer's input.
        stream = stream + branch("mlp", x if parallel else stream, feed_forward)
        # The mean over the layers with experts.
        router = router + losses[0] / max(model.num_routers, 1)
        closest = jnp.minimum(closest, losses[1])
    if spec.stream_scale:
        # A number of the model's that is not trained.
        stream = stream * jax.lax.stop_gradient(w["stream_scale"])
    return stream, router, closest


def _norm(model: Model, w: Any, x: Any, *, spec: Any = None, axes: int = 1) -> Any:
    spec, dims = spec or model.norm, tuple(range(-axes, 0))
    if spec.kind == "layer":
        x = x - x.mean(axis=dims, keepdims=True)
    y = x / jnp.sqrt((x * x).mean(axis=dims, keepdims=True) + model.norm_eps)
    # Named after their dimensions: scale_D, scale_H, scale_NH.
    scale = next((value for name, value in w.items() if name.startswith("scale_")), None)
    bias = next((value for name, value in w.items() if name.startswith("bias_")), None)
    if scale is not None:
        y = y * _to_end(scale + 1 if spec.scale == "one_plus" else scale, y)
    return y if bias is None else y + _to_end(bias, y)


def _to_end(vector: Any, x: Any) -> Any:
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def _mixer(model: Model, spec: Any, w: Any, x: Any, rows: PackedRows) -> Any:
    weights = _below(w, f"{spec.name}.")
    # Only fields that differ from their defaults must be known to the formula below.
    changed = {f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default}
    if spec.name == "attention" and changed <= ATTENTION_FIELDS:
        return _attention(model, spec, weights, x, rows)
    assert model.layers is not None
    return model.layers(spec, weights, x, rows.position, rows.segment)


def _attention(model: Model, spec: Any, w: Any, x: Any, rows: PackedRows) -> Any:
    q = jnp.einsum("bld,dnh->blnh", x, w["q_DNH"])
    k = jnp.einsum("bld,dkh->blkh", x, w["k_DKH"])
    v = jnp.einsum("bld,dkh->blkh", x, w["v_DKH"])
    if spec.bias != "none":
        q, k, v = (
            y + _to_end(w[name], y) for y, name in ((q, "q_bias_NH"), (k, "k_bias_KH"), (v, "v_bias_KH"))
        )
    if not spec.norm_after_rope:
        q, k = (_head_norm(model, spec, _below(w, f"{name}_norm."), y) for name, y in (("q", q), ("k", k)))
    if spec.rope is not None:
        q, k = (_rotate(spec.rope, y, rows.position) for y in (q, k))
    if spec.norm_after_rope:
        q, k = (_head_norm(model, spec, _below(w, f"{name}_norm."), y) for name, y in (("q", q), ("k", k)))
    # Key heads are repeated, as the plain formula has it.
    shared_by = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, shared_by, axis=2), jnp.repeat(v, shared_by, axis=2)
    scores = jnp.einsum("blnh,bmnh->bnlm", q, k) * (q.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    # A query sees at least itself, so no row is empty.
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None, :]
    is_near = (distance >= 0) & (distance < (spec.window or x.shape[1]))
    may_see = is_near[None] & (rows.segment[:, :, None] == rows.segment[:, None, :])
    weight = jax.nn.softmax(jnp.where(may_see[:, None], scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bnlm,bmnh->blnh", weight, v)
    if spec.gate:
        y = y * jax.nn.sigmoid(jnp.einsum("bld,dnh->blnh", x, w["gate_DNH"]))
    y = jnp.einsum("blnh,nhd->bld", y, w["o_NHD"])
    return y + _to_end(w["o_bias_D"], y) if spec.bias == "all" else y


def _head_norm(model: Model, spec: Any, w: Any, x: Any) -> Any:
    if spec.qk_norm == "none":
        return x
    unscaled = _Unscaled() if spec.qk_norm == "unscaled" else None
    return _norm(model, w, x, spec=unscaled, axes=2 if spec.qk_norm == "all" else 1)


@dataclasses.dataclass(frozen=True)
class _Unscaled:
    kind: str = "rms"
    scale: str = "none"


def _rotate(rope: Any, x: Any, position: Any) -> Any:
    rotated = int(x.shape[-1] * rope.rotated_share) // 2 * 2
    half = rotated // 2
    frequency = _scaled(rope, rope.theta ** (-np.arange(half) / half)).astype(np.float32)
    # Positions times frequencies in float32, as every implementation has them: its rounding is part of the
    # model.
    angle = (position[..., None].astype(jnp.float32) * frequency[None, None]).astype(jnp.float64)
    factor = getattr(rope.scaling, "attention_factor", 1.0)
    angle = -angle if rope.backwards else angle
    cos, sin = factor * jnp.cos(angle)[:, :, None, :], factor * jnp.sin(angle)[:, :, None, :]
    # Pairs (i, i + half), as in checkpoints of Llama.
    a, b, unrotated = x[..., :half], x[..., half:rotated], x[..., rotated:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, unrotated], axis=-1)


def _scaled(rope: Any, frequency: np.ndarray) -> np.ndarray:
    """Frequencies for contexts that are longer than those of pretraining."""
    scaling, dims = rope.scaling, 2 * len(frequency)
    match type(scaling).__name__:
        case "LinearScaling":
            return frequency / scaling.factor
        case "ProportionalScaling":
            return np.where(np.arange(len(frequency)) < int(scaling.share * len(frequency)), frequency, 0.0)
        case "Llama3Scaling":
            wavelength = 2 * math.pi / frequency
            smooth = (scaling.original_seq_len / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            # Between the two limits both are mixed; longer waves are interpolated, shorter ones stay.
            blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
            blended = np.where(
                wavelength > scaling.original_seq_len / scaling.low_freq_factor,
                frequency / scaling.factor,
                blended,
            )
            return np.where(
                wavelength < scaling.original_seq_len / scaling.high_freq_factor, frequency, blended
            )
        case "YarnScaling":
            ends = [
                # The dim whose wave turns that many times over the original context.
                dims * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            ]
            if scaling.truncate:
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], dims - 1)
            # 0 where a dim turns often over the context, and stays; 1 where it is interpolated.
            # 0.001 where both ends meet: a step in place of a division by zero.
            width = max(high - low, 0) or 0.001
            ramp = np.clip((np.arange(len(frequency)) - low) / width, 0, 1)
            return ramp * frequency / scaling.factor + (1 - ramp) * frequency
        case _:
            return frequency


def _feed_forward(model: Model, spec: Any, w: Any, x: Any, rows: PackedRows) -> tuple[Any, Any, Any]:
    """Output, router losses, and how close a choice or a kink was."""
    valid = rows.segment > 0
    if "router_DX" in w:
        return _experts(spec, w, x, valid)
    changed = {f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default}
    if changed - MLP_FIELDS or spec.activation == "xielu":
        assert model.layers is not None
        return model.layers(spec, w, x, rows.position, rows.segment), jnp.zeros(()), jnp.inf
    up = x @ w["up_DF"]
    up = up + _to_end(w["up_bias_F"], up) if spec.bias else up
    if not spec.gated:
        bent, wide = up, _activate(spec.activation, up)
    else:
        bent = x @ w["gate_DF"]
        bent = bent + _to_end(w["gate_bias_F"], bent) if spec.bias else bent
        wide = _gated(spec.activation, bent, up)
    y = wide @ w["down_FD"]
    y = y + _to_end(w["down_bias_D"], y) if spec.bias else y
    # Only this activation's slope jumps. Padding is at 0 in some models, and in no loss.
    kink = jnp.where(valid[..., None], jnp.abs(bent), jnp.inf).min() if spec.activation == "relu" else jnp.inf
    return y, jnp.zeros(()), FAR * kink


def _gated(activation: Any, gate: Any, up: Any) -> Any:
    if isinstance(activation, str):
        return _activate(activation, gate) * up
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)


def _activate(activation: str, x: Any) -> Any:
    match activation:
        case "silu":
            return x / (1 + jnp.exp(-x))
        case "gelu":
            return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return jnp.where(x > 0, x, 0.0)
        case "relu2":
            return jnp.where(x > 0, x, 0.0) ** 2
        case _:
            raise ValueError(activation)


def _shared(spec: Any, x: Any, w: Any) -> Any:
    up = x @ w["up_DF"]
    wide = _gated(spec.activation, x @ w["gate_DF"], up) if spec.gated else _activate(spec.activation, up)
    return spec.shared_scale * (wide @ w["down_FD"])


def _experts(spec: Any, w: Any, x: Any, valid: Any) -> tuple[Any, Any, Any]:
    logits = x @ w["router_DX"]
    softmax, X = spec.score == "softmax", logits.shape[-1]
    score = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    # Gradients do not flow through the choice of experts. Without a bias the logits are ranked alike.
    ranked = logits if (softmax and not spec.correction_bias) or spec.chosen_by == "logits" else score
    ranked = jax.lax.stop_gradient(
        ranked + (_to_end(w["router_bias_X"], ranked) if spec.correction_bias else 0.0)
    )
    gaps = []
    if spec.top_groups < spec.num_groups:
        in_groups = ranked.reshape(*ranked.shape[:-1], spec.num_groups, X // spec.num_groups)
        best = jnp.sort(in_groups, axis=-1)[..., -2 if spec.group_score == "best_two" else -1 :].sum(axis=-1)
        is_best, gap = _highest(best, spec.top_groups)
        gaps.append(gap)
        ranked = jnp.where(jnp.repeat(is_best, X // spec.num_groups, axis=-1), ranked, -jnp.inf)
    chosen, gap = _highest(ranked, spec.top_k)
    # The gap between the last chosen and the first not chosen, of a token that is one.
    closest = jnp.stack([jnp.where(valid, gap, jnp.inf).min() for gap in (*gaps, gap)]).min()
    weight = jnp.where(chosen, score, 0.0)
    if spec.normalize_top_k:
        weight = weight / weight.sum(axis=-1, keepdims=True)
    weight = weight * spec.weight_scale
    read, added = (weight, 1.0 * chosen) if spec.weight_input else (jnp.ones_like(weight), weight)
    of_experts = x[:, :, None, :] * read[..., None]
    up = jnp.einsum("blxd,xdf->blxf", of_experts, w["up_XDF"])
    if spec.gated:
        wide = _gated(spec.activation, jnp.einsum("blxd,xdf->blxf", of_experts, w["gate_XDF"]), up)
    else:
        wide = _activate(spec.activation, up)
    y = jnp.einsum("blxd,blx->bld", jnp.einsum("blxf,xfd->blxd", wide, w["down_XFD"]), added)
    y = jnp.where(valid[..., None], y, 0.0)  # padding goes to no expert
    if "shared.up_DF" in w:
        shared = _shared(spec, x, _below(w, "shared."))
        y = y + (shared * jax.nn.sigmoid(x @ w["shared_gate_D"])[..., None] if spec.shared_gate else shared)
    slots = (chosen & valid[..., None]).sum(axis=1)
    tokens = jnp.maximum(valid.sum(axis=1), 1)[:, None]
    # 1 for every expert if tokens are spread evenly.
    share = slots * (X / spec.top_k) / tokens
    chance = score if softmax else score / score.sum(axis=-1, keepdims=True)
    balance = (share * jnp.where(valid[..., None], chance, 0.0).sum(axis=1)).sum()
    z = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0).sum()
    return y, spec.balance_loss * balance + spec.router_z_loss * z, closest


def _highest(ranked: Any, count: int) -> tuple[Any, Any]:
    """True for the highest ones, and the gap to the first that is not among them."""
    order = jnp.sort(ranked, axis=-1)[..., ::-1]
    return ranked >= order[..., count - 1 : count], order[..., count - 1] - order[..., count]
