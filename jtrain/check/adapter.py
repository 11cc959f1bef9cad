"""Adapter off = base: what is frozen stays, bit for bit, and the adapter begins as nothing and is trained."""

from collections.abc import Sequence

import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.packing import OneDevice
from jtrain.check.records import Sample
from jtrain.check.rounding import MARGIN, RUNS, moved
from jtrain.config.course import LOSS, Course
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import ParamInfo


def adapter_off_is_base(course: Course, infos: Sequence[ParamInfo], device: OneDevice, sample: Sample) -> str:
    """Proves that a run with its adapter switched off is its base.

    Args:
      course: updates of the run with its adapter, whose evaluation is of `sample` before the first one.
      device: the base alone.

    Raises:
      Differs: names the tensor that moved, or did not, or the record that the first adapter changes.
    """
    frozen = [info.path for info in infos if info.frozen]
    added = [info.path for info in infos if info.is_adapter]
    for path in frozen:
        if course.first[path].tobytes() != course.last[path].tobytes():
            raise Differs(f"{path} is frozen, and {len(course.losses)} updates have changed it")
    for path in added:
        if np.array_equal(course.first[path], course.last[path]):
            raise Differs(f"{path} is of the adapter, and {len(course.losses)} updates have not moved it")
    assert course.nats_BL is not None
    base = device.sums(sample).nats
    runs = [device.sums(sample, moved(device.params, seed)).nats for seed in range(RUNS)]
    spread = float(np.max(np.abs(np.asarray(runs) - base)))
    for number, piece in enumerate(sample.pieces):
        nats = piece.of(course.nats_BL)[piece.of(sample.arrays["target_BL"]) != IGNORE].sum(dtype=np.float64)
        if not abs(nats - base[number]) <= LOSS * abs(base[number]) + MARGIN * spread:
            raise Differs(
                f"nats {nats:.6g} with the first adapter, {base[number]:.6g} without; first record that differs: "
                f"{piece.place}"
            )
    return f"{len(frozen)} frozen arrays bit for bit after {len(course.losses)} updates, {len(added)} trained"
