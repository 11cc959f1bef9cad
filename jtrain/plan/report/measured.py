"""Measurements of a run, printed beside its plan."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from jtrain.config import tree
from jtrain.errors import UserError
from jtrain.plan.report.plan_sheet import Measured


def measured(workdir: Path, given: Mapping[str, str]) -> Measured:
    """Measurements of the run in a workdir: its peak memory and its median step.

    Args:
      given: path -> value as text, of the config that is planned.

    Raises:
      UserError: there is no metrics.jsonl with train steps, or the run has another model or batch.
    """
    file = workdir / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"--calibrate {workdir}: there is no {file}. Give the workdir of a run.")
    if (text := workdir / "config.txt").is_file():
        _check_same(workdir, tree.parse(text.read_text()), given)
    try:
        # A line without a newline is still being written.
        whole = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        lines = [line for line in whole if "step_time_ms" in line]
        peaks = [peak for line in lines if (peak := line["device_memory_peak_gib"]) is not None]
    except (json.JSONDecodeError, KeyError) as error:
        raise UserError(
            f"--calibrate {workdir}: {file} is not that of a run ({error!r}). Give another workdir."
        ) from error
    if not lines:
        raise UserError(f"--calibrate {workdir}: {file} holds no train step yet. Let the run log one.")
    return Measured(
        str(workdir),
        peak_bytes=int(max(peaks) * 2**30) if peaks else None,
        step_s=statistics.median(line["step_time_ms"] for line in lines) / 1e3,
        tokens_per_s=statistics.median(line["tokens_per_s"] for line in lines),
    )


def _check_same(workdir: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuses a workdir whose run has another model or batch.

    Raises:
      UserError: names up to three of the fields that differ.
    """
    paths = [path for path in here if path.startswith("model.") or path in ("data.global_batch", "data.seq_len")]
    other = [f"{path}={there.get(path)} there, {here[path]} here" for path in paths if there.get(path) != here[path]]
    if other:
        raise UserError(f"--calibrate {workdir} is of another run: {'; '.join(other[:3])}. Plan that run's config.")
