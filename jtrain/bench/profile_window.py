"""A config trained for a few steps with a profile window: tokens/s, and the window's report, kept in --out.

    python -m jtrain.bench profile_window --config llama1b --out DIR

The text is the Python standard library, byte by byte, so nothing else is needed; the model is the config's.
DIR gets report.html and breakdown.json of the window, with clocks where the driver tells them.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jtrain.bench import Options, Row, option, row
from jtrain.bench.tiny import train_config
from jtrain.errors import UserError
from jtrain.profile.trace_dir import FOLDER

FILES = ("report.html", "breakdown.json")
TEXT = ("data.path=stdlib", "data.tokenizer=bytes", "checkpoint.every_steps=None", "eval.every_steps=None")


OPTIONS = (
    option("--config", default="llama1b", help="what to train (default: %(default)s)"),
    option("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="change the config"),
    option("--steps", type=int, default=8, help="updates; the last three are traced (default: %(default)s)"),
    option("--out", type=Path, required=True, metavar="DIR", help="where the report goes"),
)


def run(args: Options) -> Iterator[Row]:
    """Tokens/s before and in the window, and the size of the report.

    Raises:
      UserError: fewer than 6 steps; or the window left no report.
    """
    # Two steps to compile and warm up, one to measure, three to trace.
    if args.steps < 6:
        raise UserError(
            f"--steps {args.steps} leaves no steps before the three that are traced. Give 6 or more."
        )
    window = (args.steps - 3, args.steps)
    sets = [
        *TEXT,
        f"num_steps={args.steps}",
        f"profile.steps={window}",
        # Every step is logged: rates are of single steps.
        "metrics.log_every_steps=1",
        *args.sets,
    ]
    with tempfile.TemporaryDirectory() as folder:
        lines = train_config(args.config, sets, Path(folder), stdout=None)
        # Lines of events have no rate.
        lines = [line for line in lines if line.get("tokens_per_s")]
        # The first two steps compile and fill caches.
        for phase, first, last in (
            ("before the window", 2, window[0]),
            ("in the window", window[0], window[1]),
        ):
            rates = [line["tokens_per_s"] for line in lines if first < line["step"] <= last]
            yield row(f"{args.config}, {phase}, median step", statistics.median(rates), "tokens/s")
        reports = sorted((Path(folder) / FOLDER).glob("*/report.html"))
        if not reports:
            # The report is written by a process of its own, whose log says what went wrong.
            logs = [file.read_text()[-500:] for file in (Path(folder) / FOLDER).glob("*/postprocess.log")]
            raise UserError(
                f"the window of {args.config} left no report: {' '.join(logs) or 'no trace was written'}."
            )
        args.out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            # The newest window's folder is the last by name.
            shutil.copy(reports[-1].parent / name, args.out / name)
        size = (args.out / "report.html").stat().st_size
    yield row(f"{args.config}: {args.out / 'report.html'}", size / 2**10, "KiB")
