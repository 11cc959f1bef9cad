"""Optimizer state in host memory: in float32 compute the same run, bit for bit, with less device memory."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import Layout, OffloadSpec
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.block import BlockSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, Optimizer, build
from jtrain.step import host_offload
from jtrain.step.state import TrainState, abstract_state, init_state, shardings_of
from jtrain.step.train_step import BATCH_SPEC, make_eval_step, make_train_step
from jtrain.telemetry.recompiles import count_programs
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.state_checks import assert_a_rejected_step_changes_nothing, assert_copies_agree

SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=32, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=64, vocab_size=64, z_loss=1e-4
)
ADAMW = AdamW(peak_lr=3e-3, warmup_steps=2)
NUM_STEPS = 4


@dataclasses.dataclass
class Setting:
    """A small model on emulated devices, and its step."""

    layout: Layout
    optimizer: Optimizer
    mesh: jax.sharding.Mesh
    step: Any
    batch: Batch
    drawn: TrainState | None = None

    def first(self) -> TrainState:
        """The first state; its values are computed once, since steps consume what they are given."""
        if self.drawn is None:
            self.drawn = jax.tree.map(np.array, init_state(self.layout, self.optimizer, self.mesh, seed=0))
        return jax.tree.map(jax.device_put, self.drawn, shardings_of(self.like()))

    def like(self) -> TrainState:
        return abstract_state(self.layout, self.optimizer, self.mesh)


def setting(axes: dict[str, int], *, optimizer: Any = ADAMW, **fields: Any) -> Setting:
    """The setting, compiled once for all tests that use it and do not change how updates are sliced."""
    fields = {"offload": OffloadSpec()} | fields  # the default is the same setting as nothing said
    return _setting(host_offload.SLICE_ELEMENTS, tuple(axes.items()), optimizer, **fields)


@functools.cache
def _setting(
    slice_elements: int,
    axes: tuple[tuple[str, int], ...],
    optimizer: Any,
    *,
    pattern: tuple[BlockSpec, ...] | None = None,
    **fields: Any,
) -> Setting:
    del slice_elements  # a step is traced with it
    mesh_spec = MeshSpec(**dict(axes))
    mesh = make_mesh(mesh_spec, jax.devices()[: mesh_spec.size])
    sizes: dict[str, Any] = SIZES if pattern is None else SIZES | dict(pattern=pattern)
    model = Transformer(**sizes)
    infos = model.param_infos()
    spec: dict[str, Any] = {"compute_dtype": "float32"} | fields
    lay = layout_from(spec, mesh_spec, infos)
    opt = build(optimizer, num_steps=20, params=map_params(lambda info: info, infos))
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), adversarial_batch())
    return Setting(lay, opt, mesh, make_train_step(model, opt, lay, mesh), batch)


@dataclasses.dataclass
class Trained:
    losses: list[float]
    first: dict[str, np.ndarray]
    last: dict[str, np.ndarray]
    kinds: dict[str, str]  # memory of every array of the state, before the first step


def by_name(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def kinds_of(state: TrainState) -> dict[str, str]:
    return {name: x.sharding.memory_kind for name, x in by_name(state).items()}


def trained(axes: dict[str, int], **fields: Any) -> Trained:
    """Four steps; the state stays where it was, and the step is traced once."""
    run = setting(axes, **fields)
    state = run.first()
    kinds, shardings = kinds_of(state), jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.map(lambda x: x.sharding, run.like()) == shardings
    first = jax.tree.map(np.array, by_name(state))
    losses: list[float] = []
    for _ in range(NUM_STEPS):
        state, metrics = run.step(state, run.batch)
        losses.append(float(metrics["loss_nats"]))
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
    assert_copies_agree(state)
    last = jax.tree.map(np.array, by_name(state))
    assert_a_rejected_step_changes_nothing(run.step, state, run.batch)
    assert count_programs(run.step) == 1
    assert losses[-1] < losses[0] - 0.1, "the loss must move, or equality proves nothing"
    return Trained(losses, first, last, kinds)


@functools.cache
def plain(axes: tuple[tuple[str, int], ...], optimizer: AdamW = ADAMW, **fields: Any) -> Trained:
    return trained(dict(axes), optimizer=optimizer, **fields)


def assert_same_bits(got: Trained, want: Trained) -> None:
    assert got.first.keys() == want.first.keys() == got.last.keys()
    for name, x in want.first.items():
        np.testing.assert_array_equal(got.first[name], x, err_msg=name)
    assert got.losses == want.losses
    for name, x in want.last.items():
        np.testing.assert_array_equal(got.last[name], x, err_msg=name)
        moves = name not in ("guard.left_out", "guard.since", "guard.skipped")  # zero in a healthy run
        assert not moves or not np.array_equal(x, want.first[name], equal_nan=x.dtype.kind == "f"), (
            f"{name} must move"
        )


def on_host(run: Trained) -> set[str]:
    return {name for name, kind in run.kinds.items() if kind == "pinned_host"}


def matrices(run: Trained, *fields: str) -> set[str]:
    """Names of the state's matrices below these fields."""
    found = {name for name in run.kinds if name.startswith(tuple(f"opt_state.{field}." for field in fields))}
    return {name for name in found if "scale_D" not in name}


LAYOUTS: tuple[Any, ...] = (
    ({}, dict(zero_stage=0)),
    ({}, dict(zero_stage=0, microbatches=2, remat="full")),
    ({"data": 8}, dict(zero_stage=0)),
    ({"data": 8}, dict(zero_stage=3)),
    ({"data": 2, "tensor": 4}, dict(zero_stage=3, microbatches=2)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "fields"), LAYOUTS, ids=str)
def test_state_in_host_memory_gives_the_same_bits(axes: dict[str, int], fields: dict[str, Any]) -> None:
    """All moments of matrices on the host: losses, parameters and moments of four steps equal to the last
    bit.
    """
    want = plain(tuple(axes.items()), **fields)
    got = trained(axes, offload=OffloadSpec(optimizer=1.0), **fields)
    assert on_host(want) == set()
    assert on_host(got) == matrices(got, "mu", "nu")
    assert len(on_host(got)) == 18
    assert_same_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", (1, 2))
def test_state_split_under_whole_parameters_differs_by_rounding_alone(zero_stage: int) -> None:
    """Stages 1 and 2 slice whole parameters, and XLA:CPU contracts other multiply-adds where it fuses the
    slice.

    That moves last bits of the plain layout (see `Optimizer.update`). Per step at most the rounding of one
    float32 operation on parameters below 1, 2^-24, so 2^-21 in four steps with what the gradients make of it.
    """
    axes = {"data": 8}
    want = plain(tuple(axes.items()), zero_stage=zero_stage)
    got = trained(axes, zero_stage=zero_stage, offload=OffloadSpec(optimizer=1.0))
    assert len(on_host(got)) == 18
    for name, x in want.first.items():
        np.testing.assert_array_equal(got.first[name], x, err_msg=name)
    np.testing.assert_allclose(got.losses, want.losses, rtol=2**-21)
    for name, x in want.last.items():
        np.testing.assert_allclose(got.last[name], x, rtol=2**-20, atol=2**-21, err_msg=name)


@pytest.mark.slow
def test_a_part_of_the_state_is_the_largest_arrays_that_fit() -> None:
    """Three tenths of the bytes: some moments here, some there, of one parameter too; and the same bits."""
    got = trained({"data": 2, "tensor": 4}, zero_stage=3, microbatches=2, offload=OffloadSpec(optimizer=0.3))
    sizes = {name: x.nbytes for name, x in got.first.items() if name.startswith("opt_state.")}
    share = sum(sizes[name] for name in on_host(got)) / sum(sizes.values())
    assert 0.25 < share <= 0.3
    assert sum(sizes[name] == max(sizes.values()) for name in on_host(got)) == 3, (
        "of six; then what still fits"
    )
    assert_same_bits(got, plain((("data", 2), ("tensor", 4)), zero_stage=3, microbatches=2))


STATES: tuple[Any, ...] = (
    pytest.param(
        AdamW(3e-3, warmup_steps=2, moment_dtype="bfloat16_sr"), {}, ("mu", "nu"), marks=pytest.mark.slow
    ),
    (AdamW(3e-3, warmup_steps=2, moment_dtype="int8"), {}, ("mu", "nu", "mu_scale", "nu_scale")),
    pytest.param(
        AdamW(3e-3, warmup_steps=2, master_dtype="float32"),
        {"param_dtype": "bfloat16"},
        ("mu", "nu", "master"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AdamW(3e-3, warmup_steps=2, param_rounding="stochastic"),
        {"param_dtype": "bfloat16"},
        ("mu", "nu"),
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize(("optimizer", "fields", "names"), STATES, ids=str)
def test_every_form_of_state_streams(
    optimizer: AdamW, fields: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, masters and random bits come out the same where a shard is updated in slices of a layer's
    part.
    """
    monkeypatch.setattr(host_offload, "SLICE_ELEMENTS", 64)
    # The small model's blocks of int8 are as long as its dimensions: no device may cut them, and no slice
    # does.
    whole = optimizer.moment_dtype == "int8"
    axes: dict[str, int] = {} if whole else {"data": 2, "tensor": 2}
    # Feed-forward layers alone: a program of all forms has half of the matrices of a Llama, each with its own
    # slices.
    fields = fields | {"zero_stage": 0 if whole else 3, "pattern": (BlockSpec(None),)}
    want = plain(tuple(axes.items()), optimizer, **fields)
    got = trained(axes, optimizer=optimizer, offload=OffloadSpec(optimizer=1.0), **fields)
    assert on_host(got) == matrices(got, *names)
    assert_same_bits(got, want)


@pytest.mark.parametrize("share", (0.5, pytest.param(1.0, marks=pytest.mark.slow)))
def test_the_hosts_cores_compute_the_same_update(share: float) -> None:
    """ZeRO-Offload's form: whole parameters' state on the host, or none of it. The same arithmetic on the
    same CPU.
    """
    axes = {"data": 2, "tensor": 4}
    got = trained(axes, zero_stage=3, microbatches=2, offload=OffloadSpec(optimizer=share, update="host"))
    paths = {name.removeprefix("opt_state.mu.") for name in on_host(got) if ".mu." in name}
    assert on_host(got) == {f"opt_state.{field}.{path}" for field in ("mu", "nu") for path in paths}
    assert 0 < len(paths) <= 9
    assert (len(paths) == 9) == (share == 1.0)
    assert_same_bits(got, plain(tuple(axes.items()), zero_stage=3, microbatches=2))


@pytest.mark.slow
def test_parameters_and_state_together_stay_on_the_host() -> None:
    """Layers' parameters stream with their moments; evaluation reads them from there."""
    want = plain((), zero_stage=0)
    spec = OffloadSpec(optimizer=1.0, params=1.0)
    got = trained({}, zero_stage=0, offload=spec)
    assert {name for name in on_host(got) if name.startswith("params.layers.")} == {
        name for name in got.kinds if name.startswith("params.layers.") and "scale_D" not in name
    }
    assert_same_bits(got, want)
    run = setting({}, zero_stage=0, offload=spec)
    nats_BL = make_eval_step(Transformer(**SIZES), run.layout, run.mesh)(run.first().params, run.batch)
    targets = np.sum(np.asarray(run.batch.target_BL) != IGNORE)
    assert np.asarray(nats_BL).sum() / targets == pytest.approx(want.losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ({}, {"data": 2}), ids=str)
def test_muon_takes_whole_matrices_out_of_host_memory(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters may wait on the host, but no shard or slice of one is orthogonalised for itself."""
    monkeypatch.setattr(host_offload, "SLICE_ELEMENTS", 64)
    fields: dict[str, Any] = {"optimizer": Muon(3e-3, warmup_steps=2), "zero_stage": 3 if axes else 0}
    want, got = trained(axes, **fields), trained(axes, offload=OffloadSpec(params=1.0), **fields)
    assert len([name for name in on_host(got) if name.startswith("params.layers.")]) == 7
    for name, x in want.last.items():
        np.testing.assert_allclose(got.last[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_hosts_cores_take_only_what_has_its_state_there() -> None:
    """Parameters are on the host, a third of the state: the rest of the update is the device's, to the same
    bits.
    """
    got = trained({}, zero_stage=0, offload=OffloadSpec(optimizer=0.3, params=1.0, update="host"))
    states = {name for name in on_host(got) if name.startswith("opt_state.")}
    assert 0 < len(states) < 18
    assert_same_bits(got, plain((), zero_stage=0))


@pytest.mark.parametrize(
    ("saved_share", "resumed_share"), (pytest.param(1.0, "none", marks=pytest.mark.slow), ("none", 1.0))
)
def test_a_checkpoint_does_not_know_what_was_offloaded(
    saved_share: Any, resumed_share: Any, tmp_path: Path
) -> None:
    """Two steps, a save, two more under the other setting: the bits of four steps under one."""
    axes, fields = {"data": 2, "tensor": 4}, {"zero_stage": 3, "microbatches": 2}
    before = setting(axes, offload=OffloadSpec(optimizer=saved_share), **fields)
    after = setting(axes, offload=OffloadSpec(optimizer=resumed_share), **fields)
    state = before.first()
    for _ in range(2):
        state, _ = before.step(state, before.batch)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(2, state, {}, "")
        checkpoints.wait()
        state, _ = checkpoints.restore(2, after.like())
    assert kinds_of(state) == kinds_of(after.like())
    assert ("pinned_host" in kinds_of(state).values()) == (resumed_share == 1.0)
    losses: list[float] = []
    for _ in range(2):
        state, metrics = after.step(state, after.batch)
        losses.append(float(metrics["loss_nats"]))
    assert count_programs(after.step) == 1
    want = plain(tuple(axes.items()), **fields)
    assert losses == want.losses[2:]
    for name, x in by_name(state).items():
        np.testing.assert_array_equal(np.asarray(x), want.last[name], err_msg=name)
