"""Text sampled from a checkpoint."""

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config.resume import open_checkpoint
from jtrain.config.run import Run
from jtrain.config.trained_params import read_params
from jtrain.data import PackedText, make_tokenizer
from jtrain.data.chat.messages import ASSISTANT, ChatMessage
from jtrain.data.tokenizer import Tokenizer
from jtrain.errors import UserError
from jtrain.model.kv_cache_decode import TokenSampler, generate_ids
from jtrain.model.transformer import Transformer
from jtrain.runtime import multihost
from jtrain.telemetry.run_progress import ContinuedText

DEFAULT_MAX_TOKENS = 200

SAMPLED_PARAMS = 20_000_000
"""Most parameters of a model from which a text is sampled at the end of a run, 80 MB in float32."""

SAMPLE_TOKENS = 96
"""Tokens of that text: a few lines of bytes."""


class Prompt(NamedTuple):
    """Tokens that a model reads before it answers, and those at which its answer ends."""

    ids: list[int]
    tokenizer: Tokenizer
    end_ids: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with the parameters of one checkpoint, ready to sample from.

    context: row length in training, in tokens: the longest text that the model has learnt to continue.
    data: data that it was trained on, which has the chat template.
    """

    step: int
    model: Transformer
    params: dict[str, Any]
    tokenizer: Tokenizer
    context: int
    data: PackedText


def load(workdir: Path, step: int | None = None) -> Trained:
    """Reads the parameters of a checkpoint onto one device, matrices in the run's compute dtype.

    Raises:
      FileError: the workdir has no checkpoint.
      CheckpointError: there is no checkpoint of this step, or it is damaged.
    """
    with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        return _load(checkpoints, step)


def _load(checkpoints: Checkpoints, step: int | None) -> Trained:
    step, run = open_checkpoint(checkpoints, step)
    precision = run.precision
    params = read_params(
        checkpoints,
        step,
        run,
        lambda info: precision.compute_dtype if info.is_matrix else precision.param_dtype,
    )
    tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
    return Trained(step, run.model, params, tokenizer, run.data.seq_len, run.data)


def sample_at_end(checkpoints: Checkpoints, run: Run, step: int) -> ContinuedText | str | None:
    """Samples a short text from the last checkpoint of a run: after the first of `eval.prompts`, else a new
    document.

    Only of a small model in a single process, where it takes a few seconds, most of them the compiler's: more
    parameters, or weights that several processes hold, would keep a machine busy for a few words. `jtrain
    generate` samples from every run.

    Returns:
      The text; one line where something unforeseen went wrong, which must not fail a run that is complete;
      None where no text is due.
    """
    num_params = sum(math.prod(info.shape) for info in jax.tree.leaves(run.model.param_infos()))
    if multihost.process_count() > 1 or num_params > SAMPLED_PARAMS:
        return None
    start_s = time.perf_counter()
    try:
        trained = _load(checkpoints, step)
        text = run.eval.prompts[0] if run.eval.prompts else ""
        prompt = prompt_of(trained.data, text) if text else _of_document(trained.tokenizer, "")
        pieces = stream(
            trained.model,
            trained.params,
            trained.tokenizer,
            prompt,
            context=trained.context,
            max_tokens=min(SAMPLE_TOKENS, trained.context // 2),
        )
        answer = "".join(pieces)
    except UserError:  # no text can begin without a prompt, or the prompt fills the context
        return None
    except Exception as error:  # a compiler raises many types
        return f"no text by the model: {type(error).__name__}: {error}"
    # In a chat the answer is another message.
    is_chat = prompt.ids != _of_document(prompt.tokenizer, text).ids
    return ContinuedText(f"{text}\n" if is_chat else text, answer, time.perf_counter() - start_s)


def prompt_of(data: PackedText, text: str) -> Prompt:
    """Returns a prompt in the form of the data: what a user says, where a source has chats, by the template
    of the first one; otherwise the beginning of a document.
    """
    for setup in data.setups(seed=0):
        mask = setup.source.mask_with(setup.tokenizer, setup.end_token, name=setup.name)
        if mask is None or not mask.is_chat:
            continue
        tokenizer, template = make_tokenizer(setup.tokenizer, end_token=setup.end_token), mask.rule.template
        chat, _ = template.render([ChatMessage("user", text)], prompts=ASSISTANT)
        if template.is_built_in:
            return _of_document(tokenizer, chat)
        ids = tokenizer.encode_marked([chat], [[]])[0][0]
        stops = [tokenizer.encode_marked([stop], [[]])[0][0] for stop in template.stops]
        # A stop that is several tokens ends with its last one.
        end_ids = {tokenizer.end_id, *(int(stop[-1]) for stop in stops if len(stop))}
        return Prompt(ids.tolist(), tokenizer, frozenset(end_ids))
    return _of_document(make_tokenizer(data.tokenizer, end_token=data.end_token), text)


def _of_document(tokenizer: Tokenizer, text: str) -> Prompt:
    # As in training: a document begins with this id.
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    return Prompt([*begin, *tokenizer.encode(text).tolist()], tokenizer, frozenset({tokenizer.end_id}))


def stream(
    model: Transformer,
    params: dict[str, Any],
    tokenizer: Tokenizer,
    prompt: str | Prompt = "",
    *,
    context: int,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the text that follows `prompt`, piece by piece, until the document ends or `max_tokens`.

    A text is read as the beginning of a document, as in training: after the tokenizer's begin id, if it has
    one.

    Args:
      params: whole arrays; the dtype of the matrices is the compute dtype.
      context: limit in tokens of prompt and answer together.
      max_tokens: None takes `DEFAULT_MAX_TOKENS`, or the room left in the context.
      temperature, top_k, top_p: see `jtrain.model.kv_cache_decode.TokenSampler`.

    Raises:
      UserError: prompt and answer are longer than the context, the prompt is empty and the tokenizer has no
        begin id, or a value is out of range.
    """
    sampler = TokenSampler(temperature, top_k, top_p, vocab_size=tokenizer.vocab_size)
    prompt = _of_document(tokenizer, prompt) if isinstance(prompt, str) else prompt
    ids = np.asarray(prompt.ids, np.int32)
    if len(ids) == 0:
        raise UserError(
            "the prompt is empty, and this tokenizer has no id that begins a document. Give a prompt."
        )
    max_tokens = _max_tokens(len(ids), context=context, wanted_tokens=max_tokens)
    chunks = generate_ids(
        model, params, ids, max_tokens=max_tokens, sampler=sampler, seed=seed, end_ids=prompt.end_ids
    )
    # Without the begin id, which some tokenizers would decode.
    ids_so_far = prompt.ids[prompt.ids[0] == tokenizer.begin_id :]
    # The prompt's text is printed by the caller, so output begins after it.
    num_shown = len(tokenizer.decode(ids_so_far))
    text = ""
    for chunk in chunks:
        # Decodes everything again, with the prompt: the text of a token may depend on its neighbours.
        ids_so_far += chunk[:-1] if chunk and chunk[-1] in prompt.end_ids else chunk
        text = tokenizer.decode(ids_so_far)
        num_complete = len(text.rstrip("\ufffd"))  # the last character may be incomplete
        if num_complete > num_shown:
            yield text[num_shown:num_complete]
            num_shown = num_complete
    # What is left over was incomplete: the text ends in the middle of a character.
    if len(text) > num_shown:
        yield text[num_shown:]


def _max_tokens(num_prompt: int, *, context: int, wanted_tokens: int | None) -> int:
    room = context - num_prompt
    if room < 1:
        raise UserError(
            f"the prompt has {num_prompt} tokens, and the context is data.seq_len={context} for prompt and "
            "answer together. Shorten the prompt."
        )
    if wanted_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if not 1 <= wanted_tokens <= room:
        raise UserError(
            f"--max-tokens {wanted_tokens} must be from 1 to {room}: the context is data.seq_len={context}, "
            f"and the prompt has {num_prompt} tokens of it."
        )
    return wanted_tokens
