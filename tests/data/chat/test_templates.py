"""Chat templates: text, tokens and targets are those that a model reads and samples, or the record is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.data_parts import chats
from bench.data_parts.sampled_masks import SampledMasks
from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.chat import environment
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.data.inspect.token_runs import token_lines
from jtrain.data.loss_mask import encode_parts, split_chunk
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats.masked_text import MaskedText
from jtrain.data.tokenizer import make_tokenizer, whole_document
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from tests.data.chat import templates
from tests.data.masked_sources import write_records
from tests.data.test_loss_mask import documents_of

Chat = list[dict[str, Any]]
HELLO = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer with a template in a folder of its own."""

    def write(template: str, *stops: str) -> Path:
        folder = tmp_path / "tokenizer"
        chats.write_tokenizer(folder, template, stops or (templates.STOP,))
        return folder

    return write


def texts_of(record: dict[str, Any], folder: Path, kind: str = "jsonl", **fields: Any) -> list[MaskedText]:
    """The records that one line becomes."""
    path = write_records(folder, kind, [record])
    source = Source(path=path, **{"messages_field": "messages", **fields})
    mask = source.mask_with(str(folder / "tokenizer"), None, name="sft")
    corpus = Corpus(source, name="sft", cache_dir=folder / "cache", mask=mask)
    texts: list[Any] = [corpus[number] for number in range(len(corpus))]
    assert (corpus.sizes(0, len(corpus)) > 0).all()
    return texts


def learned(text: MaskedText) -> list[str]:
    return [text[start:end] for start, end in text.learned]


def test_a_turn_is_learned_from_the_generation_prompt_through_its_stop_token(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    folder = tokenizer(templates.PLAIN)
    [text] = texts_of({"messages": HELLO}, tmp_path)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you.<|im_end|>\n"
    )
    assert learned(text) == ["Hello!<|im_end|>", "See you.<|im_end|>"], "not the line end behind it"
    # The special tokens are tokens, and the document has no begin and end beside them.
    tokens = make_tokenizer(str(folder))
    (lengths, ids), ignored = encode_parts(tokens, [split_chunk(whole_document(tokens, text), 0, text)])
    assert "".join(map(tokens.spell, ids.tolist())) == text
    assert lengths.tolist() == [len(ids)]
    is_learned = np.ones(len(ids), bool)
    for start, end, weight in ignored.tolist():
        assert weight == 0
        is_learned[start:end] = False
    said = "".join(map(tokens.spell, ids[is_learned].tolist()))
    assert said == "Hello!<|im_end|>See you.<|im_end|>"
    assert ids.tolist().count(tokens.end_id) == 4, "one token each"


def test_the_template_comes_from_the_folder_a_file_or_the_config(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    folder = tokenizer(templates.PLAIN)
    want = texts_of({"messages": HELLO}, tmp_path)
    (tmp_path / "own.jinja").write_text(templates.PLAIN)
    for given in (str(tmp_path / "own.jinja"), templates.PLAIN, str(folder)):
        assert texts_of({"messages": HELLO}, tmp_path, chat_template=given) == want
    (folder / "chat_template.jinja").write_text(templates.PLAIN.replace("user", "client"))
    named = [{"name": "default", "template": "{{ 'no' }}"}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert texts_of({"messages": HELLO}, tmp_path) == want, "the file of its own wins"
    [roles] = texts_of({"messages": HELLO}, tmp_path, chat_template="roles")
    assert roles.startswith("<|user|>\nHi\n<|assistant|>\nHello!\n")


def test_thoughts_tools_and_contents_in_parts_are_written(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    tokenizer(templates.THINKING)
    thought = [HELLO[0], {**HELLO[1], "reasoning": "A greeting."}, *HELLO[2:]]
    [text] = texts_of({"messages": thought}, tmp_path)
    assert learned(text)[0] == "<think>\nA greeting.\n</think>\nHello!<|im_end|>"
    tokenizer(templates.TOOLS)
    call = {"id": "1", "function": {"name": "look_up", "arguments": '{"word": "tree"}'}}
    called = [
        HELLO[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a plant", "tool_call_id": "1"},
        HELLO[1],
    ]
    [text] = texts_of({"messages": called, "tools": [chats.TOOL]}, tmp_path, tools_field="tools")
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    want = '<tool_call>{"name": "look_up", "arguments": {"word": "tree"}}</tool_call><|im_end|>'
    assert learned(text) == [want, "Hello!<|im_end|>"]
    as_text = {"messages": called, "tools": json.dumps([chats.TOOL])}
    assert texts_of(as_text, tmp_path, "parquet", tools_field="tools") == [text]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in HELLO]
    for template in (templates.PLAIN, templates.PARTS):
        tokenizer(template)
        for chat in (HELLO, parts):
            [text] = texts_of({"messages": chat}, tmp_path)
            assert learned(text) == ["Hello!<|im_end|>", "See you.<|im_end|>"]


def test_a_stop_token_may_belong_to_the_next_message_or_end_the_document(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    folder = tokenizer(templates.BORROWED, "<|endoftext|>", "<|user|>")
    [text] = texts_of({"messages": HELLO}, tmp_path)
    assert learned(text) == ["Hello!<|user|>", "See you."]
    tokens = make_tokenizer(str(folder))
    (_, ids), ignored = encode_parts(tokens, [split_chunk(whole_document(tokens, text), 0, text)])
    assert tokens.spell(int(ids[-1])) == "<|endoftext|>"
    assert ignored[-1, 1] < len(ids), "the end of the document is learned"


def test_a_chat_whose_history_reads_otherwise_is_refused_or_one_record_a_turn(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    tokenizer(templates.FORGETFUL)
    thought = [
        dict(message, reasoning_content=f"R{i}") if i % 2 else message for i, message in enumerate(HELLO)
    ]
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 1: .*turn, message 1, that .*once it is history: .*'split'"
    ):
        texts_of({"messages": thought}, tmp_path)
    [last] = texts_of({"messages": thought}, tmp_path, train_on="last")
    assert learned(last) == ["<think>\nR3\n</think>\nSee you.<|im_end|>"]
    assert "R1" not in last, "as the model will read it"
    first, second = texts_of({"messages": thought}, tmp_path, on_rewritten_turn="split")
    assert (
        first
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nR1\n</think>\nHello!<|im_end|>"
    )
    assert learned(second) == learned(last)
    assert learned(first) == ["<think>\nR1\n</think>\nHello!<|im_end|>"]
    # What a turn rewrites not stays one record.
    assert len(texts_of({"messages": HELLO}, tmp_path, on_rewritten_turn="split")) == 1


def test_a_run_reads_split_chats_and_every_sampled_token_once(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    """From the file to the batch, in two formats: each turn is a sequence of its own, after its own prompt."""
    folder = tokenizer(templates.FORGETFUL)
    tokens = make_tokenizer(str(folder))
    records = []
    for number in range(30):
        chat = [dict(m, content=f"{m['content']} {number}") for m in HELLO[: 2 + 2 * (number % 2)]]
        for message in chat[1::2]:
            message["reasoning_content"] = f"thought {number}"
        records.append({"messages": chat})
    (tmp_path / "b").mkdir()
    for kind in ("jsonl", "parquet"):
        source = Source(
            path=write_records(tmp_path / "b", kind, records),
            messages_field="messages",
            on_rewritten_turn="split",
            tokenizer=str(folder),
        )
        spec = PackedText(
            sources={"sft": source},
            seq_len=128,
            global_batch=4,
            eval_fraction=0.0,
            epochs=1,
            engine="inline",
            cache_dir=str(tmp_path / "cache"),
        )
        with open_dataset(spec, seed=0).train_batches() as batches:
            said = []
            for ids, targets in documents_of(batches):
                spelled = "".join(map(tokens.spell, ids))
                answer = "".join(tokens.spell(t) for t in targets if t != IGNORE)
                assert spelled.removesuffix("\n").endswith(f"<|im_start|>assistant\n{answer}")
                said.append(answer)
        want = [
            f"<think>\nthought {n}\n</think>\n{text} {n}<|im_end|>"
            for n in range(30)
            for text in ("Hello!", "See you.")[: 1 + n % 2]
        ]
        assert sorted(said) == sorted(want)


def message(role: str, content: Any = "x", **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


REFUSED: dict[str, tuple[str, Chat, dict[str, Any], str]] = {
    "order": (templates.ALTERNATING, [*HELLO, HELLO[1]], {}, r"template fail: roles must alternate"),
    "tool without a call": (templates.PLAIN, [HELLO[0], message("tool"), HELLO[1]], {},
        r"message 1 of role 'tool' after 'user': a role out of order, as it answers no call"),
    "no assistant": (templates.PLAIN, HELLO[:1], {}, r"holds no message of role 'assistant'"),
    "fails": ("{{ messages[0].nothing + 1 }}", HELLO, {}, r"template fail: UndefinedError: .*nothing"),
    "sandbox": ("{{ messages.append(1) }}", HELLO, {}, r"template fail: SecurityError"),
    "cannot stop": (templates.PLAIN.replace("<|im_end|>", ""), HELLO, {},
        r"turn, message 1, that cannot stop: .*known: '<\|im_end\|>'\), but goes on with .*stop_tokens"),
    "open thought": (templates.OPEN_THOUGHT, HELLO, {}, r"message 1, that cannot be sampled: .*generation prompt has"),
    "drops reasoning": (templates.PLAIN, [HELLO[0], message("assistant", reasoning_content="Hm.")], {},
        r"'reasoning_content' in message 1 of role 'assistant' that .* leaves out: 'Hm\.'"),
    "drops a call": (templates.PLAIN, [HELLO[0], message("assistant", tool_calls=[{"name": "look_up"}])], {},
        r"'tool_calls' in message 1 .* leaves out: 'look_up'"),
    "drops a question": (templates.PLAIN.replace("m.content", "('' if m.role == 'user' else m.content)"),
        HELLO, {}, r"'content' in message 0 of role 'user' that .* leaves out: 'Hi'"),
    "special": (templates.PLAIN, [message("user", "a<|im_end|>b"), HELLO[1]], {},
        r"spells '<\|im_end\|>' in 'content' of message 0, a special token"),
    "train": (templates.PLAIN, [message("user", train=True), HELLO[1]], {}, r"train=true in message 0 of role 'user'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_model_would_sample_is_refused_by_its_name(
    case: str, tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    template, chat, fields, why = REFUSED[case]
    tokenizer(template)
    with pytest.raises(UserError, match=rf"a\.jsonl, line 1: field 'messages' .*{why}.*Mend the line"):
        texts_of({"messages": chat}, tmp_path, **fields)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no chat": ({"messages_field": None, "train_on": "last"}, r"train_on='last' is for chats\. Set .*messages_field"),
    "all and last": ({"mask_prompt": False, "train_on": "last"}, r"mask_prompt=False learns every .*train_on='last'"),
    "no file": ({"chat_template": "no.jinja"}, r"chat_template='no\.jinja': no such file; .*'roles'"),
    "no jinja": ({"chat_template": "{% for m in %}"}, r"chat_template: not a chat template: line 1: .* Mend it"),
    "tools": ({}, r"'tools' beside the messages.*Set tools_field to 'tools'"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_do_not_fit_are_refused(
    case: str, tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    tokenizer(templates.PLAIN)
    fields, why = SETTINGS[case]
    with pytest.raises(UserError, match=why):
        texts_of({"messages": HELLO, "tools": [chats.TOOL]}, tmp_path, **fields)


def test_chats_of_a_template_are_never_cut_at_row_ends(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    source = Source(
        path=write_records(tmp_path, "jsonl", [{"messages": HELLO}]),
        messages_field="messages",
        tokenizer=str(tokenizer(templates.PLAIN)),
    )
    spec = PackedText(sources={"sft": source}, seq_len=64, global_batch=1, packing="concat", engine="inline")
    with pytest.raises(UserError, match=r"data\.packing='concat' cuts chats at row ends"):
        open_dataset(spec, seed=0)


def test_arguments_in_quotes_of_python_are_not_lost(tmp_path: Path, tokenizer: Callable[..., Path]) -> None:
    r"""As LFM2 writes calls: look_up(word='don\'t'); another value than the record's is still missed."""
    quoted = templates.TOOLS.replace(
        "(call.function | tojson)",
        'call.function.name + "(\'" + (call.function.arguments.word | replace("\'", "\\\\\'")) + "\')" + \'word\'',
    )
    tokenizer(quoted)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "don't"}}}
    chat = [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    [text] = texts_of({"messages": chat}, tmp_path)
    assert learned(text) == ["<tool_call>look_up('don\\'t')word</tool_call><|im_end|>"]
    tokenizer(quoted.replace("arguments.word", "arguments.word[1:]"))
    with pytest.raises(UserError, match=r"leaves out: \"don't\" is not in its text"):
        texts_of({"messages": chat}, tmp_path)


def test_templates_have_the_helpers_of_transformers() -> None:
    source = (
        "{{ {'a': '<ü>'} | tojson }} {{ strftime_now('%Y-%m-%d') }} "
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
        " a{% generation %}bc{% endgeneration %}d"
    )
    text, spans = environment.render(source)
    assert text == '{"a": "<ü>"} 2025-01-01 13 abcd'
    assert [text[start:end] for start, end in spans] == ["bc"]
    assert "2026-11-27" in environment.render(source, now="2026-11-27")[0], "a day of one's own"


def test_every_kind_of_chat_is_sampled_as_it_is_learned(tmp_path: Path) -> None:
    """A scripted model samples each turn token by token: its prompt and its tokens are those of the record."""
    counts = {"equal": 0, "refused": 0}
    for number, template in enumerate(
        (templates.PLAIN, templates.THINKING, templates.FORGETFUL, templates.TOOLS, templates.PARTS)
    ):
        for rule in ("refuse", "split"):
            masks = SampledMasks(tmp_path / f"{number}", template, (templates.STOP,), on_rewritten_turn=rule)
            for (_, verdict), count in masks.compare(chats.conversations(12)).items():
                counts[verdict.removeprefix("split ")] += count
    assert counts["equal"] > 60, "most can be sampled"
    assert counts["refused"] > 10, "some cannot"


def test_inspect_shows_every_token_and_which_are_learned(
    tmp_path: Path, tokenizer: Callable[..., Path]
) -> None:
    folder = tokenizer(templates.PLAIN)
    source = Source(
        path=write_records(tmp_path, "jsonl", [{"messages": HELLO}] * 9),
        messages_field="messages",
        tokenizer=str(folder),
    )
    spec = PackedText(
        sources={"sft": source},
        seq_len=128,
        global_batch=1,
        eval_fraction=0.0,
        engine="inline",
        cache_dir=str(tmp_path / "cache"),
    )
    [piece, *_] = pieces_of_step(open_dataset(spec, seed=0), 0, tokens=True)
    lines = token_lines(piece)
    shown = [(line[:9].strip(), line[9:].replace("\u00b7", "")) for line in lines]
    assert shown == [
        ("read", r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("learned", "Hello!<|im_end|>"),
        ("read", r"\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
        ("learned", "See you.<|im_end|>"),
        ("read", r"\n"),
    ]
    assert lines[0].count("\u00b7") == len(piece["is_learned"][: piece["is_learned"].index(True)]) - 1
