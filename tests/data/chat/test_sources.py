"""Chats from a file to a batch: what is learned is what is sampled, in every format and with weights."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.data_parts import chats
from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.chat import environment
from jtrain.data.chat.template import ChatTemplate
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.data.inspect.token_runs import tokens_page
from jtrain.data.tokenizer import make_tokenizer
from jtrain.layout.constants import IGNORE
from jtrain.report.page import html
from tests.data.chat import templates
from tests.data.masked_sources import write_records
from tests.data.test_loss_mask import documents_of
from tests.data.writers import write_saved_dataset

COUNT = 24


def records() -> list[dict[str, Any]]:
    """Chats of two turns, contents in parts of text; of every third one the first answer has weight 0."""

    def part(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    return [
        {
            "messages": [
                {"role": "system", "content": part("Be brief."), "weight": None},
                {"role": "user", "content": part(f"Hi {number}"), "weight": None},
                {"role": "assistant", "content": part(f"Hello {number}!"), "weight": number % 3 and 1},
                {"role": "user", "content": part("Bye"), "weight": None},
                {"role": "assistant", "content": part(f"See you {number}."), "weight": 1},
            ]
        }
        for number in range(COUNT)
    ]


def spec_of(folder: Path, path: str, **fields: Any) -> PackedText:
    chats.write_tokenizer(folder / "tokenizer", templates.PLAIN, (templates.STOP,))
    source = Source(path=path, messages_field="messages", tokenizer=str(folder / "tokenizer"), **fields)
    return PackedText(
        sources={"sft": source},
        seq_len=192,
        global_batch=2,
        eval_fraction=0.0,
        epochs=1,
        engine="inline",
        cache_dir=str(folder / "cache"),
    )


@pytest.mark.parametrize("kind", ("jsonl", "parquet", "save_to_disk"))
def test_every_format_trains_on_exactly_what_is_sampled(tmp_path: Path, kind: str) -> None:
    if kind == "save_to_disk":
        (tmp_path / "saved").mkdir()
        path = str(write_saved_dataset(tmp_path / "saved", pa.Table.from_pylist(records())))
    else:
        path = write_records(tmp_path, kind, records())
    spec = spec_of(tmp_path, path)
    tokens = make_tokenizer(str(tmp_path / "tokenizer"))
    said = []
    with open_dataset(spec, seed=0).train_batches() as batches:
        for _, targets in documents_of(batches):
            said.append(tokens.decode([t for t in targets if t != IGNORE], specials=True))
    want = [
        (f"Hello {number}!<|im_end|>" if number % 3 else "") + f"See you {number}.<|im_end|>"
        for number in range(COUNT)
    ]
    assert sorted(said) == sorted(want)


def test_blocks_of_a_template_that_are_not_sampled_are_said(tmp_path: Path) -> None:
    """GENERATION marks a line end behind the stop token; jtrain learns without it, and says so once."""
    path = write_records(tmp_path, "jsonl", records())
    said: list[str] = []
    open_dataset(spec_of(tmp_path, path, chat_template=templates.GENERATION), seed=0, say=said.append)
    [line] = [line for line in said if "generation" in line]
    assert line.startswith(
        "data: data.sources.sft: data.sources.sft.chat_template: its blocks {% generation %}"
    )
    assert "they mark '\\n', which no model samples" in line
    exact = templates.GENERATION.replace(
        "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}",
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    )
    assert exact != templates.GENERATION
    late = exact.replace(
        "{% generation %}{{ m.content", "{{ m.content[:1] }}{% generation %}{{ m.content[1:]"
    )
    for template, words in ((exact, ""), (late, "they leave out 't'")):
        said.clear()
        open_dataset(spec_of(tmp_path, path, chat_template=template), seed=0, say=said.append)
        lines = [line for line in said if "generation" in line]
        assert lines == [] if not words else words in lines[0]


def test_a_page_shows_each_token_and_if_it_is_learned(tmp_path: Path) -> None:
    """Texts are escaped, and the counts are those of the step."""
    chat = {"messages": [{"role": "user", "content": "<b>"}, {"role": "assistant", "content": "</script>"}]}
    spec = spec_of(tmp_path, write_records(tmp_path, "jsonl", [chat] * 9))
    pieces = pieces_of_step(open_dataset(spec, seed=0), 0, tokens=True)
    page = html(tokens_page("Tokens of step 0", [(f"row {piece['row']}", piece) for piece in pieces]))
    learned = sum(sum(piece["is_learned"]) for piece in pieces)
    assert page.count('class="learned"') == learned > 0
    assert page.count('class="read"') == sum(len(piece["tokens"]) for piece in pieces) - learned
    assert "&lt;|im_end|&gt;" in page
    assert "<b>" not in page.partition("Tokens of step 0")[2].partition("<script")[0]


def test_the_built_in_template_is_exported_as_others_render_it() -> None:
    """Without the variable that only jtrain gives; another template is exported as it is."""
    messages = [{"role": "user", "content": "Hi"}]
    text, _ = environment.render(ChatTemplate().exported, messages=messages, add_generation_prompt=True)
    assert text == "<|user|>\nHi\n<|assistant|>\n"
    assert ChatTemplate(source=templates.PLAIN).exported == templates.PLAIN
