"""Traces of layers of a pattern: one for many meshes, whose numbers are those of the whole step."""

import collections
from typing import Any

import pytest

from jtrain.layout.mesh import MeshSpec
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.job import Job
from jtrain.step.description.layout_class import LayoutClass, class_of
from jtrain.step.description.part_jaxprs import METRICS, UPDATE
from jtrain.step.description.pattern_sizes import layer_parts
from tests.layouts import layout_from
from tests.step.test_description import LENGTH, ROWS, SIZES, gradients_of

LATENT = LatentAttentionSpec(kv_rank=32, q_rank=64, nope_head_dim=16, rope_head_dim=8, value_head_dim=16)
WINDOW = AttentionSpec(window=16)
EXPERTS = MoESpec(num_experts=16, top_k=2, d_ff=32, shared_experts=1)
MODELS: dict[str, dict[str, Any]] = {
    "windows": dict(pattern=(BlockSpec(WINDOW), BlockSpec())),
    "latents": dict(first=(BlockSpec(LATENT),), pattern=(BlockSpec(LATENT, EXPERTS),)),
}


def job_of(model: str, axes: dict[str, int], **layout: Any) -> Job:
    transformer, mesh = Transformer(**SIZES, **MODELS[model]), MeshSpec(**axes)
    laid_out = layout_from(layout, mesh, transformer.param_infos())
    batch = ROWS * mesh.batch_shards * layout.get("microbatches", 1)
    return Job(transformer, laid_out, AdamW(peak_lr=1e-3), batch, LENGTH)


def classes_of(job: Job) -> list[LayoutClass]:
    sizes: Any = dict(rows=job.rows(), seq_len=job.seq_len)
    layers = [class_of("layers", model, job.layout, **sizes) for model in layer_parts(job.model).values()]
    return [*layers, class_of("end", job.model, job.layout, **sizes)]


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_meshes_of_a_search_share_their_traces(zero_stage: int) -> None:
    """Any number of devices along replica, data and expert: a search of a model with a pattern over 512 devices
    once traced its layers for each of hundreds of meshes, which took minutes.
    """
    for model, expert in (("windows", (1, 1)), ("latents", (2, 8))):
        axes = [
            dict(replica=2, data=2, expert=expert[0], tensor=2),
            dict(replica=8, data=4, expert=expert[1], tensor=2),
        ]
        first, second = (classes_of(job_of(model, one, zero_stage=zero_stage)) for one in axes)
        assert first == second
        # What `tensor` splits is as it is.
        assert first != classes_of(job_of(model, axes[0] | dict(tensor=1), zero_stage=zero_stage))


@pytest.mark.parametrize(
    ("model", "axes", "layout"),
    [
        ("windows", dict(replica=2, data=2, tensor=2), dict(zero_stage=3, microbatches=2, remat="full")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("windows", dict(data=8, tensor=8), dict(zero_stage=2)),
                ("latents", dict(replica=2, data=4), dict(zero_stage=3)),
                ("latents", dict(data=2, expert=4), dict(zero_stage=2, remat="full")),
            )
        ),
    ],
    ids=str,
)
def test_the_parts_of_a_pattern_are_the_whole_step(
    model: str, axes: dict[str, int], layout: dict[str, Any]
) -> None:
    """The jaxpr of one device's gradients has what the scaled traces say, array by array and element by
    element.
    """
    job = job_of(model, axes, **layout)
    expected: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for one in job.step.collectives:
        if one.part != "partitioner" and not {METRICS, UPDATE} & set(one.scope):
            expected[one.kind, one.axes, one.dtype, "arrays"] += one.count
            expected[one.kind, one.axes, one.dtype, "elements"] += one.elements
    assert gradients_of(job) == expected
    assert len(expected) > 4


def test_fewer_experts_on_a_device_than_a_token_chooses_are_planned() -> None:
    """One expert on each of 16 devices, of which a token chooses eight: the trace once had too few experts."""
    moe = MoESpec(num_experts=16, top_k=8, d_ff=32)
    model, mesh = Transformer(**SIZES, pattern=(BlockSpec(feed_forward=moe),)), MeshSpec(expert=16)
    layout = layout_from(dict(zero_stage=0), mesh, model.param_infos())
    job = Job(model, layout, AdamW(peak_lr=1e-3), ROWS * mesh.batch_shards, LENGTH)
    forward = [product for product in job.step.products if product.groups and product.when == "forward"]
    # Rows that a device's experts multiply are on average its own tokens' choices.
    assert {(product.groups, product.rows) for product in forward} == {(1, ROWS * LENGTH * moe.top_k)}
