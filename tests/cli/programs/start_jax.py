"""Starts jax as every command does; prints how many devices it has, their platform and the cache's folder.

    python start_jax.py DEVICES [compile]

DEVICES: number of emulated ones, 0 for those that are there. compile: compiles a loop as well.
"""

import os
import sys

from jtrain.runtime import platform

count, *more = sys.argv[1:]
platform.start_jax(os.environ, emulate_devices=int(count) or None)
import jax  # noqa: E402, after the variables are set
import jax.numpy as jnp  # noqa: E402

print(len(jax.devices()), jax.devices()[0].platform, jax.config.jax_compilation_cache_dir)
if more == ["compile"]:
    platform.compile_collectives_anew()
    repeat = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda i, x: x @ x, x))
    repeat(jnp.ones((99, 99))).block_until_ready()
