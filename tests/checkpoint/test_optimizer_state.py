"""Eight-bit moments, their scales and master weights are saved like other arrays, and a resumed run is
unchanged.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.state import TrainState, abstract_state, init_state
from jtrain.step.train_step import make_train_step
from tests.layouts import layout_from

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]

INT8 = AdamW(peak_lr=1e-2, warmup_steps=0, moment_dtype="int8", master_dtype="float32")
WIDE: dict[str, Any] = {"d_model": 256, "d_ff": 256, "tie_embeddings": False}
WIDE |= {"param_dtype": "bfloat16", "optimizer": INT8}


def test_scales_codes_and_masters_come_back_on_any_layout(
    tmp_path: Path, make_like: MakeLike, fill: Fill, bits_of: BitsOf
) -> None:
    """Any layout restores bit for bit what 8-way ZeRO-3 saved; another precision is refused."""
    state = fill(make_like({"data": 8}, zero_stage=3, **WIDE), 7)
    names = {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state)}
    assert names == {"int8", "uint8", "float32"}
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(7, state, {"next": 7}, "seed: int = 0\n")
        checkpoints.wait()
        for axes, zero_stage in (({}, 0), ({"data": 4, "replica": 2}, 1), ({"data": 2, "tensor": 2}, 2)):
            like = make_like(axes, zero_stage=zero_stage, **WIDE)
            got, _ = checkpoints.restore(7, like)
            assert bits_of(got) == bits_of(state)
            assert jax.tree.structure(got) == jax.tree.structure(state)
            assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(like)]
        other = make_like({}, **(WIDE | {"optimizer": AdamW(peak_lr=1e-2, warmup_steps=0)}))
        with pytest.raises(CheckpointError, match=r"(?s)of another optimizer: .*opt_state\.mu.* int8"):
            checkpoints.restore(7, other)


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, bits_of: BitsOf) -> None:
    """Two steps, a save and two more steps give the same bits as four steps, including stochastic
    rounding.
    """
    model = Transformer(
        num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=64, vocab_size=64
    )
    infos = model.param_infos()
    layout = layout_from(dict(param_dtype="bfloat16"), MeshSpec(), infos)
    optimizer = build(INT8, num_steps=20, params=map_params(lambda info: info, infos))
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    step = make_train_step(model, optimizer, layout, mesh)
    token = np.random.default_rng(0).integers(0, 64, (4, 16), np.int32)
    position = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    batch = jax.device_put(
        Batch(token, np.roll(token, -1, axis=1), position, np.ones_like(token)), jax.devices()[0]
    )

    state = init_state(layout, optimizer, mesh, seed=0)
    first = bits_of(state)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        for k in range(4):
            if k == 2:
                checkpoints.save(2, state, {}, "")
                checkpoints.wait()
            state, _ = step(state, batch)
        again, _ = checkpoints.restore(2, abstract_state(layout, optimizer, mesh))
    for _ in range(2):
        again, _ = step(again, batch)
    assert bits_of(again) == bits_of(state)
    assert sum(a != b for a, b in zip(first, bits_of(state), strict=True)) > 20


def test_a_checkpoint_from_before_scales_and_masters_is_one_without(
    tmp_path: Path, make_like: MakeLike, fill: Fill, bits_of: BitsOf
) -> None:
    """An old checkpoint has only the two moments, and nothing for the arrays that were added later."""
    like = make_like({"data": 8}, zero_stage=3)
    state = fill(like, 3)
    moments = {"mu": state.opt_state.mu, "nu": state.opt_state.nu}
    older: Any = {"step": state.step, "params": state.params, "opt_state": moments}
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(3, older, {"next": 3}, "seed: int = 0\n")
        checkpoints.wait()
        restored, _ = checkpoints.restore(3, dataclasses.replace(like, guard={}))
    assert bits_of(restored) == bits_of(dataclasses.replace(state, guard={}))
