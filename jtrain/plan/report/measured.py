"""Measurements of a run, printed beside its plan."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.config import tree
from jtrain.errors import UserError
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.report.plan_sheet import RunMeasurements
from jtrain_kernels.device import known

_COMPARED_PREFIXES = (
    "model.",
    "mesh.",
    "layout.",
    "pipeline.",
    "precision.",
    "kernels",
    "data.global_batch",
    "data.seq_len",
)
"""Beginnings of the config fields that decide how long a step takes."""


def read_measurements(workdir: Path, planned: Mapping[str, str], machine: Machine) -> RunMeasurements:
    """Measurements of the run in a workdir: its peak memory and its median step.

    Args:
      planned: path -> value as text, of the config that is planned, its mesh and layout chosen.

    Raises:
      UserError: there is no metrics.jsonl with train steps, or the run had another model, batch, layout or
        machine.
    """
    file = workdir / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"--calibrate {workdir}: there is no {file}. Give the workdir of a run.")
    # Workdirs without either file are taken as they are.
    if (config_file := workdir / "config.txt").is_file():
        _check_same(workdir, tree.parse(config_file.read_text()), planned)
    if (facts_file := workdir / "run.json").is_file():
        _check_machine(workdir, json.loads(facts_file.read_text())["devices"], machine)
    try:
        # A line without a newline is still being written.
        records = [
            json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        lines = [line for line in records if "step_time_ms" in line]
        # None where the device does not report its memory.
        peaks = [peak for line in lines if (peak := line["device_memory_peak_gib"]) is not None]
    except (json.JSONDecodeError, KeyError) as error:
        raise UserError(
            f"--calibrate {workdir}: {file} is not that of a run ({error!r}). Give another workdir."
        ) from error
    if not lines:
        raise UserError(f"--calibrate {workdir}: {file} holds no train step yet. Let the run log one.")
    return RunMeasurements(
        str(workdir),
        peak_bytes=int(max(peaks) * 2**30) if peaks else None,
        # The median, because a few slow steps must not move it.
        step_s=statistics.median(line["step_time_ms"] for line in lines) / 1e3,
        tokens_per_s=statistics.median(line["tokens_per_s"] for line in lines),
    )


def _check_same(workdir: Path, run_config: Mapping[str, str], planned: Mapping[str, str]) -> None:
    """Refuses a workdir whose run has another model, batch or layout.

    Raises:
      UserError: names up to three of the fields that differ.
    """
    chosen = (
        "layout.auto",
        *(path for path, text in planned.items() if "as_needed" in text),
    )  # chosen by the plan
    paths = [path for path in planned if path.startswith(_COMPARED_PREFIXES) and path not in chosen]
    differences = [
        f"{path}={run_config.get(path)} there, {planned[path]} here"
        for path in paths
        if run_config.get(path) != planned[path]
    ]
    if differences:
        raise UserError(
            f"--calibrate {workdir} is of another run: {'; '.join(differences[:3])}. Plan that run's config."
        )


def _check_machine(workdir: Path, run_devices: Mapping[str, Any], machine: Machine) -> None:
    """Refuses a run on other devices; of a chip known only to a --machine file it compares the number."""
    chip = machine.device
    # The name in a machine's file may be the user's own.
    is_other_chip = chip.name in known() and chip.kind not in run_devices["kind"]
    if is_other_chip or run_devices["count"] != machine.count:
        raise UserError(
            f"--calibrate {workdir}: that run was on {run_devices['count']} x {run_devices['kind']}, and "
            f"{machine} are planned. Give the run's --device and --count."
        )
