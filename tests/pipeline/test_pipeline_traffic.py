"""The collectives of compiled pipelined steps are those of the plan, array by array and byte by byte.

A compiled program does not say how often a branch is taken: the schedule does.
"""

from typing import Any

import pytest

from jtrain.pipeline.spec import PipelineSpec
from tests.step.test_collectives import SIZES, compiled, layout_of, predicted

FOUR = SIZES | dict(num_layers=4)
DATA = dict(stage=2, data=2)
ZB = PipelineSpec("zb-h1")


def _slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("axes", "pipeline", "sizes", "layout"),
    [
        (dict(stage=2, data=2, tensor=2), ZB, {}, dict(remat="full")),
        _slow(DATA, PipelineSpec(), {}, dict(remat="full")),
        _slow(DATA, PipelineSpec("interleaved", chunks=2), {}, {}),
        _slow(DATA, PipelineSpec("zbv"), {}, {}),
        _slow(DATA, PipelineSpec(), {}, dict(zero_stage=1)),
        _slow(DATA, PipelineSpec(), {}, dict(zero_stage=2)),
        _slow(DATA, PipelineSpec(), dict(tie_embeddings=True), {}),
        _slow(dict(stage=4, data=2), PipelineSpec(), dict(num_layers=5), {}),
        _slow(DATA, PipelineSpec(), dict(vocab_size=40_000), {}),
        _slow(dict(replica=2, stage=2, data=2), ZB, {}, {}),
        _slow(dict(stage=2, tensor=4), PipelineSpec(), {}, dict(remat="full")),
        _slow(DATA, PipelineSpec(gather="step"), {}, {}),
        _slow(DATA, PipelineSpec("zb-h1", gather="step"), {}, dict(zero_stage=2)),
        _slow(dict(stage=2, context=2), PipelineSpec(), {}, dict(context_attention="ulysses", remat="full")),
        _slow(dict(stage=2, data=2, context=2), ZB, {}, {}),
        _slow(dict(stage=2, data=2, context=2), PipelineSpec(), {}, dict(remat="full")),
    ],
    ids=str,
)
def test_compiled_collectives_are_the_plans(
    axes: dict[str, int], pipeline: PipelineSpec, sizes: dict[str, Any], layout: dict[str, Any]
) -> None:
    """Kinds, axes, dtypes, number of arrays and bytes; layers that permute compute in every tick."""
    settings = layout_of(**dict(zero_stage=3, microbatches=4) | layout)
    got = compiled(axes, FOUR | sizes, pipeline=pipeline, **settings)
    assert got == predicted(axes, FOUR | sizes, pipeline=pipeline, **settings)
    assert got["collective-permute", ("stage",), 2, "f32"][1] > 0
    assert any(used != ("stage",) and size > 1000 for (_, used, _, _), (_, size) in got.items())


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", (PipelineSpec(), ZB), ids=str)
def test_overlapped_projections_permute_in_every_tick(pipeline: PipelineSpec) -> None:
    """Byte by byte; in how many pieces is the kernels' choice.

    Of two devices along `tensor` XLA joins what two turns of the ring send.
    """
    axes, layout = dict(stage=2, tensor=4), layout_of(3, 4, tensor_overlap=True, remat="full")
    got, want = (
        {key: size for key, (_, size) in table(axes, FOUR, pipeline=pipeline, **layout).items()}
        for table in (compiled, predicted)
    )
    assert got == want
    assert ("collective-permute", ("tensor",), 2, "f32") in got
