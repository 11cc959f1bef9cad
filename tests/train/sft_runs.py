"""Small runs of fine-tuning that a plain loop of transformers repeats: tests/train/peers/sft.py.

    python -m tests.train.sft_runs

writes golden/sft.json: sizes of the models, conversations, and which of them each batch has.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import EvalSpec, Run, build_run
from jtrain.data import PackedText, open_dataset
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.hf.model_config import model_from_config
from jtrain.layout.precision import PrecisionSpec
from jtrain.optim import AdamW, Cosine

HERE = Path(__file__).parent
SETTINGS = HERE / "golden" / "sft.json"
THEIRS, CHATS = "theirs", "chats.jsonl"
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "fields": {"tie_word_embeddings": False}},
    "qwen3": {"model_type": "qwen3", "fields": {"tie_word_embeddings": True}},
    "gemma": {"model_type": "gemma", "fields": {}},
    "olmo2": {"model_type": "olmo2", "fields": {}},
}
SIZES = dict(
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=264,
)
NUM_STEPS = 12
_FLOAT32 = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype", "grad_accum_dtype"), "float32")


def conversations() -> list[list[dict[str, str]]]:
    """Conversations of one to three turns, of which no two are alike."""
    chats = []
    for number in range(40):
        chat = [{"role": "system", "content": f"Count from {number}."}] if number % 3 == 0 else []
        for turn in range(1 + number % 3):
            chat.append({"role": "user", "content": f"And {'then ' * (number % 4)}{turn}?"})
            chat.append({"role": "assistant", "content": f"{number * turn + number}{'.' * (1 + number % 5)}"})
        chats.append(chat)
    return chats


def write_conversations(path: Path) -> None:
    """Writes them as JSON lines."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations()))


def sft() -> fdl.Config[Run]:
    """The run, in a folder with `chats.jsonl` and the model of transformers in `theirs`."""
    run = load_config("tiny_sft")
    run.num_steps = NUM_STEPS
    run.mesh.data = 1
    run.model = model_from_config(json.loads((Path(THEIRS) / "config.json").read_text()))
    run.precision = fdl.Config(PrecisionSpec, **_FLOAT32)
    run.optimizer = AdamW(peak_lr=3e-3, warmup_steps=3, schedule=Cosine(0.1), weight_decay=0.1, clip_norm=1.0)
    run.data = dataclasses.replace(data(CHATS), engine="processes")
    run.eval = fdl.Config(EvalSpec, every_steps=None)
    run.checkpoint.every_steps = None
    run.metrics.log_every_steps = 1
    return run


def data(path: str) -> PackedText:
    """Several conversations a row, none held out."""
    source = build_run(load_config("tiny_sft")).data.sources["chats"]
    return PackedText(
        sources={"chats": dataclasses.replace(source, path=path)},
        seq_len=256,
        global_batch=3,
        tokenizer="bytes_chat",
        eval_fraction=0.0,
        engine="inline",
    )


def conversations_by_step(path: str) -> list[list[int]]:
    """Numbers of the conversations in each batch of the run."""
    dataset = open_dataset(data(path), seed=0)
    steps = []
    for step in range(NUM_STEPS):
        names = [piece["document"] for piece in pieces_of_step(dataset, step, tokens=True)]
        steps.append([int(name.rpartition(":")[2]) for name in names])
    return steps


def main() -> None:
    """Writes golden/sft.json."""
    with tempfile.TemporaryDirectory() as folder:
        write_conversations(Path(folder) / CHATS)
        batches = conversations_by_step(str(Path(folder) / CHATS))
    optimizer: Any = build_run(load_config("tiny_sft")).optimizer
    settings = {
        "cases": CASES,
        "sizes": SIZES,
        "num_steps": NUM_STEPS,
        "peak_lr": 3e-3,
        "warmup_steps": 3,
        "weight_decay": optimizer.weight_decay,
        "clip_norm": optimizer.clip_norm,
        "conversations": conversations(),
        "batches": batches,
    }
    SETTINGS.write_text(json.dumps(settings) + "\n")


if __name__ == "__main__":
    main()
