"""Settings that a config leaves open: `layout.auto`, `as_needed` shares of offload, the loss's chunk size.

The choice is written into the config, so config.txt holds it and a rerun keeps it. A rerun chooses again only
if the devices or a setting that changes a step's memory or time have changed, or if the old choice no longer
fits.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.config import tree
from jtrain.config.load import set_values
from jtrain.config.resume import config_from_text
from jtrain.config.run import build_run
from jtrain.errors import UserError
from jtrain.layout.layout import VOCABULARY_AXES
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import BATCH_AXES
from jtrain.layout.precision import itemsize
from jtrain.model.ops import best_chunk
from jtrain.plan.compile.compiled_step import topology_devices
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.fit_check import available_bytes, free_host_bytes
from jtrain.plan.from_run import search_task
from jtrain.plan.nothing_fits import no_point
from jtrain.plan.search import fastest_miss, resolve_as_needed, search
from jtrain.plan.search_task import evaluate, fits
from jtrain.runtime.multihost import from_process_zero, same_everywhere
from jtrain.step.layout_choices import auto_settings, layout_settings
from jtrain_kernels.device import DEVICES, DeviceSpec, Host, from_device, live

_CPU = dataclasses.replace(
    DEVICES["cpu"], peak_bf16_flops=1e12, hbm_bytes_per_s=5e10, link_bytes_per_s=1e10, host=Host(1, None, 1e9)
)
"""Nominal figures of a CPU, whose peaks are not published: here only the order of the predictions counts. It
has no link to host memory, because its memory is the host's."""


def devices_of(topology: str | None) -> list[jax.Device]:
    """The compile-only devices of a topology; without one, the devices of this process.

    Raises:
      UserError: the topology is unknown.
    """
    # A topology needs no device, only its compiler.
    return jax.devices() if topology is None else topology_devices(topology)


def choose_layout(run_config: Any, *, devices: Sequence[jax.Device], workdir: Path | None) -> list[str]:
    """Decides the open settings of a config; returns lines for the log.

    Args:
      run_config: config of a `Run`; changed in place.
      devices: all devices of the run.
      workdir: folder of an earlier attempt, whose choice is kept; None if there is none.

    Raises:
      UserError: nothing fits (the message has the closest layout); the devices' peaks are unknown; or
        processes see different workdirs and would train differently.
    """
    # The chunk comes first: the layout's memory depends on it.
    notes = choose_loss_chunk(run_config, live(devices[0])) + _choose_layout(run_config, devices, workdir)
    # Each process decides for itself; unequal configs would compile unequal steps.
    if notes and not same_everywhere(tree.flat(run_config)):
        raise UserError(
            f"{notes[0]}: other processes chose other settings, because {workdir} is not the same folder for "
            "all of them. Set --workdir to a shared folder, or layout.auto=False and the shares of "
            "layout.offload to numbers."
        )
    return notes


def choose_loss_chunk(run_config: Any, device: DeviceSpec) -> list[str]:
    """Sets `model.loss_chunk_tokens` if it is `auto`; returns lines for the log.

    Args:
      run_config: config of a `Run`; changed in place.
    """
    run = build_run(run_config)
    if run.model.loss_chunk_tokens != "auto":
        return []
    mesh = run.mesh.shape
    # Axes that split a microbatch's tokens or the vocabulary.
    shards = math.prod(mesh[axis] for axis in (*BATCH_AXES, "context", *VOCABULARY_AXES))
    tokens, reason = best_chunk(
        device,
        # Tokens of one device's microbatch.
        tokens=max(1, run.data.global_batch * run.data.seq_len // shards // run.layout.microbatches),
        d_model=run.model.d_model,
        vocab=run.model.vocab_size,
        itemsize=itemsize(run.precision.compute_dtype),
        shards=math.prod(mesh[axis] for axis in VOCABULARY_AXES),
    )
    set_values(run_config, {"model.loss_chunk_tokens": tokens})
    return [f"model.loss_chunk_tokens=auto: {tokens}, {reason}"]


def _choose_layout(run_config: Any, devices: Sequence[jax.Device], workdir: Path | None) -> list[str]:
    run = build_run(run_config)
    spec = run.layout
    shares = [path for path, value in layout_settings(spec).items() if value == "as_needed"]
    # The config leaves nothing open.
    if not spec.auto and not shares:
        return []
    machine = _machine(devices, run.mesh.size)
    task = search_task(run, machine)
    # `auto` decides all layout settings, else only the shares are open.
    open_paths = list(auto_settings(spec)) if spec.auto else shares
    subject = f"layout.auto on {machine}" if spec.auto else f"{', '.join(shares)} on {machine}"
    if (
        workdir is not None
        and (earlier_settings := _earlier_settings(run_config, open_paths, workdir, devices)) is not None
    ):
        set_values(run_config, earlier_settings)
        earlier_layout = build_run(run_config).layout
        # The free memory may be less than at the earlier attempt.
        if fits(task, evaluate(task, earlier_layout, run.mesh, timed=False).plan):
            return [f"{subject}: as before, {_settings_text(earlier_settings)}"]
    # Only the shares are open: the layout itself stays as the config says.
    if not spec.auto:
        chosen_settings = {path: layout_settings(resolve_as_needed(task, run.mesh))[path] for path in shares}
        set_values(run_config, chosen_settings)
        return [f"{subject}: the smallest that fits, {_settings_text(chosen_settings)}"]
    points = search(task, [run.mesh])
    if not points:
        raise no_point(task, run.mesh, fixed=True, is_local=not _compile_only(devices))
    # The fastest, because a search returns points in that order.
    best = points[0]
    set_values(run_config, auto_settings(best.spec))
    nominal = " (nominal: a CPU's peaks are not published)" if machine.device.platform == "cpu" else ""
    notes = [
        f"{subject}: {_settings_text(best.settings)}: the fastest layout that fits, {best.step_s:.3g} s per "
        f"step predicted{nominal}, {best.plan.total_bytes / 2**30:.2f} of {task.budget_bytes / 2**30:.2f} GiB"
    ]
    # Tells the user what more memory would buy.
    if (miss := fastest_miss(task, [run.mesh])) is not None and miss.step_s < best.step_s:
        notes.append(
            f"layout.auto: {_settings_text(miss.settings)} would take {miss.step_s:.3g} s, but needs "
            f"{miss.plan.total_bytes / 2**30:.2f} GiB"
        )
    if len(points) > 1:
        notes.append(
            f"layout.auto: the second fastest that fits, {_settings_text(points[1].settings)}, "
            f"{points[1].step_s:.3g} s"
        )
    return notes


def _machine(devices: Sequence[jax.Device], count: int) -> Machine:
    """The run's machine with the memory that is free on process 0, so that all processes choose alike.

    Raises:
      UserError: the devices' peaks are not published.
    """
    first_device = devices[0]
    spec = from_device(first_device)
    available = available_bytes(devices)
    if spec is None or available is None or (spec.platform != "cpu" and spec.peak_bf16_flops is None):
        raise UserError(
            "layout.auto and as_needed compare predicted times, but the peaks of "
            f"{first_device.device_kind!r} are "
            "not published. Set layout.auto=False, and layout.offload.* to numbers or none."
        )
    # A compile-only host has no free memory to read.
    compile_only = _compile_only(devices)
    devices_per_host = sum(device.process_index == jax.process_index() for device in devices)
    local_sizes = np.asarray(
        [available, 0 if compile_only or spec.platform == "cpu" else free_host_bytes() or 0], np.int64
    )
    # 0 stands for unknown, because only numbers travel between processes.
    hbm_bytes, host_bytes = (int(size) for size in from_process_zero(local_sizes))
    published = _CPU if spec.platform == "cpu" else spec
    # A run may have fewer devices per host than the data sheet.
    host = published.host if compile_only else dataclasses.replace(published.host, devices=devices_per_host)
    # CPU devices need no network between them: they share one machine.
    device_spec: DeviceSpec = dataclasses.replace(
        published,
        hbm_bytes=hbm_bytes,
        host=host,
        linked=count if spec.platform == "cpu" else published.linked,
    )
    return Machine(device_spec, count, host_bytes or None, has_this_install=True)


def _compile_only(devices: Sequence[jax.Device]) -> bool:
    """True if the devices are not here, only their compiler is."""
    return devices[0].platform != "cpu" and devices[0].client is not jax.local_devices()[0].client


def _earlier_settings(
    run_config: Any, open_paths: Sequence[str], workdir: Path, devices: Sequence[jax.Device]
) -> dict[str, object] | None:
    """The choice of an earlier attempt in this workdir; None if its config or its devices differ."""
    text_file, facts_file = workdir / "config.txt", workdir / "run.json"
    # The first attempt has neither file yet.
    if not (text_file.is_file() and facts_file.is_file()):
        return None
    # Both through the same text form, so that equal values compare equal.
    earlier_config, config = tree.parse(text_file.read_text()), tree.parse(tree.flat(run_config))
    # Fields that change the memory or the time of a step; others, such as names, may differ.
    compared_prefixes = (
        "mesh.",
        "layout.",
        "pipeline.",
        "precision.",
        "kernels",
        "data.global_batch",
        "data.seq_len",
    )
    compared_prefixes += ("model.", "optimizer.")
    is_same_config = all(
        earlier_config.get(path) == config[path]
        for path in config
        if path.startswith(compared_prefixes) and path not in open_paths
    )
    # Another number or kind of devices may fit another layout.
    facts = json.loads(facts_file.read_text())
    if not is_same_config or facts["devices"] != {"kind": devices[0].device_kind, "count": len(devices)}:
        return None
    earlier_layout = layout_settings(build_run(config_from_text(text_file.read_text())).layout)
    return {path: earlier_layout[path] for path in open_paths}


def _settings_text(settings: dict[str, object]) -> str:
    """Settings as text, such as `layout.remat=full`, without those of the mesh.

    Of more than three, those that a layout has anyway are left out, but for what every layout is asked about.
    """
    visible = {path: value for path, value in settings.items() if not path.startswith("mesh.")}
    # Few settings are those that the config left open: each is shown, whatever was chosen.
    if len(visible) > 3:
        asked, defaults = (
            ("layout.zero_stage", "layout.remat", "layout.microbatches"),
            layout_settings(LayoutSpec()),
        )
        visible = {
            path: value
            for path, value in visible.items()
            if path in asked or value != defaults.get(path, value)
        }
    return " ".join(f"{path}={value}" for path, value in visible.items())
