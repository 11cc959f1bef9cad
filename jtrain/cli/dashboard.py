"""Live page of one or more runs: `python -m jtrain.dashboard runs/a runs/b`."""

import shlex
import signal
import threading

from jtrain.cli.options import add_workdir
from jtrain.cli.run import Args, Command, Parser, Verb, WrongValue
from jtrain.errors import UserError

LOOPBACK = "127.0.0.1"


def add_options(parser: Parser) -> None:
    """Declares the options."""
    add_workdir(parser, "folders of the runs, side by side on one page", several=True, required=False)
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="listen here (default: %(default)s, this machine alone)",
    )
    parser.add_argument("--port", type=_port, default=8123, help="default: %(default)s; 0 is any free one")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise WrongValue(f"{text} must be a port from 1 to 65535, or 0 for any free one")
    return int(text)


def execute(args: Args) -> int:
    """Serves the page until SIGINT, SIGTERM or SIGHUP; returns the exit code."""
    from jtrain.dashboard.run_folder import open_runs  # lazy: --help needs none of it
    from jtrain.dashboard.server import DashboardServer
    from jtrain.runtime.signals import stop_signals

    if not args.workdir:
        raise UserError(
            "no run is given. Give its folder, or those of several: `jtrain dashboard runs/tiny`. `jtrain "
            "launch --config=tiny` makes that one."
        )
    server = DashboardServer(open_runs(args.workdir), args.host, args.port)
    # Before any thread is there: each inherits the mask, so the signal waits for `sigwait`.
    stops = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    thread = threading.Thread(target=server.serve, name="dashboard")
    thread.start()
    if args.host != LOOPBACK:
        print(f"warning: whoever reaches {args.host} can read these runs, their texts included")
    host = f"[{args.host}]" if ":" in args.host else args.host  # IPv6
    print(f"http://{host}:{server.port}/ (numbers for Prometheus at /metrics; Ctrl-C ends it)", flush=True)
    server.read_all()  # a page that is opened meanwhile shows what is read so far
    signal.sigwait(stops)
    server.stop()
    thread.join()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    return 0


VERB = Verb(
    "dashboard",
    Command(
        "serve a live page of runs, and their numbers for Prometheus",
        execute,
        add_options,
        description="Serves one page that follows runs as they train: loss, speed, where the wall time went, "
        "parts of traced steps, mixture against plan, clocks, checkpoints, events and texts. It reads the "
        "files of the workdirs alone. /metrics has the newest numbers for Prometheus.",
        subject="workdir",
        next_command=lambda args: shlex.join(["jtrain", "profile", "--workdir", args.workdir[0]]),
    ),
)
main = VERB.main
