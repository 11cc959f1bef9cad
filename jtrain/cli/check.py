"""Check of a run before it is paid for: `python -m jtrain.check --config=NAME`."""

import os
import shlex
import time
from typing import Any

from jtrain.cli.options import add_config, add_json, config_words
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.runtime import exit_codes
from jtrain.runtime.platform import start_jax

DEVICE, COUNT = "h100", 8
"""Machine of the plan, unless another one is named: one host of what most people rent."""


def add_options(parser: Parser) -> None:
    """Declares the options of a check."""
    add_config(parser)
    parser.add_argument(
        "--device", default=DEVICE, metavar="NAME", help="chip of the plan's compiler (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="devices of the plan (default: those of the mesh, or a host)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LINE", help="prove only this line, by its name"
    )
    parser.add_argument(
        "--without-compiler",
        action="store_true",
        help="leave out the plan's compiler, for another check at once",
    )
    add_json(parser)


def execute(args: Args) -> int:
    """Prints a line for each proof; returns the exit code, 1 if one fails."""
    started_s = time.perf_counter()
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    start_jax(os.environ, emulate_devices=8)
    import jax  # lazy, as the imports below: together over a second

    # The steps compile for longer than they compute.
    jax.config.update("jax_disable_most_optimizations", True)
    from jtrain.check.lines import chosen, print_lines
    from jtrain.check.memory import CompiledPlan
    from jtrain.check.proof import RunCheck
    from jtrain.config.load import load_config, mesh_size

    run_config = load_config(args.config, args.fiddlers, args.sets)
    count = args.count or _count(run_config, mesh_size)
    memory = CompiledPlan(config_words(args), args.device, count, is_wanted=not args.without_compiler)
    try:
        check = RunCheck(run_config, memory, started_s=started_s)
        lines = print_lines(chosen(check.proofs(), args.only))
    finally:
        memory.close()
    failed = [line for line in lines if line.verdict == "FAILS"]
    seconds = time.perf_counter() - started_s
    held = sum(line.verdict == "holds" for line in lines)
    print(
        f"{held} hold, {len(failed)} fail, {len(lines) - held - len(failed)} not checked, in {seconds:.0f} s"
    )
    write_json(args, {"lines": [line.to_json() for line in lines], "seconds": seconds})
    if failed:
        print(f"next: {_next_after(args, failed[0].name)}")
    return 1 if failed else exit_codes.DONE


def _count(run_config: Any, mesh_size: Any) -> int:
    """Devices of the mesh; where `data` takes what is there, whole hosts of them."""
    size = mesh_size(run_config)
    return size if run_config.mesh.data != "auto" else -(-size // COUNT) * COUNT


def _next_after(args: Args, name: str) -> str:
    """The command that shows more of the line that failed."""
    words = config_words(args)
    if name in ("learned = sampled", "targets per batch > 0"):
        return shlex.join(["jtrain", "data", "inspect", *words, "--tokens"])
    return shlex.join(["jtrain", "check", *words, "--only", name])


def next_command(args: Args) -> str:
    """Command to suggest after this one: the training."""
    return shlex.join(["jtrain", "launch", *config_words(args)])


VERB = Verb(
    "check",
    Command(
        "prove a config on its own data, small and on emulated devices, before it is paid for",
        execute,
        add_options,
        description=(
            "Proves on emulated devices, with the run's own data, template, model, loss and optimizer made "
            "small, that packing, layout, accumulation, masks, resuming and export change nothing."
        ),
        exits="Exit codes: 0 all that applies holds; 1 a line fails and names what differs; 2 a mistake.",
        subject="config",
        next_command=next_command,
    ),
)
main = VERB.main
