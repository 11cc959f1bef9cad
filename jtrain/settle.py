"""What a config leaves to the devices, settled before a run: `layout.auto`, shares of offload left `as_needed`, and the
chunks of the loss.

What was picked goes into the config, so config.txt holds it, and a rerun keeps it: it picks anew only where the
devices, the batch or the rest of the layout are others, or where it would no longer fit.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain import config, leaves
from jtrain.guard import same_everywhere
from jtrain.loss_chunk import settle_loss_chunk
from jtrain.plan.aot import topology_devices
from jtrain.plan.fit import available_bytes
from jtrain.plan.network import Machine
from jtrain.plan.search import (
    Job,
    evaluate,
    fastest_miss,
    fits,
    layout_settings,
    no_point,
    resolve_as_needed,
    search,
)
from jtrain_kernels.device import DEVICES, DeviceSpec, Host, from_device, live

_CPU = dataclasses.replace(
    DEVICES["cpu"], peak_bf16_flops=1e12, hbm_bytes_per_s=5e10, link_bytes_per_s=1e10, host=Host(1, None, 1e9)
)
"""Nominal: nobody publishes a CPU's peaks, and only the order of predictions counts here. No link to a host's memory:
it is the same memory."""

_HOST_SHARE = 0.8
"""Of the host's memory that is free: the rest is for the data and the checkpoints."""


def devices_of(topology: str | None) -> list[jax.Device]:
    """The devices of a topology, to compile for; without one those that are here.

    Raises:
      ValueError: no such topology.
    """
    return jax.devices() if topology is None else topology_devices(topology)


def settle(run_config: Any, *, devices: Sequence[jax.Device], workdir: Path | None) -> list[str]:
    """Sets in the config what it leaves open; returns what to say about it.

    Args:
      run_config: of a `Run`; changed in place.
      devices: all of the run's.
      workdir: where an earlier attempt may have picked; None looks for none.

    Raises:
      ValueError: nothing fits, with what comes closest; the devices' peaks are unknown; or processes see different
        workdirs and would not train the same.
    """
    notes = settle_loss_chunk(run_config, live(devices[0])) + _settle(run_config, devices, workdir)
    if notes and not same_everywhere(leaves.flat(run_config)):
        raise ValueError(
            f"{notes[0]}: other processes settled otherwise, as {workdir} is not the same folder for all of them. Set "
            "--workdir to a shared one, or layout.auto=False and the shares of layout.offload to numbers."
        )
    return notes


def _settle(run_config: Any, devices: Sequence[jax.Device], workdir: Path | None) -> list[str]:
    run = config.build(run_config)
    spec = run.layout
    shares = [path for path, value in layout_settings(spec).items() if value == "as_needed"]
    if not spec.auto and not shares:
        return []
    machine = _machine(devices, run.mesh.size)
    infos = run.model.param_infos()
    job = Job(run.model, infos, run.optimizer, spec, machine, run.data.global_batch, run.data.seq_len)
    open_paths = list(layout_settings(spec)) if spec.auto else shares
    said = f"layout.auto on {machine}" if spec.auto else f"{', '.join(shares)} on {machine}"
    if workdir is not None and (kept := _picked_before(run_config, open_paths, workdir, devices)) is not None:
        config.set_values(run_config, kept)
        again = config.build(run_config).layout
        if fits(job, evaluate(job, again, run.mesh, timed=False).plan):
            return [f"{said}: as before, {_text(kept)}"]
    if not spec.auto:
        picked = {path: layout_settings(resolve_as_needed(job, run.mesh))[path] for path in shares}
        config.set_values(run_config, picked)
        return [f"{said}: the smallest that fits, {_text(picked)}"]
    points = search(job, [run.mesh])
    if not points:
        raise no_point(job, lambda job: [run.mesh], fixed=True)
    best = points[0]
    config.set_values(run_config, layout_settings(best.spec))
    nominal = " (nominal: a CPU's peaks are not published)" if machine.device.platform == "cpu" else ""
    notes = [
        f"{said}: {_text(best.settings)}: the fastest of {len(points)} that fit, {best.step_s:.3g} s a step "
        f"predicted{nominal}, {best.plan.total_bytes / 2**30:.2f} of {job.budget_bytes / 2**30:.2f} GiB"
    ]
    if (miss := fastest_miss(job, [run.mesh])) is not None and miss.step_s < best.step_s:
        notes.append(
            f"layout.auto: {_text(miss.settings)} would take {miss.step_s:.3g} s, but "
            f"{miss.plan.total_bytes / 2**30:.2f} GiB"
        )
    if len(points) > 1:
        notes.append(f"layout.auto: the next that fits, {_text(points[1].settings)}, {points[1].step_s:.3g} s")
    return notes


def _machine(devices: Sequence[jax.Device], count: int) -> Machine:
    """These devices with what they may use, as process 0 sees it: every process has to pick the same.

    Raises:
      ValueError: nobody says what they can do.
    """
    first = devices[0]
    spec = from_device(first)
    available = available_bytes(devices)
    if spec is None or available is None or (spec.platform != "cpu" and spec.peak_bf16_flops is None):
        raise ValueError(
            f"layout.auto and as_needed compare predictions, but nothing is published of a {first.device_kind!r}. Set "
            "layout.auto=False, and layout.offload.* to shares or none."
        )
    compile_only = first.platform != "cpu" and first.client is not jax.local_devices()[0].client
    per_host = jax.local_device_count()
    here = np.asarray([available, 0 if compile_only or spec.platform == "cpu" else _free_host_bytes()], np.int64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        here = multihost_utils.broadcast_one_to_all(here)
    hbm_bytes, host_bytes = int(here[0]), int(here[1])
    known = _CPU if spec.platform == "cpu" else spec
    host = known.host if compile_only else dataclasses.replace(known.host, devices=per_host)
    described: DeviceSpec = dataclasses.replace(
        known, hbm_bytes=hbm_bytes, host=host, linked=count if spec.platform == "cpu" else known.linked
    )
    return Machine(described, count, int(host_bytes * _HOST_SHARE) or None)


def _free_host_bytes() -> int:
    """Memory of this host that is free; 0 where nothing says."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return 0
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _picked_before(
    run_config: Any, open_paths: Sequence[str], workdir: Path, devices: Sequence[jax.Device]
) -> dict[str, object] | None:
    """What an earlier attempt in this workdir picked, if it was asked the same on devices of the same kind."""
    text_file, facts_file = workdir / "config.txt", workdir / "run.json"
    if not (text_file.is_file() and facts_file.is_file()):
        return None
    there, here = leaves.parse(text_file.read_text()), leaves.parse(leaves.flat(run_config))
    asked = ("mesh.", "layout.", "data.global_batch", "data.seq_len", "model.", "optimizer.")
    same = all(there.get(path) == here[path] for path in here if path.startswith(asked) and path not in open_paths)
    facts = json.loads(facts_file.read_text())
    if not same or facts["devices"] != {"kind": devices[0].device_kind, "count": len(devices)}:
        return None
    earlier = layout_settings(config.build(config.read(text_file.read_text())).layout)
    return {path: earlier[path] for path in open_paths}


def _text(settings: dict[str, object]) -> str:
    """`layout.zero_stage=3 layout.remat=full`: without the mesh, and of several settings without what is empty."""
    shown = {path: value for path, value in settings.items() if not path.startswith("mesh.")}
    if len(shown) > 3:
        may_be_empty = ("layout.remat_save", "layout.offload.")
        defaults = [path for path, value in shown.items() if value in ("none", (), "device")]
        empty = [path for path in defaults if path.startswith(may_be_empty)]
        shown = {path: value for path, value in shown.items() if path not in empty}
    return " ".join(f"{path}={value}" for path, value in shown.items())
