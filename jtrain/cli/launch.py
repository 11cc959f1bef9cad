"""Training command: `python -m jtrain.launch --config=tiny`."""

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from jtrain.errors import UserError
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.runtime import cli
from jtrain.runtime.accelerators import DEVICES
from jtrain.runtime.platform import start_jax, use_unified_memory
from jtrain.runtime.store_paths import check_workdir, default_workdir, workdir_path
from jtrain.supervise.command import add_arguments, refuse_alone, supervise
from jtrain.supervise.heart import start_heart


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser; does not import jax."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.launch",
        description="Trains the model of a config. The same command again resumes; Ctrl-C saves first.",
        epilog="Exit codes: 0 done; 2 an error that you can fix, as printed; 75 stopped, with a checkpoint; 76 a "
        "device or host computes wrongly or hangs, as named; 1 a bug. With --supervise also 128 + a signal.",
        allow_abbrev=False,
    )
    cli.add_config_arguments(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder, gs:// or s3:// (default: runs/<config>)")
    parser.add_argument("--device", choices=DEVICES, help="run on this kind of device (default: the fastest here)")
    parser.add_argument("--emulate-devices", type=int, metavar="N", help="run on N CPU devices")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--topology", metavar="T", help="with --dry-run: compile for this machine (v5p:4x4x8, h200:8)")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="NAME",
        help="resume with another `precision`, `kernels`, `data`, `num_steps` or field of the optimizer, such as "
        "`optimizer.peak_lr`, than the workdir's run: losses will differ",
    )
    parser.add_argument("--from-scratch", action="store_true", help="begin at step 0 where all checkpoints are lost")
    add_arguments(parser)
    parser.add_argument("--print-config", action="store_true", help="print every field with its value and stop")
    return parser


def launch(args: argparse.Namespace) -> int:
    """Runs the command with parsed arguments; returns the exit code."""
    heart = start_heart(os.environ)
    if args.topology is not None and not args.dry_run:
        raise UserError(f"--topology {args.topology} compiles for a machine that is not here. Add --dry-run.")
    if args.topology is not None:
        os.environ.update(AOT_ENVIRONMENT)
    # Ignore trace requests until the loop handles them: by default SIGUSR1 would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    start_jax(os.environ, emulate_devices=args.emulate_devices, device=args.device)

    from jtrain.config import tree  # lazy, as the imports below: together over a second
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run

    run_config = load_config(args.config, args.fiddlers, args.sets)
    if args.print_config:
        print(tree.flat(run_config), end="")
        return 0
    run = build_run(run_config)
    if run.layout.offload.unified_memory:
        use_unified_memory(os.environ, topology=args.topology)

    from jtrain.config.devices import settle_mesh
    from jtrain.plan import auto_layout
    from jtrain.plan.from_run import dry_run
    from jtrain.train.start import start

    if args.dry_run:
        devices, lines = settle_mesh(run_config, auto_layout.devices_of(args.topology))
        for line in (*lines, *auto_layout.settle(run_config, devices=devices, workdir=None)):
            print(line)
        dry_run(build_run(run_config), topology=args.topology, devices=devices)
        return 0
    meant = dict(allow_change=args.allow_change, from_scratch=args.from_scratch)
    return start(run_config, run, home=workdir_path(args.workdir), environ=os.environ, heart=heart, **meant)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run() -> int:
        args = parser().parse_args(argv)
        refuse_alone(args)
        if args.dry_run or args.print_config:  # which only print, and end
            return launch(args)
        if args.workdir is None:
            args.workdir = str(default_workdir(args.config))
        check_workdir(args.workdir)
        return supervise(args, argv, os.environ, workdir=Path(args.workdir)) if args.supervise else launch(args)

    return cli.run(run)
