"""Start of a training process: joins the others, opens the workdir, chooses what is `auto`, and trains."""

import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.config import tree
from jtrain.config.devices import resolve_mesh
from jtrain.config.resume import with_auto_remarks
from jtrain.config.run import Run, build_run
from jtrain.plan import auto_layout
from jtrain.runtime import accelerators
from jtrain.runtime.multihost import join_processes
from jtrain.runtime.platform import (
    compile_collectives_anew,
    devices_line,
    present_devices,
    user_cache,
)
from jtrain.runtime.process_comparison import compare_processes, this_process
from jtrain.runtime.stores import in_store
from jtrain.supervise.heart import Heart
from jtrain.telemetry.goodput import process_start_s
from jtrain.train import attempt
from jtrain.train.heartbeat import Heartbeat
from jtrain.train.store_mirror import open_workdir


def start(
    run_config: Any,
    run: Run,
    *,
    home: Path,
    environ: MutableMapping[str, str],
    heart: Heart | None,
    allow_change: Sequence[str],
    from_scratch: bool,
    dry_run: bool,
) -> int:
    """Starts an attempt of `run`, which `run_config` builds; returns the exit code.

    Args:
      home: folder of the run, or its URL in an object store.
      environ: names the other processes.
      heart: heartbeat to the supervisor; None if nobody supervises.
      allow_change, from_scratch: as of `attempt.train`.
      dry_run: prints the plan and ends, where `attempt.train` would lock the workdir.
    """
    if heart is not None:
        # The heartbeat begins before the processes join: one that hangs there is found too.
        heart.configure(run.supervise, run.alerts.in_workdir(None if in_store(home) else home))
        heart.enter("joining")
    config_text = tree.flat(run_config)
    # Before joining, so that every process has its description when the others ask for it.
    process = this_process(tree.parse(config_text))
    join_processes(environ, peer_s=run.supervise.peer_s)
    # Before devices are used: collectives between different versions could fail or wait for each other.
    hosts = compare_processes(process)
    devices = present_devices()
    if jax.process_index() == 0:
        print(devices_line(devices, hosts), flush=True)
    # Only where jax chose the CPU by itself: a set platform is a wish.
    if (
        devices[0].platform == "cpu"
        and not environ.get("JAX_PLATFORMS")
        and (line := accelerators.unused_warning(environ))
    ):
        print(line, file=sys.stderr, flush=True)
    if heart is not None:
        heart.joined(jax.process_index(), jax.process_count())
        heart.enter("setup")
    compile_collectives_anew()
    # Before the layout is chosen: a rerun takes it from the workdir.
    workdir, watchers = (home, []) if dry_run else open_workdir(home, environ)
    if heart is not None:
        heart.configure(run.supervise, run.alerts.in_workdir(workdir))
        watchers = [*watchers, Heartbeat(heart)]
    # Chosen after the devices are known, and noted in the config that is kept.
    devices, lines = resolve_mesh(run_config, devices)
    for line in (*lines, *auto_layout.choose_layout(run_config, devices=devices, workdir=workdir)):
        if jax.process_index() == 0:
            print(line, flush=True)
    run, config_text = build_run(run_config), with_auto_remarks(tree.flat(run_config), config_text)
    options: Any = dict(allow_change=allow_change, from_scratch=from_scratch, devices=devices)
    if dry_run:
        return attempt.dry_run(run, workdir=workdir, config_text=config_text, **options)
    return attempt.train(
        run,
        workdir=workdir,
        home=home,
        config_text=config_text,
        started_s=process_start_s(),
        watchers=watchers,
        cache=user_cache(environ),
        **options,
    )
