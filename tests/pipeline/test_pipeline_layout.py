"""Layers on stages: every layer in one place, each place on the worker that the schedule wants, the same
numbers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.pipeline.cells import to_csv
from jtrain.pipeline.pipeline_layout import PipelineLayout, place_layers, schedule_of
from jtrain.pipeline.published_schedules import make_schedule
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.state import TrainState, init_state

SIZES: dict[str, Any] = dict(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=64)


def placed(schedule: str, stages: int, layers: int, chunks: int = 1) -> PipelineLayout:
    return place_layers(PipelineSpec(schedule, chunks), stages=stages, num_layers=layers)


@pytest.mark.parametrize(
    ("schedule", "stages", "layers", "chunks", "order"),
    [
        ("1f1b", 4, 8, 1, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("1f1b", 4, 5, 1, (0, 1, 2, -1, 3, -1, 4, -1)),
        ("interleaved", 2, 8, 2, (0, 1, 4, 5, 2, 3, 6, 7)),
        ("zbv", 2, 8, 1, (0, 1, 6, 7, 2, 3, 4, 5)),
        ("dualpipev", 2, 5, 1, (0, 1, 4, -1, 2, -1, 3, -1)),
    ],
)
def test_the_order_of_layers(
    schedule: str, stages: int, layers: int, chunks: int, order: tuple[int, ...]
) -> None:
    """Written out by hand for each kind of placement, even and uneven."""
    found = placed(schedule, stages, layers, chunks)
    assert found.order == order
    assert found.in_order == (order == tuple(range(layers)))
    assert (found.identity_message() is None) == (-1 not in order)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(("stages", "layers"), [(2, 4), (2, 7), (3, 17), (4, 8), (8, 61)])
def test_every_layer_has_one_place_in_ascending_virtual_stages(
    schedule: str, stages: int, layers: int
) -> None:
    """Read along the virtual stages, layers ascend without a gap; no two chunks differ by more than one
    layer.
    """
    found = placed(schedule, stages, layers, 2 if schedule == "interleaved" else 1)
    k = found.layers_per_chunk
    seen: list[int] = []
    counts = set()
    for virtual in range(found.num_virtual):
        worker, chunk = found.where(virtual)
        start = (worker * found.chunks + chunk) * k
        real = [layer for layer in found.order[start : start + k] if layer >= 0]
        assert found.layers_of(virtual) == (real[0], len(real))
        seen += real
        counts.add(len(real))
    assert seen == list(range(layers))
    assert max(counts) - min(counts) <= 1
    assert found.num_identity == found.places - layers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: placed("1f1b", 8, 5),
            r"mesh\.stage=8 \(pip.*at least 8 layers, but model\.num_layers=5\. .*at most 5",
        ),
        (
            lambda: placed("zbv", 4, 7),
            r"4 of 2 chunks each .* 8 layers, .*=7\. Set mesh\.stage to at most 3, or a sch",
        ),
        (
            lambda: PipelineSpec("1f2b"),
            r"schedule='1f2b' is not .*Did you mean 1f1b\? there are gpipe, .*CSV file",
        ),
        (lambda: PipelineSpec("interleaved"), r"chunks=1 with .*=interleaved: .*Set pipeline\.chunks=2, or"),
        (lambda: PipelineSpec("zbv", chunks=3), r"chunks=3 with .*=zbv: zbv always has 2 per worker\. Leave"),
        (lambda: PipelineSpec("a.csv", chunks=3), r"chunks=3 with .*=a\.csv: the file says"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    """With the field, the numbers and the way out."""
    with pytest.raises(UserError, match=message):
        call()


def test_a_schedule_of_a_file_places_layers_and_is_checked(tmp_path: Path) -> None:
    """Rows say the stages, cells the chunks; other numbers, a wrong cell or a wrong order are refused."""
    file = tmp_path / "own.csv"
    schedule = make_schedule("zbv", 2, 3)
    file.write_text(to_csv(schedule))
    spec = PipelineSpec(str(file))
    found = place_layers(spec, stages=2, num_layers=8)
    assert found.order == placed("zbv", 2, 8).order
    assert schedule_of(found, 3).streams == schedule.streams
    with pytest.raises(
        UserError, match=r"is for 2 stages, one per row, but stages=4\. Set stages to 2 \(mesh\.stage"
    ):
        place_layers(spec, stages=4, num_layers=8)
    with pytest.raises(UserError, match=r"has 3 microbatches, but microbatches=4\. .*layout\.microbatches"):
        schedule_of(found, 4)
    file.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(UserError, match=r"own\.csv, line 2, cell 2: '1X0' is not an operation"):
        place_layers(spec, stages=2, num_layers=8)
    file.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(UserError, match="worker 1, 1B0"):
        schedule_of(place_layers(spec, stages=2, num_layers=8), 1)


def test_the_way_out_of_more_chunks_than_layers_works() -> None:
    """The stage count that the message names is accepted."""
    assert placed("zbv", 3, 7).num_virtual == 6
    assert placed("1f1b", 5, 5).num_virtual == 5


@pytest.mark.parametrize(
    ("offload", "gather", "message", "ways_out"),
    [
        (
            OffloadSpec(activations=1.0),
            "tick",
            r"activations=1\.0 with mesh\.stage=2: .*Set layout\.offload\.activations=none, or "
            r"mesh\.stage=1\.",
            (dict(offload=OffloadSpec()), dict(stage=1)),
        ),
        (
            OffloadSpec(params=0.5),
            "step",
            r"params=0\.5 with pipeline\.gather=step: .*Set pipeline\.gather=tick, or "
            r"layout\.offload\.params=none\.",
            (dict(offload=OffloadSpec()), dict(gather="tick")),
        ),
    ],
    ids=("activations", "params"),
)
def test_offload_that_stages_do_not_have_is_refused(
    offload: OffloadSpec, gather: Any, message: str, ways_out: tuple[dict[str, Any], ...]
) -> None:
    """And each way out that the message names works."""
    infos = Transformer(num_layers=4, **SIZES).param_infos()

    def lay(*, offload: OffloadSpec, gather: Any, stage: int = 2) -> None:
        spec = LayoutSpec(offload=offload, remat="full")
        make_layout(spec, MeshSpec(stage=stage), infos, pipeline=PipelineSpec(gather=gather))

    with pytest.raises(UserError, match=message):
        lay(offload=offload, gather=gather)
    for way_out in ways_out:
        changed: dict[str, Any] = dict(offload=offload, gather=gather) | way_out
        lay(**changed)


def test_a_model_without_a_stack_of_layers_is_refused() -> None:
    """There is nothing to cut; one stage is the way out."""
    infos = tuple(info for info in Transformer(num_layers=4, **SIZES).param_infos() if not info.is_stacked)
    with pytest.raises(
        UserError, match=r"mesh\.stage=2 cuts a model between its layers, but .* Set mesh\.stage=1 and"
    ):
        make_layout(LayoutSpec(), MeshSpec(stage=2), infos)
    make_layout(LayoutSpec(), MeshSpec(stage=1), infos)


def first_state(
    pipeline: PipelineSpec | None, optimizer: AdamW | Muon, *, stage: int, **layout: Any
) -> TrainState:
    model = Transformer(num_layers=5, **SIZES)
    mesh = MeshSpec(stage=stage, data=2)
    precision = PrecisionSpec(param_dtype="bfloat16")
    more: Any = dict(pipeline=pipeline or PipelineSpec(), precision=precision)
    lay = make_layout(LayoutSpec(**layout), mesh, model.param_infos(), **more)
    opt = build(optimizer, num_steps=4, params=map_params(lambda info: info, model.param_infos()))
    return init_state(lay, opt, make_mesh(mesh, jax.devices()[: mesh.size]), seed=0)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_first_weights_are_those_of_a_run_without_stages(zero_stage: Any) -> None:
    """Every logical layer is equal bit for bit, master weights too; identity layers are zero."""
    spec = AdamW(peak_lr=1e-3, warmup_steps=1, moment_dtype="int8", master_dtype="float32")
    want = first_state(None, spec, stage=1, zero_stage=zero_stage)
    got = first_state(PipelineSpec("zbv"), spec, stage=2, zero_stage=zero_stage)
    order = np.array(placed("zbv", 2, 5).order)

    def compare(a: jax.Array, b: jax.Array) -> bool:
        if a.shape == b.shape:
            np.testing.assert_array_equal(a, b)
            return False
        assert b.shape == (len(order), *a.shape[1:])
        assert b.sharding.shard_shape(b.shape)[0] == len(order) // 2
        np.testing.assert_array_equal(np.asarray(b)[order >= 0], np.asarray(a)[order[order >= 0]])
        assert not np.any(np.asarray(b)[order < 0])
        return True

    moved = jax.tree.map(compare, want, got)
    assert sum(jax.tree.leaves(moved)) >= 9 * 4, "parameters, moments, scales and masters of every layer"
