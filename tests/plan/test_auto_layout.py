"""What a config leaves open is chosen for the devices: layout.auto and as_needed, and a rerun keeps it."""

import json
from pathlib import Path

import jax
import pytest

from jtrain.config import tree
from jtrain.config.load import load_config, set_values
from jtrain.config.run import build_run
from jtrain.plan.auto_layout import choose_layout
from jtrain.runtime import exit_codes
from jtrain.train import attempt

SETS = ("mesh.data=8", "layout.auto=True", "data.global_batch=16")


def in_workdir(workdir: Path, text: str) -> None:
    """What a run leaves there that settling looks at."""
    devices = {"kind": jax.devices()[0].device_kind, "count": 8}
    (workdir / "config.txt").write_text(text)
    (workdir / "run.json").write_text(json.dumps({"devices": devices}))


def test_auto_puts_what_it_picks_into_the_config_and_says_why(emulated_devices: list[jax.Device]) -> None:
    """On CPUs with memory to spare nothing is recomputed, and predictions are called nominal."""
    run_config = load_config("tiny", (), (*SETS, "layout.remat=full", "layout.microbatches=2"))
    notes = choose_layout(run_config, devices=emulated_devices, workdir=None)
    spec = build_run(run_config).layout
    assert (spec.remat, spec.microbatches, spec.auto) == ("none", 1, True)
    assert notes[0].startswith("layout.auto on 8 x cpu: layout.zero_stage=")
    assert "the fastest layout that fits" in notes[0]
    assert "nominal" in notes[0]
    assert "layout.remat: Literal['none', 'full', 'named'] = 'none'\n" in tree.flat(run_config)


def test_a_config_without_open_questions_is_left_alone(emulated_devices: list[jax.Device]) -> None:
    """Nothing is picked, nothing is said."""
    run_config = load_config("tiny")
    before = tree.flat(run_config)
    assert choose_layout(run_config, devices=emulated_devices, workdir=None) == []
    assert tree.flat(run_config) == before


def test_a_rerun_keeps_what_was_picked(emulated_devices: list[jax.Device], tmp_path: Path) -> None:
    """Even what would not be picked now: the run's own layout goes on."""
    first = load_config("tiny", (), SETS)
    choose_layout(first, devices=emulated_devices, workdir=tmp_path)
    set_values(first, {"layout.zero_stage": 1, "layout.remat": "full"})
    in_workdir(tmp_path, tree.flat(first))

    again = load_config("tiny", (), SETS)
    notes = choose_layout(again, devices=emulated_devices, workdir=tmp_path)
    assert tree.flat(again) == tree.flat(first)
    assert "as before, layout.zero_stage=1 layout.remat=full" in notes[0]


@pytest.mark.parametrize(
    "changed",
    ("data.global_batch=32", "precision.compute_dtype=bfloat16", "mesh.data=4", "pipeline.schedule=gpipe"),
)
def test_another_batch_mesh_schedule_or_dtype_is_picked_for_anew(
    emulated_devices: list[jax.Device], tmp_path: Path, changed: str
) -> None:
    """What was picked for something else is not kept."""
    first = load_config(
        "tiny", (), (*SETS, "precision.param_dtype=float32", "precision.reduce_dtype=float32")
    )
    set_values(first, {"layout.remat": "full", "precision.compute_dtype": "float32"})
    if changed != "precision.compute_dtype=bfloat16":
        set_values(first, {"precision.compute_dtype": "bfloat16"})
    in_workdir(tmp_path, tree.flat(first))
    again = load_config("tiny", (), (*SETS, changed))
    notes = choose_layout(again, devices=emulated_devices, workdir=tmp_path)
    assert "the fastest layout that fits" in notes[0]
    assert build_run(again).layout.remat == "none"


def test_as_needed_is_nothing_where_all_fits(emulated_devices: list[jax.Device]) -> None:
    """A share that is not needed is none, and everything else of the layout stays."""
    sets = ("mesh.data=8", "layout.zero_stage=1", "layout.offload.optimizer=as_needed")
    run_config = load_config("tiny", (), sets)
    notes = choose_layout(run_config, devices=emulated_devices, workdir=None)
    spec = build_run(run_config).layout
    assert (spec.offload.optimizer, spec.zero_stage, spec.auto) == ("none", 1, False)
    assert notes == [
        "layout.offload.optimizer on 8 x cpu: the smallest that fits, layout.offload.optimizer=none"
    ]


def test_a_model_that_fits_nowhere_is_refused_before_anything_is_allocated(
    emulated_devices: list[jax.Device],
) -> None:
    """With the nearest miss."""
    run_config = load_config("llama70b", (), ("mesh.data=8", "layout.auto=True", "layout.microbatches=64"))
    refusal = r"8 devices are here: cpu, [\d.]+ GiB each; nothing fits into 8 x cpu: the nearest miss takes"
    with pytest.raises(ValueError, match=refusal):
        choose_layout(run_config, devices=emulated_devices, workdir=None)


@pytest.mark.slow
def test_a_run_trains_with_what_was_picked(emulated_devices: list[jax.Device], tmp_path: Path) -> None:
    """Losses are those of the plain layout, and config.txt holds the choice, so the next attempt keeps it."""
    sets = ("mesh.data=8", "checkpoint.every_steps=None", "eval.every_steps=None")
    losses: list[list[float]] = []
    for name, more in (("plain", ()), ("auto", ("layout.auto=True",))):
        run_config = load_config("tiny", ("debug",), (*sets, *more))
        choose_layout(run_config, devices=emulated_devices, workdir=tmp_path / name)
        run = build_run(run_config)
        assert (
            attempt.train(run, workdir=tmp_path / name, config_text=tree.flat(run_config)) == exit_codes.DONE
        )
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss_nats"] for line in lines if "loss_nats" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # bfloat16
    assert losses[0][-1] < losses[0][0] - 0.1, "the loss must move, or equality says nothing"
    again = load_config("tiny", ("debug",), (*sets, "layout.auto=True"))
    notes = choose_layout(again, devices=emulated_devices, workdir=tmp_path / "auto")
    assert "as before" in notes[0]
    assert tree.flat(again) == (tmp_path / "auto" / "config.txt").read_text()
