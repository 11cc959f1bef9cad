"""Runs that learn from a stored teacher: from its workdir to the loss, what is refused, and a writer that is killed."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run
from jtrain.data import open_dataset
from jtrain.data.references import samples_in
from jtrain.data.teacher import StoredTeacher, TeacherWriter, keep, parts_in
from jtrain.errors import FileError, UserError
from jtrain.model.transformer import Transformer
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.reference import write_reference

SMALL = (
    "mesh.data=8",
    "model.num_layers=2",
    "model.d_model=32",
    "model.head_dim=8",
    "model.d_ff=32",
    "num_steps=4",
    "data.engine=inline",
    "data.seq_len=128",
    "data.global_batch=8",
    "data.eval_fraction=0.2",
    "data.eval_batches=2",
    "eval.every_steps=4",
    "eval.answers=0",
    "eval.prompts=()",
    "checkpoint.every_steps=4",
    "metrics.log_every_steps=1",
    "metrics.tensorboard=False",
    "precision.compute_dtype=float32",
)
LAYOUT = ("mesh.data=2", "mesh.context=2", "mesh.tensor=2", "layout.zero_stage=3")
STUDENT = ("objective.top_k=5",)


def run_of(chats: Path, *sets: str, fiddlers: tuple[str, ...] = ()) -> tuple[Any, Run]:
    config = load_config("tiny_sft", fiddlers, (*SMALL, f"data.sources.chats.path={chats}", *sets))
    return config, build_run(config)


def train(chats: Path, workdir: Path, *sets: str, fiddlers: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    config, run = run_of(chats, *sets, fiddlers=fiddlers)
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config)) == 0
    return metrics.read(workdir / metrics.FILE)


class OwnLoss(Transformer):
    """A user's model whose loss knows of no teacher."""

    # What is refused at run time is refused by the types too.
    def cross_entropy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, params: Any, x_BLD: Any, target_BL: Any, placement: Any, weight_BL: Any = None
    ) -> Any:
        return super().cross_entropy(params, x_BLD, target_BL, placement, weight_BL)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Chats, and the workdir of a teacher that stayed what it was at the start."""
    folder = tmp_path_factory.mktemp("teacher")
    chats, lines = folder / "chats.jsonl", []
    for number in range(60):
        turns = [("user", f"question {number}"), ("assistant", f"answer {number * 7}"), ("user", "and?")]
        turns += [("assistant", f"{'x' * (number % 9)} no more")]
        lines.append(json.dumps({"messages": [dict(role=role, content=text) for role, text in turns]}) + "\n")
    chats.write_text("".join(lines))
    train(
        chats,
        folder / "teacher",
        "optimizer.peak_lr=1e-30",
        "eval.every_steps=None",
        "data.eval_fraction=0.0",
    )
    return chats, folder


@pytest.fixture(scope="module")
def stored(teacher: tuple[Path, Path]) -> Path:
    chats, folder = teacher
    _, run = run_of(chats, *STUDENT, fiddlers=("distill",))
    count = write_reference(run, workdir=folder / "teacher", out=folder / "said", devices=jax.devices())
    assert count == 60
    return folder / "said"


def test_a_student_that_is_its_teacher_has_nothing_to_learn(teacher: tuple[Path, Path], stored: Path) -> None:
    """From the teacher's workdir through the folder to a step on rows that lie otherwise, in another layout."""
    chats, folder = teacher
    sets = (*STUDENT, f"objective.stored={stored}", "optimizer.peak_lr=1e-2", *LAYOUT)
    same = train(chats, folder / "same", *sets, fiddlers=("distill",))
    first = next(line for line in same if "loss_nats" in line)
    assert abs(first["loss_nats"]) < 1e-6
    assert first["grad_norm"] < 1e-5
    other = train(chats, folder / "other", *sets, "seed=1", "objective.top_k=3", fiddlers=("distill",))
    losses = [line["loss_nats"] for line in other if "loss_nats" in line]
    assert losses[0] > 1e-3
    assert losses[-1] < 0.9 * losses[0]
    assert [line["eval_tokens"] > 0 for line in other if "eval_loss_nats" in line], (
        "held-out chats need no teacher"
    )


def test_a_writer_goes_on_where_another_ended(
    teacher: tuple[Path, Path], stored: Path, tmp_path: Path
) -> None:
    chats, folder = teacher
    _, run = run_of(chats, *STUDENT, fiddlers=("distill",))
    (part,) = parts_in(stored)
    rng = np.random.default_rng(0)
    token_BL = rng.integers(0, 200, (1, 8)).astype(np.int32)
    (other,) = samples_in(token_BL, np.roll(token_BL, -1, axis=1), np.ones((1, 8), np.int32))
    out = tmp_path / "said"
    teacher_name = f"step 4 of {(folder / 'teacher').resolve()}"
    # A part that an earlier writer left: one sample, of these records or not.
    writer = TeacherWriter(out, top_k=5, teacher=teacher_name)
    writer.add(other, np.zeros((8, 5), np.int32), np.zeros((8, 6), np.float32))
    writer.flush()
    assert write_reference(run, workdir=folder / "teacher", out=out, devices=jax.devices()) == 61
    assert [path.name for path in parts_in(out)] == ["000000.safetensors", "000001.safetensors"]
    got, want = load_file(parts_in(out)[1]), load_file(part)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    # Nothing is left to say, so nothing is written.
    assert write_reference(run, workdir=folder / "teacher", out=out, devices=jax.devices()) == 61
    assert len(parts_in(out)) == 2


def test_pieces_of_text_are_found_again_in_every_epoch(teacher: tuple[Path, Path], tmp_path: Path) -> None:
    """Documents of one to five rows, packed otherwise in each epoch, at data.path and with some held out."""
    _, folder = teacher
    rng, texts = np.random.default_rng(0), tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_bytes(
            rng.integers(97, 122, rng.integers(20, 600)).astype(np.uint8).tobytes()
        )
    sets = (f"data.path={texts}/*.txt", "data.seq_len=128", "data.global_batch=8", "model.vocab_size=264")
    run = build_run(load_config("tiny", ["debug", "distill"], (*sets, "data.packing=best_fit", *STUDENT)))
    count = write_reference(run, workdir=folder / "teacher", out=tmp_path / "said", devices=jax.devices())
    stored = StoredTeacher(str(tmp_path / "said"), top_k=5)
    data = dataclasses.replace(run.data, epochs=3, eval_fraction=0.2, engine="inline")
    found = list[int]()
    with open_dataset(data, seed=1).train_batches() as batches:
        for batch in batches:
            ids = batch.token_BL, batch.target_BL, batch.segment_BL
            _, logprob_BLI = stored.at_targets(*ids, np.arange(128), vocab_size=264)
            total_BL = np.exp(logprob_BLI).sum(axis=-1)
            np.testing.assert_allclose(total_BL[batch.target_BL >= 0], 1.0, rtol=1e-5)
            found.append(len(list(samples_in(*ids))))
    assert sum(found) > 2 * count


def test_what_does_not_fit_is_refused_with_a_way_out(
    teacher: tuple[Path, Path], stored: Path, tmp_path: Path
) -> None:
    chats, folder = teacher
    distill: Any = dict(fiddlers=("distill",))
    with pytest.raises(
        UserError, match=r"objective=Distillation\(top_k=32\) without objective\.stored, the folder"
    ):
        train(chats, tmp_path / "run", **distill)
    with pytest.raises(FileError, match=r"objective\.stored='nowhere' has nothing that a teacher said"):
        train(chats, tmp_path / "run", "objective.stored=nowhere", **distill)
    at = f"objective.stored={stored}"
    with pytest.raises(
        UserError, match=r"objective\.top_k=32, and .* has the 5 most probable.*objective\.top_k=5"
    ):
        train(chats, tmp_path / "run", at, **distill)
    longer = tmp_path / "chats.jsonl"
    longer.write_text(chats.read_text().replace("answer", "reply"))
    with pytest.raises(
        UserError, match=r"is of other records: of its 60 samples none has the hash [0-9a-f]{32}"
    ):
        train(longer, tmp_path / "run", at, *STUDENT, **distill)
    with pytest.raises(UserError, match=r"objective\.top_k=900 tokens of model\.vocab_size=264.*at most 264"):
        run_of(chats, "objective.top_k=900", **distill)
    config, _ = run_of(chats, **distill)
    fdl.update_callable(config.model, OwnLoss)
    with pytest.raises(UserError, match=r"gives OwnLoss\.cross_entropy what a teacher says as `soft`"):
        build_run(config)
    with pytest.raises(UserError, match=r"finds what the teacher said.*Set data\.packing=best_fit"):
        run_of(chats, "data.packing=concat", **distill)
    with pytest.raises(
        UserError, match=r"--out .*: 000000\.safetensors has top_k=5, and this one would have top_k=6"
    ):
        TeacherWriter(stored, top_k=6, teacher="")
    with pytest.raises(UserError, match=r"has teacher=step 4 of .*, and this one would have teacher=step 8"):
        TeacherWriter(stored, top_k=5, teacher="step 8")
    _, run = run_of(chats)
    with pytest.raises(UserError, match=r"a reference is for preference pairs or for a distillation"):
        write_reference(run, workdir=folder / "teacher", out=tmp_path / "out", devices=jax.devices())
    broken = tmp_path / "said"
    shutil.copytree(stored, broken)
    parts_in(broken)[0].write_bytes(b"half a part")
    with pytest.raises(
        FileError, match=r"000000\.safetensors cannot be read .* Remove it, and make it again"
    ):
        StoredTeacher(str(broken), top_k=5)


def test_fewer_tokens_leave_their_probability_to_the_others() -> None:
    logprob = np.log(np.asarray([[0.5, 0.25, 0.125, 0.125], [0.5, 0.5, 1e-9, 0.0 + 1e-30]], np.float32))
    np.testing.assert_allclose(np.exp(keep(logprob, 1)), [[0.5, 0.5], [0.5, 0.5]], rtol=1e-6)
    np.testing.assert_array_equal(keep(logprob, 3), logprob)
