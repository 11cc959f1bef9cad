"""Adapter off = base: what is frozen stays, bit for bit, and the adapter begins as nothing and is trained."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jtrain.check.layouts import LayoutReference
from jtrain.check.lines import Differs
from jtrain.check.packing import OneDevice, nats_of
from jtrain.check.records import Sample
from jtrain.check.rounding import MARGIN, RUNS, moved
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import ParamInfo
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.model.adapters.base_hash import hash_base, hex_of
from jtrain.model.adapters.merge import merge
from jtrain.model.param import Params
from jtrain.step_comparison.comparable_run import LOSS_TOLERANCE, ArraysByPath


def adapter_off_is_base(
    reference: LayoutReference,
    infos: Sequence[ParamInfo],
    device: OneDevice,
    sample: Sample,
    *,
    freezes_all: bool,
    scale: float,
) -> str:
    """Proves that a run with its adapter switched off is its base, before the first update and after the
    last, and that the plain model that it is merged to computes as it does.

    Args:
      reference: updates of the run with its adapter, whose evaluation is of `sample` before the first one.
      device: the base alone.
      freezes_all: True if the adapter trains no parameter of the base beside it.
      scale: factor of the products of its matrices.

    Raises:
      Differs: names the tensor that moved, or did not, or the record that the first adapter changes, or the
        trained one although it is off.
    """
    results = reference.results
    frozen = [info.path for info in infos if info.frozen]
    added = [info.path for info in infos if info.is_adapter]
    if freezes_all and (free := sorted({info.path for info in infos} - {*frozen, *added})):
        raise Differs(f"{free[0]} is of the base and is trained")
    for path in frozen:
        if results.first[path].tobytes() != results.last[path].tobytes():
            raise Differs(f"{path} is frozen, and {len(results.losses)} updates have changed it")
    for path in added:
        if np.array_equal(results.first[path], results.last[path]):
            raise Differs(f"{path} is of the adapter, and {len(results.losses)} updates have not moved it")
    base_logits_BLV = device.logits(sample.arrays)
    base = nats_of(sample, base_logits_BLV)
    runs = [device.sums(sample, moved(device.params, seed)).nats for seed in range(RUNS)]
    spread = float(np.max(np.abs(np.asarray(runs) - base)))
    bounds = LOSS_TOLERANCE * np.abs(base) + MARGIN * spread
    assert results.nats_BL is not None
    first = _nats_of_pieces(sample, results.nats_BL)
    # Negated, so that nan counts as different.
    if (different := np.flatnonzero(~(np.abs(first - base) <= bounds))).size:
        number = int(different[0])
        raise Differs(
            f"nats {first[number]:.6g} with the first adapter, {base[number]:.6g} without; first record "
            f"that differs: {sample.pieces[number].place}"
        )
    states = reference.first_state.params, results.last_params
    base_hash, hash_after = (hex_of(hash_base(infos, jax.tree.map(jnp.asarray, params))) for params in states)
    if hash_after != base_hash:
        raise Differs(f"the hash of the base was {base_hash[:16]} and is {hash_after[:16]} after training")
    # What is trained beside the adapter is no part of the base.
    off = {path: results.last[path] if path in frozen else results.first[path] for path in results.last}
    off_logits_BLV = device.logits(sample.arrays, without_adapter(_on_device(off)))
    for piece in sample.pieces:
        if piece.of(off_logits_BLV).tobytes() != piece.of(base_logits_BLV).tobytes():
            raise Differs(f"logits with the trained adapter off are not the base's, of {piece.place}")
    # Without this, an adapter that no forward pass reads would look like one that is off.
    state = dataclasses.replace(reference.first_state, params=results.last_params)
    trained: Any = reference.comparable.train([sample.arrays], state, evaluates=True).nats_BL
    trained_nats = _nats_of_pieces(sample, trained)
    if not (np.abs(trained_nats - base) > bounds).any():
        raise Differs(f"the adapter after {len(results.losses)} updates changes the nats of no record")
    merged_params = merge(infos, jax.tree.map(jnp.asarray, results.last_params), scale, lambda _: "float32")
    merged = nats_of(sample, device.logits(sample.arrays, merged_params))
    if (different := np.flatnonzero(~(np.abs(merged - trained_nats) <= bounds))).size:
        number = int(different[0])
        raise Differs(
            f"nats {merged[number]:.6g} of the merged model and {trained_nats[number]:.6g} of the adapter; "
            f"first record that differs: {sample.pieces[number].place}"
        )
    return (
        f"{len(frozen)} frozen arrays bit for bit after {len(results.losses)} updates, {len(added)} trained; "
        f"off, the same logits bit for bit; merged, the same nats; base {base_hash[:16]}"
    )


def _on_device(arrays: ArraysByPath) -> Params:
    """Parameters of arrays by path."""
    return jax.tree.map(jnp.asarray, unflatten_dict(arrays, sep="."))


def _nats_of_pieces(sample: Sample, nats_BL: np.ndarray) -> np.ndarray:
    """Nats of each piece, summed over its targets."""
    target_BL = sample.arrays["target_BL"]
    return np.asarray(
        [piece.of(nats_BL)[piece.of(target_BL) != IGNORE].sum(dtype=np.float64) for piece in sample.pieces]
    )
