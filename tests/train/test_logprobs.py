"""`jtrain.logprobs`: those of plain logits on any layout, with the same bits in any company, in one compiled shape."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import FileError, UserError
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.moe import MoESpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.step.state import init_state
from jtrain.telemetry.recompiles import count_programs
from jtrain.train import attempt
from jtrain.train.logprobs import PlacedModel, _eval_step, place_sequences
from tests.layouts import layout_from
from tests.preferences import ADAMW, LAYOUTS, SIZES, VOCAB

ROWS, COLS = 8, 256
QUICK = ("packed", "all")
EVERY_LAYOUT = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
EXPERTS = (dict(replica=2, expert=2), {})
SMALL = ("num_steps=2", "data.engine=inline", "eval.every_steps=None", "metrics.tensorboard=False")


@functools.cache
def placed(layout: str) -> PlacedModel:
    axes, fields = LAYOUTS.get(layout, EXPERTS)
    mixture: dict[str, Any] = {} if layout in LAYOUTS else dict(moe=MoESpec(num_experts=4, top_k=2))
    spec, model = MeshSpec(**axes), Transformer(**SIZES, **mixture)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    laid_out = layout_from(dict(compute_dtype="float32") | fields, spec, model.param_infos())
    optimizer = build(ADAMW, num_steps=2, params=map_params(lambda info: info, model.param_infos()))
    params = init_state(laid_out, optimizer, mesh, seed=3).params
    return PlacedModel(model, params, laid_out, mesh, ROWS, COLS)


def drawn(count: int, *, seed: int, most: int = COLS) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size).astype(np.int32) for size in rng.integers(1, most + 1, count)]


def plain(model: PlacedModel, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities by logits of one sequence, in float64 from there."""
    batch = Batch(*(jnp.asarray(x)[None] for x in (ids, ids, np.arange(len(ids)), np.ones_like(ids))))
    logits = np.asarray(model.model.logits(model.params, batch)[0], np.float64)
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    return log_p[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_log_probabilities_are_those_of_plain_logits_on_any_layout(layout: str) -> None:
    one, model = placed("packed"), placed(layout)
    sequences = [*drawn(9, seed=1), np.asarray([5]), np.asarray([], np.int32)]
    results = jtrain.logprobs(model, sequences)
    assert [len(result) for result in results] == [max(0, len(ids) - 1) for ids in sequences]
    np.testing.assert_allclose(results[0], plain(one, sequences[0]), atol=5e-6)
    assert np.std(np.concatenate(results)) > 0.01, "tokens differ"


@pytest.mark.parametrize("layout", [*EVERY_LAYOUT, pytest.param("experts", marks=pytest.mark.slow)])
def test_a_sequence_has_the_same_bits_in_any_company(layout: str) -> None:
    """Alone, among others of any length, and in another order; on CPUs, in one compiled shape."""
    model = placed(layout)
    sequences = drawn(40, seed=2, most=130)
    together = jtrain.logprobs(model, sequences)
    backwards = jtrain.logprobs(model, sequences[::-1])[::-1]
    for index in (0, 7, 19, 39):
        (alone,) = jtrain.logprobs(model, [sequences[index]])
        np.testing.assert_array_equal(together[index], alone)
    for first, second in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(first, second)
    compiled: Any = _eval_step(model.model, model.layout, model.mesh)
    assert count_programs(compiled) == 1


def test_places_are_multiples_of_the_powers_of_two_that_hold_a_sequence() -> None:
    assert place_sequences([100, 60, 130, 20], seq_len=256, context=1) == [(1, 0), (1, 128), (0, 0), (1, 192)]
    rng = np.random.default_rng(0)
    for seq_len, context in ((256, 1), (200, 1), (512, 2), (384, 2), (64, 4)):
        lengths = rng.integers(0, seq_len + 1, 60).tolist()
        taken = set[tuple[int, int]]()
        for length, (row, start) in zip(
            lengths, place_sequences(lengths, seq_len=seq_len, context=context), strict=True
        ):
            cells = {(row, column) for column in range(start, start + length)}
            assert not cells & taken
            assert start + length <= seq_len
            taken |= cells
            slot = max(64, 1 << max(0, length - 1).bit_length())
            assert start % slot == 0
            piece = seq_len // (2 * context)
            assert context == 1 or start == 0 or start // piece == (start + length - 1) // piece


def test_rows_of_several_sequences_are_taken_apart_by_their_segments() -> None:
    model, (first, second, third) = placed("packed"), drawn(3, seed=4, most=20)
    token, segment = (np.zeros((2, 48), np.int32) for _ in range(2))
    middle = len(first) + len(second)
    token[0, : len(first)], token[0, len(first) : middle], token[1, : len(third)] = first, second, third
    segment[0, : len(first)], segment[0, len(first) : middle], segment[1, : len(third)] = 1, 2, 1
    for got, want in zip(
        jtrain.logprobs(model, token, segment), jtrain.logprobs(model, [first, second, third]), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_what_cannot_be_computed_is_refused() -> None:
    model = placed("packed")
    with pytest.raises(UserError, match=r"sequence 1 has 257 tokens, and a row has data\.seq_len=256"):
        jtrain.logprobs(model, [[1], [0] * 257])
    with pytest.raises(UserError, match=rf"sequence 0 has the id {VOCAB}, and the model has ids from 0 to"):
        jtrain.logprobs(model, [[1, VOCAB]])
    with pytest.raises(UserError, match=r"segments has rows of \[2\] numbers, and tokens of \[3\]"):
        jtrain.logprobs(model, np.zeros((1, 3), np.int32), np.ones((1, 2), np.int32))
    with pytest.raises(UserError, match=r"row 0 of segments has the sequences \[1, 2, 1\]"):
        jtrain.logprobs(model, np.zeros((1, 4), np.int32), np.array([[1, 2, 0, 1]]))
    for wrong in ([100, 101, 102], [[1.5, 2.0]], [[[1, 2], [3, 4]]]):
        with pytest.raises(UserError, match=r"tokens\[0\] is .*Give a list of sequences"):
            jtrain.logprobs(model, wrong)
    with pytest.raises(UserError, match=r"step=3 and sets=\[\] are of a folder that is read"):
        jtrain.logprobs(model, [[1, 2]], step=3)
    rows = placed("all").rows
    with pytest.raises(UserError, match=rf"data\.global_batch={rows + 1} does not split evenly"):
        dataclasses.replace(placed("all"), rows=rows + 1)
    with pytest.raises(AttributeError, match="no attribute 'logprob'"):
        jtrain.logprob  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("fiddlers", [[], ["lora"]])
def test_a_folder_is_read_in_any_layout(fiddlers: list[str], tmp_path: Path) -> None:
    """In that of the run; an adapter is merged."""
    config = load_config(
        "tiny", ["debug", *fiddlers], ["mesh.data=2", "precision.compute_dtype=float32", *SMALL]
    )
    run = build_run(config)
    args: Any = dict(config_text=tree.flat(config), devices=jax.devices()[:2])
    assert attempt.train(run, workdir=tmp_path / "run", **args) == 0
    sequences = drawn(9, seed=1, most=64)
    want = jtrain.logprobs(tmp_path / "run", sequences)
    for sets in (
        ["mesh.stage=2"],
        ["mesh.tensor=2", "layout.zero_stage=3"],
        ["data.seq_len=128"],
    ):
        for got, expected in zip(jtrain.logprobs(tmp_path / "run", sequences, sets=sets), want, strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-6)
    with pytest.raises(FileError, match="No checkpoint in"):
        jtrain.logprobs(tmp_path, sequences)
