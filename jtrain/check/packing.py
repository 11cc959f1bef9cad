"""Packed = alone, and export = import: what one device computes of records in shared rows and in their own."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jtrain.check.lines import Differs, DoesNotApply
from jtrain.check.records import Sample, SampleArrays, one_by_one
from jtrain.check.rounding import MARGIN, RUNS, Worst, largest, moved
from jtrain.errors import UserError
from jtrain.hf.directory import write_directory
from jtrain.hf.mapping import from_hf
from jtrain.hf.model_config import config_from_model, family_of, model_from_config
from jtrain.hf.model_files import open_tensors, read_config
from jtrain.hf.prove import evaluator
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.model.param import Params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.step.objective import Objective, ObjectiveSpec
from jtrain.step_comparison.comparable_run import GRADIENT_TOLERANCE, LOSS_TOLERANCE


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the targets of a sample.

    nats: of each piece.
    gradients: of all pieces, by path.
    """

    nats: np.ndarray
    gradients: dict[str, np.ndarray]


class OneDevice:
    """One model on one device: logits, nats and gradients of any batch of one shape."""

    def __init__(self, model: Transformer, params: Params) -> None:
        self.model, self.params = model, _in_float32(params)
        self._evaluate = evaluator(without_losses_of_rows(model))

    def logits(self, arrays: SampleArrays, params: Params | None = None) -> np.ndarray:
        """Logits, [B, L, V]."""
        return np.asarray(self._run(arrays, self.params if params is None else params)[0])

    def sums(self, sample: Sample, params: Params | None = None) -> Sums:
        """Nats and gradients of the pieces of a sample, as they are packed."""
        logits_BLV, (_, gradients) = self._run(sample.arrays, self.params if params is None else params)
        return Sums(nats_of(sample, np.asarray(logits_BLV)), by_path(gradients))

    def sums_alone(self, sample: Sample) -> Sums:
        """The same, each piece in a row of its own."""
        nats, total = np.zeros(len(sample.pieces)), dict[str, np.ndarray]()
        for alone, numbers in one_by_one(sample):
            sums = self.sums(alone)
            nats[numbers] = sums.nats
            total = {path: total.get(path, 0) + value for path, value in sums.gradients.items()}
        return Sums(nats, total)

    def _run(self, arrays: SampleArrays, params: Params) -> Any:
        batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
        # Divided by 1: sums of pieces add up, means over another number of targets do not.
        return self._evaluate(_in_float32(params), batch, jnp.float32(1.0))


def _in_float32(params: Params) -> Params:
    """The same numbers: a base in blocks has others in bfloat16, in which gradients would be rounded."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def without_losses_of_rows(model: Transformer) -> Transformer:
    """The model without losses of routers, which are means over a row and so depend on what shares it."""

    def quiet(spec: Any) -> Any:
        if not isinstance(spec, MoESpec):
            return spec
        return dataclasses.replace(spec, balance_loss=0.0, router_z_loss=0.0, bias_update_rate=0.0)

    def blocks(specs: Any) -> Any:
        return tuple(dataclasses.replace(b, feed_forward=quiet(b.feed_forward)) for b in specs)

    return dataclasses.replace(
        model, moe=quiet(model.moe), pattern=blocks(model.pattern), first=blocks(model.first)
    )


def by_path(gradients: Any) -> dict[str, np.ndarray]:
    """Arrays by path, as float64."""
    return {path: np.asarray(x, np.float64) for path, x in flatten_dict(dict(gradients), sep=".").items()}


def nats_of(sample: Sample, logits_BLV: np.ndarray) -> np.ndarray:
    """Cross entropy of each piece, summed over its targets in float64."""
    nats = np.zeros(len(sample.pieces))
    for number, piece in enumerate(sample.pieces):
        target = piece.of(sample.arrays["target_BL"])
        learned = np.flatnonzero(target != IGNORE)
        rows = piece.of(logits_BLV)[learned].astype(np.float64)
        # Subtracted before exp, which overflows from 710 on; a masked prompt has no row.
        highest = rows.max(axis=1, initial=-np.inf) if len(learned) else np.zeros(0)
        log_sums = np.log(np.exp(rows - highest[:, None]).sum(axis=1)) + highest
        nats[number] = (log_sums - rows[np.arange(len(learned)), target[learned]]).sum()
    return nats


def packed_is_alone(
    device: OneDevice,
    samples: Sequence[Sample],
    objective: Objective,
    first_loss: float,
    evaluated_BL: np.ndarray,
) -> str:
    """Proves that records of one row know nothing of each other, in training and in evaluation.

    Args:
      samples: batches, of which the last one is as the data plane made it.
      first_loss, evaluated_BL: loss of the first train step, and nats of an evaluation, on the first batch.

    Raises:
      Differs: names the first record whose nats differ, or the gradient.
    """
    worst, num_pieces = Worst(), 0
    for number, sample in enumerate(samples):
        packed, alone = device.sums(sample), device.sums_alone(sample)
        # What weights of another ulp change: rounding that packing may change as well.
        runs = [device.sums(sample, moved(device.params, seed)) for seed in range(RUNS)]
        spread = np.max([np.abs(run.nats - packed.nats) for run in runs], axis=0)
        bounds = LOSS_TOLERANCE * np.abs(alone.nats) + MARGIN * spread
        _check_nats(sample, "packed", packed.nats, alone.nats, bounds)
        noise = largest([run.gradients for run in runs], packed.gradients)
        for path, gradient in alone.gradients.items():
            difference = float(np.abs(packed.gradients[path] - gradient).max(initial=0.0))
            bound = GRADIENT_TOLERANCE * float(np.abs(gradient).max(initial=0.0)) + MARGIN * noise[path]
            worst.add(f"gradient of {path}", difference, bound)
        worst.refuse()
        # The train step and the evaluation were run on the first batch alone.
        if number == 0:
            evaluated = np.asarray([piece.of(evaluated_BL).sum(dtype=np.float64) for piece in sample.pieces])
            _check_nats(sample, "in evaluation", evaluated, alone.nats, bounds)
            # Of pairs it is that of their own lines.
            if isinstance(objective, ObjectiveSpec):
                loss, spread_of_loss = (_mean(objective, sample, nats) for nats in (alone.nats, spread))
                bound = LOSS_TOLERANCE * loss + MARGIN * spread_of_loss
                worst.add("loss of the train step", abs(first_loss - loss), bound)
                worst.refuse()
        num_pieces += len(sample.pieces)
    return f"{num_pieces} records, nats and gradients; {worst.text}"


def _mean(objective: ObjectiveSpec, sample: Sample, nats: np.ndarray) -> float:
    """Loss of a batch, of the nats of its pieces."""
    counts = np.asarray([(piece.of(sample.arrays["target_BL"]) != IGNORE).sum() for piece in sample.pieces])
    if objective.mean == "tokens":
        return float(nats.sum()) / max(int(counts.sum()), 1)
    has_targets = counts > 0
    return float((nats[has_targets] / counts[has_targets]).mean())


def _check_nats(sample: Sample, label: str, nats: np.ndarray, alone: np.ndarray, bounds: np.ndarray) -> None:
    """Raises Differs for the first record that has other nats than alone."""
    # Negated, so that nan counts as different.
    different = np.flatnonzero(~(np.abs(nats - alone) <= bounds))
    if different.size:
        number = int(different[0])
        raise Differs(
            f"nats {nats[number]:.6g} {label} and {alone[number]:.6g} alone, bound {bounds[number]:.2g}; "
            f"first record that differs: {sample.pieces[number].place}; {different.size} of "
            f"{len(sample.pieces)} differ"
        )


def check_positions(sample: Sample) -> None:
    """Raises Differs if positions or segments of a row are not those of its records."""
    covered_BL = np.zeros_like(sample.arrays["segment_BL"])
    for piece in sample.pieces:
        position, segment = piece.of(sample.arrays["position_BL"]), piece.of(sample.arrays["segment_BL"])
        piece.of(covered_BL)[:] = 1
        if not np.array_equal(position, np.arange(len(position))):
            raise Differs(f"positions of {piece.name} (row {piece.row}) begin at {position[0]}, not at 0")
        # A number that goes on from the record before would join both documents.
        segment_before = sample.arrays["segment_BL"][piece.row, piece.start - 1] if piece.start else 0
        if not segment.min() == segment.max() > 0 or segment[0] == segment_before:
            raise Differs(f"segment {segment[0]} of {piece.name} (row {piece.row}) is not its own")
    if np.any((sample.arrays["segment_BL"] != 0) != (covered_BL != 0)):
        raise Differs("padding is not segment 0, or a record is")


def export_is_import(device: OneDevice, sample: Sample, *, begin_id: int, end_id: int) -> str:
    """Proves that a Hugging Face folder holds the model: written, read again, the same logits.

    Raises:
      Differs: names the first record whose logits differ.
      DoesNotApply: no family has this model.
    """
    model = device.model
    try:
        family = family_of(model)
    except UserError as error:
        raise DoesNotApply(str(error).split(". Keep")[0]) from error
    columns = sample.arrays["token_BL"].shape[1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = config_from_model(
            model, dtype="float32", max_seq_len=columns, begin_id=begin_id, end_id=end_id, family=family
        )
        write_directory(folder, device.params, model, config, dtype="float32", family=family)
        config = read_config(folder)
        theirs = model_from_config(config)
        with open_tensors(folder) as tensors:
            params = from_hf(tensors, theirs, dtype="float32", family=family)
        size = sum(file.stat().st_size for file in folder.iterdir())
    for path, value in by_path(params).items():
        if not np.array_equal(value, by_path(device.params)[path]):
            raise Differs(f"{path} was exported and comes back with other values")
    logits_BLV = device.logits(sample.arrays)
    theirs_BLV = np.asarray(
        jax.jit(theirs.logits)(params, Batch(**{name: jnp.asarray(x) for name, x in sample.arrays.items()}))
    )
    spread = max(
        np.abs(device.logits(sample.arrays, moved(device.params, s)) - logits_BLV).max() for s in range(RUNS)
    )
    bound = LOSS_TOLERANCE * float(np.abs(logits_BLV).max()) + MARGIN * float(spread)
    for piece in sample.pieces:
        difference = float(np.abs(piece.of(logits_BLV) - piece.of(theirs_BLV)).max())
        if not difference <= bound:
            raise Differs(
                f"logits {difference:.2g} apart, bound {bound:.2g}; first record that differs: {piece.name}"
            )
    return (
        f"as {family.model_type}, {size / 2**10:.0f} KiB: every weight bit for bit, logits within {bound:.1g}"
    )
