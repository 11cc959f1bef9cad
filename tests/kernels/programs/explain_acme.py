"""Explains the choice of rms_norm with a new back end on two chips, and runs its kernel."""

import jax.numpy as jnp

from jtrain.bench.__main__ import bench
from jtrain_kernels import device, registry
from jtrain_kernels.rms_norm.api import rms_norm

for name in ("acme1", "h200"):
    bench(["kernels", "--explain", "rms_norm", "--device", name])
with registry.on(device.from_name("cpu"), forced={"rms_norm": "acme"}):
    print(rms_norm(jnp.full((8, 4), 2.0), jnp.ones(4), 0.0)[0])
