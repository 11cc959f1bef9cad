"""Text sampled from a checkpoint: `python -m jtrain.generate --workdir runs/tiny --prompt "def "`."""

import os
import shlex

from jtrain.cli.options import add_step, add_workdir
from jtrain.cli.run import Args, Command, Parser, Verb
from jtrain.runtime.platform import start_jax
from jtrain.runtime.stores import run_folder


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_workdir(parser)
    add_step(parser)
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: a new document)"
    )
    begin.add_argument(
        "--chat", metavar="TEXT", help="what a user says, in the chat template of the run's data"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: 200, or the room left in the context"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    choice.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the most likely tokens with total probability P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text")


def generate(args: Args) -> int:
    """Samples as the parsed arguments ask; returns the exit code."""
    workdir = run_folder(args.workdir)
    # Before `sampling` is imported: it imports jax, whose platform must be chosen first.
    start_jax(os.environ)
    from jtrain.train.sampling import load, prompt_of, stream  # lazy: importing jax takes over a second

    trained = load(workdir, args.step)
    pieces = stream(
        trained.model,
        trained.params,
        trained.tokenizer,
        args.prompt if args.chat is None else prompt_of(trained.data, args.chat),
        context=trained.context,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    # The prompt is printed with the first piece, which continues it without a newline.
    for index, piece in enumerate(pieces):
        print(args.prompt + piece if index == 0 else piece, end="", flush=True)
    print()
    return 0


VERB = Verb(
    "generate",
    Command(
        "sample text from a checkpoint",
        generate,
        add_options,
        subject="workdir",
        next_command=lambda args: f"jtrain checkpoint list --workdir {shlex.quote(args.workdir)}",
    ),
)
main = VERB.main
