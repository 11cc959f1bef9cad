"""Training command: `python -m jtrain.launch --config=tiny`."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from jtrain.cli.options import (
    add_config,
    add_local_devices,
    add_workdir,
    config_words,
    in_new_workdir,
    without,
)
from jtrain.cli.run import Args, Command, Parser, Verb, collect_as_before
from jtrain.errors import TakenWorkdir, UserError
from jtrain.plan import AOT_ENVIRONMENT
from jtrain.runtime import exit_codes
from jtrain.runtime.platform import start_jax, use_unified_memory
from jtrain.runtime.stores import check_workdir, default_workdir, workdir_path
from jtrain.supervise.heart import start_heart
from jtrain.supervise.supervisor import Supervisor

REMARK = (
    "# `jtrain explain FIELD` says what a field means: its unit, its default, its values and who reads it."
)
"""Last line of --print-config: a remark, as in config.txt."""


def _add_supervisor(parser: Parser) -> None:
    """Adds --supervise and --processes, which the processes that a supervisor starts are not given."""
    parser.add_argument(
        "--supervise",
        action="store_true",
        help=(
            "start the training process from one that watches it: a crash or a hang is named, ended and "
            "restarted"
        ),
    )
    parser.add_argument(
        "-n",
        "--processes",
        type=int,
        metavar="N",
        help="with --supervise: start N processes on this host (default: 1)",
    )


def add_options(parser: Parser) -> None:
    """Declares the options of a training command."""
    add_config(parser)
    add_workdir(parser, "folder, gs:// or s3:// (default: runs/<config>)", required=False)
    add_local_devices(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, refuse what the run would be refused for, and stop",
    )
    parser.add_argument(
        "--check", action="store_true", help="run `jtrain check` first, and train only if all of it holds"
    )
    parser.add_argument(
        "--topology", metavar="T", help="with --dry-run: compile for this machine (v5p:4x4x8, h200:8)"
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "resume with another `precision`, `kernels`, `data`, `num_steps` or field of the optimizer, "
            "such as `optimizer.peak_lr`, than the workdir's run: losses will differ"
        ),
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="begin at step 0 where all checkpoints are lost"
    )
    _add_supervisor(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print every field with its value and stop"
    )


def launch(args: Args) -> int:
    """Trains, or starts a supervisor that does; returns the exit code."""
    if args.processes is not None and not args.supervise:
        raise UserError(f"--processes {args.processes} starts processes from a supervisor. Add --supervise.")
    if args.check:
        if code := run_check(args):
            return code
        # Not again in a child of the supervisor.
        args.words = [word for word in args.words if word != "--check"]
    # These only print, and end: no supervisor, no workdir.
    if args.print_config or args.topology is not None:
        return train(args)
    if args.workdir is None:
        args.workdir = str(default_workdir(args.config))
    # In the first process: a supervisor would find out only when its child does.
    check_workdir(args.workdir)
    # A dry run needs no watching, but all processes that would train.
    is_supervised = args.supervise and (not args.dry_run or args.processes is not None)
    return supervise(args) if is_supervised else train(args)


def run_check(args: Args) -> int:
    """Runs `jtrain check` of the same config, once for all processes of a host; returns its exit code."""
    if os.environ.get("JTRAIN_PROCESS_ID", "0") != "0":
        return exit_codes.DONE
    # A process of its own: emulated devices are chosen before jax starts, and once.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JTRAIN_")}
    command = [sys.executable, "-m", "jtrain.check", *config_words(args)]
    return subprocess.run(command, env=environ, check=False).returncode


def supervise(args: Args) -> int:
    """Runs the same command without `--supervise` under a supervisor; returns the exit code."""
    supervisor_options = Parser("", description="", epilog="")
    _add_supervisor(supervisor_options)
    # The options of the supervisor are left out, all others go to the child word for word.
    _, run_words = supervisor_options.parse_known_args(args.words)
    # None for a URL: supervisors of several hosts meet in folders only.
    workdir = None if re.match(r"\w+:/", args.workdir) else Path(args.workdir)
    command = [sys.executable, "-m", "jtrain.launch", *run_words]
    processes = 1 if args.processes is None else args.processes
    return Supervisor(command, os.environ, processes=processes, workdir=workdir).run()


def train(args: Args) -> int:
    """Runs the command in this process; returns the exit code."""
    # First: the heartbeat tells the supervisor that this process is alive before it imports jax.
    heart = start_heart(os.environ)
    if args.topology is not None and not args.dry_run:
        raise UserError(f"--topology {args.topology} compiles for a machine that is not here. Add --dry-run.")
    if args.topology is not None:
        # Before jax is imported: it reads these variables when it looks for devices.
        os.environ.update(AOT_ENVIRONMENT)
    # Ignore trace requests until the loop handles them: by default SIGUSR1 would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    start_jax(os.environ, emulate_devices=args.emulate_devices, device=args.device)

    from jtrain.config import tree  # lazy, as the imports below: together over a second
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run

    run_config = load_config(args.config, args.fiddlers, args.sets)
    if args.print_config:
        print(tree.flat(run_config), REMARK, sep="")
        return 0
    run = build_run(run_config)
    # Before devices are used: XLA reads these variables when it makes its allocator.
    if run.layout.offload.unified_memory:
        use_unified_memory(os.environ, topology=args.topology)

    if args.topology is not None:
        return compile_for(args.topology, run_config)

    from jtrain.train.start import start

    collect_as_before()
    try:
        return start(
            run_config,
            run,
            home=workdir_path(args.workdir),
            environ=os.environ,
            heart=heart,
            allow_change=args.allow_change,
            from_scratch=args.from_scratch,
            dry_run=args.dry_run,
        )
    except TakenWorkdir as error:
        raise UserError(
            f"{error}\nnext: {in_new_workdir(args.words, f'{args.workdir}{error.ending}')}"
        ) from error


def compile_for(topology: str, run_config: Any) -> int:
    """Prints the plan for devices that need not be here, with their compiler's figures; returns the exit
    code.
    """
    from jtrain.config.devices import resolve_mesh
    from jtrain.config.run import build_run
    from jtrain.plan import auto_layout
    from jtrain.plan.from_run import compile_plan

    devices, lines = resolve_mesh(run_config, auto_layout.devices_of(topology))
    for line in (*lines, *auto_layout.choose_layout(run_config, devices=devices, workdir=None)):
        print(line)
    compile_plan(build_run(run_config), topology=topology, devices=devices)
    return 0


def next_command(args: Args) -> str:
    """Command to suggest after one that only printed: the training; a run that trained names its own."""
    if not (args.print_config or args.dry_run) or os.environ.get("JTRAIN_PROCESS_ID", "0") != "0":
        return ""
    return shlex.join(["jtrain", "launch", *without(args.words, "--topology")])


VERB = Verb(
    "launch",
    Command(
        "train the model of a config; the same command again resumes",
        launch,
        add_options,
        description="Trains the model of a config. The same command again resumes; Ctrl-C saves first.",
        exits=exit_codes.line(*exit_codes.MEANINGS) + " With --supervise also 128 + a signal.",
        subject="config",
        next_command=next_command,
    ),
)
main = VERB.main
