"""The fuzz of layouts: its draws, its reference, a slice of its trials, and a bug that it has to find."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.bench import Options, layouts
from jtrain.bench.layout_trials import adversarial_batch, pairs
from jtrain.bench.layout_trials.bounds import history_bound
from jtrain.bench.layout_trials.refusals import follow, reason_of, try_ways_out, ways_out
from jtrain.bench.layout_trials.settings import (
    FACTORS,
    as_text,
    changed_factors,
    defaults,
    is_float32,
    refusal,
)
from jtrain.bench.layout_trials.trial import Lab, batches_of, shrink
from jtrain.layout.constants import IGNORE
from jtrain.pipeline.ticks import TickColumn
from jtrain.step import pipelined

TRIALS = 40
STAGES: dict[str, Any] = {"mesh.stage": 2, "layout.microbatches": 4}


@pytest.fixture(scope="module")
def lab() -> Lab:
    """References that the trials of these tests share."""
    return Lab()


@pytest.mark.slow
def test_draws_meet_nearly_all_pairs_soon_and_are_those_of_the_seed() -> None:
    """Forty settings, all accepted, meet 95 % of the pairs of values; half of the settings compute in
    float32.
    """
    draw = pairs.Draw(0)
    settings = list(itertools.islice(draw, TRIALS))
    assert all(refusal(setting) is None for setting in settings)
    met = set[pairs.Pair]().union(*map(pairs.pairs_of, settings))
    possible = pairs.all_pairs() - draw.refused
    assert len(met & possible) / len(possible) > 0.95
    assert sum(map(is_float32, settings)) >= TRIALS // 2
    assert len({as_text(setting) for setting in settings}) == TRIALS
    again = list(itertools.islice(pairs.Draw(0), 3))
    assert again == settings[:3]
    assert next(iter(pairs.Draw(1))) != settings[0]


@pytest.mark.slow
def test_every_way_out_ends_its_refusal() -> None:
    """Of 400 settings by chance; each refusal names a way out that can be followed, and following leads to a
    config.
    """
    reasons: set[str] = set()
    for setting in itertools.islice(pairs.random_settings(0), 400):
        error = refusal(setting)
        if error is None:
            continue
        reasons.add(reason_of(error))
        results = try_ways_out(error, setting)
        assert results, error
        assert all(does_help for _, does_help in results), (results, error)
        accepted, _ = follow(setting)
        assert accepted is not None, error
        assert refusal(accepted) is None
    assert len(reasons) >= 20, "most reasons are met"


def test_ways_out_are_read_off_a_message() -> None:
    """Both alternatives, with a number for `2 or more` and for a divisor; and a dead end is seen as one."""
    setting = defaults() | {"layout.tensor_overlap": True}
    error = refusal(setting)
    assert error is not None
    assert ways_out(error, setting) == [{"mesh.tensor": 2}, {"layout.tensor_overlap": False}]
    setting = defaults() | {"mesh.data": 4, "layout.microbatches": 8}
    error = refusal(setting)
    assert error is not None
    assert {"layout.microbatches": 4} in ways_out(error, setting)
    dead_end = type(error)("layout.zero_stage=0 is not liked. Set layout.zero_stage=0, or think again.")
    assert ways_out(dead_end, setting) == []


def test_batches_are_adversarial() -> None:
    """Rows differ in their documents; there are an empty row, one without targets, one-token documents and
    padding.
    """
    assert adversarial_batch.IGNORED == IGNORE
    for batch in (batch for variant in range(3) for batch in batches_of(variant)):
        segment, position, target, token = (
            batch[f"{name}_BL"] for name in ("segment", "position", "target", "token")
        )
        lengths = [np.bincount(row[row > 0])[1:].tolist() for row in segment]
        assert len(set(map(tuple, lengths))) >= len(lengths) - 2, (
            "no two microbatches have the same documents"
        )
        assert lengths.count([]) == 1, "one row is empty"
        assert any(1 in of_row for of_row in lengths)
        assert any(
            (row > 0).any() and (targets == IGNORE).all()
            for row, targets in zip(segment, target, strict=True)
        )
        np.testing.assert_array_equal(target[segment == 0], IGNORE)
        row, column = np.nonzero(target != IGNORE)
        np.testing.assert_array_equal(target[row, column], token[row, column + 1])
        np.testing.assert_array_equal(segment[row, column], segment[row, column + 1])
        np.testing.assert_array_equal(position[row, column] + 1, position[row, column + 1])


@pytest.mark.slow
def test_a_pipeline_is_equal_until_its_backward_pass_reads_other_positions(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug that no test noticed on 2026-11-23: the backward pass takes the forward microbatch's
    documents.
    """
    setting = defaults() | STAGES
    healthy = lab.trial(setting, 0)
    assert healthy.unequal == []
    assert healthy.shares["first loss"] < 1
    right = pipelined.Worker.backward

    def wrong(self: Any, cotangents: Any, kept: Any, carry: Any, row_F: Any, parts: Any) -> Any:
        forward = row_F[TickColumn.FORWARD_MICROBATCH]
        back = row_F[TickColumn.BACKWARD_MICROBATCH]
        row_F = row_F.at[TickColumn.BACKWARD_MICROBATCH].set(jnp.where(forward >= 0, forward, back))
        return right(self, cotangents, kept, carry, row_F, parts)

    monkeypatch.setattr(pipelined.Worker, "backward", wrong)
    found = lab.trial(setting, 0)
    assert any("gradient (mu)" in line for line in found.unequal)
    assert found.shares["gradient (mu)"] > 1000, "far beyond rounding"
    assert found.shares["first loss"] < 1, "the forward pass is right"


def test_the_first_steps_largest_values_are_those_of_one_device() -> None:
    """In float32, before rounding to 8 bits has made one layout's values another's; a weight's largest hardly
    moves.
    """
    in_float32 = history_bound(defaults(), 3)
    assert in_float32.shape == (1, 3, 3), "broadcasts over layers"
    assert in_float32[0, :, 2].tolist() == [1e-5, 1e-5, 1e-5]
    in_bfloat16 = history_bound(defaults() | {"precision.compute_dtype": "bfloat16"}, 3)
    assert in_float32[0, :, 0].tolist() == in_bfloat16[0, :, 2].tolist() == [0.25, 0.02, 1.0]


def test_a_failing_setting_is_shrunk() -> None:
    """Only what a failure takes stays; a step towards it that jtrain refuses is left out."""
    setting = defaults() | {
        "mesh.tensor": 2,
        "layout.tensor_overlap": True,
        "layout.remat": "full",
        "mesh.data": 2,
    }
    assert changed_factors(shrink(setting, lambda smaller: smaller["layout.tensor_overlap"])) == {
        "mesh.tensor": 2,
        "layout.tensor_overlap": True,
    }


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="--trials 0 must be at least 1"):
        list(layouts.run(Options(trials=0, seed=0, only=None, refusals=False)))
    for only in ("20", "5:3", "x", "-1:2"):
        with pytest.raises(ValueError, match=f"--only {only} must be K or K:L, trials from 0 to --trials 20"):
            layouts.choose_trials(only, 20)
    assert layouts.choose_trials("3:7", 20) == range(3, 7)
    assert layouts.choose_trials(None, 20) == range(20)


def test_every_option_of_the_layout_is_drawn() -> None:
    """A new field of the specs of layouts and precisions has to become a factor, or be named here with a
    reason.
    """
    import dataclasses

    from jtrain.layout.layout import LayoutSpec, OffloadSpec
    from jtrain.layout.mesh import MeshSpec
    from jtrain.layout.precision import PrecisionSpec
    from jtrain.pipeline.spec import PipelineSpec

    specs = {"mesh": MeshSpec, "layout": LayoutSpec, "layout.offload": OffloadSpec}
    specs |= {"pipeline": PipelineSpec, "precision": PrecisionSpec}
    fields = {
        f"{prefix}.{field.name}" for prefix, spec in specs.items() for field in dataclasses.fields(spec)
    }
    elsewhere = {
        "layout.remat_save",  # with layout.remat
        "layout.offload",  # its fields
        "layout.auto",  # chooses settings, and is none
        "layout.microbatch_tokens",  # chooses layout.microbatches
        "layout.offload.unified_memory",  # a CUDA driver's
    }
    assert fields - set(FACTORS) == elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("first", (0, 10))
def test_twenty_trials_are_equal(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The slice of the fuzz that CI runs, in halves of which each worker takes one, with its tables."""
    rows = {row["what"]: row["value"] for row in layouts.fuzz(20, 0, range(first, first + 10))}
    printed = capsys.readouterr().out
    assert rows["settings that were unequal"] == 0, printed
    assert rows["settings that were run"] == 10
    assert (rows["pairs of settings met, of those not known to be refused"] or 0) > 60
    assert "pairs of settings met, by setting" in printed
