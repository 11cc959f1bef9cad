"""Postprocessing of a trace window: breakdown.json, report.html, clock counters in the xplane file.

    python -m jtrain.profile.postprocess runs/tiny/profile/20

A run starts this as a separate process and goes on training. All input comes from the window's folder, so it
can also be run again later.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.breakdown import aligned_samples
from jtrain.profile.analysis.records import HloOp, Peaks, Trace
from jtrain.profile.analysis.xplane import trace_files
from jtrain.profile.trace_dir import read_facts


def postprocess(folder: Path) -> list[str]:
    """Writes breakdown.json and report.html, and adds clocks and multipliers to the trace for XProf.

    Returns:
      Lines for the run's log: the measured bubble of a pipeline, the error if the trace could not be
      annotated. The report is written in all cases.

    Raises:
      UserError: the trace cannot be read.
    """
    from jtrain.profile.analysis import breakdown, figures, pipeline_trace
    from jtrain.profile.analysis.breakdown_json import write_breakdown
    from jtrain.profile.report import profile_page

    traced = breakdown.load(folder)
    window_breakdown = breakdown.analyse(folder, traced)
    # Data and page first: they are there even if the trace cannot be annotated.
    write_breakdown(window_breakdown, folder / "breakdown.json")
    profile_page.write(window_breakdown, folder / "report.html")
    messages = (
        [figures.pipeline_line(window_breakdown.pipeline)] if window_breakdown.pipeline is not None else []
    )
    messages += [note for note in window_breakdown.notes if note.startswith(pipeline_trace.UNKNOWN)]
    try:
        annotate(folder, traced.trace, traced.ops)
    except Exception as error:  # the report must not fail because the trace could not be annotated
        messages.append(f"no clocks in the trace itself: {type(error).__name__}: {error}")
    return messages


def main(argv: list[str]) -> int:
    """Postprocesses a window at the lowest priority, since training goes first; prints lines for its log."""
    os.nice(19)
    try:
        for line in postprocess(Path(argv[0])):
            print(line)
    # A bug is to be seen with its traceback; these are the user's or the disk's.
    except (ValueError, OSError) as error:
        print(error)
        return 2
    return 0


def annotate(folder: Path, trace: Trace, ops: Mapping[str, HloOp]) -> None:
    """Adds clocks, power and each op's multiplier to the window's trace files, where XProf shows them."""
    from jtrain.profile.report import xplane_counters  # lazy: readers of a breakdown do not need it

    sampled = aligned_samples(folder, trace)
    peaks = Peaks(**read_facts(folder)["peaks"])
    flops, size = (np.array([getattr(op, name) for op in ops.values()], float) for name in ("flops", "bytes"))
    # b at full clock: the clock of each single event is looked up where the event is annotated.
    unknown = np.full(len(ops), np.nan)
    sensitivity = clock_loss.sensitivity(flops, size, peaks, unknown)
    for file in trace_files(folder):
        xplane_counters.annotate(file, sampled, peaks, dict(zip(ops, sensitivity.tolist(), strict=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
