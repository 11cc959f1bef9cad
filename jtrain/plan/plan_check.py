"""Verdict on one plan: the largest batch that fits, and the refusal of a plan that cannot be relied on."""

import dataclasses
import math
import re

from jtrain.errors import UserError
from jtrain.plan.estimate.machine import HOST_RESERVE
from jtrain.plan.fit_check import ways_out
from jtrain.plan.report.plan_sheet import TOLERANCE, Sheet
from jtrain.plan.search import Point, SearchTask, evaluate, fits


def largest_rows(task: SearchTask, point: Point) -> int:
    """Most sequences per device that fit at a time, with the same number of microbatches; 0 if not even one fits."""
    task = dataclasses.replace(task, memory_share=1.0)
    shards = point.mesh.batch_shards * point.spec.microbatches

    def fit(rows: int) -> bool:
        larger = task.changed(global_batch=rows * shards)
        return fits(larger, evaluate(larger, point.spec, point.mesh, timed=False).plan, host_known=False)

    if not fit(1):
        return 0
    high = 2
    while fit(high) and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def check_good(sheet: Sheet) -> None:
    """Refuses a plan that does not fit or that cannot be relied on.

    Raises:
      UserError: the plan does not fit, or formula and compiler are too far apart.
    """
    difference = sheet.difference
    if difference is not None and sheet.compiled is not None and abs(difference) > TOLERANCE:
        raise UserError(
            f"not a good plan: the formula says {sheet.plan.total_bytes / 2**30:.2f} GiB per device and the compiler "
            f"{sheet.compiled.peak_bytes / 2**30:.2f}, {difference:+.0%}. They are more than {TOLERANCE:.0%} apart, so "
            "neither can be relied on. Set layout.remat=full or more layout.microbatches for a margin, and report this."
        )
    takes = sheet.plan.total_bytes if sheet.compiled is None else sheet.compiled.peak_bytes
    there = sheet.machine.host_bytes_per_device
    if there is not None and sheet.plan.host_bytes > there:
        needed = math.ceil(sheet.plan.host_bytes * sheet.machine.devices_per_host / (1 - HOST_RESERVE) / 2**30)
        raise UserError(
            f"{sheet.config} does not fit {sheet.machine}: {sheet.plan.host_bytes / 2**30:.1f} GiB of host memory per "
            f"device, but its share of the host is {there / 2**30:.1f}, with {HOST_RESERVE:.0%} left free. Give "
            f"--host-memory {needed}GiB if the host has it, or set smaller shares of layout.offload."
        )
    room = sheet.machine.room_bytes(unified=sheet.job.layout.spec.offload.unified_memory)
    if takes > room:
        ways = ways_out(sheet.job, limit=room, host=there is not None)
        # Here --count sets the devices, and the mesh follows.
        mesh = sheet.job.layout.mesh
        others = mesh.size // mesh.replica // mesh.shape["data"]
        ways = [re.sub(r"--set mesh\.data=(\d+)", lambda m: f"--count {int(m[1]) * others}", way) for way in ways]
        listed = ", or any of:\n" + "\n".join(ways) if ways else ", --host-memory SIZE or a larger --count."
        raise UserError(
            f"{sheet.config} does not fit {sheet.machine}: {takes / 2**30:.1f} of "
            f"{room / 2**30:.1f} GiB per device. Add --search{listed}"
        )
