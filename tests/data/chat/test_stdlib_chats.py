"""Conversations about names: answers that anybody can check, and each name in one conversation alone."""

import json
from pathlib import Path

import pytest

from jtrain.data.chat.stdlib_chats import chat_about, style_of, words_of, write_stdlib_chats

NAMES = {
    "read_all_lines": ("in snake case", ["read", "all", "lines"]),
    "_readAll": ("in camel case", ["All"]),
    "MAX_SIZE": ("in capitals", ["MAX", "SIZE"]),
    "ReadAll": ("in camel case", ["Read", "All"]),
    "__init__": ("as one word", ["init"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_a_style_and_words(name: str) -> None:
    assert (style_of(name), words_of(name)) == NAMES[name]


def test_each_name_is_in_one_conversation(tmp_path: Path) -> None:
    """Names that occur in two files, too short ones and those without clear words are left out."""
    (tmp_path / "a.py").write_text(
        "def read_all(): ...\nclass ReadAll: ...\nclass HTTPServer: ...\nMAX_SIZE = 1\n"
    )
    (tmp_path / "b.py").write_text("class B:\n    def read_all(self): ...\n    def f(self): ...\n")
    files, out = [tmp_path / "a.py", tmp_path / "b.py"], tmp_path / "out" / "chats.jsonl"
    write_stdlib_chats(files, out, chat_about)
    chats = [json.loads(line) for line in (tmp_path / "out" / "chats.jsonl").read_text().splitlines()]
    asked = sorted(chat["messages"][0]["content"] for chat in chats)
    assert asked == [f"How is `{name}` written?" for name in ("MAX_SIZE", "ReadAll", "read_all")]
    [question, style, _, second] = chat_about("read_all")["messages"]
    assert (question["role"], style["content"]) == ("user", "in snake case")
    assert second["content"] in ("two", "no")
