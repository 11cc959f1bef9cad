"""Evaluation: the numbers of real runs against numpy, and the standard error against what it predicts."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.data import open_dataset, open_sets
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.mesh import make_mesh
from jtrain.step.state import abstract_state
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.evaluation import eval_result


def corpus(folder: Path, count: int, seed: int) -> Path:
    """Writes documents of repeated words: some are easier to predict than others, as in any corpus."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        words = rng.choice(["the", "cat", "sat", "Ünï", "漢字", "on", "a mat"], 3 + i % 4)
        (folder / f"{i:03}.txt").write_text(" ".join(rng.choice(words, 30 + 40 * (i % 3))))
    return folder


def trained(workdir: Path, path: Path, *sets: str) -> tuple[Run, dict[str, Any]]:
    """Trains five steps in float32; returns the run and the line of its evaluation."""
    sets = (
        "mesh.data=8",
        f"data.path={path}",
        "data.engine=inline",
        "data.eval_fraction=0.3",
        "data.eval_batches=1000",
        "precision.compute_dtype=float32",
        "metrics.tensorboard=False",
        "optimizer.warmup_steps=0",
        *sets,
    )
    config = load_config("tiny", ["debug"], sets)
    run = build_run(config)
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config)) == 0
    [line] = [line for line in metrics.read(workdir / metrics.FILE) if "eval_loss_nats" in line]
    return run, line


def in_numpy(workdir: Path, run: Run, name: str | None) -> dict[str, Any]:
    """What the line should say of the split (None) or a set, from the checkpoint, all logits, and float64
    numpy.
    """
    mesh = make_mesh(run.mesh, jax.devices()[: run.mesh.size])
    layout = run_layout(run)
    with Checkpoints(workdir, run.checkpoint) as checkpoints:
        state, _ = checkpoints.restore(5, abstract_state(layout, build_run_optimizer(run), mesh))
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state.params)
    dataset = open_dataset(run.data, seed=run.seed)
    held_out = (
        dataset.held_out() if name is None else open_sets(run.eval.sets, run.data, dataset.setups)[name]
    )
    decode = held_out.streams[0].tokenizer.decode
    by_document: dict[int, list[float]] = {}
    size, logits_of = 0, jax.jit(run.model.logits)
    for batch in held_out.batches():
        host = batch.batch
        logits = logits_of(params, Batch(*(jnp.asarray(x) for x in vars(host).values())))
        logits = np.asarray(logits, np.float64)
        for row, column in zip(*np.nonzero(host.target_BL != IGNORE), strict=True):
            target, of_all = host.target_BL[row, column], logits[row, column]
            nats = math.log(np.exp(of_all - of_all.max()).sum()) + float(of_all.max() - of_all[target])
            by_document.setdefault(int(batch.document_BL[row, column]), []).append(nats)
        for row, segments in zip(host.token_BL, host.segment_BL, strict=True):
            for piece in range(1, segments.max() + 1):
                ids = row[segments == piece]
                size += len(decode(ids).replace("\0", "").encode()) - len(
                    decode(ids[:1]).replace("\0", "").encode()
                )
    every = np.concatenate([np.asarray(nats) for nats in by_document.values()])
    residuals = [sum(nats) - every.mean() * len(nats) for nats in by_document.values()]
    count = len(by_document)
    return {
        "loss_nats": every.mean(),
        "loss_standard_error": math.sqrt(count / (count - 1) * sum(r * r for r in residuals)) / len(every),
        "bits_per_byte": every.sum() / math.log(2) / size,
        "tokens": len(every),
        "documents": count,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "tokenizer"),
    [
        ((), "bytes"),
        (("mesh.data=2", "mesh.context=2", "mesh.tensor=2", "layout.zero_stage=3"), "bpe"),
    ],
    ids=["data parallel, bytes", "all axes, BPE"],
)
def test_a_run_reports_what_numpy_computes_from_all_logits(
    mesh: tuple[str, ...],
    tokenizer: str,
    tmp_path: Path,
    tokenizer_json: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Loss, standard error and bits per byte of the split and of a set; its words are ASCII: no cut splits
    one.
    """
    other = corpus(tmp_path / "other", 7, seed=1)
    for file in other.iterdir():
        file.write_text(file.read_text().encode("ascii", "ignore").decode())
    sets = (*mesh, f"eval.sets={{'other': {{'path': {str(other)!r}}}}}")
    if tokenizer == "bpe":
        sets += (f"data.tokenizer={tokenizer_json}", "model.vocab_size=400")
    run, line = trained(tmp_path / "run", corpus(tmp_path / "text", 60, seed=0), *sets)
    want = in_numpy(tmp_path / "run", run, "other")
    assert set(line["eval_sets"]) == {"other"}
    assert line["eval_sets"]["other"] == pytest.approx(want, rel=1e-5)
    assert want["documents"] == 7
    split = in_numpy(tmp_path / "run", run, None)
    split.pop("bits_per_byte")  # cuts split characters here; test_held_out.py counts their bytes
    assert {name: line[f"eval_{name}"] for name in split} == pytest.approx(split, rel=1e-5)
    assert 10 < split["documents"] < 30
    said = capsys.readouterr().out
    assert "eval.sets.other: 7 documents in 7 files" in said
    shown = line["eval_sets"]["other"]
    assert (
        f"step 5/5  eval other loss {shown['loss_nats']:.4f} +- {shown['loss_standard_error']:.4f} nats  "
        f"{shown['bits_per_byte']:.4f} bits/byte\n" in said
    )


@pytest.mark.slow
def test_sets_alone_are_evaluated_without_a_split(tmp_path: Path) -> None:
    """With data.eval_fraction=0 the split's fields are null."""
    other = corpus(tmp_path / "other", 7, seed=1)
    sets = (f"eval.sets={{'other': {{'path': {str(other)!r}}}}}", "data.eval_fraction=0")
    _, line = trained(tmp_path / "run", corpus(tmp_path / "text", 20, seed=0), *sets)
    assert line["eval_loss_nats"] is None
    assert line["eval_sets"]["other"]["loss_nats"] > 1


def test_the_standard_error_is_how_far_means_of_other_documents_lie() -> None:
    """In 2,000 samples of 40 documents whose tokens are alike; tokens taken as independent would say a third
    of it.
    """
    rng = np.random.default_rng(0)
    means, errors, alone = [], [], []
    for _ in range(2000):
        tokens = rng.integers(5, 100, 40)
        level = rng.normal(2.0, 0.5, 40)
        each = [rng.normal(mean, 1.0, n) for mean, n in zip(level, tokens, strict=True)]
        nats = np.array([values.sum() for values in each])
        result = eval_result(nats, tokens, None)
        means.append(result.loss_nats)
        errors.append(result.loss_standard_error)
        alone.append(np.concatenate(each).std() / math.sqrt(tokens.sum()))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    assert np.mean(alone) < 0.5 * np.std(means)


def test_one_document_has_no_standard_error_and_no_text_no_bits() -> None:
    """Null, not zero; documents without a target do not count."""
    result = eval_result(np.array([3.0, 0.0]), np.array([2, 0]), None)
    assert (result.loss_nats, result.loss_standard_error, result.bits_per_byte) == (1.5, None, None)
    assert (result.tokens, result.documents) == (2, 1)
    assert result.summary() == "loss 1.5000 nats"
    assert eval_result(np.array([math.log(2) * 8]), np.array([4]), 2).bits_per_byte == pytest.approx(4.0)


def test_a_tokenizer_of_a_set_must_fit_the_model(tmp_path: Path, tokenizer_json: Path) -> None:
    other = corpus(tmp_path / "other", 3, seed=1)
    field = json.dumps({"other": {"path": str(other), "tokenizer": str(tokenizer_json)}})
    with pytest.raises(ValueError, match=r"eval\.sets\.other\.tokenizer makes 278 .*model\.vocab_size=256"):
        trained(tmp_path / "run", corpus(tmp_path / "text", 20, seed=0), f"eval.sets={field}")
    assert not (tmp_path / "run").exists()
