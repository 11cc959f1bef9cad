"""Small runs keep what a large one is made of, and cut batches what records are made of."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jtrain.check.lines import Differs
from jtrain.check.records import Sample, cut_rows, one_by_one, read_samples, with_few_ids
from jtrain.check.rounding import Worst, bisect
from jtrain.check.sampled import learned_is_sampled, targets_are_never_zero
from jtrain.check.small_run import DEVICES, SmallRuns, small_data
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run
from jtrain.data import TextDataset, open_dataset
from jtrain.layout.constants import IGNORE
from jtrain.model.router import MoESpec
from tests.check.example_runs import words_of, write_chats
from tests.planting import ROOT

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def small_runs(run: Run) -> SmallRuns:
    return SmallRuns(run, small_data(run.data, seq_len=64, rows=16))


def kinds(run: Run) -> set[Any]:
    """Blocks of a model without their sizes."""

    def kind(spec: Any) -> Any:
        if not dataclasses.is_dataclass(spec):
            return spec if isinstance(spec, str | bool) else type(spec)
        fields = (getattr(spec, field.name) for field in dataclasses.fields(spec))
        return type(spec), tuple(kind(value) for value in fields)

    return {kind(block) for block in run.model.blocks}


@pytest.mark.parametrize("name", NAMES)
def test_a_small_run_has_the_layers_and_axes_of_the_large_one(name: str) -> None:
    """Every kind of block, key heads shared as before, experts chosen, every axis in use; and it is small."""
    run = build_run(load_config(name))
    small = small_runs(run)
    plain = small.plain(64)
    assert kinds(plain) == kinds(run)
    large, model = run.model, plain.model
    assert (model.num_heads == model.num_kv_heads) == (large.num_heads == large.num_kv_heads)
    # Blocks of 64 inputs, whole ones in each shard, are wide.
    assert sum(np.prod(info.shape) for info in model.param_infos()) < (
        600_000 if small.has_blocks else 400_000
    )
    if small.has_blocks:
        assert run.adapter is not None
        assert plain.adapter is not None
        assert plain.adapter.base_dtype == run.adapter.base_dtype
        assert {info.dtype for info in plain.param_infos() if info.frozen} == {"nf4", "bfloat16"}
    if isinstance(large.router, MoESpec):
        assert model.router is not None
        assert 1 <= model.router.top_k < model.router.num_experts <= 8
    for axis in small.axes:
        assert small.with_axes(plain, (axis,)).mesh.shape[axis] == 2
    whole = small.interrupted(small.axes[-3:], plain, 64)
    assert whole.mesh.size <= DEVICES
    assert whole.layout.zero_stage == run.layout.zero_stage
    assert whole.precision == run.precision
    assert type(whole.optimizer) is type(run.optimizer)


def test_no_weights_of_a_small_model_come_where_those_of_the_run_are_read() -> None:
    """Nor does a callback of the run see steps that are not its own."""
    small = small_runs(build_run(load_config("tiny", ["stream"])))
    plain = small.plain(64)
    assert small.run.weight_stream is not None
    assert plain.weight_stream is small.interrupted((), plain, 64).weight_stream is None
    assert plain.callbacks == ()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> TextDataset:
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    name = words_of("chats")[0].partition("=")[2]
    run = build_run(load_config(str(ROOT / name)))
    source = dataclasses.replace(run.data.sources["chats"], path=str(folder / "chats.jsonl"))
    data = dataclasses.replace(run.data, sources={"chats": source})
    return open_dataset(small_data(data, seq_len=256, rows=16), seed=0)


@pytest.fixture(scope="module")
def sample(chats: TextDataset) -> Sample:
    return next(read_samples(chats))


def test_a_cut_batch_has_no_two_rows_alike(sample: Sample) -> None:
    """More documents, some padding, one row empty and one without targets; each target is the next token."""
    cut = cut_rows(sample, seed=0)
    assert len(cut.pieces) > len(sample.pieces)
    target_BL, segment_BL = cut.arrays["target_BL"], cut.arrays["segment_BL"]
    counts = (target_BL != IGNORE).sum(axis=1)
    assert sorted(counts)[:2] == [0, 0]
    assert len(set((segment_BL > 0).sum(axis=1).tolist())) > 8
    for piece in cut.pieces:
        target, ids = piece.of(target_BL), piece.of(cut.arrays["token_BL"])
        learned = np.flatnonzero(target != IGNORE)
        assert target[-1] == IGNORE
        assert np.array_equal(target[learned], ids[learned + 1])
        assert np.array_equal(piece.of(cut.arrays["position_BL"]), np.arange(len(ids)))


def test_records_alone_have_the_targets_of_the_batch(sample: Sample) -> None:
    """As many, of the same ids, each record in a row of its own; ids without gaps stay apart."""
    [few], vocab_size = with_few_ids([sample])
    assert vocab_size % 16 == 0
    parts = list(one_by_one(few))
    assert [number for _, numbers in parts for number in numbers] == list(range(len(sample.pieces)))
    assert sum(part.num_targets for part, _ in parts) == sample.num_targets > 100
    assert all((part.arrays["segment_BL"].max(axis=1) <= 1).all() for part, _ in parts)


def with_target(sample: Sample, row: int, column: int, value: int) -> Sample:
    target_BL = sample.arrays["target_BL"].copy()
    target_BL[row, column] = value
    return Sample({**sample.arrays, "target_BL": target_BL}, sample.pieces)


def test_learned_is_sampled_names_the_record_of_a_wrong_target(chats: TextDataset, sample: Sample) -> None:
    """A stop token that is not learned, a prompt that is, the token behind the stop token, another id."""
    assert "records" in learned_is_sampled(chats, [sample])
    piece = sample.pieces[3]
    learned = np.flatnonzero(piece.of(sample.arrays["target_BL"]) != IGNORE) + piece.start
    ids = sample.arrays["token_BL"][piece.row]
    first, last = int(learned[0]), int(learned[-1])
    for column, value in (
        (last, IGNORE),
        (first - 1, int(ids[first])),
        (last + 1, int(ids[last + 2])),
        (first, int(ids[first + 1]) + 1),
    ):
        with pytest.raises(Differs, match=piece.name):
            learned_is_sampled(chats, [with_target(sample, piece.row, column, value)])
    everything = sample.only(())
    with pytest.raises(Differs, match="is sampled and not learned"):
        learned_is_sampled(chats, [everything])


def test_a_batch_without_targets_is_named(sample: Sample) -> None:
    """A batch may be read in parts, and a part of it may have none."""
    nothing = sample.only(())
    assert "a batch of 32 rows has" in targets_are_never_zero([sample, nothing], rows=32)
    with pytest.raises(
        Differs, match=f"batch 1 has no target in 16 rows; first record: {sample.pieces[0].name}"
    ):
        targets_are_never_zero([sample, nothing], rows=16)


def test_the_record_that_differs_is_found(sample: Sample) -> None:
    """By halves; a difference that takes two records names both, and NaN is over every bound."""
    units = sample.units
    assert bisect(units, lambda some: units[5] in some) == units[5][0].place
    assert "together" in bisect(units, lambda some: units[0] in some and units[-1] in some)
    worst = Worst()
    # What is frozen may not move at all, and does not.
    worst.add("update of c", 0.0, 0.0)
    worst.refuse()
    worst.add("loss", 5.0, 1.0, is_tensor=False)
    worst.add("gradient of a", 2.0, 1.0)
    worst.add("gradient of b", float("nan"), 1.0)
    with pytest.raises(Differs, match="gradient of a 2 apart, bound 1 and 2 others"):
        worst.refuse()
