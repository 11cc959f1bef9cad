"""Proof of one model: logits, loss and every gradient as transformers has them, and on every layout as on one
device.

All is float32 at a small size with drawn weights. `against_peer` compares one device with transformers' own
class, rows of one document and rows of several; `against_one_device` compares layouts with that device. A
layout that is refused is no failure: its reason is part of the result.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.run import EvalSpec, Run, validate
from jtrain.data import PackedText
from jtrain.errors import UserError, first_few
from jtrain.hf.mapping import from_hf, to_hf
from jtrain.hf.model_config import family_in, model_from_config
from jtrain.hf.model_files import open_tensors, read_config
from jtrain.hf.peer import PeerBatch, read_results, run_peer
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.families.family import Family
from jtrain.model.forward_placement import single_device
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.step_comparison.comparable_run import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    BatchArrays,
    ComparableRun,
    RunResults,
)

PEER = 1e-5
"""Largest relative difference from transformers: of logits to the largest one, of a gradient to its norm."""
SMALL = 1e-2
"""Gradients that are smaller than this share of the whole gradient are compared with that share: float32 has
no more digits of a sum that cancels, like the gradient of a key's bias without rotary positions, which is
0."""

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor 2": (dict(tensor=2), {}),
    "context 2": (dict(context=2), {}),
    "expert 2": (dict(expert=2), {}),
    "stage 2": (dict(stage=2), dict(microbatches=2)),
    "ZeRO 3 over data 2": (dict(data=2), dict(zero_stage=3)),
    "stage 2, context 2, tensor 2": (dict(stage=2, context=2, tensor=2), dict(microbatches=2)),
    "ZeRO 3 over data 2, context 2, tensor 2": (dict(data=2, context=2, tensor=2), dict(zero_stage=3)),
}
"""Layouts by name: axes of the mesh, fields of `LayoutSpec`."""
DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison.

    difference, bound: the largest relative difference, None where the layout is refused, and the one that
      is allowed.
    where: the tensor of the largest difference, or the reason of a refusal.
    """

    compared: str
    quantity: str
    difference: float | None
    bound: float
    where: str = ""

    @property
    def is_equal(self) -> bool:
        """True unless the difference is over the bound; a difference that is not a number is."""
        return self.difference is None or self.difference <= self.bound


@dataclasses.dataclass(frozen=True)
class Proof:
    """Findings of transformers about its model, and every comparison."""

    facts: dict[str, Any]
    config: dict[str, Any]
    checks: list[Check]

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return all(check.is_equal for check in self.checks)


def prove(source: str, python: str | None, *, sets: Sequence[str], seed: int) -> Proof:
    """Proves the model of a config.json, of the folder of one, or of a `model_type`; needs 8 devices.

    Raises:
      UserError: as `run_peer`, or jtrain does not have this model.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        facts = run_peer(python, source, folder, sets=sets, seed=seed)
        config = read_config(folder)
        model, family = model_from_config(config), family_in(config)
        with open_tensors(folder) as tensors:
            params = from_hf(tensors, model, dtype="float32", family=family)
        batches = read_results(folder)
    checks = [
        *against_peer(model, family, params, batches, without_gradient=set(facts["buffers"])),
        *against_one_device(model, params, batches["packed"].arrays),
    ]
    return Proof(facts, config, checks)


@dataclasses.dataclass(frozen=True)
class Computed:
    """Values of one device for a batch, in the forms of `PeerBatch`; the logits of padding are 0."""

    logits_BLV: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


def evaluator(model: Transformer) -> Any:
    """Returns the jitted function of parameters, a batch and a number of targets: logits, and the objective
    by that number with its gradients; on one device in float32.
    """

    @jax.jit  # one program for all batches of a shape
    def evaluate(params: Params, batch: Batch, num_targets: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            return model.loss(params, batch, single_device("float32"))[0] / num_targets

        return model.logits(params, batch), jax.value_and_grad(loss)(params)

    return evaluate


def compute(
    model: Transformer, family: Family, params: Params, batches: Mapping[str, BatchArrays]
) -> dict[str, Computed]:
    """Logits, mean loss and gradients by the names of saved tensors, of batches of one shape, in float32."""
    evaluate = evaluator(model)
    out: dict[str, Computed] = {}
    for label, arrays in batches.items():
        batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
        num_targets = jnp.float32((arrays["target_BL"] != IGNORE).sum())
        logits_BLV, (loss, gradients) = evaluate(params, batch, num_targets)
        is_token_BL1 = (arrays["segment_BL"] > 0)[..., None]
        out[label] = Computed(
            np.where(is_token_BL1, np.asarray(logits_BLV), 0),
            float(loss),
            dict(to_hf(gradients, model, dtype="float32", family=family)),
        )
    return out


def against_peer(
    model: Transformer,
    family: Family,
    params: Params,
    batches: dict[str, PeerBatch],
    *,
    without_gradient: set[str],
) -> Iterator[Check]:
    """Compares one device with transformers.

    Args:
      without_gradient: saved tensors that are buffers, like a router's correction bias.
    """
    computed = compute(model, family, params, {label: batch.arrays for label, batch in batches.items()})
    for label, want in batches.items():
        got, compared = computed[label], f"transformers, {label}"
        difference = np.abs(got.logits_BLV - want.logits_BLV).max() / np.abs(want.logits_BLV).max()
        yield Check(compared, "logits", float(difference), PEER)
        yield Check(compared, "loss", abs(got.loss / want.loss - 1), PEER)
        if names := (set(got.gradients) - without_gradient) ^ set(want.gradients):
            reason = f"not on both sides: {first_few(sorted(names), 4)}"
            yield Check(compared, "gradients", np.inf, PEER, reason)
        else:
            yield worst_gradient(compared, got.gradients, want.gradients)


def worst_gradient(compared: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Check:
    """The gradient that differs most, relative to its norm."""
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in want.items()}
    floor = SMALL * float(np.linalg.norm(list(norms.values())))
    differences = {
        name: float(np.linalg.norm((got[name] - want[name]).astype(np.float64))) / max(norm, floor)
        for name, norm in norms.items()
    }
    worst = _worst(differences)
    return Check(compared, "gradients", differences[worst], PEER, worst)


def against_one_device(
    model: Transformer,
    params: Params,
    arrays: dict[str, np.ndarray],
    layouts: Mapping[str, tuple[dict[str, int], dict[str, Any]]] = LAYOUTS,
) -> Iterator[Check]:
    """Compares the first step of every layout with that of one device."""
    comparable = ComparableRun(_run(model, arrays, {}, {}))
    first_state = comparable.first_state(params)
    want = comparable.train([arrays], first_state)
    for name, (axes, fields) in layouts.items():
        try:
            run = _run(model, arrays, axes, fields)
            validate(run)
            got = ComparableRun(run).train([arrays], first_state)
        except UserError as error:
            yield Check(name, "refused", None, 0.0, str(error))
            continue
        yield from _compare(name, got, want)


def _compare(name: str, got: RunResults, want: RunResults) -> Iterator[Check]:
    yield Check(name, "loss", abs(got.losses[0] / want.losses[0] - 1), LOSS_TOLERANCE)
    moments = {path: mu for path, mu in want.moments.items() if path.startswith("mu ")}
    largest = {path: float(np.abs(mu).max()) for path, mu in moments.items()}
    floor = SMALL * max(largest.values())
    differences = {
        path: float(np.abs(got.moments[path] - mu).max()) / max(largest[path], floor)
        for path, mu in moments.items()
    }
    worst = _worst(differences)
    yield Check(name, "gradients", differences[worst], GRADIENT_TOLERANCE, worst.removeprefix("mu "))


def _worst(differences: dict[str, float]) -> str:
    # NaN is the worst of all.
    return max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))


def _run(
    model: Transformer, arrays: dict[str, np.ndarray], axes: dict[str, int], fields: dict[str, Any]
) -> Run:
    rows, columns = arrays["token_BL"].shape
    return Run(
        seed=0,
        num_steps=2,
        mesh=MeshSpec(**{"data": 1, **axes}),
        layout=LayoutSpec(**{"zero_stage": 0, **fields}),
        precision=PrecisionSpec(
            param_dtype="float32", compute_dtype="float32", reduce_dtype="float32", grad_accum_dtype="float32"
        ),
        model=model,
        # Without clipping, the first moment of the first step is (1 - b1) times the gradient.
        optimizer=AdamW(peak_lr=1e-3, warmup_steps=1, clip_norm=None),
        data=PackedText(path="stdlib", seq_len=columns, global_batch=rows),
        eval=EvalSpec(every_steps=None),
    )
