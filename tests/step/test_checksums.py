"""A flipped bit anywhere in the state is found by the next step, on the device and in the array where it
is.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.step.checksums import METRIC, copies, differing_copies, summed_arrays
from jtrain.step.state import abstract_state, init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.bit_flips import copied, flip
from tests.step.test_train_step import ADAMW, SIZES

LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    (dict(replica=2, data=2, tensor=2), dict(zero_stage=3, param_dtype="bfloat16")),
    ({}, {}),
    (dict(data=8), dict(zero_stage=0)),
    (dict(data=8), dict(zero_stage=1, microbatches=2)),
    (dict(data=8), dict(zero_stage=3)),
    (dict(data=2, tensor=4), dict(zero_stage=2)),
    (dict(replica=4, data=2), dict(zero_stage=1, param_dtype="bfloat16")),
)
BIG: dict[str, Any] = SIZES | {"d_ff": 1024}
"""Large enough that CPUs sum its arrays in folds."""


@dataclasses.dataclass
class Stepper:
    """A compiled step with checksums, its first state, and what the checks need."""

    step: Any
    first: Any
    batch: Any
    like: Any
    mesh: Any

    def sums(self, state: Any) -> tuple[Any, np.ndarray, np.ndarray]:
        state, metrics = self.step(state, self.batch)
        both = np.asarray(metrics[METRIC])
        return state, both[:, 0], both[:, 1]


def stepper(axes: dict[str, int], layout: dict[str, Any], *, checksums: bool = True) -> Stepper:
    spec = MeshSpec(**axes)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    model = Transformer(**BIG)
    infos = model.param_infos()
    lay = layout_from(dict(layout), spec, infos)
    opt = build(ADAMW, num_steps=20, params=map_params(lambda info: info, infos))
    step = make_train_step(model, opt, lay, mesh, checksums=checksums)
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), adversarial_batch())
    return Stepper(step, init_state(lay, opt, mesh, seed=0), batch, abstract_state(lay, opt, mesh), mesh)


@pytest.mark.parametrize(
    ("axes", "layout"),
    [LAYOUTS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS[1:])],
    ids=str,
)
def test_every_flipped_bit_is_found_where_it_is(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Ten flips per layout, in any array, device and bit: the next step's sums differ there and nowhere else.

    Without a flip no sum differs, and no copies do.
    """
    run = stepper(axes, layout)
    names = [name for name, _ in summed_arrays(run.like)]
    devices, first = list(run.mesh.devices.flat), copies(run.like, run.mesh)
    assert {"step", "params.layers.mlp.up_DF", "opt_state.nu.embed_VD"} <= set(names)
    state, _, returned = run.sums(copied(run.first))
    for _ in range(5):
        state, given, following = run.sums(state)
        np.testing.assert_array_equal(given, returned)
        assert differing_copies(given, first) == differing_copies(following, first) == []
        returned = following
    state = jax.device_put(jax.device_get(state), jax.tree.map(lambda x: x.sharding, state))
    rng = np.random.default_rng(0)
    for array in (0, *rng.integers(0, len(names), 9)):
        here = copied(state)
        leaf = dict(summed_arrays(here))[names[array]]
        device = int(rng.integers(len(devices)))
        flip(leaf, devices[device], int(rng.integers(2**30)), int(rng.integers(8)))
        _, given, _ = run.sums(here)
        assert np.argwhere(given != returned).tolist() == [[device, array]], names[array]
        held_by = np.count_nonzero(first[:, array] == first[device, array])
        found = [(array, [device], True)] if held_by > 2 else differing_copies(given, first)
        assert differing_copies(given, first) == found
        assert not found or device in found[0][1]


def test_a_majority_names_the_device_and_a_pair_names_both() -> None:
    """Eight copies, and four pairs."""
    sums = np.full((8, 2), 7, np.uint32)
    first = np.stack([np.zeros(8, int), np.repeat(np.arange(0, 8, 2), 2)], axis=1)
    assert differing_copies(sums, first) == []
    sums[5] = 9
    assert differing_copies(sums, first) == [(0, [5], True), (1, [4, 5], False)]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS[:2], ids=str)
def test_sums_change_no_number(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Five steps with checksums give bit for bit the losses and the state of five without."""
    ends = []
    for checksums in (True, False):
        run = stepper(axes, layout, checksums=checksums)
        state, losses, metrics = run.first, [], {}
        for _ in range(5):
            state, metrics = run.step(state, run.batch)
            losses.append(float(metrics["loss_nats"]))
        assert (METRIC in metrics) == checksums
        ends.append((losses, jax.device_get(state)))
    (with_sums, one), (without, other) = ends
    assert with_sums == without
    assert len(set(without)) == 5, "the loss moves, or equality says nothing"
    jax.tree.map(np.testing.assert_array_equal, one, other)
