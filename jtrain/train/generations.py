"""Answers of the model at each evaluation, kept in the workdir: to held-out samples, and to fixed prompts."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.config.run import Run
from jtrain.data import HeldOutSet
from jtrain.data.held_out import Question
from jtrain.data.tokenizer import Tokenizer
from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout
from jtrain.model.adapters.merge import merge
from jtrain.model.kv_cache_decode import TokenSampler, generate_ids
from jtrain.model.param import Params, map_params
from jtrain.telemetry.append_file import AppendFile, keep_lines
from jtrain.telemetry.metrics import GENERATIONS, encode
from jtrain.train.sampling import prompt_of

PROMPTS = "prompts"
"""Name of the fixed prompts, beside the names of held-out sets."""

SPLIT = "split"
"""Name of the split of `data.eval_fraction`."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer.

    prompt, answer: text with special tokens spelled; the answer with its stop token.
    expected: answer of the held-out sample; None of a fixed prompt.
    """

    of: str
    prompt: str
    answer: str
    expected: str | None

    @property
    def is_exact(self) -> bool | None:
        """True if the answer is the expected one, stop token included."""
        return None if self.expected is None else self.answer == self.expected


class Generations:
    """Answers that the model gives with the most likely tokens, one prompt at a time.

    Every process computes them from whole weights in the compute dtype, which each device holds for as long
    as it takes.

    Raises:
      UserError: a prompt has no token, or leaves no room for an answer.
    """

    def __init__(
        self,
        run: Run,
        layout: Layout,
        mesh: Mesh,
        held_out: Mapping[str, HeldOutSet],
    ) -> None:
        self._model, self._infos = run.model, run.param_infos()
        self._layout, self._mesh = layout, mesh
        self._max_tokens, self._context = run.eval.answer_tokens, run.data.seq_len
        self._sets = held_out if run.eval.answers else {}
        self._count = run.eval.answers
        self._prompts = [prompt_of(run.data, text) for text in run.eval.prompts]
        for name, held_out_set in self._sets.items():
            if not held_out_set.questions(1, context=self._context):
                raise UserError(
                    f"eval.answers={run.eval.answers}: no held-out sample of {name} has a prompt with an "
                    f"answer behind it, within data.seq_len={self._context}. Set eval.answers=0, or a "
                    "source with messages_field or prompt_field."
                )
        for text, prompt in zip(run.eval.prompts, self._prompts, strict=True):
            if not 0 < len(prompt.ids) < self._context:
                raise UserError(
                    f"eval.prompts has {text!r} of {len(prompt.ids)} tokens, and prompt and answer have "
                    f"room for data.seq_len={self._context}. Change the prompt."
                )
        self._whole = jax.jit(self._in_compute_dtype, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, params: Params) -> Iterator[Answer]:
        """Yields the answers to all questions and prompts."""
        memory = jax.tree.map(lambda x: NamedSharding(self._mesh, x.sharding.spec), params)
        replicated = self._whole(jax.device_put(params, memory))
        # One device of each process answers: the others hold the same weights.
        whole = jax.tree.map(lambda x: x.addressable_data(0), replicated)
        for name, held_out in self._sets.items():
            questions = held_out.questions(self._count, context=self._context)
            stops = {int(question.answer[-1]) for question in questions if question.answer is not None}
            for question in questions:
                tokenizer = held_out.streams[question.source].tokenizer
                yield self._answer(whole, name, question, tokenizer, stops | {tokenizer.end_id})
        for prompt in self._prompts:
            question = Question(0, np.asarray(prompt.ids, np.int32), None)
            yield self._answer(whole, PROMPTS, question, prompt.tokenizer, set(prompt.end_ids))

    def _answer(
        self, params: Params, of: str, question: Question, tokenizer: Tokenizer, stops: set[int]
    ) -> Answer:
        ids = np.asarray(question.prompt, np.int32)
        chunks = generate_ids(
            self._model,
            params,
            ids,
            max_tokens=min(self._max_tokens, self._context - len(ids)),
            sampler=TokenSampler(0.0, vocab_size=tokenizer.vocab_size),
            seed=0,
            end_ids=stops,
            context=self._context,
        )
        answer = [token for chunk in chunks for token in chunk]
        expected = None if question.answer is None else _spelled(tokenizer, question.answer)
        return Answer(of, _spelled(tokenizer, ids), _spelled(tokenizer, answer), expected)

    def _in_compute_dtype(self, params: Params) -> Params:
        """The weights as `jtrain generate` reads them: layers in their order, matrices in the compute dtype,
        an adapter merged.
        """
        pipeline, precision = self._layout.pipeline, self._layout.precision
        layers = range(self._model.num_layers)
        order = None if pipeline is None else jnp.asarray([pipeline.order.index(layer) for layer in layers])

        def in_order(info: ParamInfo, x: Any) -> Any:
            return x if order is None or not info.is_stacked else jax.tree.map(lambda part: part[order], x)

        def dtype_of(info: ParamInfo) -> str:
            return precision.compute_dtype if info.is_matrix else precision.param_dtype

        ordered = map_params(in_order, self._infos, params)
        if self._layout.adapter_scale is not None:
            return merge(self._infos, ordered, self._layout.adapter_scale, dtype_of)
        return map_params(lambda info, x: x.astype(dtype_of(info)), self._infos, ordered)


def write_generations(workdir: Path, step: int, generations: list[Answer]) -> dict[str, float]:
    """Appends the answers after `step` to generations.jsonl in the workdir; returns the share of exact ones
    of each set.
    """
    if jax.process_index() == 0:
        path = workdir / GENERATIONS
        # A run that went on from an earlier step gives these answers once more.
        keep_lines(path, lambda line: line.get("step", step) < step)
        file = AppendFile(path)
        for generation in generations:
            line = {"step": step, **dataclasses.asdict(generation), "exact": generation.is_exact}
            file.append(encode(line).encode())
        file.close()
    exact: dict[str, list[bool]] = {}
    for generation in generations:
        if (is_exact := generation.is_exact) is not None:
            exact.setdefault(generation.of, []).append(is_exact)
    return {name: sum(values) / len(values) for name, values in exact.items()}


def _spelled(tokenizer: Tokenizer, ids: Any) -> str:
    return tokenizer.decode(np.asarray(ids, np.int64), specials=True)
