"""Looks at what a run reads: `python -m jtrain.data inspect --config tiny --step 100`."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain import verb

if TYPE_CHECKING:
    from jtrain.data.loader import TextDataset


def parser() -> argparse.ArgumentParser:
    """The command line; no jax is imported to read it."""
    parser = argparse.ArgumentParser(prog="python -m jtrain.data", description="Looks at what a run reads.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    inspect = verbs.add_parser(
        "inspect",
        help="print what one step trains on: documents, where they lie in the batch, their text",
        description="Prints what one step trains on. Packs every batch before it too: about a second per 50 million "
        "bytes, longer with another tokenizer.",
        allow_abbrev=False,
    )
    inspect.add_argument("--config", required=True, metavar="NAME", help="as for jtrain.launch")
    inspect.add_argument("--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER")
    inspect.add_argument("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE")
    inspect.add_argument("--step", type=int, default=0, metavar="K", help="the batch of update K -> K+1 (default: 0)")
    inspect.add_argument("--json", type=Path, metavar="FILE", help="write the same there as JSON, with the whole text")
    return parser


def pieces_of_step(dataset: "TextDataset", step: int) -> list[dict[str, Any]]:
    """One entry per document piece of batch `step`, in the order of rows and segments.

    Returns:
      Dicts of `row`, `document` (file:number), `start_token` and `end_token` in it, `text`.
    """
    iterator = dataset.train_batches()
    batch = next(itertools.islice(iterator, step, None))
    found, at, row = [], 0, 0
    for piece in iterator.pieces:
        at, row = (at if piece.row == row else 0), piece.row
        ids = batch.token_BL[row, at : at + piece.end - piece.start]
        at += len(ids)
        found.append(
            {
                "row": row,
                "document": dataset.train_document_identity(piece.document),
                "start_token": piece.start,
                "end_token": piece.end,
                "text": dataset.tokenizer.decode([int(i) for i in ids]),
            }
        )
    return found


def inspect(args: argparse.Namespace) -> int:
    """Prints the pieces of one step as a table; returns the exit code."""
    if args.step < 0:
        raise ValueError(f"--step {args.step} must be at least 0: batch k feeds update k -> k+1.")
    verb.start_jax(os.environ)

    from jtrain import config  # lazy: with jax, flax and the rest, over a second
    from jtrain.data.loader import open_dataset

    run = config.build(config.load(args.config, args.fiddlers, args.sets))
    dataset = open_dataset(run.data, seed=run.seed)
    pieces = pieces_of_step(dataset, args.step)
    tokens = sum(piece["end_token"] - piece["start_token"] for piece in pieces)
    documents = len({piece["document"] for piece in pieces})
    print(dataset.describe())
    print(f"step {args.step}: {run.data.global_batch} rows, {tokens:,} tokens of {documents} documents")
    width = max(len(piece["document"]) for piece in pieces)
    print(f"{'row':>5}  {'document':{width}}  {'tokens':>15}  text")
    for piece in pieces:
        span = f"{piece['start_token']}-{piece['end_token']}"
        print(f"{piece['row']:>5}  {piece['document']:{width}}  {span:>15}  {_excerpt(piece['text'])}")
    if args.json is not None:
        args.json.write_text(json.dumps({"step": args.step, "tokens": tokens, "pieces": pieces}, indent=1))
    return 0


def _excerpt(text: str, length: int = 60) -> str:
    """A piece on one line: its start and its end."""
    if len(text) <= length:
        return repr(text)
    return f"{text[: length // 2]!r} ... {text[-length // 2 :]!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return verb.run(lambda: inspect(args))


if __name__ == "__main__":
    sys.exit(main())
