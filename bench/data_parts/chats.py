"""Conversations of four kinds, and a small tokenizer with a chat template's special tokens."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORDS = [
    "amber",
    "bridge",
    "copper",
    "delta",
    "ember",
    "forest",
    "granite",
    "harbour",
    "island",
    "juniper",
    "kettle",
    "lantern",
    "meadow",
    "nickel",
    "orchard",
    "pebble",
    "quarry",
    "river",
    "saffron",
    "timber",
    "umbrella",
    "valley",
    "walnut",
    "yonder",
    "zephyr",
    "naïve",
    "café",
    "漢字",
    "don't",
    "3.14",
    "1,024",
]
_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]+?[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]|</s>"
)
_OTHERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of templates that are not special: a model may say them."""

KINDS = ("two turns", "system", "thinking", "tools")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def conversations(count: int, *, seed: int = 0) -> list[tuple[str, list[dict[str, Any]], list[Any] | None]]:
    """Returns chats, each with its kind and tools; the kinds take turns."""
    rng = random.Random(seed)

    def say() -> str:
        words = rng.choices(_WORDS, k=rng.randint(2, 9))
        return " ".join(words).capitalize() + rng.choice([".", "?", "!", ":\n- one\n- two"])

    def message(role: str, **keys: Any) -> dict[str, Any]:
        return {"role": role, "content": say(), **keys}

    chats = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        thought = (lambda: {"reasoning_content": say()}) if kind == "thinking" else dict
        start = [message("system")] if kind in ("system", "tools") else []
        if kind == "tools":
            call = {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": "look_up", "arguments": {"word": rng.choice(_WORDS)}},
            }
            answer = {**message("tool", name="look_up"), "tool_call_id": call["id"]}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            start += [message("user"), called, answer, message("assistant")]
            chats.append((kind, [*start, message("user"), message("assistant")], [TOOL]))
            continue
        turns = [message("user"), message("assistant", **thought())]
        turns += [message("user"), message("assistant", **thought())]
        chats.append((kind, [*start, *turns], None))
    return chats


def write_tokenizer(folder: Path, source: str, stops: Sequence[str], *, seed: int = 0) -> None:
    """Writes a tokenizer.json of 600 tokens with the special tokens that a template spells, the template, and
    the tokens at which its model stops.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] for _, chat, _ in conversations(40, seed=seed) for message in chat]
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*texts, source], trainer)
    begin, end = "<|begin_of_text|>", stops[0]
    specials = sorted({*_SPECIAL.findall(source), *stops, begin})
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _OTHERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": begin, "eos_token": end, "pad_token": end, "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
