"""Bugs that `jtrain check` finds in a run, and the line that names each: what others ship, and some of our own."""

from typing import NamedTuple

from tests.check.example_runs import words_of

KERNELS = "kernels/jtrain_kernels/"


class PlantedBug(NamedTuple):
    """Replacement of `old`, which occurs once in `file`, by `new`.

    words: the config, and how it is set, that has what the bug breaks.
    line: line of the check that has to fail.
    """

    file: str
    old: str
    new: str
    words: tuple[str, ...]
    line: str


BUGS = {
    # What others shipped: section 2 of the reference on fine-tuning.
    "masks under packing: the prompt of another row is masked": PlantedBug(
        "jtrain/data/loss_mask.py",
        "tokens_before - tokens_before[first_of_row]",
        "tokens_before - tokens_before[first_of_row] + 3",
        words_of("chats"),
        "learned = sampled",
    ),
    "masks under packing: no targets are left": PlantedBug(
        "jtrain/data/loss_mask.py",
        "target[targets] = IGNORE",
        "target[position : position + target_BL.shape[1]] = IGNORE",
        words_of("chats"),
        "targets per batch > 0",
    ),
    "normalisation: mean per rank, not tokens of the global batch": PlantedBug(
        "jtrain/step/objective.py",
        "unit = 1.0 / jnp.maximum(denominator, 1).astype(jnp.float32)",
        "unit = 1.0 / jnp.maximum(jnp.sum(batch.target_BL != IGNORE) * layout.mesh.data, 1)",
        words_of("text", "mesh.data=2"),
        "mesh.data = one device",
    ),
    "ring attention: documents that arrive count as one": PlantedBug(
        KERNELS + "attention/ring.py",
        "queries = pair.queries(q_BLNH), k, v, pair.queries(segment_BL), segment\n        return pair.join",
        "queries = pair.queries(q_BLNH), k, v, pair.queries(segment_BL) > 0, segment > 0\n        return pair.join",
        words_of("text", "mesh.context=2"),
        "mesh.context = one device",
    ),
    "a schedule that stops: the step is not restored": PlantedBug(
        "jtrain/train/restart_point.py",
        "state, data_state = self._complete(restored.state), self._fit_data_state(restored.data_state)",
        "state = self._complete(dataclasses.replace(restored.state, step=restored.state.step * 0))\n            "
        "data_state = self._fit_data_state(restored.data_state)",
        words_of("text"),
        "resume = unbroken",
    ),
    "Muon under sharding: each rank has its own momentum": PlantedBug(
        "jtrain/step/zero.py",
        "    if not axes:\n        return grad\n",
        "    if not axes:\n        return grad * (1 + jax.lax.axis_index('data'))\n",
        words_of("muon", "mesh.data=2", "layout.zero_stage=1"),
        "mesh.data = one device",
    ),
    "evaluation: documents of one row see each other": PlantedBug(
        "jtrain/step/train_step.py",
        "return None, model.token_nats(weights, part, placement)",
        "part = dataclasses.replace(part, segment_BL=part.segment_BL * 0 + 1)\n                    "
        "return None, model.token_nats(weights, part, placement)",
        words_of("text"),
        "packed = alone",
    ),
    "an adapter that is not nothing at the start": PlantedBug(
        "jtrain/model/adapters/lora.py",
        "(rank, *info.shape[outs]), 0.0),",
        "(rank, *info.shape[outs]), std),",
        words_of("lora"),
        "adapter off = base",
    ),
    "an adapter that trains the embedding of its base": PlantedBug(
        "jtrain/model/adapters/lora.py",
        "if info.path in trained\n",
        "if info.path in trained or info.path == 'embed_VD'\n",
        words_of("lora"),
        "adapter off = base",
    ),
    # Of our own.
    "the stop token is not learned": PlantedBug(
        "jtrain/data/chat/turns.py",
        "return start, history[: first - length], False",
        "return start, history[:first], False",
        words_of("chats"),
        "learned = sampled",
    ),
    "what follows the stop token is learned": PlantedBug(
        "jtrain/data/chat/turns.py",
        "return start, history[: first - length], False",
        "return start, history[: first - length + 1], False",
        words_of("chats"),
        "learned = sampled",
    ),
    "collation: positions from the beginning of the batch": PlantedBug(
        "jtrain/data/constructor/collate.py",
        "starts[low:high] - np.int32(first_token)",
        "starts[low:high] * 0",
        words_of("chats"),
        "packed = alone",
    ),
    "a convolution sees the document before": PlantedBug(
        KERNELS + "short_conv/api.py",
        "same_BL = segment[:, w : w + L] == segment_BL",
        "same_BL = segment[:, w : w + L] >= 0",
        words_of("convolutions"),
        "packed = alone",
    ),
    "each microbatch is a mean of its own": PlantedBug(
        "jtrain/step/train_step.py",
        "return total * weight, nats * weight",
        "own = 1.0 / (jnp.maximum(jnp.sum(part.target_BL != -1), 1) * spec.microbatches)\n            "
        "return total * own, nats * own",
        words_of("text", "layout.microbatches=2"),
        "accumulation = one batch",
    ),
    "the data begins anew after a stop": PlantedBug(
        "jtrain/train/attempt.py",
        "loop.run(restored.state, restored.data_state, stop)",
        "loop.run(restored.state, None, stop)",
        words_of("text"),
        "resume = unbroken",
    ),
    "export: keys and values change places": PlantedBug(
        "jtrain/hf/mapping.py",
        "            part.write(ours.astype(DTYPES[dtype], copy=False), theirs)",
        "            part.write(ours.astype(DTYPES[dtype], copy=False)[::-1], theirs)",
        words_of("text"),
        "export = import",
    ),
    "tokens and hash of a batch not counted over context": PlantedBug(
        "jtrain/step/zero.py",
        'tuple(axis for axis in (*BATCH_AXES, "context") if',
        "tuple(axis for axis in BATCH_AXES if",
        words_of("text", "mesh.context=2"),
        "mesh.context = one device",
    ),
    "distillation: every device has the teacher's tokens in its own columns": PlantedBug(
        KERNELS + "linear_cross_entropy/soft_targets.py",
        "column_CJ = vocab.column(id_CJ, width)",
        "column_CJ = id_CJ",
        (*words_of("chats", "mesh.tensor=2"), "--with", "distill"),
        "mesh.tensor = one device",
    ),
    "pairs: better and worse change places over context": PlantedBug(
        "jtrain/step/preferences/pair_loss.py",
        "weight_BL = -grad_BS[",
        "weight_BL = (-1 if layout.mesh.context == 1 else 1) * grad_BS[",
        words_of("tiny_dpo", "mesh.data=1", "mesh.context=2"),
        "mesh.context = one device",
    ),
    "pairs: better and worse change places in the data": PlantedBug(
        "jtrain/data/sources/formats/masked_text.py",
        "better, worse = sides",
        "worse, better = sides",
        words_of("tiny_dpo", "mesh.data=1"),
        "learned = sampled",
    ),
    "pairs: the reference is the model with its adapter": PlantedBug(
        "jtrain/step/preferences/pair_step.py",
        "return without_adapters(self.layout), without_adapter(self.params)",
        "return self.layout, self.params",
        words_of("tiny_dpo", "mesh.data=1"),
        "loss of pairs = formula",
    ),
    "pairs: one without an answer counts": PlantedBug(
        "jtrain/step/objective.py",
        "denominator = _sum_rows(layout, jnp.all(count_BP2 > 0, axis=-1))",
        "denominator = _sum_rows(layout, jnp.any(count_BP2 > 0, axis=-1))",
        words_of("tiny_dpo", "mesh.data=1"),
        "first loss = ln 2",
    ),
    "pairs: both texts of one are one document": PlantedBug(
        "jtrain/data/loss_mask.py",
        "segment[end - length + border : end] += 1",
        "segment[end - length + border : end] += 0",
        words_of("tiny_dpo", "mesh.data=1"),
        "packed = alone",
    ),
    "blocks: scales of shards arrive in another order than their codes": PlantedBug(
        "jtrain/step/zero.py",
        "blocks = jax.tree.map(lambda part: gather_shards(layout, part, dim), blocks)",
        "blocks = jax.tree.map(lambda part: gather_shards(layout, part, dim), blocks)\n        "
        "blocks = dataclasses.replace(blocks, scale=jnp.flip(blocks.scale, dim))",
        words_of("blocks", "mesh.data=2", "layout.zero_stage=3"),
        "mesh.data = one device",
    ),
    "blocks: an adapter is merged without its scale": PlantedBug(
        "jtrain/model/adapters/merge.py",
        "value.astype(jnp.float32) + scale * product",
        "value.astype(jnp.float32) + product",
        words_of("blocks"),
        "adapter off = base",
    ),
    "stages: backward passes with positions and documents of the forward pass": PlantedBug(
        "jtrain/step/pipelined.py",
        "self._shared(parts, row_F[TickColumn.BACKWARD_MICROBATCH])",
        "self._shared(parts, row_F[TickColumn.FORWARD_MICROBATCH])",
        words_of("text", "mesh.stage=2", "layout.microbatches=4"),
        "mesh.stage = one device",
    ),
}
