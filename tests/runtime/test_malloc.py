import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"

COUNT_FAULTS = """
import os, resource, sys
import jax, jax.numpy as jnp
from jtrain.runtime import platform

if sys.argv[1] == "keep":
    platform.start_jax(os.environ)  # as every command line begins
jax.devices()
step = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.outer(x, x)).sum())  # 64 MiB of temporaries
x, counts = jnp.ones(4096), []
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(counts)[4])  # the heap takes some steps to reach its size
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_step_reuses_the_pages_of_the_step_before() -> None:
    """Compares page faults per step in a process with the setting and one without: 64 MiB are 16384 pages."""

    def faults(mode: str) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=KERNELS)
        return int(done.stdout)

    without = faults("default")
    assert without > 10_000, "nothing to save, so the next line would prove nothing"
    assert faults("keep") < without / 10
