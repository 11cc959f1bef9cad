"""What libtpu and XLA call a machine of some number of devices."""

import itertools
import math

from jtrain_kernels.device import DeviceSpec

DEVICES_PER_CHIP = {"tpu7x": 2}
"""Topologies count chips; JAX counts the halves of these."""


def topology_of(device: DeviceSpec, count: int) -> str:
    """`h200:8`, `v5e:4x4`, `v5p:4x4x8`: the most cubic slice of so many devices; the compiler says whether it exists.

    Small slices are written longest side first (2x2x1), full ones the other way round (4x4x8), as Google does.

    Raises:
      ValueError: half a chip.
    """
    if device.platform != "tpu":
        return f"{device.name}:{count}"
    per_chip = DEVICES_PER_CHIP.get(device.name, 1)
    if count % per_chip:
        raise ValueError(f"--count {count}: a {device.name} has {per_chip} devices. Use {count + 1}.")
    chips, dims = count // per_chip, device.torus_dims or 1
    sides = [d for d in range(1, chips + 1) if chips % d == 0]
    shapes = [s for s in itertools.combinations_with_replacement(sides, dims) if math.prod(s) == chips]
    shape = min(shapes, key=lambda s: (sum(s), s))
    if 1 in shape:
        shape = tuple(reversed(shape))
    return f"{device.name}:{'x'.join(map(str, shape))}"
