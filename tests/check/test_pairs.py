"""Batches of preference pairs in the check: their two texts, what is learned of them, and their loss by formula."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.check.lines import Differs
from jtrain.check.pairs import loss_of_differences
from jtrain.check.records import Sample, cut_pairs, one_by_one, read_samples, texts_of_pair
from jtrain.check.sampled import learned_is_sampled
from jtrain.check.small_run import small_data
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.data import TextDataset, open_dataset
from jtrain.layout.constants import IGNORE
from jtrain.step.objective import DPO
from jtrain.step.preferences.pair_loss import pair_losses


@pytest.fixture(scope="module")
def pairs() -> TextDataset:
    run = build_run(load_config("tiny_dpo"))
    return open_dataset(small_data(run.data, seq_len=512, rows=8), seed=0)


@pytest.fixture(scope="module")
def sample(pairs: TextDataset) -> Sample:
    return next(read_samples(pairs))


def test_a_pair_is_two_texts_beside_each_other(sample: Sample) -> None:
    """Better and worse in turn, in one row, each from position 0; alone, a pair keeps its two segments."""
    assert [piece.side for piece in sample.pieces] == [0, 1] * len(sample.units)
    for better, worse in sample.units:
        assert (better.row, better.end, better.record) == (worse.row, worse.start, worse.record)
        assert [int(p.of(sample.arrays["position_BL"])[0]) for p in (better, worse)] == [0, 0]
    parts = [part for part, _ in one_by_one(sample, sample.units)]
    assert sum(part.num_targets for part in parts) == sample.num_targets > 100
    assert {int(part.arrays["segment_BL"].max()) for part in parts} == {2}


def test_cut_pairs_stay_beside_each_other(sample: Sample) -> None:
    """One row is empty and one without targets, one pair has no worse answer; targets are the next token."""
    cut = cut_pairs(sample, seed=0)
    target_BL, segment_BL = cut.arrays["target_BL"], cut.arrays["segment_BL"]
    assert sorted((segment_BL > 0).any(axis=1))[:2] == [False, True]
    assert sorted((target_BL != IGNORE).sum(axis=1))[1] == 0
    has_targets = [tuple(bool((p.of(target_BL) != IGNORE).any()) for p in unit) for unit in cut.units]
    assert has_targets.count((True, False)) == 1
    assert has_targets.count((True, True)) > 10
    for better, worse in cut.units:
        assert better.end == worse.start
        segments = [set(p.of(segment_BL).tolist()) for p in (better, worse)]
        assert segments[0] == {min(segments[1]) - 1}
    for piece in cut.pieces:
        target, ids = piece.of(target_BL), piece.of(cut.arrays["token_BL"])
        learned = np.flatnonzero(target != IGNORE)
        assert np.array_equal(target[learned], ids[learned + 1])


def test_both_answers_are_learned_and_their_places_count(pairs: TextDataset, sample: Sample) -> None:
    """A worse text in the place of the better one, and a worse answer that is not learned, are named."""
    assert "records" in learned_is_sampled(pairs, [sample])
    swapped = tuple(dataclasses.replace(piece, side=1 - (piece.side or 0)) for piece in sample.pieces)
    with pytest.raises(Differs, match=r"\(better\).* is learned after"):
        learned_is_sampled(pairs, [Sample(sample.arrays, swapped)])
    target_BL = sample.arrays["target_BL"].copy()
    sample.units[2][1].of(target_BL)[:] = IGNORE
    with pytest.raises(Differs, match=r"\(worse\).* is sampled and not learned"):
        learned_is_sampled(pairs, [Sample({**sample.arrays, "target_BL": target_BL}, sample.pieces)])


def test_a_pair_of_one_segment_is_named(pairs: TextDataset, sample: Sample) -> None:
    whole = dataclasses.replace(sample.pieces[0], end=sample.pieces[1].end)
    with pytest.raises(Differs, match="has 1 segments, and two texts"):
        texts_of_pair(whole, np.ones_like(sample.arrays["segment_BL"]))


@pytest.mark.parametrize(
    "objective",
    [
        DPO(beta=0.3, margin=0.2),
        DPO(form="sigmoid_norm"),
        DPO(form="ipo", beta=0.4),
        DPO(form="simpo", reference="none", margin=1.0),
    ],
    ids=lambda objective: objective.form,
)
def test_the_formula_is_that_of_the_step(objective: DPO) -> None:
    """Losses of pairs by the check's own float64 formula, and by the step."""
    scores = np.random.default_rng(0).normal(size=(1, 5, 2)).astype(np.float32)
    counts = np.asarray([[[3, 5], [1, 1], [2, 7], [4, 4], [6, 1]]], np.int32)
    got, _ = pair_losses(objective, jnp.asarray(scores), jnp.asarray(counts))
    if objective.form != "sigmoid":
        scores = scores / counts
    want = loss_of_differences(objective, (scores[..., 0] - scores[..., 1]).astype(np.float64))
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)
