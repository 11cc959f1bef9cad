"""Which runs are the same run, and which changes a workdir refuses."""

from pathlib import Path

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import (
    MAY_CHANGE_ON_RESUME,
    check_same_run,
    config_from_text,
    differences,
    run_of_checkpoint,
    with_history,
)
from jtrain.config.run import build_run
from jtrain.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def text_of(*sets: str) -> str:
    return tree.flat(load_config("tiny", (), sets))


@pytest.mark.parametrize(
    "change",
    [
        "mesh.data=8",
        "layout.zero_stage=3",
        "model.scan_layers=False",
        "model.loss_chunk_tokens=64",
        "checkpoint.every_steps=7",
        "eval.every_steps=7",
        "eval.sets={'wiki': {'path': 'wiki/*.jsonl'}}",
        "metrics.log_every_steps=7",
        "guard.on_bad=stop",
    ],
)
def test_a_layout_is_not_another_run(tmp_path: Path, change: str) -> None:
    """What MAY_CHANGE_ON_RESUME lists may, and the change is really one."""
    (tmp_path / "config.txt").write_text(text_of())
    assert text_of(change) != text_of()
    check_same_run(tmp_path, text_of(change))


@pytest.mark.parametrize(
    "change", ["seed=1", "num_steps=301", "model.num_layers=2", "data.seq_len=128", "optimizer.b1=0.8"]
)
def test_a_workdir_of_another_run_is_refused_with_the_difference(tmp_path: Path, change: str) -> None:
    """And only the difference: one line, with both values."""
    (tmp_path / "config.txt").write_text(text_of())
    path, _, value = change.partition("=")
    there = tree.parse(text_of())[path]
    with pytest.raises(ValueError, match="holds another run") as refusal:
        check_same_run(tmp_path, text_of(change))
    listed = [line for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert listed == [f"  {path}: {there} there, {value} here"]
    assert "--workdir" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("precision", "precision.param_dtype=bfloat16"),
        ("precision", "precision.compute_dtype=float32"),
        ("precision", "precision.reduce_dtype=bfloat16"),
        ("precision", "precision.matmul_dtype=fp8_current"),
        ("kernels", "kernels=(('rms_norm','xla'),)"),
        ("num_steps", "num_steps=400"),
        ("optimizer.peak_lr", "optimizer.peak_lr=1e-3"),
        ("optimizer.schedule", "optimizer.schedule.final_fraction=0.2"),
    ],
)
def test_another_precision_is_another_run_unless_it_is_allowed_by_name(
    tmp_path: Path, name: str, change: str
) -> None:
    """Refused with the option that permits it; permitted, the change is returned and kept as a remark."""
    (tmp_path / "config.txt").write_text(text_of())
    with pytest.raises(
        UserError, match=rf"(?s)holds another run:\n  {change.partition('=')[0]}: .*--allow-change {name} "
    ):
        check_same_run(tmp_path, text_of(change))
    with pytest.raises(UserError, match="holds another run"):
        check_same_run(tmp_path, text_of(change, "seed=1"), allow=[name])
    changes = check_same_run(tmp_path, text_of(change), allow=[name])
    assert len(changes) == 1
    kept = with_history(tmp_path, text_of(change), step=40, changes=changes)
    assert kept == text_of(change) + f"# changed at step 40: {changes[0]}\n"
    assert tree.parse(kept) == tree.parse(text_of(change)), "remarks are no fields"
    (tmp_path / "config.txt").write_text(kept)
    assert check_same_run(tmp_path, text_of(change)) == []
    assert with_history(tmp_path, text_of(change), step=50, changes=()) == kept, (
        "a later attempt keeps the remark"
    )


def refusal_of(change: str, name: str) -> str:
    return rf"(?s)holds another run:\n  {change.partition('=')[0]}: .*--allow-change {name} "


def test_only_precision_and_kernels_may_be_allowed_to_change(tmp_path: Path) -> None:
    """A name that is none is refused with those that there are."""
    with pytest.raises(
        UserError, match=r"precison: Did you mean precision\? It takes code, precision, kernels"
    ):
        check_same_run(tmp_path, text_of(), allow=["precison"])


def test_components_by_name_are_set_printed_and_read_back() -> None:
    """`data.sources` is a dict of components: each name is a step of the path."""
    changed = load_config("mixture", sets=["data.sources.topics.weight=0.25"])
    text = tree.flat(changed)
    assert "data.sources.topics.weight: float = 0.25\n" in text
    assert tree.flat(config_from_text(text)) == text
    built = build_run(config_from_text(text))
    assert list(built.data.sources) == ["code", "docstrings", "comments", "topics", "packages", "signatures"]
    assert built.data.sources["topics"].weight == 0.25
    with pytest.raises(
        ValueError, match=r"data\.sources has no topic\. Did you mean topics\? It has: code, "
    ):
        load_config("mixture", sets=["data.sources.topic.weight=0.25"])
    with pytest.raises(ValueError, match=r"data\.sources\.topics is a component, not a value"):
        load_config("mixture", sets=["data.sources.topics=1"])
    with pytest.raises(ValueError, match=r"data\.sources\.topics\.weight='much' is a str, but must be float"):
        load_config("mixture", sets=["data.sources.topics.weight=much"])


def test_a_checkpoint_is_read_without_the_schedule_that_trained_it() -> None:
    """Its CSV file may be gone, or its path relative to another folder."""
    run_config = load_config("tiny")
    infos = build_run(run_config).model.param_infos()
    run_config.mesh.stage, run_config.pipeline.schedule = 2, "gone.csv"
    text = tree.flat(run_config)
    with pytest.raises(UserError, match=r"schedule gone\.csv cannot be read"):
        build_run(config_from_text(text))
    assert run_of_checkpoint(text).model.param_infos() == infos


def test_a_field_that_an_older_run_did_not_have_is_a_difference() -> None:
    """Nobody knows what that code did instead."""
    older = "".join(
        line for line in text_of().splitlines(keepends=True) if not line.startswith("model.z_loss")
    )
    assert differences(older, text_of()) == ["model.z_loss: absent there, 0.0 here"]


def test_a_new_workdir_holds_no_run(tmp_path: Path) -> None:
    check_same_run(tmp_path, text_of())


def test_what_may_change_names_real_paths() -> None:
    """A renamed field would silently become part of the run's identity."""
    paths = [
        leaf.path for name in ("tiny", "mixture", "lora_llama8b") for leaf in tree.leaves(load_config(name))
    ]
    for prefix in MAY_CHANGE_ON_RESUME:
        assert any(path.startswith(prefix) for path in paths), prefix
