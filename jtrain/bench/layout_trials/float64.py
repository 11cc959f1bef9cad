"""Reference in float64 with no code of jtrain: forward pass, loss, gradients, AdamW and Muon.

Written from the papers and from the documentation of the settings, whole arrays on one device, every expert
computed for every token. Gradients are JAX's own. It reads arrays by the names that checkpoints have, and
nothing else.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Flat = dict[str, np.ndarray]
"""Arrays by path, such as `layers.attention.q_DNH`; layers are stacked along the first dimension."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Settings of a model that its arrays do not show."""

    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tied: bool = False
    z_loss: float = 0.0
    experts: int = 0
    top_k: int = 0
    normalize_top_k: bool = True
    balance_loss: float = 0.0
    router_z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class Descent:
    """Settings of the optimizer: AdamW, or Muon for the layers' matrices; warm-up, then a half cosine."""

    muon: bool = False
    peak_lr: float = 3e-3
    warmup_steps: int = 4
    num_steps: int = 20
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    momentum: float = 0.95
    update_rms: float = 0.2

    def rate(self, step: int) -> float:
        """Learning rate of update `step`, from 0."""
        # Update 0 already has a rate: (0 + 1) / warmup_steps.
        rise = min(1.0, (step + 1) / self.warmup_steps)
        progress = min(max((step - self.warmup_steps) / (self.num_steps - self.warmup_steps), 0.0), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_lr * rise * (self.final_fraction + (1 - self.final_fraction) * cosine)


@dataclasses.dataclass
class ReferenceCourse:
    """Results of some steps.

    gradients: of each step, not clipped.
    mu, nu: moments after the first step.
    slopes: of each step, root of the second moment without bias, which divides a gradient's error in Adam's
      update.
    nats_BL: with the first parameters.
    closest: smallest difference of the last expert that was chosen and the first that was not, in router
      logits.
    """

    losses: list[float]
    norms: list[float]
    gradients: list[Flat]
    slopes: list[Flat]
    mu: Flat
    nu: Flat
    last: Flat
    nats_BL: np.ndarray
    closest: float


def train(
    sizes: Sizes,
    descent: Descent,
    params: Flat,
    batches: Sequence[Mapping[str, np.ndarray]],
    rejected: tuple[int, ...] = (),
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> ReferenceCourse:
    """Trains from `params` on one batch per step.

    Args:
      rejected: steps, from 0, that leave parameters and moments as they are.
      noise: largest error added to every element of a gradient, relative to the largest element of its array.
    """
    rng = np.random.default_rng(seed)
    # JAX is in 32 bits for the run under test; only this block has 64.
    with jax.enable_x64(True):
        p = {path: np.asarray(value).astype(np.float64) for path, value in params.items()}
        m = {path: np.zeros_like(value) for path, value in p.items()}
        v = {path: np.zeros_like(value) for path, value in p.items()}
        course = ReferenceCourse([], [], [], [], {}, {}, {}, np.zeros(()), math.inf)
        for step, batch in enumerate(batches):
            (_, (loss, nats, closest)), gradient = differentiate(sizes)(p, batch)
            g = {path: np.asarray(value) for path, value in gradient.items()}
            # Sorted, so that each array gets the same errors in every run of the seed.
            for path, value in sorted(g.items() if noise else ()):
                # Exact zeros stay: no layout adds anything to the gradient of what no token reads.
                error = noise * np.abs(value).max() * rng.uniform(-1, 1, value.shape)
                g[path] = value + np.where(value == 0, 0.0, error)
            norm = math.sqrt(sum(float((value**2).sum()) for value in g.values()))
            course.losses.append(float(loss))
            # Unclipped: bounds scale them by the clip themselves.
            course.norms.append(norm)
            course.gradients.append(g)
            course.closest = min(course.closest, float(closest))
            if step == 0:
                course.nats_BL = np.asarray(nats)
            clip = 1.0 if descent.clip_norm is None else min(1.0, descent.clip_norm / norm)
            if step not in rejected:
                p, m, v = _update(descent, step, p, {path: clip * value for path, value in g.items()}, m, v)
            # Without bias: v / (1 - b2^t), as Adam divides.
            course.slopes.append({path: np.sqrt(v[path] / (1 - descent.b2 ** (step + 1))) for path in v})
            if step == 0:
                course.mu, course.nu = dict(m), dict(v)
        course.last = p
        return course


def _update(d: Descent, step: int, p: Flat, g: Flat, m: Flat, v: Flat) -> tuple[Flat, Flat, Flat]:
    new_p, new_m, new_v = dict(p), dict(m), dict(v)
    for path, value in p.items():
        is_scale = path.rpartition(".")[2].startswith("scale_")
        # Scales of norms are neither decayed nor orthogonalised.
        decay = 0.0 if is_scale else d.weight_decay
        if d.muon and path.startswith("layers.") and not is_scale:
            new_m[path] = d.momentum * m[path] + (1 - d.momentum) * g[path]
            # Nesterov's look-ahead with both terms corrected for their own number of steps.
            lookahead = d.momentum * new_m[path] / (1 - d.momentum ** (step + 2))
            lookahead = lookahead + (1 - d.momentum) * g[path] / (1 - d.momentum ** (step + 1))
            direction = d.update_rms * _orthogonal(path, lookahead)
        else:
            new_m[path] = d.b1 * m[path] + (1 - d.b1) * g[path]
            new_v[path] = d.b2 * v[path] + (1 - d.b2) * g[path] ** 2
            corrected = np.sqrt(new_v[path] / (1 - d.b2 ** (step + 1)))
            direction = new_m[path] / (1 - d.b1 ** (step + 1)) / (corrected + d.eps)
        new_p[path] = value - d.rate(step) * (direction + decay * value)
    return new_p, new_m, new_v


def _orthogonal(path: str, stack: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz steps of every layer's matrix [inputs, outputs], times the longer side's root."""
    letters = path.rpartition("_")[2]
    # The letters at the end of a path name its dimensions, D being the model's width.
    matrices = stack.reshape(-1, *stack.shape[2:]) if letters.startswith("X") else stack
    # Experts are further matrices of the stack.
    letters = letters.removeprefix("X")
    # A matrix into the model's width has the other dimensions as inputs.
    inputs = matrices.shape[1] if letters[0] == "D" else math.prod(matrices.shape[1:-1])
    x = matrices.reshape(len(matrices), inputs, -1)
    longer = math.sqrt(max(x.shape[1:]))
    # The iteration multiplies by x x^T, which is smaller if x is wide.
    tall = x.shape[1] > x.shape[2]
    x = x.swapaxes(1, 2) if tall else x
    # The Frobenius norm bounds the spectral norm, so the iteration starts within its range.
    x = x / (np.sqrt((x**2).sum(axis=(1, 2), keepdims=True)) + 1e-8)
    for _ in range(5):
        square = x @ x.swapaxes(1, 2)
        # Muon's published quintic coefficients.
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    x = x.swapaxes(1, 2) if tall else x
    return longer * x.reshape(stack.shape)


@functools.cache
def differentiate(sizes: Sizes) -> Callable[..., Any]:
    """Function of (parameters, batch) that gives (objective, (loss, nats, closest)) and its gradients."""
    return jax.jit(jax.value_and_grad(functools.partial(_objective, sizes), has_aux=True))


def _objective(sizes: Sizes, p: Any, batch: Any) -> Any:
    target = batch["target_BL"]
    has_target = target >= 0
    # A batch without any target has a loss of 0, not nan.
    count = jnp.maximum(has_target.sum(), 1)
    x, router, closest = _hidden(sizes, p, batch)
    unembed = p["embed_VD"].T if sizes.tied else p["unembed_DV"]
    logits = x @ unembed
    partition = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
    nats = jnp.where(has_target, partition - picked, 0.0)
    penalty = jnp.where(has_target, sizes.z_loss * partition**2, 0.0)
    loss = nats.sum() / count
    # Penalties are sums over tokens too, divided by the same count.
    return loss + (penalty.sum() + router) / count, (loss, nats, closest)


def _hidden(sizes: Sizes, p: Any, batch: Any) -> Any:
    position, segment = batch["position_BL"], batch["segment_BL"]
    columns = jnp.arange(segment.shape[1])
    causal = columns[:, None] >= columns[None, :]
    may_see = causal[None] & (segment[:, :, None] == segment[:, None, :])
    layers = {path.removeprefix("layers."): value for path, value in p.items() if path.startswith("layers.")}
    num_layers = len(layers["attention_norm.scale_D"])

    def layer(carry: Any, w: Any) -> Any:
        x, router, closest = carry
        x = x + _attention(sizes, w, _norm(x, w["attention_norm.scale_D"], sizes.norm_eps), position, may_see)
        h = _norm(x, w["mlp_norm.scale_D"], sizes.norm_eps)
        if not sizes.experts:
            return (x + _swiglu(h, w["mlp.gate_DF"], w["mlp.up_DF"], w["mlp.down_FD"]), router, closest), None
        # Padding is in no expert, so its router does not count.
        y, losses, gap = _experts(sizes, w, h, segment > 0)
        return (x + y, router + losses / num_layers, jnp.minimum(closest, gap)), None

    first = (p["embed_VD"][batch["token_BL"]], jnp.zeros(()), jnp.full((), jnp.inf))
    (x, router, closest), _ = jax.lax.scan(layer, first, layers)
    return _norm(x, p["final_norm.scale_D"], sizes.norm_eps), router, closest


def _norm(x: Any, scale: Any, eps: float) -> Any:
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def _rotate(sizes: Sizes, x: Any, position: Any) -> Any:
    half = x.shape[-1] // 2
    frequency = (sizes.rope_theta ** (-np.arange(half) / half)).astype(np.float32).astype(np.float64)
    # Positions times frequencies in float32, as every implementation has them: its rounding is part of the
    # model.
    angle = (position[..., None].astype(jnp.float32) * frequency[None, None].astype(np.float32)).astype(
        jnp.float64
    )
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(sizes: Sizes, w: Any, x: Any, position: Any, may_see: Any) -> Any:
    q = jnp.einsum("bld,dnh->blnh", x, w["attention.q_DNH"])
    k = jnp.einsum("bld,dkh->blkh", x, w["attention.k_DKH"])
    v = jnp.einsum("bld,dkh->blkh", x, w["attention.v_DKH"])
    if "attention.q_norm.scale_H" in w:
        q = _norm(q, w["attention.q_norm.scale_H"], sizes.norm_eps)
        k = _norm(k, w["attention.k_norm.scale_H"], sizes.norm_eps)
    q, k = _rotate(sizes, q, position), _rotate(sizes, k, position)
    # Key heads are repeated, as the plain formula has it.
    shared_by = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, shared_by, axis=2), jnp.repeat(v, shared_by, axis=2)
    scores = jnp.einsum("blnh,bmnh->bnlm", q, k) / math.sqrt(q.shape[-1])
    # A query sees at least itself, so no row is empty.
    weight = jax.nn.softmax(jnp.where(may_see[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("blnh,nhd->bld", jnp.einsum("bnlm,bmnh->blnh", weight, v), w["attention.o_NHD"])


def _swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    g = x @ gate
    return (g * jax.nn.sigmoid(g) * (x @ up)) @ down


def _experts(sizes: Sizes, w: Any, x: Any, valid: Any) -> Any:
    logits = x @ w["mlp.router_DX"]
    chance = jax.nn.softmax(logits, axis=-1)
    # Gradients do not flow through the choice of experts.
    ranked = jnp.sort(jax.lax.stop_gradient(logits), axis=-1)[..., ::-1]
    # The gap between the last chosen and the first not chosen expert.
    gap = jnp.where(valid, ranked[..., sizes.top_k - 1] - ranked[..., sizes.top_k], jnp.inf).min()
    chosen = jax.lax.stop_gradient(logits) >= ranked[..., sizes.top_k - 1 : sizes.top_k]
    weight = jnp.where(chosen, chance, 0.0)
    if sizes.normalize_top_k:
        # Weights of the chosen experts sum to 1 only if the model normalises them.
        weight = weight / weight.sum(axis=-1, keepdims=True)
    gate, up = (jnp.einsum("bld,xdf->blxf", x, w[f"mlp.{name}_XDF"]) for name in ("gate", "up"))
    expert_outputs = jnp.einsum("blxf,xfd->blxd", gate * jax.nn.sigmoid(gate) * up, w["mlp.down_XFD"])
    y = jnp.einsum("blxd,blx->bld", expert_outputs, weight)
    y = jnp.where(valid[..., None], y, 0.0)  # padding goes to no expert
    if "mlp.shared.gate_DF" in w:
        y = y + _swiglu(x, w["mlp.shared.gate_DF"], w["mlp.shared.up_DF"], w["mlp.shared.down_FD"])
    slots = (chosen & valid[..., None]).sum(axis=1)
    tokens = jnp.maximum(valid.sum(axis=1), 1)[:, None]
    # 1 for every expert if tokens are spread evenly.
    share = slots * (sizes.experts / sizes.top_k) / tokens
    balance = (share * jnp.where(valid[..., None], chance, 0.0).sum(axis=1)).sum()
    z = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0).sum()
    return y, sizes.balance_loss * balance + sizes.router_z_loss * z, gap
