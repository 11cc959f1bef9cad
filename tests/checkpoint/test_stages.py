"""A checkpoint does not know the number of stages: it holds the model's layers in their own order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files
from jtrain.optim import AdamW
from jtrain.pipeline.pipeline_layout import place_layers
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.state import TrainState

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]

LAYERS = 7
STAGED: tuple[Any, ...] = (
    pytest.param(dict(stage=2), PipelineSpec("zbv"), dict(zero_stage=1), marks=pytest.mark.slow),
    (dict(stage=2, data=2), PipelineSpec("interleaved", chunks=3), dict(zero_stage=3)),
    pytest.param(
        dict(stage=4, context=2), PipelineSpec("1f1b"), dict(param_dtype="bfloat16"), marks=pytest.mark.slow
    ),
    pytest.param(
        dict(replica=2, stage=3), PipelineSpec("dualpipev"), dict(zero_stage=0), marks=pytest.mark.slow
    ),
)


def like_of(
    make_like: MakeLike, axes: dict[str, int], pipeline: PipelineSpec | None, **fields: Any
) -> TrainState:
    moments = AdamW(peak_lr=1e-3, warmup_steps=2, moment_dtype="int8")
    size = dict(num_layers=LAYERS, vocab_size=384, optimizer=moments)
    return make_like(axes, **(dict(pipeline=pipeline) if pipeline else {}), **size, **fields)


def order_of(axes: dict[str, int], pipeline: PipelineSpec) -> tuple[int, ...]:
    return place_layers(pipeline, stages=axes["stage"], num_layers=LAYERS).order


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("axes", "pipeline", "fields"), STAGED)
def test_stages_read_and_write_the_same_checkpoint(
    tmp_path: Path,
    make_like: MakeLike,
    fill: Fill,
    bits_of: BitsOf,
    axes: dict[str, int],
    pipeline: PipelineSpec,
    fields: dict[str, Any],
) -> None:
    """One device -> stages -> one device is the same state, bit for bit, and the same manifest, leaf by leaf.

    In between each stage holds its own layers, identity layers are zeros, and plain Orbax reads what the
    stages wrote.
    """
    dtype = {key: value for key, value in fields.items() if key == "param_dtype"}
    plain = like_of(make_like, {}, None, **dtype)
    state = fill(plain, 3)
    order = order_of(axes, pipeline)
    with Checkpoints(tmp_path / "plain", CheckpointSpec()) as checkpoints:
        checkpoints.save(3, state, {}, "")
    staged = like_of(make_like, axes, pipeline, **fields)
    with Checkpoints(tmp_path / "plain", CheckpointSpec(), layer_order=order) as checkpoints:
        placed, _ = checkpoints.restore(3, staged)
    moved = 0
    for leaf, want, old in zip(*map(jax.tree.leaves, (placed, staged, state)), strict=True):
        assert (leaf.shape, leaf.sharding) == (want.shape, want.sharding)
        if leaf.shape == old.shape:
            assert bits_of(leaf) == bits_of(old)
            continue
        moved += 1
        for place, layer in enumerate(order):
            want = np.asarray(old)[layer] if layer >= 0 else np.zeros(old.shape[1:], old.dtype)
            assert np.asarray(leaf)[place].tobytes() == want.tobytes()
    assert moved >= 9 * 4

    with Checkpoints(tmp_path / "staged", CheckpointSpec(), layer_order=order) as checkpoints:
        checkpoints.save(3, placed, {}, "")
    with Checkpoints(tmp_path / "staged", CheckpointSpec()) as checkpoints:
        back, _ = checkpoints.restore(3, plain)
        assert bits_of(back) == bits_of(state)
        written = checkpoints.folder / "3"
    with Checkpoints(tmp_path / "plain", CheckpointSpec()) as checkpoints:
        manifests = [files.read_manifest(path) for path in (written, checkpoints.folder / "3")]
    assert manifests[0].leaves == manifests[1].leaves
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(written / files.STATE)
    found, want = (tree["layers"]["mlp"]["up_DF"] for tree in (arrays["params"], state.params))
    assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
