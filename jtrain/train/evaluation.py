"""Evaluation on held-out text: loss, its standard error over documents, and bits per byte."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float64, Int64

from jtrain.config.run import Run, check_vocabulary
from jtrain.data import HeldOutSet, TextDataset, open_sets, put_batch
from jtrain.data.references import StoredReferences
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.model.param import Params
from jtrain.runtime.multihost import same_everywhere
from jtrain.step.objective import DPO
from jtrain.step.preferences.pair_loss import pair_losses
from jtrain.step.preferences.pair_step import without_adapters
from jtrain.step.train_step import make_eval_step
from jtrain.telemetry.metrics import EvalResult
from jtrain.train.generations import SPLIT, Generations, write_generations


class Evaluation:
    """Evaluates parameters on the split of `data.eval_fraction`, if there is one, and on every set of
    `eval.sets`.

    Every process reads the whole of each set, and feeds its devices the rows that they need.

    Raises:
      UserError: a set cannot be held out (`open_sets`), its tokenizer has more ids than the model, or
        processes see different files of it.
    """

    def __init__(
        self,
        run: Run,
        layout: Layout,
        mesh: Mesh,
        dataset: TextDataset,
        references: StoredReferences | None = None,
    ) -> None:
        self._mesh = mesh
        self._context = run.mesh.context
        self._step = make_eval_step(run.model, layout, mesh)
        self._pairs = PairScores(run, layout, mesh, references) if run.data.has_pairs else None
        self._generations: Generations | None = None
        evaluates = run.eval.every_steps is not None
        # Only if it will be used: opening a split reads an index of the data.
        self._split = dataset.held_out() if evaluates and run.data.eval_fraction else None
        self._sets = open_sets(run.eval.sets, run.data, dataset.setups, dataset.say) if evaluates else {}
        # In every process and in the same order: each comparison waits for all processes.
        for name, held_out in self._sets.items():
            check_vocabulary(run.model, held_out.vocab_size, field=f"eval.sets.{name}.tokenizer")
            if not same_everywhere(held_out.fingerprint()):
                raise UserError(
                    f"eval.sets.{name}.path={run.eval.sets[name].path!r}: the processes of this run find "
                    "different files there. Give every host the same files."
                )

        if evaluates and (run.eval.answers or run.eval.prompts):
            split = {} if self._split is None else {SPLIT: self._split}
            self._generations = Generations(run, layout, mesh, {**split, **self._sets})

    def describe(self) -> list[str]:
        """Returns a line for each set of `eval.sets`, for the plan of a run."""
        return [f"eval.sets.{name}: {held_out.describe()}" for name, held_out in self._sets.items()]

    def __call__(self, params: Params) -> tuple[EvalResult | None, dict[str, EvalResult]]:
        """Returns the result on the split, and those on the sets by name."""
        split = None if self._split is None else self._evaluate(params, self._split)
        return split, {name: self._evaluate(params, held_out) for name, held_out in self._sets.items()}

    def answer(self, params: Params, workdir: Path, step: int) -> dict[str, float]:
        """Has the model answer, keeps the answers in the workdir, and returns the share of exact ones by set."""
        if self._generations is None:
            return {}
        return write_generations(workdir, step, list(self._generations(params)))

    def _evaluate(self, params: Params, held_out: HeldOutSet) -> EvalResult:
        if self._pairs is not None:
            return self._evaluate_pairs(params, held_out, self._pairs)
        # One sum per document, since the standard error is over documents.
        nats, tokens = np.zeros(held_out.num_documents), np.zeros(held_out.num_documents, np.int64)
        text_bytes: int | None = 0
        for held in held_out.batches(context=self._context):
            nats_BL = np.asarray(jax.device_get(self._step(params, put_batch(held.batch, self._mesh))))
            # IGNORE marks positions without a target.
            is_target_BL = held.batch.target_BL != IGNORE
            documents = held.document_BL[is_target_BL]
            nats += np.bincount(documents, nats_BL[is_target_BL], minlength=len(nats))
            tokens += np.bincount(documents, minlength=len(tokens))
            # Without bytes from one batch, the bits per byte of the whole set are not known.
            text_bytes = (
                None if text_bytes is None or held.text_bytes is None else text_bytes + held.text_bytes
            )
        return eval_result(nats, tokens, text_bytes)

    def _evaluate_pairs(self, params: Params, held_out: HeldOutSet, pairs: "PairScores") -> EvalResult:
        losses, margins, tokens = (
            list[Float64[np.ndarray, " pairs"]](),
            list[Float64[np.ndarray, " pairs"]](),
            0,
        )
        for held in held_out.batches(context=self._context):
            batch = put_batch(held.batch, self._mesh)
            loss, margin = pairs(params, held.batch, batch, np.asarray(self._step(params, batch)))
            losses.append(loss)
            margins.append(margin)
            tokens += int((held.batch.target_BL != IGNORE).sum())
        loss, margin = np.concatenate(losses), np.concatenate(margins)
        count = max(len(loss), 1)
        error = float(loss.std(ddof=1)) / math.sqrt(count) if count > 1 else None
        return EvalResult(
            float(loss.sum()) / count,
            error,
            None,
            tokens,
            len(loss),
            float(margin.sum()) / count,
            float((margin > 0).sum()) / count,
        )


class PairScores:
    """Losses and margins of held-out pairs, by the objective that is trained."""

    def __init__(self, run: Run, layout: Layout, mesh: Mesh, references: StoredReferences | None) -> None:
        assert isinstance(run.objective, DPO)
        self._objective, self._references, self._order_L = run.objective, references, run.context_order()
        self._reference_step = (
            make_eval_step(run.model, without_adapters(layout), mesh)
            if run.objective.reference == "adapter_off"
            else None
        )

    def __call__(
        self, params: Params, rows: Batch, batch: Batch, nats_BL: Float[np.ndarray, "B L"]
    ) -> tuple[Float64[np.ndarray, " pairs"], Float64[np.ndarray, " pairs"]]:
        """Returns the loss and the margin of each pair whose texts both have targets.

        Args:
          rows, batch: the batch on the host, and on the devices.
          nats_BL: cross entropy of its tokens.
        """
        score_BL = -nats_BL
        if self._reference_step is not None:
            score_BL = score_BL + np.asarray(self._reference_step(without_adapter(params), batch))
        if self._references is not None:
            score_BL = score_BL + self._references.beside(rows, self._order_L).reference_BL
        num_rows, length = nats_BL.shape
        # Numbers of texts over all rows; 0 of each row is padding.
        text_BL = np.arange(num_rows)[:, None] * (length + 2) + rows.segment_BL

        def sum_texts(value_BL: np.ndarray) -> np.ndarray:
            sums = np.bincount(text_BL.ravel(), value_BL.ravel(), minlength=num_rows * (length + 2))
            sum_BS = sums.reshape(num_rows, -1)[:, 1:]
            return sum_BS[:, : sum_BS.shape[1] // 2 * 2].reshape(-1, 2)

        score_P2, count_P2 = sum_texts(score_BL), sum_texts(rows.target_BL != IGNORE)
        is_pair = (count_P2 > 0).all(axis=1)
        loss, margin = pair_losses(
            self._objective,
            jnp.asarray(score_P2[is_pair][None], jnp.float32),
            jnp.asarray(count_P2[is_pair][None], jnp.int32),
        )
        return np.asarray(loss[0], np.float64), np.asarray(margin[0], np.float64)


def eval_result(
    nats: Float64[np.ndarray, " documents"], tokens: Int64[np.ndarray, " documents"], text_bytes: int | None
) -> EvalResult:
    """Returns the mean over all tokens, its standard error, and bits per byte.

    The standard error is that of a ratio of sums over documents, which are drawn independently while the
    tokens of a document are not: with residuals r_d = nats_d - mean * tokens_d of D documents, sqrt(D / (D -
    1) * sum(r_d^2)) over the number of tokens. It tells how much the mean would differ with other documents,
    so it holds for one model; two models that are evaluated on the same documents differ by less.

    Args:
      nats: sum over the targets of each document.
      tokens: number of its targets; documents without any do not count.
      text_bytes: bytes of text of all targets.
    """
    nats, tokens = nats[tokens > 0], tokens[tokens > 0]
    # A set without any target has no loss; 1 keeps the division defined.
    total, count = int(tokens.sum()), len(tokens)
    mean = float(nats.sum()) / max(total, 1)
    residual = nats - mean * tokens
    # D / (D - 1) is Bessel's correction; one document alone has no error.
    error = math.sqrt(count / (count - 1) * float(residual @ residual)) / total if count > 1 else None
    bits = float(nats.sum()) / math.log(2) / text_bytes if text_bytes else None
    return EvalResult(mean, error, bits, total, count)
