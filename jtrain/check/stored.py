"""Log-probabilities of another model for a run's samples: all are there; rows that were cut anew have made-up ones."""

import functools
from collections.abc import Sequence

import numpy as np

from jtrain.check.records import Sample
from jtrain.data.references import StoredReferences, samples_in
from jtrain.data.teacher import StoredTeacher
from jtrain.model.ops import SoftTargets
from jtrain.step.objective import DPO, Distillation, Objective


def check_stored(objective: Objective, samples: Sequence[Sample], *, vocab_size: int) -> str:
    """Looks up all samples of batches in what the run's objective has stored; returns what it has shown.

    Raises:
      UserError: the file or folder is not there, or a sample is not in it.
    """
    match objective:
        case DPO(stored=str(path)):
            look_up = StoredReferences.read(path).at_targets
        case Distillation(stored=str(path), top_k=k):
            look_up = functools.partial(StoredTeacher(path, top_k=k).at_targets, vocab_size=vocab_size)
        case _:
            return ""
    for sample in samples:
        look_up(*sample.ids, np.arange(sample.ids[0].shape[1]))
    return f"; all of them in {path}"


def with_made_up_teacher(objective: Distillation, vocab_size: int, samples: Sequence[Sample]) -> list[Sample]:
    """The same batches with tokens of a teacher that nobody has asked: those of a text wherever it is packed."""
    out = []
    for sample in samples:
        shape = sample.ids[0].shape
        id_BLJ = np.zeros((*shape, objective.top_k), np.int32)
        logprob_BLI = np.zeros((*shape, objective.top_k + 1), np.float32)
        for placed in samples_in(*sample.ids):
            rng, span = (
                np.random.default_rng(list(placed.hash)),
                (placed.row, slice(placed.start, placed.end)),
            )
            length = placed.end - placed.start
            id_BLJ[span] = np.argsort(rng.random((length, vocab_size)), axis=-1)[:, : objective.top_k]
            p_LI = rng.dirichlet(np.ones(objective.top_k + 1), size=length)
            # With all tokens of the vocabulary there are no others.
            p_LI[:, -1] *= objective.top_k < vocab_size
            with np.errstate(divide="ignore"):
                logprob_BLI[span] = np.log(p_LI / p_LI.sum(axis=-1, keepdims=True))
        soft = SoftTargets(id_BLJ, logprob_BLI, objective.share)
        out.append(Sample({**sample.arrays, "soft": soft}, sample.pieces))
    return out
