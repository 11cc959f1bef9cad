"""Runs on preference pairs: what they log and evaluate, and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run
from jtrain.errors import UserError
from jtrain.telemetry import metrics
from jtrain.train import attempt

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.num_layers=2",
    "model.d_model=32",
    "model.head_dim=8",
    "model.d_ff=32",
    "adapter.rank=4",
    "num_steps=3",
    "data.engine=inline",
    "data.seq_len=256",
    "data.global_batch=8",
    "data.eval_fraction=0.3",
    "data.eval_batches=2",
    "eval.every_steps=3",
    "checkpoint.every_steps=3",
    "metrics.log_every_steps=1",
    "metrics.tensorboard=False",
    "precision.compute_dtype=float32",
)


def write_pairs(folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    lines = []
    for number in range(60):
        prompt = {"role": "user", "content": f"question {number}"}
        answers = {"chosen": f"YES {number}", "rejected": f"no, not {number}"}
        chats = {name: [prompt, {"role": "assistant", "content": text}] for name, text in answers.items()}
        lines.append(json.dumps(chats) + "\n")
    path.write_text("".join(lines))
    return path


def run_of(path: Path | str, *sets: str) -> tuple[Any, Run]:
    config = load_config("tiny_dpo", [], (*SMALL, f"data.sources.pairs.path={path}", *sets))
    return config, build_run(config)


def test_a_run_starts_at_ln_2_and_tells_pairs_apart(tmp_path: Path) -> None:
    """On eight devices; held-out pairs are compared by the same loss, and begin at ln 2 as well."""
    config, run = run_of(
        write_pairs(tmp_path), "mesh.data=8", "layout.zero_stage=3", "optimizer.peak_lr=1e-2"
    )
    workdir = tmp_path / "run"
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config)) == 0
    lines = metrics.read(workdir / metrics.FILE)
    steps = [line for line in lines if "loss_nats" in line]
    evaluations = [line for line in lines if "eval_loss_nats" in line]
    for first, prefix in ((steps[0], ""), (evaluations[0], "eval_")):
        assert abs(first[f"{prefix}loss_nats"] - math.log(2)) < 1e-6
        assert first[f"{prefix}reward_margin"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["loss_nats"] < math.log(2) - 1e-3
    assert [line["step"] for line in evaluations] == [0, 3]
    assert evaluations[-1]["eval_loss_nats"] < math.log(2) - 1e-3
    assert evaluations[-1]["eval_accuracy"] > 0.9, "answers in capitals are better"
    assert evaluations[-1]["eval_reward_margin"] > 1e-3
    assert evaluations[-1]["eval_documents"] > 5


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("adapter=None",), r"adapter_off is the model without its adapter, and the run has none"),
        (
            ("adapter.train=('embed',)",),
            r"adapter\.train=\('embed',\): without its adapter the model would not be",
        ),
        (("model.z_loss=1e-4",), r"model\.z_loss=0\.0001 with objective=DPO"),
        (
            ("adapter=None", "objective.reference=none", "precision.matmul_dtype=fp8_current"),
            r"precision\.matmul_dtype=fp8_current with objective=DPO",
        ),
        (
            ("data.sources.pairs.rejected_field=None",),
            r"compares two answers, and data\.sources\.pairs has one",
        ),
        (
            ("eval.sets={'more': {'path': 'a.jsonl', 'messages_field': 'chosen'}}",),
            r"compares two answers, and eval\.sets\.more has one",
        ),
        (("objective.beta=0.0",), r"objective\.beta=0\.0 must be a finite number above 0"),
        (("objective.margin=-1.0",), r"objective\.margin=-1\.0 must be a finite number, zero or more"),
        (("objective.form=simpo",), r"form=simpo has no reference, but objective\.reference=adapter_off"),
        (("objective.form=ipo", "objective.margin=1.0"), r"objective\.margin=1\.0 with objective\.form=ipo"),
    ],
    ids=str,
)
def test_what_pairs_cannot_have_is_refused(sets: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        run_of(write_pairs(tmp_path), *sets)


def test_pairs_without_their_loss_are_refused(tmp_path: Path) -> None:
    source = {"path": str(write_pairs(tmp_path)), "messages_field": "chosen", "rejected_field": "rejected"}
    config = load_config("tiny_sft", [], (f"data.sources={{'pairs': {source}}}",))
    with pytest.raises(UserError, match=r"has preference pairs, whose loss is objective=DPO\(\.\.\.\)"):
        build_run(config)


@pytest.mark.slow
def test_check_says_that_it_does_not_prove_pairs() -> None:
    command = [sys.executable, "-m", "jtrain.check", "--config=tiny_dpo", "--without-compiler"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "preference pairs, whose two texts no proof tells apart yet" in done.stderr
