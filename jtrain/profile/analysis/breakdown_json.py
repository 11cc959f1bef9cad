"""breakdown.json: a window's `Breakdown`, written and read."""

import json
from pathlib import Path

from jtrain.errors import UserError
from jtrain.profile.analysis.records import (
    Breakdown,
    ClockTrack,
    CommRow,
    LiveBuffer,
    LiveTrack,
    MemoryRow,
    OpRow,
    Peaks,
    PipelineShares,
    PipelineTrack,
    StepBreakdown,
)
from jtrain.profile.analysis.step_tracks import CriticalPath, Lane, LaneTrack, PathRow, WhatIf
from jtrain.runtime.atomic_io import write_whole


def write_breakdown(breakdown: Breakdown, file: Path) -> None:
    """Writes breakdown.json atomically; raises ValueError if it would hold `nan` or an infinity."""
    write_whole(file, json.dumps(breakdown.to_dict(), indent=1, allow_nan=False) + "\n")


def read_breakdown(file: Path) -> Breakdown:
    """Reads a breakdown that `write_breakdown` wrote.

    Raises:
      UserError: the file is missing, truncated or written by another version.
    """
    advice = f"Write it again: python -m jtrain.profile.postprocess {file.parent}."
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. {advice}") from error
    except ValueError as error:
        raise UserError(f"{file} is truncated or not JSON ({error}). {advice}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if version != 2:
        raise UserError(f"{file} has version={version}, but this jtrain reads version=2. {advice}")
    # JSON has lists where the classes have tuples, and dicts where they have classes.
    rows = {"steps": StepBreakdown, "ops": OpRow, "clocks": ClockTrack, "memory": MemoryRow}
    try:
        for name, row_class in rows.items():
            values[name] = [row_class(**fields) for fields in values[name]]
        values["communication"] = [
            CommRow(**(fields | {"axes": tuple(fields["axes"])})) for fields in values["communication"]
        ]
        values["peaks"] = Peaks(**values["peaks"])
        if (fields := values["live"]) is not None:
            buffers = [LiveBuffer(**buffer) for buffer in fields["largest"]]
            values["live"] = LiveTrack(**{**fields, "largest": buffers})
        if (fields := values["lanes"]) is not None:
            lanes = [Lane(**lane) for lane in fields["lanes"]]
            values["lanes"] = LaneTrack(**{**fields, "lanes": lanes})
        if (fields := values["path"]) is not None:
            path_rows = [PathRow(**row) for row in fields["rows"]]
            causes = [WhatIf(**row) for row in fields["causes"]]
            values["path"] = CriticalPath(**{**fields, "rows": path_rows, "causes": causes})
        if (fields := values["pipeline"]) is not None:
            steps = [PipelineShares(**step) for step in fields["steps"]]
            spans = {
                name: [[tuple(span) for span in row] for row in fields[name]]
                for name in ("measured", "planned")
            }
            values["pipeline"] = PipelineTrack(**{**fields, **spans, "steps": steps})
        return Breakdown(**values)
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} has a missing or an unknown field ({error}). {advice}") from error
