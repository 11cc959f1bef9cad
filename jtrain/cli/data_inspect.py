"""`jtrain data inspect`: the documents and tokens of one step, or the order of many."""

from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.options import add_config, add_json
from jtrain.cli.run import Args, Parser, write_json
from jtrain.data.inspect.excerpt import excerpt
from jtrain.errors import UserError
from jtrain.report.table import Table, numbers, words
from jtrain.runtime.atomic_io import write_whole

if TYPE_CHECKING:
    from jtrain.config.run import Run
    from jtrain.data.dataset import TextDataset


def add_inspect_options(parser: Parser) -> None:
    """Declares the options of `inspect`."""
    add_config(parser)
    add_json(parser)
    parser.add_argument("--step", type=int, metavar="K", help="the batch of update K -> K+1 (default: 0)")
    parser.add_argument(
        "--order",
        action="store_true",
        help=(
            "print instead how different the rows and steps are: documents per step, overlap, correlation, "
            "drift"
        ),
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps that --order reads (default: 100)")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="print every token, those that are learned apart from those read",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="with --tokens: write them as a page for a browser"
    )


def inspect(args: Args, run: "Run", dataset: "TextDataset") -> int:
    """Prints the pieces of one step, or the order of many, as a table; returns the exit code."""
    if args.html is not None and not args.tokens:
        raise UserError(f"--html {args.html} is a page of tokens. Give --tokens, or leave --html out.")
    if args.order and args.tokens:
        raise UserError("--tokens shows one step, and --order many. Leave one of them out.")
    if args.order:
        return inspect_order(args, dataset)
    if args.steps is not None:
        raise UserError(
            f"--steps {args.steps} is the number of steps that --order reads. Give --order, or --step K."
        )
    step = args.step or 0
    if step < 0:
        raise UserError(f"--step {step} must be at least 0: batch k feeds update k -> k+1.")
    if step >= run.num_steps:
        # Every step before it is planned: a number of too many digits would take for ever.
        raise UserError(
            f"--step {step} is after the run, which has num_steps={run.num_steps}. Give --step "
            f"{run.num_steps - 1} or less."
        )
    from jtrain.data.inspect.step_contents import pieces_of_step  # lazy: imports numpy

    pieces = pieces_of_step(dataset, step, tokens=args.tokens)
    tokens = sum(piece["end_token"] - piece["start_token"] for piece in pieces)
    documents = len({(piece["source"], piece["document"]) for piece in pieces})
    # All rows of the step, whichever process of the run would read them.
    rows = run.data.global_batch
    print(dataset.describe())
    print(
        f"step {step}: {rows} rows, {tokens:,} tokens of {documents} documents, "
        f"{tokens / (rows * run.data.seq_len):.2%} full"
    )
    # With one source, its name would be the same in every line.
    several = len(dataset.names) > 1
    names = [f"{piece['source']} {piece['document']}" if several else piece["document"] for piece in pieces]
    names = [
        " ".join([name, piece.get("answer", "")]).rstrip() for name, piece in zip(names, pieces, strict=True)
    ]
    if args.tokens:
        from jtrain.data.inspect.token_runs import token_lines, tokens_page

        learned = sum(sum(piece["is_learned"]) for piece in pieces)
        print(f"{learned:,} tokens are learned, {tokens - learned:,} only read")
        named = [(f"row {piece['row']}, {name}", piece) for name, piece in zip(names, pieces, strict=True)]
        if args.html is not None:
            from jtrain.report.page import html as page_html  # lazy: most calls print to the terminal

            write_whole(args.html, page_html(tokens_page(f"Tokens of step {step}", named)))
            print(f"wrote {args.html}")
        else:
            for name, piece in named:
                print("\n".join([f"{name}:", *token_lines(piece)]))
        write_json(args, {"step": step, "tokens": tokens, "learned": learned, "pieces": pieces})
        return 0
    table = Table("documents", numbers("row") + words("document") + numbers("tokens") + words("text"))
    for name, piece in zip(names, pieces, strict=True):
        span = f"{piece['start_token']}-{piece['end_token']}"
        table.add(str(piece["row"]), name, span, piece.get("marked") or excerpt(piece["text"]))
    print("\n".join(table.lines()))
    write_json(args, {"step": step, "tokens": tokens, "pieces": pieces})
    return 0


def inspect_order(args: Args, dataset: "TextDataset") -> int:
    """Prints how different the rows and steps of the first batches are; returns the exit code."""
    from jtrain.data.inspect.order_report import measure_order  # lazy: numpy
    from jtrain.data.inspect.order_tables import lines_of

    if args.step is not None:
        # A step and an order of steps are two questions.
        raise UserError(
            f"--order reads all steps from the first one on, not --step {args.step}. Leave one of them out."
        )
    report = measure_order(dataset, 100 if args.steps is None else args.steps)
    print(dataset.describe())
    print("\n".join(lines_of(report)))
    write_json(args, report.to_json())
    return 0
