"""Prints the page faults of a step whose temporaries are 64 MiB.

    python count_page_faults.py keep|default

keep: with jtrain's setting of malloc.
"""

import os
import resource
import sys

import jax
import jax.numpy as jnp

from jtrain.runtime import platform

if sys.argv[1] == "keep":
    platform.start_jax(os.environ)  # as every command line begins
jax.devices()
step = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.outer(x, x)).sum())
x = jnp.ones(4096)
counts: list[int] = []
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(counts)[4])  # the heap takes some steps to reach its size
