"""Chats from the file to the targets: of the one text that their messages make, what assistants say is
learned.
"""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import Source, open_dataset
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.corpus import Corpus
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from tests.data.masked_sources import write_records
from tests.data.test_loss_mask import documents_of, expected, prepared, spec

Chat = list[dict[str, Any]]


def chat(*contents: str) -> Chat:
    """A chat in which user and assistant take turns."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


HELLO = [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello!", "1 + 1?", "2")]
HELLO_TEXT = "<|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\nHello!\n<|user|>\n1 + 1?\n<|assistant|>\n2\n"


def source(folder: Path, kind: str, chats: list[Chat], **fields: Any) -> Source:
    path = write_records(folder, kind, [{"id": i, "messages": messages} for i, messages in enumerate(chats)])
    return Source(path=path, messages_field="messages", **fields)


def open_corpus(source: Source, folder: Path) -> Corpus:
    return Corpus(source, name="sft", cache_dir=folder / "cache")


def long_chats(count: int) -> list[Chat]:
    """Chats of up to 40 messages, users' in lower case and assistants' in upper case; an assistant's is the
    last.
    """
    rng = np.random.default_rng(0)
    return [
        chat(
            *(
                "".join(rng.choice(list(("abcdλ", "ABCDЖ")[i % 2]), rng.integers(1, 60)))
                for i in range(2 * turns)
            )
        )
        for turns in rng.integers(1, 20, count).tolist()
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "arrayrecord"])
def test_every_format_with_lists_gives_the_text_and_what_is_learned(kind: str, tmp_path: Path) -> None:
    chats = [chat("a", "ü漢\n"), HELLO, [{"role": "assistant", "content": "", "name": "x"}], *long_chats(5)]
    corpus = open_corpus(source(tmp_path, kind, chats), tmp_path)
    found: list[Any] = list(corpus.read(np.arange(8)))
    assert str(found[1]) == HELLO_TEXT
    assert [found[1][start:end] for start, end in found[1].learned] == ["Hello!\n", "2\n"]
    assert (found[2], found[2].learned) == ("<|assistant|>\n\n", ((14, 15),))
    assert [found[0][start:end] for start, end in found[0].learned] == ["ü漢\n\n"]
    want = [len(text.encode()) for text in found]
    sizes = corpus.sizes(0, 8)
    assert (sizes >= want).all(), "else the end of a chat would be in no chunk"
    if kind in ("parquet", "arrow"):
        assert sizes.tolist() == want
        assert corpus.sizes(2, 5).tolist() == want[2:5]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_may_lie_in_an_object_or_struct(kind: str, tmp_path: Path) -> None:
    path = write_records(tmp_path, kind, [{"meta": {"chat": HELLO}}])
    corpus = open_corpus(Source(path=path, messages_field="meta.chat"), tmp_path)
    assert corpus[0] == HELLO_TEXT
    assert corpus.sizes(0, 1)[0] >= len(HELLO_TEXT)


def test_all_messages_are_learned_and_cut_into_the_same_tokens_where_the_prompt_is_too(
    tmp_path: Path,
) -> None:
    some, every = (
        open_dataset(
            spec(
                source(tmp_path, "jsonl", long_chats(30), mask_prompt=mask_prompt),
                seq_len=4096,
                eval_fraction=0.0,
            ),
            seed=0,
        ).train_batches()
        for mask_prompt in (True, False)
    )
    for _ in range(5):
        masked, whole = next(some), next(every)
        np.testing.assert_array_equal(masked.token_BL, whole.token_BL)
        here = (whole.segment_BL[:, :-1] == whole.segment_BL[:, 1:]) & (whole.segment_BL[:, 1:] > 0)
        np.testing.assert_array_equal(whole.target_BL[:, :-1][here], whole.token_BL[:, 1:][here])
        assert (masked.target_BL == IGNORE).sum() > (whole.target_BL == IGNORE).sum()


def pairs(*three: tuple[str, str]) -> list[Any]:
    """Cases of three settings with two values each; the quick ones have every pair of values of any two."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] * (sum(map(tuple.index, three, case)) % 2))
        for case in itertools.product(*three)
    ]


@pytest.mark.parametrize(
    ("kind", "tokenizer_kind", "form"), pairs(("jsonl", "parquet"), ("bytes", "bpe"), ("raw", "prepared"))
)
def test_rows_hold_the_chats_and_targets_are_what_assistants_say(
    kind: str, tokenizer_kind: str, form: str, tmp_path: Path, tokenizer_json: Path
) -> None:
    """Compares with a construction that tokenises each part of each chat by itself."""
    name = "bytes" if tokenizer_kind == "bytes" else str(tokenizer_json)
    chats = [
        chat(f"the cat {i}", f"sat on the {i}", "the end" * (i % 3), "yes" * (1 + i % 2)) for i in range(40)
    ]
    chats[7].append({"role": "user", "content": "and no answer"})
    documents = []
    for messages in chats:
        parts, before = [], ""
        for message in messages:
            before += f"<|{message['role']}|>\n"
            if message["role"] == "assistant":
                parts += [(before, False), (f"{message['content']}\n", True)]
                before = ""
            else:
                before += f"{message['content']}\n"
        documents.append([*parts, (before, False)] if before else parts)
    want = expected(make_tokenizer(name), documents, end=None)
    sft = source(tmp_path, kind, chats)
    more = {"prepared": prepared(sft, tmp_path / "out", name)} if form == "prepared" else {}
    dataset = open_dataset(
        spec(sft, tokenizer=name, packing="best_fit", seq_len=512, eval_fraction=0.0, **more), seed=0
    )
    seen = set()
    for ids, targets in documents_of(itertools.islice(dataset.train_batches(), 12)):
        assert targets == want[ids]
        seen.add(ids)
    assert len(want) == 40
    assert seen == want.keys()


@pytest.mark.parametrize(
    ("packing", "kind", "form"), pairs(("concat", "best_fit"), ("jsonl", "parquet"), ("raw", "prepared"))
)
def test_long_chats_keep_their_mask_through_chunks_and_rows(
    packing: str, kind: str, form: str, tmp_path: Path
) -> None:
    """Two bytes tell what is learned: upper case, the line end behind it, and the end of the chat."""
    sft = source(tmp_path, kind, long_chats(40))
    more = {"prepared": prepared(sft, tmp_path / "out")} if form == "prepared" else {}
    dataset = open_dataset(spec(sft, packing=packing, eval_fraction=0.0, **more), seed=1)
    is_upper = np.isin(np.arange(256), list("ABCDЖ".encode()))
    learned = []
    for batch in itertools.islice(dataset.train_batches(), 60):
        token, after = batch.token_BL[:, :-1], batch.token_BL[:, 1:]
        in_piece = (np.diff(batch.segment_BL, axis=1) == 0) & (batch.segment_BL[:, 1:] > 0)
        is_learned = (
            is_upper[after] | ((after == ord("\n")) & is_upper[token]) | ((after == 0) & (token == ord("\n")))
        )
        np.testing.assert_array_equal(batch.target_BL[:, :-1], np.where(is_learned & in_piece, after, IGNORE))
        assert (batch.target_BL[:, -1] == IGNORE).all()
        learned.append((batch.target_BL != IGNORE).sum())
    assert 0.2 < np.mean(learned) / 256 < 0.7


def test_what_messages_are_not(tmp_path: Path) -> None:
    """Each is named with its place, is left out where that is the policy, and the others are trained on."""
    bad: list[tuple[Any, str]] = [
        ("hi", r"field 'messages' is str, not a list of messages"),
        ([], r"field 'messages' is a list without messages"),
        (["hi"], r"field 'messages' holds str as message 0, not an object with role and content"),
        (
            [{"from": "observation", "value": "hi"}],
            r"holds 'observation' as 'from' of message 0; known are human, user, gpt,",
        ),
        ([*HELLO, {"role": "user"}], r"holds no 'content' in message 5; its keys: 'role'"),
        ([{"role": 1, "content": "x"}], r"holds int as 'role' in message 0"),
        (
            [{"role": "user", "content": [{"type": "image"}]}, *chat("a", "b")],
            r"holds a list as 'content' of message 0\. Only text .* no images",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}],
            r"holds \{'id': 1\} in 'tool_calls' of message 0, which names no function",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}],
            r"role 'assistant'.*its roles: 'gpt', 'us",
        ),
        ([{"role": "assistant", "content": "\ud800"}], r"field 'messages' 'utf-8' codec can't encode"),
    ]
    for number, (messages, why) in enumerate(bad):
        folder = tmp_path / str(number)
        folder.mkdir()
        sft = source(
            folder, "jsonl", [*[chat("a", "b" * i) for i in range(20)][:9], messages, chat("c", "d")]
        )
        with pytest.raises(
            UserError, match=rf"a\.jsonl, line 10: .*{why}.*Mend the line, or set data\.on_bad"
        ):
            list(itertools.islice(open_dataset(spec(sft, eval_fraction=0.0), seed=0).train_batches(), 40))
        batches = open_dataset(
            spec(sft, on_bad_record="skip", eval_fraction=0.0, epochs=1), seed=0
        ).train_batches()
        tokens = sum(int((batch.segment_BL > 0).sum()) for batch in batches)
        good = [f"<|user|>\na\n<|assistant|>\n{'b' * i}\n" for i in (*range(9), 1)]
        assert tokens == sum(len(text) + 2 for text in good), "each begins and ends with an id of its own"
        assert batches.state()["skipped"] == {"sft": 1}
        assert any(
            f"document a.jsonl:9: {folder}/a.jsonl, line 10: " in line for line in batches.take_messages()
        )


def test_a_file_of_chats_without_text_names_the_setting_that_trains_on_them(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet", "arrow", "json"):
        sft = source(tmp_path, kind, [HELLO] * 3)
        with pytest.raises(
            UserError, match=r"no (field|column) 'text'; .*messages.* set data\.sources\.sft\.messages_field="
        ):
            open_dataset(spec(Source(path=sft.path)), seed=0)
        with pytest.raises(
            UserError, match=r"name the source in data\.sources, with messages_field='messages'"
        ):
            Corpus(Source(path=sft.path), name="data", cache_dir=tmp_path / "cache")
        next(open_dataset(spec(sft, eval_fraction=0.0), seed=0).train_batches())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no column": ("parquet", {"messages_field": "chat"}, r"no column 'chat'; its columns: messages, n\. Set "),
    "no field": ("jsonl", {"messages_field": "chat"}, r"format or data\.sources\.sft\.messages_field='chat' is wrong"),
    "a number": ("parquet", {"messages_field": "n"}, r"'n' is int64, not lists of messages: no list of structs\. "),
    "text too": ("jsonl", {"text_field": "n"}, r"messages_field='messages' and text_field='n' are both set"),
    "prompt too": ("jsonl", {"prompt_field": "n"}, r"messages_field='messages' and prompt_field='n' are both set"),
    "mask too": ("jsonl", {"mask_field": "n"}, r"messages_field='messages' and mask_field='n' are both set"),
    "csv": ("csv", {}, r"a\.csv: a field of csv is text and no list of messages.*or remove .*sft\.mess"),
    "text": ("jsonl", {"format": "text"}, r"of text records only the text is read, but .*messages_field='messages'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, fields, why = REFUSED[case]
    path = write_records(tmp_path, kind, [{"messages": HELLO, "n": 1}])
    with pytest.raises(UserError, match=why):
        Corpus(
            Source(path=path, **{"messages_field": "messages", **fields}),
            name="sft",
            cache_dir=tmp_path / "cache",
        )


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"by": "human", "value": "hi"}, r"no field 'role', only 'by', 'value'"),
        ({"role": "user", "content": [{"type": "image"}]}, r"field 'content' is list<.* and not text"),
    ],
)
def test_columns_of_other_messages_are_refused_when_they_are_opened(
    message: Any, why: str, tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist([{"messages": [message]}]), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=rf"a\.parquet: column 'messages' is list<.*, not lists of messages: {why}\. Set"
    ):
        open_corpus(Source(path=str(tmp_path / "a.parquet"), messages_field="messages"), tmp_path)


def test_an_index_of_chats_is_stale_for_another_part_of_them(tmp_path: Path) -> None:
    sft = source(tmp_path, "jsonl", long_chats(5))
    recipe = Recipe(name="sft", source=sft, tokenizer="bytes", cache_dir=tmp_path / "cache")
    prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())
    other = Source(path=sft.path, messages_field="messages", mask_prompt=False)
    with pytest.raises(
        UserError, match=r"with messages_field='messages', mask_prompt=True, now .*mask_prompt=False"
    ):
        open_dataset(spec(other, prepared=str(tmp_path / "out")), seed=0)


def test_a_line_is_never_shorter_than_its_text() -> None:
    """JSON lines are cut into chunks by the bytes of their lines."""
    for messages in ([{"role": "assistant", "content": ""}], chat("", ""), HELLO):
        text = "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in messages)
        assert len(json.dumps({"m": messages}, separators=(",", ":"))) > len(text)
