"""Chunked recurrences against the token-by-token references in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.hlo.flops import flops
from jtrain.hlo.parser import read, visits
from jtrain_kernels import cost, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.delta_rule.api import DELTA_RULE as DELTA_RULE_OP
from jtrain_kernels.delta_rule.api import delta_rule
from jtrain_kernels.mamba2.api import MAMBA2 as MAMBA2_OP
from jtrain_kernels.mamba2.api import mamba2
from jtrain_kernels.recurrence.documents import RecurrentState, number_documents
from tests.kernels.gradients import TOLERANCE, agree_with, normal
from tests.kernels.recurrent.mixers import DELTA_RULE, KDA, MAMBA2, MIXERS, B, H, Mixer, N, P, flat, packed

of_mixers = pytest.mark.parametrize("mixer", MIXERS, ids=str)

LENGTH = 29
"""Tokens of a row: no multiple of a chunk."""


def in_float64(
    mixer: Mixer, inputs: tuple[np.ndarray, ...], segment: np.ndarray, state: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The reference's results and last state, from a state of the first document, by default zeros."""
    rows = len(segment)
    state = np.zeros((rows, N, H, P)) if state is None else state
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (*inputs, state)]
        rest = (jnp.asarray(segment), arrays.pop(), jnp.asarray(segment[:, 0]))
        y, last = jax.jit(mixer.reference)(*arrays, *rest)
        return np.asarray(y), np.asarray(last)


def assert_close(got: Any, want: np.ndarray, dtype: str = "float32") -> None:
    """Equality within the tolerance of all ops, relative to the largest element."""
    scale = np.abs(want).max()
    assert scale > 1e-3
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("mixer", "dtype"),
    [*((mixer, "float32") for mixer in MIXERS), (KDA, "bfloat16")],
    ids=str,
)
def test_chunks_are_the_recurrence(mixer: Mixer, dtype: str) -> None:
    """Results, the last state, and the gradients of all inputs and of the state before the row.

    The first row's first document goes on from that state, the second row's does not. Some log-decays are near
    -90, whose inverse is more than float32 holds.
    """
    inputs = [*map(np.copy, mixer.inputs(LENGTH)), normal(9, B, N, H, P)]
    inputs[mixer.gate][:, 5::9] = 90.0
    segment = packed(3, LENGTH)
    before = jnp.asarray([segment[0, 0], 99], jnp.int32)

    def run(*inputs: Any) -> jax.Array:
        initial = RecurrentState(inputs[-1].astype(jnp.float32), before)
        y, state = mixer.run(*inputs[:-1], jnp.asarray(segment), initial=initial)
        return flat(y, state.state_BNHP, segment)

    def reference(*inputs: Any) -> jax.Array:
        y, state = mixer.reference(*inputs[:-1], jnp.asarray(segment), inputs[-1], before)
        return flat(y, state, segment)

    agree_with(run, reference, tuple(inputs), dtype)


@pytest.mark.parametrize(
    ("mixer", "chunk", "length"), [(KDA, 32, 1100), (MAMBA2, 64, 1100), (DELTA_RULE, 1, 6)], ids=str
)
def test_the_chunk_is_not_a_model(mixer: Mixer, chunk: int, length: int) -> None:
    """Several groups of long chunks, and chunks of one token, give the recurrence's results and state."""
    inputs, segment = mixer.inputs(length), packed(4, length)
    want = in_float64(mixer, inputs, segment)
    y, state = jax.jit(lambda *x: mixer.run(*x, jnp.asarray(segment), chunk=chunk))(*inputs)
    valid = (segment > 0)[..., None, None]
    assert_close(y * jnp.asarray(valid), want[0] * valid)
    assert_close(state.state_BNHP, want[1])


@of_mixers
def test_documents_packed_are_documents_alone(mixer: Mixer) -> None:
    """Each document of random rows, one of a single token, gets what it gets in a row of its own with padding
    after it; the state after such a row is the one after its last token.

    The planted bug, rows whose states are never reset, is found by far more than the tolerance.
    """
    inputs, segment = mixer.inputs(LENGTH), packed(5, LENGTH)
    per_token, others = inputs[: mixer.per_token], inputs[mixer.per_token :]
    documents = [
        (b, np.flatnonzero(segment[b] == s)) for b in range(B) for s in np.unique(segment[b]) if s > 0
    ]
    sizes = np.asarray([len(tokens) for _, tokens in documents])
    assert sizes.min() == 1
    assert len(sizes) > 4
    # Packed rows and rows of one document in one batch: one program.
    rows = [
        np.stack([*x, *(np.resize(x[b, tokens], x.shape[1:]) for b, tokens in documents)]) for x in per_token
    ]
    alone = (np.arange(LENGTH) < sizes[:, None]).astype(np.int32)
    run = jax.jit(lambda segment, *x: mixer.run(*x, segment))
    y, state = run(np.concatenate([segment, alone]), *rows, *others)
    leaky, _ = run(np.ones((B + len(sizes), LENGTH), np.int32), *rows, *others)
    y, leaky = np.asarray(y), np.asarray(leaky)
    for row, (b, tokens) in enumerate(documents):
        want = y[B + row, : len(tokens)]
        np.testing.assert_allclose(y[b, tokens], want, atol=1e-5 * np.abs(y).max())
        starts_the_row = tokens[0] == 0
        assert (np.abs(leaky[b, tokens[0]] - want[0]).max() < 1e-3) == starts_the_row
    longest = int(np.argmax(sizes))
    only = tuple(x[B + longest : B + longest + 1, : sizes[longest]] for x in rows)
    _, want_state = in_float64(mixer, (*only, *others), np.ones((1, sizes[longest]), np.int32))
    assert_close(state.state_BNHP[B + longest], want_state[0])


@pytest.mark.parametrize("mixer", [DELTA_RULE, MAMBA2], ids=str)
def test_one_token_at_a_time_is_the_row(mixer: Mixer) -> None:
    """A prompt in a padded chunk, then one token after the other from the states in between."""
    prompt, padded, length = 5, 8, 16
    inputs = mixer.inputs(length)
    per_token = [jnp.asarray(x) for x in inputs[: mixer.per_token]]
    others = [jnp.asarray(x) for x in inputs[mixer.per_token :]]
    want, want_state = in_float64(mixer, inputs, np.ones((B, length), np.int32))

    def step(state: RecurrentState, token: list[jax.Array]) -> tuple[RecurrentState, jax.Array]:
        y, state = mixer.run(
            *(x[:, None] for x in token), *others, jnp.ones((B, 1), jnp.int32), initial=state
        )
        return state, y[:, 0]

    @jax.jit
    def generate() -> tuple[jax.Array, jax.Array]:
        valid = jnp.broadcast_to((jnp.arange(padded) < prompt).astype(jnp.int32), (B, padded))
        y, state = mixer.run(*(x[:, :padded] for x in per_token), *others, valid)
        state, y_LB = jax.lax.scan(step, state, [jnp.moveaxis(x[:, prompt:], 1, 0) for x in per_token])
        return jnp.concatenate([y[:, :prompt], jnp.moveaxis(y_LB, 0, 1)], axis=1), state.state_BNHP

    got, state = generate()
    assert_close(got, want)
    assert_close(state, want_state)


def test_decays_from_none_to_all_are_exact() -> None:
    """With log-decays near 0 beside some of -1,000, no decay is a difference of two large sums."""
    inputs, segment = list(MAMBA2.inputs(LENGTH)), np.ones((B, LENGTH), np.int32)
    draw = np.random.default_rng(0).choice([-5.0, 1.0, 1000.0], (B, LENGTH, N), p=[0.8, 0.15, 0.05])
    inputs[MAMBA2.gate] = draw.astype(np.float32)
    want, _ = in_float64(MAMBA2, tuple(inputs), segment)
    y, _ = jax.jit(lambda *x: MAMBA2.run(*x, jnp.asarray(segment), chunk=32))(*inputs)
    # Relative to each token's own result: the large ones are those of large steps.
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


def test_documents_are_numbered_within_the_row() -> None:
    """Padding belongs to the document before it; a segment that comes again is another document."""
    segment = jnp.asarray([[0, 7, 7, 0, 7, 2, 0, 7], [0, 0, 0, 0, 0, 0, 0, 0]], jnp.int32)
    for first, want in ((7, [0, 0, 0, 0, 0, 1, 1, 2]), (3, [0, 1, 1, 1, 1, 2, 2, 3])):
        number, last = number_documents(segment, jnp.full(2, first, jnp.int32))
        np.testing.assert_array_equal(number, [want, [0] * 8])
        np.testing.assert_array_equal(last, [7, first])


@pytest.mark.parametrize(
    ("op", "case", "of_forward"),
    [
        (DELTA_RULE_OP, "qwen3_next", cost.delta_rule_flops),
        (DELTA_RULE_OP, "kimi_linear", cost.delta_rule_flops),
        (MAMBA2_OP, "nemotron_h", cost.mamba2_flops),
    ],
    ids=("qwen3_next", "kimi_linear", "nemotron_h"),
)
def test_the_program_computes_little_more_than_the_formula(
    op: registry.Op, case: str, of_forward: Any
) -> None:
    """FLOPs of all matmuls, as compiled, times the trips of their loops: within 1.3 times those of the formula."""
    avals = {n: shorter(x) if isinstance(x, jax.ShapeDtypeStruct) else x for n, x in op.cases[case].items()}
    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    text = jax.jit(aot.op_function(op, avals, gradients=False)).lower(arrays).compile().as_text()
    assert text is not None
    parsed = read(text)
    dots = [v for v in visits(text) if v.instruction.opcode == "dot"]
    executed = sum(flops(v.instruction, parsed) * (v.num_runs or 0) for v in dots)
    assert 0.9 < executed / of_forward(avals) < 1.3


def shorter(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array of a case with two groups of tokens, in float32, in which XLA:CPU leaves matmuls as they are."""
    shape = tuple(2048 if size == 8192 else size for size in x.shape)
    return jax.ShapeDtypeStruct(shape, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


def test_what_does_not_fit_is_refused() -> None:
    """Each message has the numbers and the way out."""
    q, k, v, g, beta = (jnp.asarray(x) for x in KDA.inputs(8))
    segment, three = jnp.ones((B, 8), jnp.int32), jnp.zeros((B, 8, 3, H))
    with pytest.raises(ValueError, match=r"chunk=48 must be a power of two\. Nearest sizes: 32, 64"):
        delta_rule(q, k, v, g, beta, segment, chunk=48)
    with pytest.raises(ValueError, match="4 value heads are no multiple of 3 key heads"):
        delta_rule(three, three, v, g, beta, segment)
    with pytest.raises(ValueError, match="g has 4 channels per head, but a key has 8"):
        delta_rule(q, k, v, g[..., :4], beta, segment)
    x, dt, *_, a, d = (jnp.asarray(x) for x in MAMBA2.inputs(8))
    with pytest.raises(ValueError, match="4 heads are no multiple of 3 groups"):
        mamba2(x, dt, a, three, three, d, segment)
