"""Loss masks from the file to the targets: what is not learned is IGNORE, and only that."""

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.constructor.context_order import context_order
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.corpus import Corpus
from jtrain.data.tokenizer import Tokenizer, make_tokenizer
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.data.masked_sources import (
    Part,
    long_texts,
    parts_of,
    spans_of,
    write_masked,
    write_prompts,
    write_records,
)

SameBatch = Callable[[Batch, Batch], None]
PAIRS = [(f"the cat {i} sat on th", f"e mat {i}, the end" if i % 4 else "") for i in range(60)]
"""Prompts and completions; `the` at the border would be one token of the test's tokenizer."""


def spec(source: Source, **fields: Any) -> PackedText:
    fields = {"seq_len": 64, "global_batch": 4, "eval_fraction": 0.1, "engine": "inline", **fields}
    return PackedText(**{"sources": {"sft": source}, **fields})


def prompts(folder: Path, **fields: Any) -> Source:
    path = write_prompts(folder / "prompts.jsonl", PAIRS)
    return Source(path=path, prompt_field="prompt", text_field="completion", **fields)


def masked(folder: Path, texts: list[str]) -> Source:
    return Source(path=write_masked(folder / "masked.jsonl", texts), mask_field="mask")


def prepared(source: Source, out: Path, tokenizer: str = "bytes", shard_bytes: int = 1000) -> str:
    recipe = Recipe(name="sft", source=source, tokenizer=tokenizer, cache_dir=out / "cache")
    prepare([recipe], out, workers=1, stream=io.StringIO(), shard_bytes=shard_bytes)
    return str(out)


def expected(
    tokenizer: Tokenizer, documents: list[list[Part]], *, end: bool | None
) -> dict[tuple[int, ...], list[int]]:
    """Returns ids -> targets of whole documents, each part tokenised by itself.

    end: True if the end of a document is always learned; None if it is where its last part is.
    """
    found = {}
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    for parts in documents:
        ids, learned = list(begin), [False] * len(begin)
        for text, is_learned in parts:
            part = tokenizer.encode(text).tolist()
            ids, learned = ids + part, learned + [is_learned] * len(part)
        ids, learned = [*ids, tokenizer.end_id], [*learned, parts[-1][1] if end is None else end]
        shifted = zip(ids[1:], learned[1:], strict=True)
        found[tuple(ids)] = [i if is_learned else IGNORE for i, is_learned in shifted] + [IGNORE]
    return found


def documents_of(batches: Iterator[Batch]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yields ids and targets of every piece."""
    for batch in batches:
        for token, target, segment in zip(batch.token_BL, batch.target_BL, batch.segment_BL, strict=True):
            for number in range(1, int(segment.max()) + 1):
                here = segment == number
                yield tuple(token[here].tolist()), target[here].tolist()


@pytest.mark.parametrize("form", ["raw", "prepared"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("by", ["prompt", "mask"])
def test_targets_of_whole_documents_are_those_of_the_learned_parts(
    by: str, kind: str, form: str, tmp_path: Path, tokenizer_json: Path
) -> None:
    """Compares with a construction that tokenises each part of each document by itself."""
    name = "bytes" if kind == "bytes" else str(tokenizer_json)
    tokenizer = make_tokenizer(name)
    texts = [text[:200] for text in long_texts(60)]
    source = prompts(tmp_path) if by == "prompt" else masked(tmp_path, texts)
    if by == "prompt":
        documents = [[(prompt, False), (completion, True)] for prompt, completion in PAIRS]
        want = expected(tokenizer, documents, end=True)
    else:
        want = expected(tokenizer, [parts_of(text) for text in texts], end=None)
    more = {"prepared": prepared(source, tmp_path / "out", name)} if form == "prepared" else {}
    dataset = open_dataset(
        spec(source, tokenizer=name, packing="best_fit", seq_len=512, eval_fraction=0.0, **more), seed=0
    )
    assert len(want) == 60
    seen = set()
    for ids, targets in documents_of(itertools.islice(dataset.train_batches(), 25)):
        assert targets == want[ids]
        seen.add(ids)
    assert seen == want.keys()


def assert_upper_case_is_learned(batch: Batch) -> int:
    """Checks a batch of bytes by its letters alone; returns the number of learned targets."""
    token, after = batch.token_BL[:, :-1], batch.token_BL[:, 1:]
    in_piece = (np.diff(batch.segment_BL, axis=1) == 0) & (batch.segment_BL[:, 1:] > 0)
    is_upper = np.isin(np.arange(256), list("ABCDЖ".encode()))
    learned = np.where(after == 0, is_upper[token], is_upper[after])
    np.testing.assert_array_equal(batch.target_BL[:, :-1], np.where(learned & in_piece, after, IGNORE))
    assert (batch.target_BL[:, -1] == IGNORE).all()
    return int((batch.target_BL != IGNORE).sum())


@pytest.mark.parametrize("form", ["raw", "prepared"])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_long_documents_carry_their_mask_through_chunks_and_rows(
    packing: str, form: str, tmp_path: Path
) -> None:
    source = masked(tmp_path, long_texts(40))
    more = {"prepared": prepared(source, tmp_path / "out")} if form == "prepared" else {}
    dataset = open_dataset(spec(source, packing=packing, **more), seed=1)
    learned = [assert_upper_case_is_learned(batch) for batch in itertools.islice(dataset.train_batches(), 40)]
    assert 0.3 < np.mean(learned) / 256 < 0.7
    evaluated = list(dataset.held_out().batches())
    assert 0.2 < np.mean([assert_upper_case_is_learned(held.batch) for held in evaluated]) / 256 < 0.8
    for held in evaluated:
        assert held.text_bytes == (held.batch.target_BL > 0).sum(), (
            "bits per byte count bytes that are learned"
        )


@pytest.mark.parametrize("form", ["raw", "prepared"])
def test_processes_resume_hosts_and_the_context_axis_change_nothing(
    form: str, tmp_path: Path, same_batch: SameBatch
) -> None:
    source = masked(tmp_path, long_texts(40))
    other = write_records(tmp_path, "jsonl", [{"text": text} for text in long_texts(20, seed=1)])
    sources = {"sft": source, "plain": Source(path=other)}
    more: dict[str, Any] = {"sources": sources, "max_loaders": 2}
    if form == "prepared":
        recipes = [
            Recipe(name=n, source=s, tokenizer="bytes", cache_dir=tmp_path) for n, s in sources.items()
        ]
        prepare(recipes, tmp_path / "out", workers=1, stream=io.StringIO())
        more["prepared"] = str(tmp_path / "out")
    dataset = open_dataset(spec(source, **more), seed=2)
    with dataset.train_batches() as batches:
        want = list(itertools.islice(batches, 12))
    state = None
    processes = open_dataset(spec(source, engine="processes", **more), seed=2)
    for first in (0, 6):
        with processes.train_batches(state) as batches:
            for step in range(first, first + 6):
                same_batch(next(batches), want[step])
            state = batches.state()
    rows = np.asarray([1, 2])
    order = context_order(64, 4, "zigzag")
    with processes.train_batches(rows=rows, context=4) as batches:
        for step in range(12):
            same_batch(next(batches), jax.tree.map(lambda x: x[rows][:, order], want[step]))


def test_a_prompt_that_is_learned_gives_the_same_ids_and_every_target(tmp_path: Path) -> None:
    only, both = (
        open_dataset(spec(prompts(tmp_path, mask_prompt=mask_prompt)), seed=0).train_batches()
        for mask_prompt in (True, False)
    )
    for _ in range(5):
        some, every = next(only), next(both)
        np.testing.assert_array_equal(some.token_BL, every.token_BL)
        shifted = np.append(every.token_BL[:, 1:], np.zeros((4, 1), np.int32), axis=1)
        same = (np.diff(every.segment_BL, axis=1, append=0) == 0) & (every.segment_BL > 0)
        np.testing.assert_array_equal(every.target_BL, np.where(same, shifted, IGNORE))
        assert (some.target_BL == IGNORE).sum() > (every.target_BL == IGNORE).sum()


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "arrayrecord"])
@pytest.mark.parametrize("by", ["prompt", "mask"])
def test_every_format_with_fields_has_masks(by: str, kind: str, tmp_path: Path) -> None:
    texts = ["ab,CD\ne", "ÜX yZ", "all lower", "UPPER", "q"]
    records = (
        [{"x": "1", "prompt": f"p {text}", "completion": text.upper()} for text in texts]
        if by == "prompt"
        else [{"x": "1", "mask": spans_of(text), "text": text} for text in texts]
    )
    path = write_records(tmp_path, kind, records)
    source = (
        Source(path=path, prompt_field="prompt", text_field="completion")
        if by == "prompt"
        else Source(path=path, mask_field="mask")
    )
    corpus = Corpus(source, name="sft", cache_dir=tmp_path / "cache")
    found: list[Any] = list(corpus.read(np.asarray([4, 1, 0, 2, 3])))
    whole = [f"p {text}{text.upper()}" for text in texts] if by == "prompt" else texts
    assert found == [whole[i] for i in (4, 1, 0, 2, 3)]
    want = (
        [[[len(text) + 2, 2 * len(text) + 2]] for text in texts]
        if by == "prompt"
        else [*map(spans_of, texts)]
    )
    assert [[list(span) for span in text.learned] for text in found] == [want[i] for i in (4, 1, 0, 2, 3)]
    assert (corpus.sizes(0, 5) >= [len(text.encode()) for text in whole]).all()


@pytest.mark.slow
def test_text_that_is_not_learned_changes_neither_loss_nor_weights(tmp_path: Path) -> None:
    """Two corpora differ in masked text that follows what is learned, so that it can act as a target
    alone.
    """
    mesh_spec = MeshSpec()
    mesh = make_mesh(mesh_spec, jax.devices()[:1])
    model = Transformer(
        num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, head_dim=8, d_ff=32, vocab_size=256
    )
    infos = model.param_infos()
    layout = make_layout(LayoutSpec(), mesh_spec, infos)
    optimizer = build(
        AdamW(peak_lr=1e-2, warmup_steps=0), num_steps=5, params=map_params(lambda info: info, infos)
    )
    step = make_train_step(model, optimizer, layout, mesh)

    def trained(source: Source) -> tuple[list[float], Any]:
        """Returns the losses of three steps and the parameters after them."""
        state, losses = init_state(layout, optimizer, mesh, seed=0), []
        batches = open_dataset(spec(source, packing="best_fit", eval_fraction=0.0), seed=0).train_batches()
        for batch in itertools.islice(batches, 3):
            put = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), batch)
            state, metrics = step(state, put)
            losses.append(float(metrics["loss_nats"]))
        return losses, jax.device_get(state.params)

    masked_results, plain_losses = [], []
    for letter in "bd":
        (tmp_path / letter).mkdir()
        source = masked(tmp_path / letter, ["LEARN" + "XYZ"[i % 3] + letter * 20 for i in range(60)])
        masked_results.append(trained(source))
        plain_losses.append(trained(Source(path=source.path))[0])
    (losses, params), (other_losses, other_params) = masked_results
    assert losses == other_losses
    assert losses[2] < losses[0] - 0.1, "the model must learn, or equality proves nothing"
    jax.tree.map(np.testing.assert_array_equal, params, other_params)
    assert abs(plain_losses[0][0] - plain_losses[1][0]) > 1e-3, (
        "without a mask the texts must differ to the model"
    )
