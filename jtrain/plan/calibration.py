"""Calibration of planned seconds by a run: how much longer its computation took than planned, in a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.step_time import Assumptions, step_time
from jtrain.plan.job import Job

FILE = "calibration.json"
"""Name of the file in a run's workdir."""

_LOW, _HIGH = 0.01, 1000.0
"""Factors between which a run's computation has to lie."""


def calibrate(workdir: Path, job: Job, plan: MemoryPlan, *, assume: Assumptions, measured_s: float) -> Path:
    """Writes the factor with which the plan's step is the measured one; returns the file.

    Raises:
      UserError: no factor explains the step, because its other parts alone are longer, or it is far too long.
    """
    # A step without a machine has no seconds.
    assert job.machine is not None, "a run is on a machine"

    def planned_s(factor: float) -> float:
        return step_time(job, plan, assume=dataclasses.replace(assume, computation=factor)).step_s

    # Bisection needs the answer between its ends.
    if not planned_s(_LOW) < measured_s < planned_s(_HIGH):
        raise UserError(
            f"--calibrate {workdir}: a step took {measured_s:.4g} s, and {planned_s(1.0):.4g} s are planned: "
            f"more than computation explains, {_LOW:g} to {_HIGH:g} times as long as planned. Plan the "
            "layout and the machine that the run had."
        )
    low, high = _LOW, _HIGH
    # The step's time grows with the factor; 60 halvings are past the precision of a float.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if planned_s(middle) < measured_s else (low, middle)
    calibration: dict[str, Any] = dict(
        device=job.machine.device.name,
        matmul_dtype=job.layout.precision.matmul_dtype,
        computation=high,
        measured_s=measured_s,
    )
    file = workdir / FILE
    file.write_text(json.dumps(calibration, indent=1) + "\n")
    return file


def measured_computation(path: Path, *, device: str, matmul_dtype: str) -> float:
    """The factor of a file that `calibrate` wrote, or of the one in a workdir.

    Raises:
      UserError: there is no such file, it is another one, or it is of another chip or precision.
    """
    # `--measured` takes the workdir that `--calibrate` wrote to, or its file.
    file = path / FILE if path.is_dir() else path
    try:
        calibration = json.loads(file.read_text())
        file_device, file_dtype, factor = (
            calibration["device"],
            calibration["matmul_dtype"],
            float(calibration["computation"]),
        )
    except OSError as error:
        raise UserError(
            f"--measured {path}: {error.strerror}. Write it with --calibrate WORKDIR, of a run on the same "
            "chip."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--measured {path}: {file} is not what --calibrate writes ({error!r}). Write it again."
        ) from error
    # The factor is of a chip's matmuls in one format.
    if (file_device, file_dtype) != (device, matmul_dtype):
        raise UserError(
            f"--measured {path} is of {file_device} with precision.matmul_dtype={file_dtype}, not of "
            f"{device} with {matmul_dtype}. Leave --measured out, or calibrate with a run of that kind."
        )
    return factor
