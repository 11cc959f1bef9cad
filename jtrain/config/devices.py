"""`mesh.data=auto`: how many of the devices that are here a run takes, and which."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jtrain.config.run import Run, build_run, validate
from jtrain.errors import UserError, first_few


def resolve_mesh(run_config: Any, devices: Sequence[jax.Device]) -> tuple[list[jax.Device], list[str]]:
    """Sets `mesh.data` if it is `auto`; returns the devices of the run, and lines for the log.

    `data` becomes the largest number that every check of the config passes: above all, the batch must split
    over it. Each process keeps the same number of its devices, the first ones; the others stay idle. A mesh
    of fixed size takes all devices (`make_mesh` refuses another number).

    Args:
      run_config: config of a `Run`; changed in place.
      devices: all devices of the run's processes; each process has the same number.

    Raises:
      UserError: the config is wrong, or no number of devices suits it.
    """
    run = build_run(run_config)
    if run.mesh.data != "auto":
        return list(devices), []
    processes = len({device.process_index for device in devices})
    others = run.mesh.with_data(1)
    refusal = None
    for each in range(len(devices) // processes, 0, -1):
        data, left = divmod(each * processes, others.size)
        if left or not data:
            continue
        try:
            _check(run, data)
        except UserError as error:
            refusal = refusal or error
            continue
        run_config.mesh.data = data
        return _taken(devices, each, data, refusal or _axes(others.shape, others.size))
    here = _count(len(devices), devices[0].platform)
    inside = f" in {processes} processes, which each take equally many" if processes > 1 else ""
    if refusal is not None:
        raise UserError(f"mesh.data=auto finds no number of devices that suits: {here}{inside}. {refusal}")
    raise UserError(
        f"{here}{inside}, but {_axes(others.shape, others.size)}. Set them lower, or add --emulate-devices "
        f"{others.size} to try the layout on this CPU."
    )


def _check(run: Run, data: int) -> None:
    """Checks the run with `data` devices along that axis."""
    validate(dataclasses.replace(run, mesh=run.mesh.with_data(data)))


def _taken(
    devices: Sequence[jax.Device], each: int, data: int, why_idle: object
) -> tuple[list[jax.Device], list[str]]:
    """Returns the first `each` devices of every process, and the lines that say so."""
    taken, seen = [], dict[int, int]()
    idle = []
    for device in devices:
        seen[device.process_index] = seen.get(device.process_index, 0) + 1
        (taken if seen[device.process_index] <= each else idle).append(device)
    said = f"mesh.data=auto: {data}, on "
    if not idle:
        return taken, [f"{said}all {len(devices)} devices" if len(devices) > 1 else f"{said}the one device"]
    names = first_few([f"{device.platform}:{device.id}" for device in idle], 8)
    verb = "stays" if len(idle) == 1 else "stay"
    return taken, [
        f"{said}{len(taken)} of the {len(devices)} devices that are here; {names} {verb} idle",
        f"to use more: {why_idle}",
    ]


def _axes(shape: dict[str, int], size: int) -> str:
    """Says how many devices the axes beside `data` take together."""
    product = " * ".join(f"mesh.{axis}={n}" for axis, n in shape.items() if n > 1)
    return f"{product} takes {size} devices at a time"


def _count(number: int, platform: str) -> str:
    return f"{number} device{' is' if number == 1 else 's are'} here ({platform})"
