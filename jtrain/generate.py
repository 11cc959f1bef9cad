"""Samples text from a checkpoint.

python -m jtrain.generate --workdir runs/tiny --prompt "def "
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain import verb

if TYPE_CHECKING:  # named in full below, so that tests can resolve them when a call is checked
    import jtrain.data.tokenizer
    import jtrain.model.transformer

DEFAULT_MAX_TOKENS = 200


def parser() -> argparse.ArgumentParser:
    """The command line; no jax is imported to read it."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.generate", description="Samples text from a checkpoint.", allow_abbrev=False
    )
    parser.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="of the run")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from (default: a new document)")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"default: {DEFAULT_MAX_TOKENS}, or what the context has room for"
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    choice.add_argument("--top-p", type=float, metavar="P", help="draw from the most likely that have probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text")
    return parser


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with the parameters of one checkpoint, ready to sample from.

    context: tokens per row that it was trained on, the longest text it has learnt to continue.
    """

    step: int
    model: "jtrain.model.transformer.Transformer"
    params: dict[str, Any]
    tokenizer: "jtrain.data.tokenizer.Tokenizer"
    context: int


def load(workdir: Path, step: int | None = None) -> Trained:
    """Reads the parameters of a checkpoint onto one device, matrices in the run's compute dtype.

    Raises:
      FileNotFoundError: no checkpoint there.
      CheckpointError: none of this step, or a damaged one.
    """
    import jax  # lazy, here and below: over a second that --help need not pay
    from jax.sharding import SingleDeviceSharding

    from jtrain import config
    from jtrain.checkpoint import Checkpoints, CheckpointSpec
    from jtrain.data import make_tokenizer
    from jtrain.model.param import map_params

    with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        step = checkpoints.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"No checkpoint in {checkpoints.folder}. Give the --workdir of another run.")
        run = config.build(config.read(checkpoints.config_text(step)))
        sharding = SingleDeviceSharding(jax.devices()[0])
        like = map_params(
            lambda info: jax.ShapeDtypeStruct(
                info.shape, run.layout.compute_dtype if info.is_matrix else run.layout.param_dtype, sharding=sharding
            ),
            run.model.param_infos(),
        )
        params = checkpoints.restore_part(step, {"params": like})["params"]
    tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
    return Trained(step, run.model, params, tokenizer, run.data.seq_len)


def stream(
    model: "jtrain.model.transformer.Transformer",
    params: dict[str, Any],
    tokenizer: "jtrain.data.tokenizer.Tokenizer",
    prompt: str = "",
    *,
    context: int,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the text that follows `prompt`, piece by piece, until the document ends or `max_tokens`.

    The prompt is read as the beginning of a document, as in training: after the tokenizer's begin id, if it has one.

    Args:
      params: whole arrays; matrices are computed with in the dtype they have.
      context: the longest text in tokens, prompt and answer together.
      max_tokens: None takes `DEFAULT_MAX_TOKENS`, or what the context has room for.
      temperature, top_k, top_p: as of `jtrain.model.decode.Sampler`.

    Raises:
      ValueError: the prompt, with the answer, is longer than the context; or it is empty and the tokenizer has no begin
        id; or a value out of range.
    """
    import numpy as np

    from jtrain.model.decode import Sampler, generate_ids

    sampler = Sampler(temperature, top_k, top_p, vocab_size=tokenizer.vocab_size)
    prompt_ids = tokenizer.encode(prompt)
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    ids = np.asarray([*begin, *prompt_ids.tolist()], np.int32)
    if len(ids) == 0:
        raise ValueError("the prompt is empty, and this tokenizer has no id that begins a document. Give a prompt.")
    max_tokens = _max_tokens(len(ids), context=context, asked=max_tokens)
    chunks = generate_ids(
        model, params, ids, max_tokens=max_tokens, sampler=sampler, seed=seed, end_id=tokenizer.end_id
    )
    known = prompt_ids.tolist()
    shown = len(tokenizer.decode(known))
    text = ""
    for chunk in chunks:
        # All of it again, with the prompt: what one token reads as may depend on those around it.
        known += chunk
        text = tokenizer.decode(known)
        whole = len(text.rstrip("\ufffd"))  # a character may be half written
        if whole > shown:
            yield text[shown:whole]
            shown = whole
    if len(text) > shown:
        yield text[shown:]


def sample(
    model: "jtrain.model.transformer.Transformer",
    params: dict[str, Any],
    tokenizer: "jtrain.data.tokenizer.Tokenizer",
    prompt: str = "",
    *,
    context: int,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """The text that follows `prompt`: `stream`, joined."""
    pieces = stream(
        model,
        params,
        tokenizer,
        prompt,
        context=context,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    return "".join(pieces)


def _max_tokens(num_prompt: int, *, context: int, asked: int | None) -> int:
    room = context - num_prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt} tokens, and the context is data.seq_len={context} for prompt and answer "
            "together. Shorten the prompt."
        )
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if not 1 <= asked <= room:
        raise ValueError(
            f"--max-tokens {asked} must be from 1 to {room}: the context is data.seq_len={context}, and the prompt has "
            f"{num_prompt} tokens of it."
        )
    return asked


def generate(args: argparse.Namespace) -> int:
    """What the parsed arguments ask for; returns the exit code."""
    verb.start_jax(os.environ)
    trained = load(args.workdir, args.step)
    pieces = stream(
        trained.model,
        trained.params,
        trained.tokenizer,
        args.prompt,
        context=trained.context,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    for index, piece in enumerate(pieces):
        print(args.prompt + piece if index == 0 else piece, end="", flush=True)
    print()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return verb.run(lambda: generate(args))


if __name__ == "__main__":
    sys.exit(main())
