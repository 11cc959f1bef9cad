"""Fine-tuning from the command to the export: the tokens that are learned, the answers that are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run
from jtrain.data import open_dataset
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.sampling import load, prompt_of, stream

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.num_layers=2",
    "model.d_model=32",
    "model.head_dim=8",
    "model.d_ff=32",
    "num_steps=2",
    "data.engine=inline",
    "data.seq_len=128",
    "data.global_batch=8",
    "data.eval_fraction=0.4",
    "eval.answers=3",
    "eval.answer_tokens=5",
    "eval.every_steps=2",
    "metrics.tensorboard=False",
    "precision.compute_dtype=float32",
)


def write_chats(folder: Path) -> Path:
    """Conversations whose answers are capitals, and nothing else is."""
    path = folder / "chats.jsonl"
    lines = []
    for number in range(60):
        said = [f"question {number}", f"ANSWER {number}", "and then", f"MORE {number}"]
        roles = ("user", "assistant") * 2
        chat = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        lines.append(json.dumps({"messages": chat}) + "\n")
    path.write_text("".join(lines))
    return path


def trained(workdir: Path, chats: Path, *sets: str) -> tuple[Run, list[dict[str, Any]]]:
    """Runs two steps; returns the run and what the model answered."""
    config = load_config("tiny_sft", [], (*SMALL, f"data.sources.chats.path={chats}", *sets))
    run = build_run(config)
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config)) == 0
    lines = (workdir / metrics.GENERATIONS).read_text().splitlines()
    return run, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "layout",
    [
        ("mesh.data=8", "layout.zero_stage=3"),
        pytest.param(
            ("mesh.stage=2", "mesh.data=4", "layout.zero_stage=1", "layout.microbatches=2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_learns_what_is_sampled_and_keeps_its_answers(layout: tuple[str, ...], tmp_path: Path) -> None:
    """With sharded weights, also on two stages: the answers are those of `jtrain generate` from the checkpoint."""
    run, answers = trained(
        tmp_path / "run",
        write_chats(tmp_path),
        *layout,
        "eval.prompts=('question 1', 'question 2')",
    )
    # Each step's learned tokens are those of the answers and their stop tokens.
    dataset = open_dataset(run.data, seed=run.seed)
    train_lines = [line for line in metrics.read(tmp_path / "run" / metrics.FILE) if "loss_nats" in line]
    pieces = pieces_of_step(dataset, 0, tokens=True)
    for piece in pieces:
        said = "".join(t for t, learned in zip(piece["tokens"], piece["is_learned"], strict=True) if learned)
        number = piece["text"].partition("question ")[2].partition("<")[0]
        assert said == f"ANSWER {number}<|im_end|>MORE {number}<|im_end|>"
    assert train_lines[0]["tokens"] == sum(sum(piece["is_learned"]) for piece in pieces) > 100

    assert [line["step"] for line in answers] == [0] * 5 + [2] * 5
    for line in answers:
        if line["of"] == "prompts":
            assert (line["expected"], line["exact"]) == (None, None)
        else:
            assert line["expected"].endswith("<|im_end|>")
            assert line["expected"].removesuffix("<|im_end|>").rstrip("0123456789 ") in ("ANSWER", "MORE")
            assert line["exact"] == (line["answer"] == line["expected"])
            assert line["prompt"].endswith("<|im_start|>assistant\n")
    model = load(tmp_path / "run")
    prompt = prompt_of(run.data, "question 1")
    text = "".join(
        stream(
            *(model.model, model.params, model.tokenizer, prompt),
            context=model.context,
            max_tokens=5,
            temperature=0.0,
        )
    )
    [kept, _] = [line["answer"] for line in answers if line["of"] == "prompts" and line["step"] == 2]
    tokenizer = make_tokenizer("bytes_chat")
    assert tokenizer.decode(tokenizer.encode_marked([kept], [[]])[0][0]) == text
    evaluations = [line for line in metrics.read(tmp_path / "run" / metrics.FILE) if "eval_exact" in line]
    assert [line["eval_exact"] for line in evaluations] == [{"split": 0.0}] * 2


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("eval.answers=-1",), r"eval\.answers=-1 must be at least 0"),
        (
            ("eval.prompts=('" + "x" * 200 + "',)",),
            r"eval\.prompts has 'x+' of 2\d\d tokens, .*data\.seq_len=128",
        ),
        (
            ("data.sources.chats.messages_field=None", "data.sources.chats.text_field=messages_text"),
            r"eval\.answers=3: no held-out sample of split has a prompt .*messages_field or prompt_field",
        ),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(sets: tuple[str, ...], why: str, tmp_path: Path) -> None:
    path = write_chats(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "messages_text": str(line)}) + "\n" for line in lines))
    with pytest.raises(UserError, match=why):
        trained(tmp_path / "run", path, "mesh.data=8", *sets)


@pytest.mark.slow
def test_tiny_sft_answers_questions_about_names_that_it_has_never_seen(tmp_path: Path) -> None:
    """As a user runs it: no exact answer before, nine of ten after, and a folder with the template."""

    def jtrain(*words: str) -> str:
        dropped = ("XLA_FLAGS", "JAX_PLATFORMS")
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    workdir, out = tmp_path / "run", tmp_path / "hf"
    jtrain("jtrain.launch", "--config=tiny_sft", "--workdir", str(workdir))
    evaluations = [line for line in metrics.read(workdir / metrics.FILE) if "eval_exact" in line]
    assert evaluations[0]["eval_exact"]["split"] == 0.0
    assert evaluations[-1]["eval_exact"]["split"] >= 0.9
    answers = [json.loads(line) for line in (workdir / metrics.GENERATIONS).read_text().splitlines()]
    held_out = {line["prompt"] for line in answers if line["of"] == "split"}
    assert len(held_out) > 80
    answer = jtrain(
        *("jtrain.generate", "--workdir", str(workdir), "--temperature", "0"),
        *("--chat", "How is `MyNames` written?"),
    )
    assert answer.strip() == "in camel case"
    jtrain("jtrain.hf", "export", "--workdir", str(workdir), "--out", str(out))
    template = json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
    assert (out / "chat_template.jinja").read_text() == template
