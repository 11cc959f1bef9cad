"""A process of a run: joins the others and prints what it sees, as JSON.

    python listen_and_sum.py [DEVICES]

Prints the GPUs that jax leaves visible, the number of processes, and the addresses at which this process
listens. With DEVICES emulated devices also the number of all devices, and the sum of 0, 1, ... over them.
"""

import json
import os
import sys
from typing import Any

import psutil
from jax._src import distributed, xla_bridge

from jtrain.runtime import multihost, platform

devices = int(sys.argv[1]) if len(sys.argv) > 1 else None
if devices:
    platform.start_jax(os.environ, emulate_devices=devices)
multihost.join_processes(os.environ)
answers: dict[str, Any] = {
    "visible": xla_bridge.CUDA_VISIBLE_DEVICES.value,
    "processes": distributed.global_state.num_processes,
}
if devices:
    import jax
    import jax.numpy as jnp

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_callback((count,), sharding, lambda index: jnp.arange(float(count))[index])
    answers |= {"devices": count, "sum": float(jax.jit(jnp.sum)(x))}
connections = psutil.Process().net_connections("inet")
answers["listening"] = [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]
print(json.dumps(answers))
