"""Topology names of libtpu and XLA for a number of devices."""

import itertools
import math

from jtrain.errors import UserError
from jtrain_kernels.device import DeviceSpec

DEVICES_PER_CHIP = {"tpu7x": 2}
"""Device -> JAX devices per chip: topologies count chips, and a TPU7x chip is two JAX devices."""


def topology_of(device: DeviceSpec, count: int) -> str:
    """Name of the most cubic slice of `count` devices, such as `h200:8`, `v5e:4x4` or `v5p:4x4x8`.

    The slice may not exist: the compiler refuses it then. As in Google's names, small slices have their
    longest side first (2x2x1), full ones last (4x4x8).

    Raises:
      UserError: the count is not a whole number of chips.
    """
    if device.platform != "tpu":
        return f"{device.name}:{count}"
    per_chip = DEVICES_PER_CHIP.get(device.name, 1)
    if count % per_chip:
        raise UserError(f"--count {count}: a {device.name} chip has {per_chip} devices. Use {count + 1}.")
    chips, dims = count // per_chip, device.torus_dims or 1
    sides = [d for d in range(1, chips + 1) if chips % d == 0]
    shapes = [s for s in itertools.combinations_with_replacement(sides, dims) if math.prod(s) == chips]
    shape = min(shapes, key=lambda s: (sum(s), s))
    # Google writes a flat slice with its longest side first.
    if 1 in shape:
        shape = tuple(reversed(shape))
    return f"{device.name}:{'x'.join(map(str, shape))}"
