"""Loss and gradients of the decoder in float64, by the reference of `jtrain bench layouts`, without code of
ours.
"""

from typing import Any

import jax
import numpy as np

from jtrain.bench.layout_trials import float64_model
from jtrain.layout.dims import Batch
from jtrain.model.block import BlockSpec
from jtrain.model.norm import NormSpec

ARRAYS = ("token_BL", "target_BL", "position_BL", "segment_BL")


def loss_and_gradients(params: Any, batch: Batch, *, z_loss: float) -> tuple[float, Any]:
    """Nats per target and the gradients of the training objective, in float64."""
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        flat = {
            jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(x, np.float64)
            for keys, x in leaves
        }
        arrays = {name: np.asarray(getattr(batch, name)) for name in ARRAYS}
        model = float64_model.Model(
            (), (BlockSpec(),), (), NormSpec(), num_routers=0, z_loss=z_loss, tied="unembed_DV" not in flat
        )
        (_, (nats, *_)), gradients = float64_model.differentiate(model)(flat, arrays)
        return float(nats), jax.tree.unflatten(structure, [np.asarray(gradients[path]) for path in flat])


def relative_errors(got: Any, want: Any) -> dict[str, float]:
    """Distance of each array from the reference's, as a share of the reference's norm, by path."""
    errors = jax.tree.map(
        lambda g, w: float(np.linalg.norm(np.float64(g) - w) / np.linalg.norm(w)), got, want
    )
    return {jax.tree_util.keystr(path): error for path, error in jax.tree_util.tree_leaves_with_path(errors)}
