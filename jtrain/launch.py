"""argv -> Run -> processes joined -> the loop.

python -m jtrain.launch --config=tiny
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain import verb
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.profile.goodput import process_start_s


def parser() -> argparse.ArgumentParser:
    """The command line; no jax is imported to read it."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.launch",
        description="Trains the model of a config. The same command again resumes; Ctrl-C saves first.",
        epilog="Exit codes: 0 done; 2 you can mend it, the message says how; 75 stopped, after a good save; 1 a bug.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="NAME",
        help="a file of configs/ (tiny, llama8b, ...), path/to/file.py[:function] or module:function",
    )
    parser.add_argument(
        "--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER", help="apply a fiddler of that file"
    )
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="set one field, after fiddlers"
    )
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="where the run lives (default: runs/<config>)")
    parser.add_argument("--emulate-devices", type=int, metavar="N", help="run on N CPU devices")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--topology", metavar="T", help="with --dry-run: compile for that machine, such as v5p:4x4x8 or h200:8"
    )
    parser.add_argument("--print-config", action="store_true", help="print every field with its value and stop")
    return parser


def default_workdir(config: str) -> Path:
    """runs/<config>; of a file or module, its function or its own name."""
    name, _, function = config.partition(":")
    return Path("runs") / (function or Path(name).stem)


def launch(args: argparse.Namespace) -> int:
    """What the parsed arguments ask for; returns the exit code."""
    if args.topology is not None and not args.dry_run:
        raise ValueError(f"--topology {args.topology} compiles for a machine that is not here. Add --dry-run.")
    if args.topology is not None:
        os.environ.update(AOT_ENVIRONMENT)
    # Who asks for a trace before there is a step must not end the run: from then on the loop listens.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    verb.start_jax(os.environ, emulate_devices=args.emulate_devices)

    import jax  # lazy, as below: with jax, flax and the rest, over a second

    from jtrain import config, leaves

    run_config = config.load(args.config, args.fiddlers, args.sets)
    if args.print_config:
        print(leaves.flat(run_config), end="")
        return 0
    run = config.build(run_config)
    if run.layout.offload.unified_memory:
        verb.use_unified_memory(os.environ, topology=args.topology)

    from jtrain import loop, settle

    workdir = args.workdir or default_workdir(args.config)
    if args.dry_run:
        for line in settle.settle(run_config, devices=settle.devices_of(args.topology), workdir=None):
            print(line)
        loop.dry_run(config.build(run_config), topology=args.topology)
        return 0
    verb.join_processes(os.environ)
    verb.compile_collectives_anew()
    for line in settle.settle(run_config, devices=jax.devices(), workdir=workdir):
        if jax.process_index() == 0:
            print(line, flush=True)
    text = leaves.flat(run_config)
    return loop.train(config.build(run_config), workdir=workdir, config_text=text, started_s=process_start_s())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return verb.run(lambda: launch(args))


if __name__ == "__main__":
    sys.exit(main())
