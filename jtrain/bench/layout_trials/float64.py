"""Reference in float64 with no code of jtrain: the steps of AdamW and Muon on `float64_model`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jtrain.bench.layout_trials.float64_model import Model, differentiate

type Flat = dict[str, np.ndarray]
"""Arrays by path, such as `layers.attention.q_DNH`; layers are stacked along the first dimension."""


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
class ReferenceResults:
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
    model: Model,
    descent: Descent,
    params: Flat,
    batches: Sequence[Mapping[str, np.ndarray]],
    rejected: tuple[int, ...] = (),
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> ReferenceResults:
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
        results = ReferenceResults([], [], [], [], {}, {}, {}, np.zeros(()), math.inf)
        for step, batch in enumerate(batches):
            (_, (loss, nats, closest)), gradient = differentiate(model)(p, batch)
            g = {path: np.asarray(value) for path, value in gradient.items()}
            # Sorted, so that each array gets the same errors in every run of the seed.
            for path, value in sorted(g.items() if noise else ()):
                # Exact zeros stay: no layout adds anything to the gradient of what no token reads.
                error = noise * np.abs(value).max() * rng.uniform(-1, 1, value.shape)
                g[path] = value + np.where(value == 0, 0.0, error)
            norm = math.sqrt(sum(float((value**2).sum()) for value in g.values()))
            results.losses.append(float(loss))
            # Unclipped: bounds scale them by the clip themselves.
            results.norms.append(norm)
            results.gradients.append(g)
            results.closest = min(results.closest, float(closest))
            if step == 0:
                results.nats_BL = np.asarray(nats)
            clip = 1.0 if descent.clip_norm is None else min(1.0, descent.clip_norm / norm)
            if step not in rejected:
                p, m, v = _update(descent, step, p, {path: clip * value for path, value in g.items()}, m, v)
            # Without bias: v / (1 - b2^t), as Adam divides.
            results.slopes.append({path: np.sqrt(v[path] / (1 - descent.b2 ** (step + 1))) for path in v})
            if step == 0:
                results.mu, results.nu = dict(m), dict(v)
        results.last = p
        return results


def _update(d: Descent, step: int, p: Flat, g: Flat, m: Flat, v: Flat) -> tuple[Flat, Flat, Flat]:
    new_p, new_m, new_v = dict(p), dict(m), dict(v)
    for path, value in p.items():
        # Vectors are neither decayed nor orthogonalised: scales of norms, biases, and those of one dimension.
        name = path.rpartition(".")[2]
        letters = name.rpartition("_")[2]
        is_vector = "scale" in name or "bias" in name or len(letters) == 1 or "W" in letters
        decay = 0.0 if is_vector else d.weight_decay
        if d.muon and path.startswith("layers.") and not is_vector:
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
