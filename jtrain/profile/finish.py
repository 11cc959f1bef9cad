"""What becomes of a window: breakdown.json, report.html and our tracks in its xplane file.

Made in a process of its own, while training goes on.

    python -m jtrain.profile.finish runs/tiny/profile/20

It reads what the window left in the folder, and nothing of the run, so that it may also be run again later.
"""

import os
import sys
from pathlib import Path


def finish(folder: Path) -> str | None:
    """Writes both files, and clocks and multipliers into the trace, for XProf and Perfetto.

    Returns what went wrong with the latter: the report is there all the same.

    Raises:
      ValueError: the trace cannot be read, with the reason.
    """
    from jtrain.profile import breakdown, report  # lazy: what is wrong with them is said in one line

    found = breakdown.analyse(folder)
    breakdown.write_json(found, folder / "breakdown.json")
    report.write(found, folder / "report.html")
    try:
        breakdown.annotate(folder)
    except Exception as error:  # whatever it is of a trace that could be read, the report is worth more
        return f"no clocks in the trace itself: {type(error).__name__}: {error}"
    return None


def main(argv: list[str]) -> int:
    """Runs at the lowest priority: training goes first. The last line that is printed says what went wrong, if so."""
    os.nice(19)
    try:
        if (said := finish(Path(argv[0]))) is not None:
            print(said)
    except (ValueError, OSError) as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
