"""What a teacher says of each token as a target of the loss: whole, split over devices, and in parts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.parts import NO_COLUMN, linear_cross_entropy_in_parts, top_k_in_parts
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from jtrain_kernels.linear_cross_entropy.soft_targets import SoftTargets
from tests.kernels.gradients import agree_with, in_float32, normal

B, L, D, V = 2, 16, 8, 40
DEVICES = 4


def targets() -> np.ndarray:
    """Targets, of which a third are ignored, though a teacher speaks of all."""
    target = np.random.default_rng(0).integers(0, V, (B, L), dtype=np.int32)
    target[np.random.default_rng(1).random((B, L)) < 1 / 3] = -1
    return target


def teacher(kept: int, share: float, *, seed: int = 5) -> SoftTargets:
    """Some tokens of each place in any order, with probabilities of their own and what is left for the others."""
    rng = np.random.default_rng(seed)
    id_BLJ = np.argsort(rng.random((B, L, V)), axis=-1)[..., :kept].astype(np.int32)
    p_BLI = rng.dirichlet(np.ones(kept + (kept < V)), size=(B, L))
    logprob_BLI = (
        np.log(p_BLI)
        if kept < V
        else np.pad(np.log(p_BLI), ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf)
    )
    return SoftTargets(jnp.asarray(id_BLJ), jnp.asarray(logprob_BLI, jnp.float32), share)


def pad_parts(w: jax.Array, first: Any, parts: int) -> tuple[jax.Array, jax.Array]:
    """Columns in parts, of which the last has others at its end that must not count, and their ids."""
    missing = -w.shape[1] % parts
    column = jnp.pad(first + jnp.arange(w.shape[1]), (0, missing), constant_values=NO_COLUMN).reshape(
        parts, -1
    )
    filled = jnp.pad(w, ((0, 0), (0, missing)), constant_values=7)
    return filled.reshape(D, parts, -1).swapaxes(0, 1), column


def loss_of(form: str, soft: SoftTargets, **settings: Any) -> Any:
    """Both sums of a form of the op as a function of hidden states and unembedding."""
    target = jnp.asarray(targets())
    settings |= dict(chunk_tokens=3, soft=soft)

    def in_parts(x: jax.Array, w: jax.Array, first: Any, axis: str | None) -> Any:
        given, column = pad_parts(w, first, 3)
        return linear_cross_entropy_in_parts(
            x, given / 2, column, target, fetch=lambda part: part * 2, axis=axis, **settings
        )

    def local(x: jax.Array, w: jax.Array) -> Any:
        if form == "parts, split":
            sums = in_parts(x, w, jax.lax.axis_index("tensor") * w.shape[1], "tensor")
        else:
            sums = vocab_parallel_linear_cross_entropy(x, w, target, axis="tensor", **settings)
        return jax.lax.psum(sums, "tensor")

    if form == "whole":
        return lambda x, w: linear_cross_entropy(x, w, target, **settings)
    if form == "parts":
        return lambda x, w: in_parts(x, w, 0, None)
    return on_devices(local, P())


def on_devices(local: Any, out_specs: Any) -> Any:
    """Runs a function of blocks, of the hidden states by position and of the unembedding by column."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("tensor",))
    specs = P(None, "tensor"), P(None, "tensor")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)


@in_float32(
    "form,kept,share",
    *[("whole", 3, 1.0), ("split", 3, 0.4), ("parts", 5, 0.4), ("parts, split", 3, 1.0), ("split", V, 1.0)],
    ("parts, split", V, 0.4),
)
def test_the_loss_and_gradients_are_those_of_the_formula(
    dtype: str, form: str, kept: int, share: float
) -> None:
    """With weights of the tokens, a z-loss and capped logits; also where all tokens of the vocabulary are kept."""
    weight = jnp.asarray(np.random.default_rng(3).random((B, L), np.float32))
    settings: Any = dict(z_loss=0.1, soft_cap=3.0, weight_BL=weight)
    soft, target = teacher(kept, share), jnp.asarray(targets())
    agree_with(
        lambda x, w: loss_of(form, soft, **settings)(x, w)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, target, soft=soft, **settings)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        dtype,
    )


def top_k(form: str, x: jax.Array, w: jax.Array, k: int, **settings: Any) -> SoftTargets:
    def local(x: jax.Array, w: jax.Array, first: Any = 0, axis: str | None = None) -> SoftTargets:
        given, column = pad_parts(w, first, 3)
        settings_of_form: Any = dict(fetch=lambda part: part * 2, chunk_tokens=3, axis=axis, **settings)
        return top_k_in_parts(x, given / 2, column, k=k, **settings_of_form)

    if form == "parts":
        return jax.jit(local)(x, w)
    split = on_devices(
        lambda x, w: local(x, w, jax.lax.axis_index("tensor") * w.shape[1], "tensor"), P(None, "tensor")
    )
    return jax.jit(split)(x, w)


@pytest.mark.parametrize("form", ["parts", "parts, split"])
def test_what_a_teacher_says_is_its_softmax(form: str) -> None:
    """The ids of the most probable tokens and the logarithms of all outcomes, against float64."""
    x, w = normal(0, B, L, D), normal(1, D, V)
    logits = 3 * np.tanh(np.einsum("bld,dv->blv", x, w, dtype=np.float64) / 3)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for k in (4, V):
        said = top_k(form, jnp.asarray(x), jnp.asarray(w), k, soft_cap=3.0)
        order = np.argsort(-logp, axis=-1, kind="stable")
        np.testing.assert_array_equal(said.id, order[..., :k])
        kept = np.take_along_axis(logp, order[..., :k], axis=-1)
        np.testing.assert_allclose(said.logprob[..., :-1], kept, atol=2e-6)
        rest = -np.expm1(np.log(np.exp(kept).sum(axis=-1))) if k < V else np.zeros((B, L))
        np.testing.assert_allclose(np.exp(said.logprob[..., -1]), rest, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        pytest.param(
            form, kept, marks=[pytest.mark.slow] * (form == "split" or (kept == V and form != "parts"))
        )
        for form in ("whole", "split", "parts", "parts, split")
        for kept in (2, V)
    ],
)
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(form: str, kept: int) -> None:
    """However little was kept: at the kept tokens and at all others, which a renormalised teacher would push away."""
    x, w = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, D, V))
    said = top_k("parts", x, w, kept)

    def run(soft: SoftTargets) -> tuple[float, float]:
        loss = loss_of(form, soft)
        (total, _), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w)
        return float(total), max(float(jnp.abs(g).max()) for g in gradients)

    num_targets = int((targets() != -1).sum())
    loss, gradient = run(said)
    assert abs(loss) < 1e-6 * num_targets
    assert gradient < 1e-5
    if kept < V:
        kept_alone = said.logprob[..., :-1] - jax.nn.logsumexp(said.logprob[..., :-1], axis=-1, keepdims=True)
        none_BL1 = jnp.full((*kept_alone.shape[:-1], 1), -jnp.inf)
        renormalised = dataclasses.replace(said, logprob=jnp.concatenate([kept_alone, none_BL1], axis=-1))
        loss, gradient = run(renormalised)
        assert loss > 0.1 * num_targets
        assert gradient > 0.1
