"""Closed forms of a pipelined step: bytes by the slots of its schedule, traffic between stages, the
bubble.
"""

from typing import Any

import pytest

from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.job import Job
from jtrain.plan.report.summary import pipeline_lines
from jtrain.plan.search import meshes, search
from jtrain.plan.search_task import SearchTask
from jtrain.plan.staged_search import search_with_stages

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
ROWS, LENGTH = 2, 4096


def job(
    *, schedule: str = "1f1b", chunks: int = 1, microbatches: int = 8, layers: int = 32, **axes: int
) -> Job:
    """One device computes ROWS sequences at a time."""
    sizes: dict[str, Any] = LLAMA8B | dict(num_layers=layers)
    model, mesh = Transformer(**sizes), MeshSpec(**axes)
    spec = LayoutSpec(remat="full", microbatches=microbatches)
    layout = make_layout(spec, mesh, model.param_infos(), pipeline=PipelineSpec(schedule, chunks))
    return Job(
        model, layout, AdamW(peak_lr=1e-4), ROWS * microbatches, LENGTH, make_machine("h200", mesh.size)
    )


def test_a_stage_has_its_part_of_the_model() -> None:
    """Parameters and optimizer state of 4 stages are a quarter each, but for the last norm, which all
    have.
    """
    whole, part = memory(job(microbatches=2)), memory(job(stage=4))
    for name in ("parameters", "optimizer"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 4, rel=1e-4)


def test_an_uneven_stage_pays_for_its_identity_layers() -> None:
    """5 layers over 4 stages take the memory and the time of 8, and the plan says so."""
    five, eight = job(stage=4, layers=5), job(stage=4, layers=8)
    assert memory(five).parameters == memory(eight).parameters
    times = [step_time(one, memory(one)) for one in (five, eight)]
    assert times[0].matmul_s == pytest.approx(times[1].matmul_s)
    assert "3 of 8 hold an identity layer" in pipeline_lines(five)[-1]
    assert len(pipeline_lines(eight)) == len(pipeline_lines(five)) - 1
    assert pipeline_lines(job()) == []


def test_1f1b_keeps_the_same_however_many_microbatches() -> None:
    """GPipe keeps all of them."""
    of = {
        schedule: [memory(job(schedule=schedule, microbatches=m, stage=4)).activations for m in (8, 16, 64)]
        for schedule in ("1f1b", "gpipe")
    }
    assert len(set(of["1f1b"])) == 1
    assert of["gpipe"][2] > 3 * of["gpipe"][1] > 5 * of["gpipe"][0]


def test_stages_send_activations_in_every_tick() -> None:
    """Down and up the chain, one array of a microbatch each."""
    one = job(stage=4)
    [sent] = [c for c in collectives(one) if c.purpose == "stage to stage"]
    assert (sent.axes, sent.kind, sent.count) == (("stage",), "collective-permute", 2 * (8 + 2 * 3))
    assert sent.array_bytes == sent.count * ROWS * LENGTH * 4096 * 2


def test_the_bubble_is_that_of_the_schedule_and_falls_with_microbatches() -> None:
    """1F1B in lockstep waits (P-1)/(M+P-1) of its time; what is computed stays the same."""
    for microbatches in (8, 32):
        one = job(stage=4, microbatches=microbatches)
        timed = step_time(one, memory(one))
        computes = timed.bubble_s * microbatches / 3
        assert timed.bubble_s / (timed.bubble_s + computes) == pytest.approx(3 / (microbatches + 3))
        layers_s = timed.matmul_s + timed.attention_s
        assert computes == pytest.approx(layers_s, rel=0.15), "the loss is no part of the bubble"
    alone = job(microbatches=8)
    assert step_time(alone, memory(alone)).bubble_s == 0


@pytest.mark.slow
def test_the_search_offers_stages_only_beyond_one_host() -> None:
    """Two hosts with a slow network between them: stages fit, and are ranked; with a fast one, or inside one
    host, none are tried.
    """
    sizes: dict[str, Any] = LLAMA8B | dict(num_layers=4)
    model = Transformer(**sizes)
    plain = make_layout(LayoutSpec(), MeshSpec(), model.param_infos())
    for count, network_bytes_per_s, batch, found in (
        (8, 5e9, 32, False),
        (16, 5e12, 256, False),
        (16, 5e9, 32, True),
    ):
        machine = make_machine("h100", count, network_bytes_per_s=network_bytes_per_s)
        task = SearchTask(Job(model, plain, AdamW(peak_lr=1e-4), batch, 2048, machine), LayoutSpec())
        points = search_with_stages(task, search(task, meshes(task)))
        assert bool(points) == found
        assert [p.step_s for p in points] == sorted(p.step_s for p in points)
        for point in points[:1]:
            assert point.mesh.stage > 1
            assert point.settings["pipeline.schedule"] in ("1f1b", "interleaved", "zb-h1")
            assert point.settings["mesh.stage"] == point.mesh.stage
