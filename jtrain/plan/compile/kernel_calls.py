"""Ops that a config's train step calls, with their arguments: what `bench kernels` measures for it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jtrain.config.run import build_run_optimizer
from jtrain.errors import UserError
from jtrain.layout.mesh import make_mesh
from jtrain.plan.from_run import plan_job
from jtrain.step.objective import abstract_batch
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from jtrain_kernels import registry
from jtrain_kernels.compat import lowering_for
from jtrain_kernels.compile_only.targets import TARGETS, TPUS, topology_devices
from jtrain_kernels.device import DeviceSpec, live


def devices_like(spec: DeviceSpec, count: int) -> list[jax.Device]:
    """`count` devices of one kind to trace for: those that are here if they are enough, else compile-only
    ones.

    Raises:
      UserError: neither exist.
    """
    live_devices = jax.devices()
    if live(live_devices[0]).name == spec.name and len(live_devices) >= count:
        return live_devices[:count]
    # A topology may have more devices than the mesh: to trace, the first ones will do.
    topologies = TPUS.get(spec.name, (f"{spec.name}:{count}",) if spec.name in TARGETS else ())
    for topology in topologies:
        if len(devices := topology_devices(topology)) >= count:
            return devices[:count]
    raise UserError(
        f"the mesh has {count} devices, but {len(live_devices)} x {live(live_devices[0]).name} are here, and "
        f"there is no compiler for {count} x {spec.name}. Set the mesh to the devices that are here, such as "
        f"--set mesh.data={len(live_devices)}, or name another device: {', '.join((*TARGETS, *TPUS))}."
    )


def kernel_calls(run: Any, devices: list[jax.Device]) -> tuple[tuple[registry.Op, registry.Avals], ...]:
    """Ops and arguments for which the train step asks the registry, each once, in order of first use.

    Args:
      run: a built `Run`, without open settings.
      devices: one for each place of the mesh, live or compile-only; nothing is computed or allocated on them.
    """
    job, optimizer = plan_job(run), build_run_optimizer(run)
    mesh = make_mesh(job.layout.mesh, devices)
    ids = jax.ShapeDtypeStruct(
        (job.global_batch, job.seq_len), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC)
    )
    step: Any = make_train_step(job.model, optimizer, job.layout, mesh, objective=job.objective)
    with registry.recording() as calls, lowering_for(mesh, live(devices[0])):
        step.trace(abstract_state(job.layout, optimizer, mesh), abstract_batch(ids, job.objective))
    # Layers that are alike ask with the same shapes.
    return tuple({(op.name, registry.shapes(avals)): (op, avals) for op, avals in calls}.values())
