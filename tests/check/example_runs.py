"""Runs to check: chats with a template, text, and models with parts that packing or layouts could break."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.data import PackedText, Source
from jtrain.model.adapters.lora import LoRA
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.recurrent.conv_mixer import ShortConvSpec
from jtrain.optim import Cosine, Muon

CHATS = "chats.jsonl"
EXAMPLES = ("text", "chats", "convolutions", "muon", "lora", "blocks")
STOP = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def words_of(config: str, *values: str) -> tuple[str, ...]:
    """Options that name one of the runs below, or a shipped config, with values that are set."""
    name = f"tests/check/example_runs.py:{config}" if config in EXAMPLES else config
    return (f"--config={name}", *(word for value in values for word in ("--set", value)))


def check(tree: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Runs `jtrain check` of the packages in `tree`; returns the exit code, the lines, and what it printed."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "lines.json"
        done = subprocess.run(
            [sys.executable, "-m", "jtrain.check", *words, "--json", str(file)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = json.loads(file.read_text())["lines"] if file.exists() else []
    return done.returncode, lines, done.stdout + done.stderr


def write_chats(folder: Path, count: int = 80) -> None:
    """Writes chats of one to four questions, of which no two have the same length."""
    records = []
    for i in range(count):
        turns = []
        for j in range(1 + i % 4):
            turns.append({"role": "user", "content": f"What is {i} and {j}, {'please' * (i % 3)}?"})
            turns.append({"role": "assistant", "content": f"It is {i + j}{'.' * (1 + (i * 7 + j) % 5)}"})
        records.append({"messages": turns})
    (folder / CHATS).write_text("".join(json.dumps(record) + "\n" for record in records))


def text() -> fdl.Config[Run]:
    """The model of `tiny` on the text that comes with Python."""
    run = load_config("tiny")
    run.mesh.data = 1
    return run


def chats() -> fdl.Config[Run]:
    """Chats in rows of 128 bytes, two or three in each."""
    run = text()
    run.data = fdl.Config(
        PackedText,
        sources={
            "chats": fdl.Config(
                Source, path=CHATS, messages_field="messages", chat_template=TEMPLATE, stop_tokens=(STOP,)
            )
        },
        seq_len=256,
        global_batch=16,
        eval_fraction=0.1,
    )
    return run


def convolutions() -> fdl.Config[Run]:
    """Layers with a short convolution beside attention."""
    run = text()
    run.model.pattern = (BlockSpec(ShortConvSpec()), BlockSpec(AttentionSpec()))
    return run


def lora() -> fdl.Config[Run]:
    """Adapters of all matrices."""
    run = text()
    run.adapter = fdl.Config(LoRA, rank=4)
    return run


def blocks() -> fdl.Config[Run]:
    """The same beside a base in blocks of four bits, with sizes that have whole blocks."""
    run = lora()
    run.adapter.base_dtype = "nf4"
    run.model.d_model, run.model.d_ff = 256, 256
    run.model.num_heads, run.model.num_kv_heads, run.model.head_dim = 4, 2, 64
    return run


def muon() -> fdl.Config[Run]:
    """Muon instead of AdamW."""
    run = text()
    run.optimizer = fdl.Config(Muon, peak_lr=3e-3, warmup_steps=0.05, schedule=fdl.Config(Cosine))
    return run
