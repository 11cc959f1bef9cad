"""`mesh.data=auto`: how many of the devices that are here a run takes, and which; its microbatches there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jtrain.config.load import choose_microbatches
from jtrain.config.run import Run, build_run, validate
from jtrain.errors import UserError, first_few
from jtrain.layout.batch_split import split_batch


def resolve_mesh(run_config: Any, devices: Sequence[jax.Device]) -> tuple[list[jax.Device], list[str]]:
    """Sets `mesh.data` if it is `auto`, then `layout.microbatches` by `layout.microbatch_tokens`; returns the
    devices of the run, and lines for the log.

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
        return list(devices), choose_microbatches(run_config)
    processes = len({device.process_index for device in devices})
    # With `data=1`, the size of the mesh is the product of the other axes.
    other_axes = run.mesh.resolve_data(1)
    refusal = None
    # From the most devices down: the first number that every check passes is the largest.
    for devices_per_process in range(len(devices) // processes, 0, -1):
        data, leftover = divmod(devices_per_process * processes, other_axes.size)
        if leftover or not data:
            continue
        try:
            _check(run, data)
        except UserError as error:
            # The first refusal is the one to name: later ones are about fewer devices.
            refusal = refusal or error
            continue
        # Written into the config, so that config.txt tells what the run really used.
        run_config.mesh.data = data
        taken_devices, lines = _take_devices(
            devices, devices_per_process, data, refusal or _axes(other_axes.shape, other_axes.size)
        )
        return taken_devices, [*lines, *choose_microbatches(run_config)]
    device_count = _count(len(devices), devices[0].platform)
    process_text = f" in {processes} processes, which each take equally many" if processes > 1 else ""
    if refusal is not None:
        raise UserError(
            f"mesh.data=auto finds no number of devices that suits: {device_count}{process_text}. {refusal}"
        )
    raise UserError(
        f"{device_count}{process_text}, but {_axes(other_axes.shape, other_axes.size)}. Set them lower, or "
        f"add --emulate-devices {other_axes.size} to try the layout on this CPU."
    )


def _check(run: Run, data: int) -> None:
    """Checks the run with `data` devices along that axis."""
    mesh = run.mesh.resolve_data(data)
    layout = split_batch(run.layout, mesh, global_batch=run.data.global_batch, seq_len=run.data.seq_len)
    validate(dataclasses.replace(run, mesh=mesh, layout=layout))


def _take_devices(
    devices: Sequence[jax.Device], devices_per_process: int, data: int, why_idle: object
) -> tuple[list[jax.Device], list[str]]:
    """Returns the first `devices_per_process` devices of every process, and the lines that say so."""
    taken_devices, num_seen = [], dict[int, int]()
    idle = []
    for device in devices:
        # Counted per process in the order of jax.devices(), which is the same everywhere.
        num_seen[device.process_index] = num_seen.get(device.process_index, 0) + 1
        (taken_devices if num_seen[device.process_index] <= devices_per_process else idle).append(device)
    prefix = f"mesh.data=auto: {data}, on "
    if not idle:
        return taken_devices, [
            f"{prefix}all {len(devices)} devices" if len(devices) > 1 else f"{prefix}the one device"
        ]
    names = first_few([f"{device.platform}:{device.id}" for device in idle], 8)
    verb = "stays" if len(idle) == 1 else "stay"
    return taken_devices, [
        f"{prefix}{len(taken_devices)} of the {len(devices)} devices that are here; {names} {verb} idle",
        f"to use more: {why_idle}",
    ]


def _axes(shape: dict[str, int], size: int) -> str:
    """Says how many devices the axes beside `data` take together."""
    product = " * ".join(f"mesh.{axis}={n}" for axis, n in shape.items() if n > 1)
    return f"{product} takes {size} devices at a time"


def _count(number: int, platform: str) -> str:
    return f"{number} device{' is' if number == 1 else 's are'} here ({platform})"
