"""A device that computes wrongly is named by its neighbour; healthy devices agree to the last bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.forward_placement import Placement
from jtrain.model.param import Params, map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.step.recompute import make_roll, make_signature, suspects
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.test_train_step import ADAMW, SIZES

QUICK: tuple[dict[str, int], dict[str, Any]] = (
    dict(data=4, tensor=2),
    dict(zero_stage=3, microbatches=2, remat="full"),
)
LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({}, {}),
    (dict(data=8), dict(zero_stage=0)),
    (dict(data=8), dict(zero_stage=1)),
    (dict(data=4), dict(zero_stage=2, microbatches=2)),
    (dict(replica=4, data=2), dict(zero_stage=3)),
    (dict(replica=2, tensor=4), dict(zero_stage=0)),
    (dict(data=2, context=2, tensor=2), dict(zero_stage=2)),
    (dict(stage=2, data=2, tensor=2), dict(zero_stage=3, microbatches=2)),
)


class Faulty(Transformer):
    """The real model, on one device of which one sum of the forward pass is off by its last bits."""

    def cross_entropy(
        self,
        params: Params,
        x_BLD: Float[Array, "B _ D"],
        target_BL: Int[Array, "B L"],
        placement: Placement,
        weight_BL: Float[Array, "B L"] | None = None,
        **more: Any,
    ) -> Any:
        here = jax.lax.axis_index(("replica", "data", "context", "tensor")) == 2
        x_BLD = jnp.where(here, x_BLD.at[0, 3, 5].multiply(1 + 2**-7), x_BLD)
        return super().cross_entropy(params, x_BLD, target_BL, placement, weight_BL, **more)


def signatures(
    axes: dict[str, int], layout: dict[str, Any], model: Transformer
) -> tuple[np.ndarray, np.ndarray, Any]:
    spec = MeshSpec(**axes)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    infos = model.param_infos()
    lay = layout_from(dict(layout), spec, infos)
    opt = build(ADAMW, num_steps=20, params=map_params(lambda info: info, infos))
    state = init_state(lay, opt, mesh, seed=0)
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), adversarial_batch())
    signature, roll = make_signature(model, lay, mesh), make_roll(mesh)
    own, again = (np.asarray(signature(state.params, state.scaling, b)) for b in (batch, roll(batch)))
    return own, again, mesh


@pytest.mark.parametrize(
    ("axes", "layout"), [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS)], ids=str
)
def test_healthy_devices_agree(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Losses and gradients of the same sequences on neighbours are equal, and differ between sequences."""
    own, again, mesh = signatures(axes, layout, Transformer(**SIZES))
    assert suspects(own, again, mesh) == []
    assert len(np.unique(own[:, 2])) == mesh.size, "each device's gradient is its own"
    rows = mesh.shape["data"] * mesh.shape["replica"]
    assert rows == 1 or not np.array_equal(own, again), "the second time the sequences were elsewhere"


@pytest.mark.parametrize(
    ("axes", "layout", "named"),
    [
        (dict(data=8), dict(zero_stage=1), [2]),
        pytest.param(dict(data=8), dict(zero_stage=3), [2], marks=pytest.mark.slow),
        pytest.param(dict(replica=4), dict(zero_stage=0), [2], marks=pytest.mark.slow),
        pytest.param(dict(data=4, tensor=2), dict(zero_stage=3), [2, 3], marks=pytest.mark.slow),
        pytest.param(dict(data=2, tensor=2), dict(zero_stage=0), [0, 1, 2, 3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_device_that_computes_wrongly_is_named(
    axes: dict[str, int], layout: dict[str, Any], named: list[int]
) -> None:
    """Alone if it computes layers alone; with its peers along `tensor`; with its neighbour if there are only
    two.
    """
    own, again, mesh = signatures(axes, layout, Faulty(**SIZES))
    assert suspects(own, again, mesh) == named


def test_a_single_difference_names_both_devices() -> None:
    """An error that happens once lies with the device or with its neighbour."""
    mesh = make_mesh(MeshSpec(data=8), jax.devices())
    own = np.arange(24, dtype=np.uint32).reshape(8, 3)
    again = np.roll(own, 1, axis=0)
    assert suspects(own, again, mesh) == []
    own[7, 2] += 1
    assert suspects(own, again, mesh) == [0, 7]
