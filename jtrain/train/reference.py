"""Log-probabilities of all preference pairs of a run by its first weights, for `objective.reference=stored`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints
from jtrain.config.run import Run
from jtrain.data import open_dataset, put_batch
from jtrain.data.mixture.schedule import Constant
from jtrain.data.references import StoredReferences, sums_of_pairs
from jtrain.errors import UserError
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.step.objective import DPO
from jtrain.step.preferences.pair_step import without_adapters
from jtrain.step.train_step import make_eval_step
from jtrain.train.restart_point import RestartPoint
from jtrain.train.setup import print_line, set_up


def write_reference(run: Run, *, workdir: Path, out: Path, devices: Sequence[jax.Device]) -> int:
    """Writes the log-probabilities of the pairs of all sources and held-out sets; returns their number.

    They are those of the weights before the first step, without an adapter, in the run's own layout.

    Args:
      workdir: the run's, which may have a checkpoint of step 0, as an imported model has.

    Raises:
      UserError: the run has no pairs, or its first weights are gone.
    """
    if not isinstance(run.objective, DPO):
        raise UserError(
            "a reference is for preference pairs, and the run has none. Set objective=DPO (--with dpo)."
        )
    objective = dataclasses.replace(run.objective, reference="none", stored=None)
    setup = set_up(dataclasses.replace(run, objective=objective), devices)
    layout, mesh = setup.job.layout, setup.mesh
    with Checkpoints(workdir, run.checkpoint, layer_order=layout.layer_order) as checkpoints:
        steps = checkpoints.steps()
        if run.adapter is None and steps and 0 not in steps:
            raise UserError(
                f"--workdir {workdir}: the reference is the model before the first step, and there is no checkpoint of "
                f"step 0 any more; the first is of step {min(steps)}. Give the workdir that `jtrain hf import` wrote."
            )
        # An adapter switched off is the model before the first step, whatever step the run is at.
        state, _ = RestartPoint(setup, checkpoints, data_may_change=True).state_at(0)
    params, step = state.params, make_eval_step(run.model, layout, mesh)
    if run.adapter is not None:
        params = without_adapter(params)
        step = make_eval_step(run.model, without_adapters(layout), mesh)
    sources = {**run.data.named_sources, **{f"held_out_{name}": s for name, s in run.eval.sets.items()}}
    data = dataclasses.replace(
        run.data,
        path=None,
        # A source of weight 0 would never be read.
        sources={name: dataclasses.replace(source, weight=1.0) for name, source in sources.items()},
        mixture=Constant(),
        eval_fraction=0.0,
        epochs=1,
        engine="inline",
        balance=False,
    )
    # Columns in the order of the text.
    order_L = np.argsort(run.context_order())
    nats: dict[bytes, tuple[float, float]] = {}
    with open_dataset(data, seed=run.seed).train_batches(context=run.mesh.context) as batches:
        for batch in batches:
            nats_BL = np.asarray(jax.device_get(step(params, put_batch(batch, mesh))))
            arrays = (nats_BL, batch.token_BL, batch.target_BL, batch.segment_BL)
            nats |= sums_of_pairs(*(array[:, order_L] for array in arrays))
    if jax.process_index() == 0:
        StoredReferences(nats, name=str(out)).write(out)
        print_line(f"{len(nats):,} pairs in {out}")
    return len(nats)
