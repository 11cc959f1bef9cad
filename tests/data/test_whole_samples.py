"""Rows hold whole samples: no token is learned without the prompt that comes before it in its sample."""

import io
import itertools
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.held_out import open_sets
from jtrain.data.inspect.order_report import measure_order
from jtrain.data.loss_mask import pieces_of_sample
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.formats import masked_text
from jtrain.errors import UserError
from tests.data.whole_samples import (
    FORMS,
    SEQ_LEN,
    count_without_prompt,
    learned_answers,
    learned_runs,
    samples,
    samples_of,
    source_of,
    spec,
    turns_of,
)


@pytest.mark.parametrize("packing", [None, "first_fit"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "prepared"])
@pytest.mark.parametrize("form", FORMS)
def test_no_token_is_learned_without_its_prompt_and_no_turn_is_lost(
    form: str, kind: str, packing: Any, tmp_path: Path
) -> None:
    """Samples of up to five rows, turns of less than one: in one epoch each answer comes, behind its prompt."""
    made = samples_of(form)
    source = source_of(tmp_path, form, made, "jsonl" if kind == "prepared" else kind)
    more: dict[str, Any] = {}
    if kind == "prepared":
        recipe = Recipe(name="sft", source=source, tokenizer="bytes", cache_dir=tmp_path / "cache")
        prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())
        more["prepared"] = str(tmp_path / "out")
    batches = open_dataset(spec(source, packing=packing, **more), seed=0).train_batches()
    lacking, whole = count_without_prompt(batches, made, form)
    assert lacking == 0
    assert whole == {answer for turns in made for answer in learned_answers(form, turns)}
    assert batches.state()["skipped"] == {}


def test_a_huge_sample_is_parsed_and_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are read at different times, among those of others; before it took as often as it has slots."""
    made = [*samples(60, 12), turns_of(range(1000, 3000), np.random.default_rng(0), 40)]
    render, sizes = masked_text.render_chat, list[int]()

    def counting(value: Any, *rule: Any, **fields: Any) -> Any:
        sizes.append(len(value))
        return render(value, *rule, **fields)

    monkeypatch.setattr(masked_text, "render_chat", counting)
    batches = open_dataset(spec(source_of(tmp_path, "messages", made), epochs=2), seed=0).train_batches()
    lacking, whole = count_without_prompt(batches, made, "messages")
    assert lacking == 0
    assert whole == {answer for turns in made for _, answer in turns}
    assert len(sizes) > 60
    assert sizes.count(4000) <= 2, "once, and perhaps to check the size of the source"


@pytest.mark.parametrize("form", FORMS)
def test_concat_by_its_name_cuts_samples(form: str, tmp_path: Path) -> None:
    """And shows that the count of tokens without their prompt can be other than 0."""
    made = samples_of(form)
    dataset = open_dataset(spec(source_of(tmp_path, form, made), packing="concat"), seed=0)
    assert count_without_prompt(dataset.train_batches(), made, form)[0] > 100


def test_rows_of_held_out_samples_are_whole_too(tmp_path: Path) -> None:
    made = samples(80, 12)
    dataset = open_dataset(spec(source_of(tmp_path, "messages", made), eval_fraction=0.5), seed=0)
    lacking, whole = count_without_prompt(
        (held.batch for held in dataset.held_out().batches()), made, "messages"
    )
    assert lacking == 0
    assert len(whole) > 50


def test_of_a_turn_longer_than_a_row_the_beginning_is_learned_and_the_rest_counted(tmp_path: Path) -> None:
    made = [[("q0;", "A0" + "A" * 300 + ".")], [("q1" + "q" * 300 + ";", "A1.")], [("q2;", "A2.")]]
    for form in ("messages", "prompt"):
        batches = open_dataset(spec(source_of(tmp_path, form, made), global_batch=2), seed=0).train_batches()
        runs = sorted(run for batch in batches for _, run in learned_runs(batch))
        assert [len(runs), runs[0][:4], runs[1][:3]] == [2, "A0AA", "A2."]
        assert len(runs[0]) > 64
        assert batches.state()["skipped"] == {"sft": 2}
        messages = "\n".join(batches.take_messages())
        assert re.search(r"document a\.jsonl:0: its 3\d\d tokens are more than a row of data\.seq_len=128; "
                         r"[12]\d\d that are learned are left out \(data\.sources\.sft\.on_too_long='split_turns'\)",
                         messages), messages  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "prepared"])
def test_drop_leaves_long_samples_out_and_counts_them(kind: str, tmp_path: Path) -> None:
    made = [[(f"q{n};", f"A{n}{'A' * (300 if n % 3 == 0 else 9)}.")] for n in range(30)]
    source = source_of(tmp_path, "prompt", made, on_too_long="drop")
    more: dict[str, Any] = {}
    if kind == "prepared":
        recipe = Recipe(name="sft", source=source, tokenizer="bytes", cache_dir=tmp_path / "cache")
        prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())
        more["prepared"] = str(tmp_path / "out")
    dataset = open_dataset(spec(source, global_batch=2, **more), seed=0)
    batches = dataset.train_batches()
    _, whole = count_without_prompt(batches, made, "prompt")
    assert whole == {f"A{n}{'A' * 9}." for n in range(30) if n % 3}
    if kind == "jsonl":
        assert batches.state()["skipped"] == {"sft": 10}
    else:
        assert "10 of them longer than a row (on_too_long='drop')" in dataset.describe()


def test_refuse_ends_the_run_and_names_the_sample(tmp_path: Path) -> None:
    source = source_of(tmp_path, "prompt", [[("q0;", "A" * 300)], [("q1;", "A1.")]] * 9, on_too_long="refuse")
    why = (
        r"data\.sources\.sft: document a\.jsonl:\d+: its 305 tokens are more than a row of data\.seq_len=128\. "
        r"Raise data\.seq_len, shorten it, or set data\.sources\.sft\.on_too_long to 'split_turns' or 'drop'"
    )
    with pytest.raises(UserError, match=why):
        list(open_dataset(spec(source, on_bad_record="skip"), seed=0).train_batches())


@pytest.mark.parametrize(
    ("fields", "more", "why"),
    [
        (
            {"on_too_long": "drop", "mask_field": None},
            {},
            r"on_too_long='drop' is for samples, and text may be",
        ),
        (
            {"on_too_long": "drop"},
            {"packing": "concat"},
            r"keeps samples whole, but data\.packing='concat' cuts",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(fields: Any, more: Any, why: str) -> None:
    source = Source(path="a", **{"mask_field": "mask", **fields})
    with pytest.raises(UserError, match=why):
        spec(source, **more)
    with pytest.raises(UserError, match=rf"eval\.sets\.mine\..*{why}"):
        open_sets({"mine": source}, spec(Source(path="a"), **more), ())


def text_and_chats(folder: Path, **fields: Any) -> PackedText:
    (folder / "text").mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for number, size in enumerate(rng.integers(20, 200, 60).tolist()):
        (folder / "text" / f"{number}.txt").write_text("z" * size)
    chats = source_of(folder, "messages", samples(60, 3))
    sources = {"web": Source(path=str(folder / "text")), "sft": chats}
    names = fields.pop("names", ("web", "sft"))
    return PackedText(
        sources={name: sources[name] for name in names}, seq_len=SEQ_LEN, global_batch=4, engine="inline",
        eval_fraction=0.0, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("first", [("web",), ("web", "sft")])
def test_a_resume_does_not_change_the_packing_in_silence(first: tuple[str, ...], tmp_path: Path) -> None:
    """The first chat source makes `best_fit` the default, for the rows of all sources; the last one unmakes
    it. By its name another packing goes on from the step, and the log says so.
    """
    then = {("web",): ("web", "sft"), ("web", "sft"): ("web",)}[first]
    before, after = ("concat", "best_fit")[:: 1 if len(first) == 1 else -1]
    with open_dataset(text_and_chats(tmp_path, names=first), seed=0).train_batches() as batches:
        next(batches)
        state = batches.state()
    dataset = open_dataset(text_and_chats(tmp_path, names=then), seed=0)
    why = rf"data\.packing='{before}', but here it is '{after}', .* samples: .*Set data\.packing to the one that"
    assert re.search(why, dataset.resume_refusal(state) or "")
    with pytest.raises(UserError, match=why):
        dataset.train_batches(state)
    for packing in (before, after):
        named = open_dataset(text_and_chats(tmp_path, names=then, packing=packing), seed=0)
        with named.train_batches(state) as batches:
            next(batches)
            line = f"step 1: data.packing {before} -> {after}"
            assert (line in batches.take_messages()) == (packing == after)
            assert batches.state()["planner"]["packing"] == packing
            assert batches.plan is not None
            assert (batches.plan.fill == 1) == (packing == "concat")


def test_text_alone_is_packed_as_before() -> None:
    text, chats = Source(path="a"), Source(path="b", messages_field="m")
    alone, mixed = spec(text), PackedText(sources={"a": text, "b": chats}, seq_len=8, global_batch=1)
    assert alone.packing_of(has_samples=False) == "concat"
    assert mixed.packing_of(has_samples=True) == "best_fit"
    assert [setup.row_tokens for setup in mixed.setups(seed=0)] == [None, 8]
    assert [setup.chunk_tokens for setup in mixed.setups(seed=0)] == [8, 4]


def test_the_example_of_the_docstring() -> None:
    runs = np.asarray([[0, 3], [5, 8], [20, 22]])
    assert pieces_of_sample(26, runs, 10) == [(0, 5), (5, 15), (20, 26)]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12),
    row_tokens=st.integers(2, 20),
)
def test_pieces_hold_prompts_whole_and_fit_the_slots(lengths: list[tuple[int, int]], row_tokens: int) -> None:
    """Against the tokens one by one; the pieces are never more than the slots of a sample."""
    is_prompt = list(itertools.chain(*([True] * a + [False] * b for a, b in lengths)))
    padded = np.diff(np.asarray([False, *is_prompt, False], np.int8))
    runs = np.stack([np.flatnonzero(padded == 1), np.flatnonzero(padded == -1)], axis=1)
    pieces = pieces_of_sample(len(is_prompt), runs, row_tokens)
    assert len(pieces) <= -(-len(is_prompt) // -(-row_tokens // 2))
    assert all(0 < end - start <= row_tokens for start, end in pieces)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
    covered = {i for start, end in pieces for i in range(start, end)}
    for i in [i for i, prompt in enumerate(is_prompt) if not prompt]:
        before = next((j for j in range(i, -1, -1) if is_prompt[j]), None)
        if before is None:
            assert i in covered
            continue
        first = next((j + 1 for j in range(before, -1, -1) if not is_prompt[j]), 0)
        assert (i in covered) == (i - first < row_tokens and (before + 1 - first) < row_tokens)
        if i in covered:
            [piece] = [piece for piece in pieces if piece[0] <= i < piece[1]]
            assert piece[0] <= first


def test_an_evaluation_of_whole_samples_has_all_its_rows(tmp_path: Path) -> None:
    """Chunks of samples are half as long as rows, and count as such."""
    made = samples(3000, 2, 12)
    source = source_of(tmp_path, "messages", made, "parquet")
    data = spec(source, seq_len=512, global_batch=4, eval_batches=8, eval_fraction=0.5)
    assert len(list(open_dataset(data, seed=0).held_out().batches())) == 8


def test_samples_that_fill_no_row_are_named_by_inspect_order(tmp_path: Path) -> None:
    source = source_of(tmp_path, "messages", samples(20, 2, 12))
    dataset = open_dataset(spec(source, seq_len=1 << 10, global_batch=1, epochs=None), seed=0)
    with pytest.raises(UserError, match=r"--order: the documents fill \d rows of data.seq_len=1,024"):
        measure_order(dataset, 20)
