"""Log-probabilities of all samples of a run by another model, stored beforehand: those of preference
pairs by the run's first weights, for `objective.reference=stored`, and those of a teacher, for
`objective=Distillation(...)`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints
from jtrain.config.run import Run
from jtrain.data import open_dataset, put_batch
from jtrain.data.constructor.context_order import context_order
from jtrain.data.mixture.schedule import Constant
from jtrain.data.references import StoredReferences, samples_in, sums_of_samples
from jtrain.data.sources.source import Source
from jtrain.data.teacher import TeacherWriter
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.runtime.multihost import same_everywhere
from jtrain.step.objective import DPO, Distillation
from jtrain.step.preferences.pair_step import without_adapters
from jtrain.step.train_step import make_eval_step
from jtrain.train.logprobs import read_placed
from jtrain.train.restart_point import RestartPoint
from jtrain.train.setup import print_line, set_up


def write_reference(run: Run, *, workdir: Path, out: Path, devices: Sequence[jax.Device]) -> int:
    """Writes what the objective of a run wants to know of its samples; returns their number.

    Of preference pairs these are the log-probabilities of the texts of all sources and held-out sets, by the
    weights before the first step, without an adapter, in the run's own layout; for a distillation the most
    probable tokens of all sources, by another run's newest weights, in its layout.

    Args:
      workdir: of preference pairs the run's, which may have a checkpoint of step 0, as an imported model has;
        for a distillation the teacher's.

    Raises:
      UserError: the objective has no use for it; the first weights, or the teacher's, are not there; or `out`
        has something else.
    """
    match run.objective:
        case DPO():
            return _write_pairs(run, run.objective, workdir=workdir, out=out, devices=devices)
        case Distillation():
            return _write_teacher(run, run.objective, workdir=workdir, out=out)
    raise UserError(
        "a reference is for preference pairs or for a distillation, and the run has neither. Set "
        "objective=DPO (--with dpo) or objective=Distillation (--with distill)."
    )


def _write_pairs(run: Run, objective: DPO, *, workdir: Path, out: Path, devices: Sequence[jax.Device]) -> int:
    objective = dataclasses.replace(objective, reference="none", stored=None)
    setup = set_up(dataclasses.replace(run, objective=objective), devices)
    layout, mesh = setup.job.layout, setup.mesh
    with Checkpoints(workdir, run.checkpoint, layer_order=layout.layer_order) as checkpoints:
        steps = checkpoints.steps()
        if run.adapter is None and steps and 0 not in steps:
            raise UserError(
                f"--workdir {workdir}: the reference is the model before the first step, and there is no "
                f"checkpoint of step 0 any more; the first is of step {min(steps)}. Give the workdir that "
                "`jtrain hf import` wrote."
            )
        # An adapter switched off is the model before the first step, whatever step the run is at.
        state, _ = RestartPoint(setup, checkpoints, data_may_change=True).state_at(0)
    params, step = state.params, make_eval_step(run.model, layout, mesh)
    if run.adapter is not None:
        params = without_adapter(params)
        step = make_eval_step(run.model, without_adapters(layout), mesh)
    sources = {**run.data.named_sources, **{f"held_out_{name}": s for name, s in run.eval.sets.items()}}
    nats: dict[bytes, float] = {}
    for batch, ids in _all_batches(run, sources, run.context_order(), context=run.mesh.context):
        nats_BL = np.asarray(jax.device_get(step(params, put_batch(batch, mesh))))
        nats |= sums_of_samples(nats_BL[:, ids.column_L], *ids.in_order)
    if jax.process_index() == 0:
        StoredReferences(nats, name=str(out)).write(out)
        print_line(f"{len(nats):,} texts in {out}")
    return len(nats)


def _write_teacher(run: Run, objective: Distillation, *, workdir: Path, out: Path) -> int:
    rows = (f"data.seq_len={run.data.seq_len}", f"data.global_batch={run.data.global_batch}")
    teacher = read_placed(workdir, sets=rows)
    if objective.top_k > teacher.model.vocab_size:
        raise UserError(
            f"objective.top_k={objective.top_k} tokens of a teacher that has {teacher.model.vocab_size}. Set "
            f"objective.top_k to at most {teacher.model.vocab_size}."
        )
    layout, mesh = teacher.layout, teacher.mesh
    step = make_eval_step(teacher.model, layout, mesh, top_k=objective.top_k)
    context = layout.mesh.context
    columns = context_order(run.data.seq_len, context, layout.context_order)
    writer = TeacherWriter(out, top_k=objective.top_k, teacher=f"step {teacher.step} of {workdir.resolve()}")
    is_writer = jax.process_index() == 0
    num_stored = len(writer.stored)
    if not same_everywhere(str(num_stored)):
        raise UserError(
            f"--out {out}: the processes find different samples there. Give a folder that all hosts share."
        )
    if is_writer and num_stored:
        print_line(f"{num_stored:,} samples are in {out} already")
    for batch, ids in _all_batches(run, run.data.named_sources, columns, context=context):
        samples = list(samples_in(*ids.in_order))
        # Every process finds the same: a step that only some take would wait for ever.
        if all(sample.hash in writer.stored for sample in samples):
            continue
        said = jax.device_get(step(teacher.params, put_batch(batch, mesh)))
        id_BLJ, logprob_BLI = (array[:, ids.column_L] for array in (said.id, said.logprob))
        for sample in samples:
            if is_writer:
                writer.add(sample, id_BLJ[sample.row], logprob_BLI[sample.row])
            writer.stored.add(sample.hash)
        if is_writer:
            writer.flush_full()
    if is_writer:
        writer.flush()
        print_line(f"{len(writer.stored):,} samples in {out}")
    return len(writer.stored)


class _Ids(NamedTuple):
    """Tokens, targets and segments of a batch in the order of the text, and where each of its columns is."""

    in_order: tuple[np.ndarray, np.ndarray, np.ndarray]
    column_L: np.ndarray


def _all_batches(
    run: Run, sources: Mapping[str, Source], order_L: np.ndarray, *, context: int
) -> Iterator[tuple[Batch, _Ids]]:
    """Yields all records of some sources once, packed as the run's rows.

    Args:
      order_L, context: place in the text of each column of a layout, and its devices along `context`.
    """
    data = dataclasses.replace(
        run.data,
        path=None,
        # A source of weight 0 would never be read. `data`, the name of the one at data.path, is no name of
        # others.
        sources={f"all_{name}": dataclasses.replace(source, weight=1.0) for name, source in sources.items()},
        mixture=Constant(),
        eval_fraction=0.0,
        epochs=1,
        engine="inline",
        balance=False,
    )
    column_L = np.argsort(order_L)
    with open_dataset(data, seed=run.seed).train_batches(context=context) as batches:
        for batch in batches:
            arrays = (array[:, column_L] for array in (batch.token_BL, batch.target_BL, batch.segment_BL))
            token_BL, target_BL, segment_BL = arrays
            yield batch, _Ids((token_BL, target_BL, segment_BL), column_L)
