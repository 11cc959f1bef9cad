"""Masks that are refused: bad spans, settings that hold no mask, and an index or a state of another mask."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from jtrain.data import Source, open_dataset
from jtrain.data.pretokenized.index_format import MASKS
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.corpus import Corpus
from jtrain.errors import UserError
from tests.data.masked_sources import (
    long_texts,
    spans_of,
    write_records,
)
from tests.data.test_loss_mask import assert_upper_case_is_learned, masked, prepared, prompts, spec

MENDABLE = {
    "no field": ({"text": "ab"}, r"no field 'mask'; its fields: 'text'\. Set data\.sources\.sft\.mask_field"),
    "no list": ({"text": "ab", "mask": 3}, r"field 'mask' is int, not a list of spans"),
    "no JSON": ({"text": "ab", "mask": "[1,"}, r"field 'mask' is no JSON"),
    "no span": ({"text": "ab", "mask": [0, 1]}, r"field 'mask' holds 0 where a span \[start, end\]"),
    "fractions": ({"text": "ab", "mask": [[0, 1.5]]}, r"holds \[0, 1\.5\] where a span"),
    "beyond": (
        {"text": "äb", "mask": [[0, 3]]},
        r"holds \[0, 3\], which is no span of the text's 2 characters",
    ),
    "empty": ({"text": "ab", "mask": [[1, 1]]}, r"holds \[1, 1\], which is no span"),
    "overlap": ({"text": "abc", "mask": [[0, 2], [1, 3]]}, r"holds \[1, 3\] after a span that ends at 2"),
}


@pytest.mark.parametrize("case", MENDABLE)
def test_a_bad_mask_is_refused_with_its_reason_or_left_out(case: str, tmp_path: Path) -> None:
    record, why = MENDABLE[case]
    good = [{"text": text[:200], "mask": spans_of(text[:200])} for text in long_texts(20)]
    source = Source(path=write_records(tmp_path, "jsonl", [*good[:9], record, *good[9:]]), mask_field="mask")
    with pytest.raises(
        UserError, match=rf"a\.jsonl, line 10: .*{why}.*Mend the line, or set data\.on_bad_record='skip'"
    ):
        list(itertools.islice(open_dataset(spec(source, eval_fraction=0.0), seed=0).train_batches(), 40))
    batches = open_dataset(spec(source, on_bad_record="skip", eval_fraction=0.0), seed=0).train_batches()
    for batch in itertools.islice(batches, 40):
        assert_upper_case_is_learned(batch)
    assert batches.state()["skipped"]["sft"] > 0


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "arrayrecord", "json"])
def test_every_format_names_the_record_and_the_span(kind: str, tmp_path: Path) -> None:
    records = [{"text": "ab", "mask": [[0, 2]]}, {"text": "ab", "mask": [[0, 3]]}]
    path = write_records(tmp_path, kind, records)
    corpus = Corpus(Source(path=path, mask_field="mask"), name="sft", cache_dir=tmp_path / "cache")
    assert corpus[0] == "ab"
    with pytest.raises(
        UserError, match=r"(record|row) 1.*'mask' holds \[0, 3\], which is no span .*on_bad_record"
    ):
        corpus[1]


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no mask column": (
        "parquet",
        {"text": "a"},
        {"mask_field": "mask"},
        r"no column 'mask'; its columns: text\. Set data\.sources\.sft\.mask_field",
    ),
    "no mask in the header": (
        "csv",
        {"text": "a"},
        {"mask_field": "mask"},
        r"no column 'mask'.*\.sft\.mask_field",
    ),
    "no mask field": (
        "jsonl",
        {"text": "a"},
        {"mask_field": "m"},
        r"or data\.sources\.sft\.mask_field='m' is wrong.*no field 'm'",
    ),
    "text as mask": (
        "parquet",
        {"text": "a", "mask": [1]},
        {"mask_field": "mask"},
        r"column 'mask' is list<.*int64>, not lists of spans .*list<list<int64>>",
    ),
    "prompt that is no text": (
        "parquet",
        {"text": "a", "prompt": 1},
        {"prompt_field": "prompt"},
        r"column 'prompt' is int64, not text\. Set data\.sources\.sft\.prompt_field",
    ),
    "chat": (
        "jsonl",
        {"c": CHAT},
        {"text_field": "c"},
        r"'c' is a list of messages\. .*sft\.messages_field='c'",
    ),
    "chat as column": (
        "parquet",
        {"c": CHAT},
        {"text_field": "c"},
        r"'c' is of lists of messages\. .*sft\.messages_field='c'",
    ),
    "chat as prompt": (
        "jsonl",
        {"text": "a", "p": CHAT},
        {"prompt_field": "p"},
        r"field 'p' is a list of messages, and the text str",
    ),
    "plain text": ("txt", {}, {"mask_field": "m"}, r"a\.txt: of text records only the text .*mask_field='m'"),
    "text format": (
        "jsonl",
        {},
        {"mask_field": "m", "format": "text"},
        r"format='text': of text records only the text",
    ),
    "tar": (
        "jsonl",
        {},
        {"prompt_field": "m", "format": "webdataset"},
        r"of webdataset .*remove .*prompt_field",
    ),
    "both": (
        "jsonl",
        {},
        {"mask_field": "m", "prompt_field": "p"},
        r"prompt_field='p' and mask_field='m' are both",
    ),
    "no prompt": (
        "jsonl",
        {},
        {"mask_prompt": False},
        r"mask_prompt=False has no prompt .*Set .*prompt_field",
    ),
    "prompt is text": (
        "jsonl",
        {},
        {"prompt_field": "text"},
        r"prompt_field='text' is also its text_f.*completion",
    ),
    "mask is text": ("jsonl", {}, {"mask_field": "text"}, r"mask_field='text' is also its text_field"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_hold_no_mask_is_refused_when_it_is_opened(case: str, tmp_path: Path) -> None:
    kind, record, fields, why = REFUSED[case]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("text")
        path = str(tmp_path / "a.txt")
    else:
        path = write_records(tmp_path, kind, [record or {"text": "a"}])
    with pytest.raises(UserError, match=why):
        Corpus(Source(path=path, **fields), name="sft", cache_dir=tmp_path / "cache")


def test_an_index_with_another_mask_is_refused_and_a_damaged_mask_is_found(tmp_path: Path) -> None:
    source = masked(tmp_path, long_texts(40))
    plain, there = Source(path=source.path), tmp_path / "out"
    open_dataset(spec(source, prepared=prepared(source, there)), seed=0)
    with pytest.raises(
        UserError, match=r"it was made with mask_field='mask', now no loss mask\. Make it again"
    ):
        open_dataset(spec(plain, prepared=str(there)), seed=0)
    index = PreparedIndex(there / "sft")
    assert index.verify() == []
    content = bytearray((there / "sft" / MASKS).read_bytes())
    content[3] ^= 1
    (there / "sft" / MASKS).write_bytes(content)
    assert index.verify() == ["masks.bin has other contents than were written"]
    with pytest.raises(UserError, match=r"it was made with no loss mask, now mask_field='mask'"):
        open_dataset(spec(source, prepared=prepared(plain, tmp_path / "plain")), seed=0)
    assert not (tmp_path / "plain" / "sft" / MASKS).exists(), "a source without a mask has no file of it"


def test_a_saved_state_of_another_mask_is_refused(tmp_path: Path) -> None:
    saved = open_dataset(spec(prompts(tmp_path)), seed=0).train_batches().state()
    with pytest.raises(UserError, match=r"sources\.sft="):
        open_dataset(spec(prompts(tmp_path, mask_prompt=False)), seed=0).train_batches(saved)
