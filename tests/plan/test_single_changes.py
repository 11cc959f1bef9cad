"""What one setting changed would give: the line of a plan leads there, and a search ends where nothing is faster."""

import dataclasses
import json
import random
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jtrain.cli.plan import main
from jtrain.config.load import for_devices, load_config
from jtrain.config.run import Run, build_run
from jtrain.layout.mesh import AXES
from jtrain.model.forward_placement import SAVEABLE
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.auto_layout import choose_loss_chunk
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.from_run import search_task
from jtrain.plan.mesh_options import divisors
from jtrain.plan.search import meshes, resolve_as_needed, search
from jtrain.plan.search_task import Point, SearchTask, estimate_job, evaluate, fits
from jtrain.plan.single_changes import faster_changes, refine
from jtrain.plan.staged_search import search_with_stages
from jtrain.step.layout_choices import changed_settings, check_layers


def test_the_first_lines_of_a_plan_say_how_far_it_is_from_the_best(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Recomputation that the memory of 8 x H200 does not ask for: 20 % slower, and what the line says comes true."""
    file = tmp_path / "plan.json"
    argv = ["--config=llama8b", "--device", "h200", "--count", "8", "--json", str(file)]
    assert main(argv) == 0
    line = capsys.readouterr().out.splitlines()[1]
    match = re.fullmatch(
        r"(\d+)% slower than with (--set \S+): ([\d,]+) tokens/s, (\d+)% of the memory", line
    )
    assert match is not None, line
    assert match[2] == "--set layout.remat=none"
    first = json.loads(file.read_text())
    assert main([*argv, *shlex.split(match[2])]) == 0
    changed = json.loads(file.read_text())
    assert changed["step"]["step_s"] == first["faster"][0]["step_s"]
    assert changed["formula"]["peak_bytes"] == first["faster"][0]["peak_bytes"]
    assert f"{changed['step']['tokens_per_s']:,.0f}" == match[3]
    assert round(100 * (first["step"]["step_s"] / changed["step"]["step_s"] - 1)) == int(match[1])
    # What is left is below what the next change could give.
    assert all(one["step_s"] >= changed["step"]["step_s"] for one in first["faster"])


def planned(config: str, device: str, count: int, sets: Sequence[str]) -> tuple[SearchTask, Point, Run]:
    """The layout of a config, as `plan` evaluates it."""
    run_config = load_config(config, (), sets)
    for_devices(run_config, count)
    machine = make_machine(device, count)
    choose_loss_chunk(run_config, machine.device)
    run = build_run(run_config)
    task = search_task(run, machine)
    return task, evaluate(task, resolve_as_needed(task, run.mesh), run.mesh), run


@pytest.mark.parametrize(
    "sets",
    [
        # A factor of the devices that leaves `context`, a limit that would cut the batch anew.
        ("mesh.data=2", "mesh.context=4"),
        ("layout.microbatch_tokens=4096",),
    ],
    ids=["axes", "limit"],
)
def test_what_would_be_faster_is_so_when_it_is_set(sets: tuple[str, ...]) -> None:
    """The first and the last of what a plan lists, typed behind the config, give their seconds and bytes."""
    task, point, run = planned("llama1b", "h100", 8, sets)
    faster = faster_changes(task, point)
    assert faster
    for other in (faster[0], faster[-1]):
        settings = changed_settings(point.settings, other.settings, run.layout.microbatch_tokens)
        # Typed behind the others, the last value of a path counts.
        values = dict(text.split("=", 1) for text in sets) | {path: str(v) for path, v in settings.items()}
        typed = [f"{path}={value}" for path, value in values.items()]
        _, found, _ = planned("llama1b", "h100", 8, typed)
        assert found.settings == other.settings | {"layout.microbatch_tokens": None}
        assert (found.step_s, found.plan.total_bytes) == (other.step_s, other.plan.total_bytes)


MACHINES = [
    ("llama1b", "h100", 8),
    ("llama8b", "h200", 8),
    ("llama8b", "h100", 16),
    ("llama8b", "a100", 32),
    ("llama8b", "v5p", 128),
    ("llama8b", "v6e", 256),
    ("llama8b", "b200", 64),
    ("llama70b", "h100", 256),
    ("llama70b", "h200", 64),
    ("llama70b", "gb200", 64),
    ("llama70b", "v5p", 512),
    ("llama8b", "mi300x", 8),
    ("qwen3_8b", "h200", 16),
    ("qwen3_30b_a3b", "h100", 64),
    ("qwen3_30b_a3b", "h200", 8),
    ("qwen3_30b_a3b", "v5p", 64),
    ("mistral_7b", "h100", 8),
    ("olmo3_7b", "h100", 16),
    ("lora_llama8b", "h100", 8),
    ("gemma3_12b", "h200", 8),
]
CHANGES = 200


@pytest.mark.slow
@pytest.mark.parametrize(("config", "device", "count"), MACHINES, ids=str)
def test_no_random_change_of_a_searchs_answer_is_faster(config: str, device: str, count: int) -> None:
    """200 draws of one setting: none that fits is faster by more than 1 %."""
    task, _, _ = planned(config, device, count, ())
    points = search(task, meshes(task))
    points += search_with_stages(task, points)
    answer = refine(task, min(points, key=lambda point: (point.step_s, point.plan.total_bytes)))
    rng, beaten, estimated = random.Random(f"{config} {device} {count}"), list[Any](), 0
    for _ in range(CHANGES):
        changed = drawn(task, answer, rng)
        estimated += changed is not None
        if changed is not None and changed.step_s < 0.99 * answer.step_s:
            beaten.append((changed.step_s / answer.step_s, changed.settings))
    assert not beaten, (answer.settings, beaten[0])
    assert estimated > 20, "most draws were refused: this proves little"


def drawn(task: SearchTask, point: Point, rng: random.Random) -> Point | None:
    """The layout with one setting drawn anew; None where it is refused or does not fit."""
    spec, mesh, pipeline = point.spec, point.mesh, point.job.layout.pipeline_spec
    try:
        match rng.choice(
            ("remat", "remat", "zero", "parts", "overlap", "groups", "context", "mesh", "mesh", "stages")
        ):
            case "remat":
                names = tuple(name for name in SAVEABLE if rng.random() < 0.5)
                remat: Any = rng.choice(("none", "full", "named" if names else "full"))
                spec = dataclasses.replace(spec, remat=remat, remat_save=names if remat == "named" else ())
            case "zero":
                spec = dataclasses.replace(spec, zero_stage=rng.choice((0, 1, 2, 3)))
            case "parts":
                rows = point.job.global_batch // mesh.batch_shards
                spec = dataclasses.replace(spec, microbatches=rng.choice(divisors(rows)))
            case "overlap":
                spec = dataclasses.replace(spec, tensor_overlap=not spec.tensor_overlap)
            case "groups":
                spec = dataclasses.replace(spec, sequence_groups=rng.choice((1, 2, 4)))
            case "context":
                spec = dataclasses.replace(spec, context_attention=rng.choice(("ring", "ulysses")))
            case "mesh":
                source, target = rng.sample(AXES, 2)
                factor = rng.choice(divisors(mesh.shape[source]))
                sizes = {source: mesh.shape[source] // factor, target: mesh.shape[target] * factor}
                mesh = dataclasses.replace(mesh, **sizes)
            case _:
                name = rng.choice([*PUBLISHED_SCHEDULES])
                chunks = rng.choice((2, 3, 4)) if name == "interleaved" else 1
                pipeline = PipelineSpec(name, chunks, rng.choice(("tick", "step")))
        layout = point.job.layout.relaid(spec, mesh, pipeline)
        check_layers(point.job.model, spec, mesh)
        changed = estimate_job(task, dataclasses.replace(point.job, layout=layout), timed=True)
    except ValueError:
        return None
    return changed if fits(task, changed.plan) else None
