"""Verdict on one plan: the largest batch that fits, and the refusal of a plan that cannot be relied on."""

import dataclasses
import math
from collections.abc import Mapping

from jtrain.errors import UserError
from jtrain.plan.nothing_fits import first_fit, suggest_changes
from jtrain.plan.report.plan_sheet import TOLERANCE, Sheet
from jtrain.plan.search_task import Point, SearchTask, evaluate, fits
from jtrain.plan.smaller_settings import fitting_settings, option_lines
from jtrain.runtime.platform import HOST_SHARE


def largest_rows(task: SearchTask, point: Point) -> int:
    """Most sequences per device that fit at a time, with the same number of microbatches; 0 if none fits."""
    # The whole room, because the sheet compares with the whole room too.
    task = dataclasses.replace(task, memory_share=1.0)
    shards = point.mesh.batch_shards * point.spec.microbatches

    def fit(rows: int) -> bool:
        larger = task.changed(global_batch=rows * shards)
        return fits(larger, evaluate(larger, point.spec, point.mesh, timed=False).plan, host_known=False)

    if not fit(1):
        return 0
    # Doubles until it does not fit, then halves the gap.
    high = 2
    while fit(high) and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def check_plan(sheet: Sheet, config_values: Mapping[str, str]) -> None:
    """Refuses a plan that does not fit or that cannot be relied on.

    Args:
      config_values: path -> value as text, of the config.

    Raises:
      UserError: the plan does not fit, or formula and compiler are too far apart.
    """
    difference = sheet.difference
    if difference is not None and sheet.compiled is not None and abs(difference) > TOLERANCE:
        raise UserError(
            f"not a good plan: the formula says {sheet.plan.total_bytes / 2**30:.2f} GiB per device and the "
            f"compiler {sheet.compiled.peak_bytes / 2**30:.2f}, {difference:+.0%}. They are more than "
            f"{TOLERANCE:.0%} apart, so neither can be relied on. Set layout.remat=full or more "
            "layout.microbatches for a margin, and report this."
        )
    # The compiler's figure, where there is one, is the better.
    peak_bytes = sheet.plan.total_bytes if sheet.compiled is None else sheet.compiled.peak_bytes
    host_capacity = sheet.machine.host_bytes_per_device
    if host_capacity is not None and sheet.plan.host_bytes > host_capacity:
        host_gib = math.ceil(sheet.plan.host_bytes * sheet.machine.devices_per_host / HOST_SHARE / 2**30)
        raise UserError(
            f"{sheet.config} does not fit {sheet.machine}: {sheet.plan.host_bytes / 2**30:.1f} GiB of host "
            f"memory per device, but its share of the host is {host_capacity / 2**30:.1f}, with "
            f"{1 - HOST_SHARE:.0%} "
            f"left free. Give --host-memory {host_gib}GiB if the host has it, or set smaller shares of "
            "layout.offload."
        )
    room_bytes = sheet.machine.room_bytes(sheet.job.layout.spec)
    if peak_bytes > room_bytes:
        # In bytes of the formula, which is off from the compiler by this ratio.
        limit = int(room_bytes * sheet.plan.total_bytes / peak_bytes)
        raise UserError(
            f"{sheet.config} does not fit {sheet.machine}: {peak_bytes / 2**30:.1f} of "
            f"{room_bytes / 2**30:.1f} GiB per device. {_fitting_advice(sheet, limit, config_values)}"
        )


def _fitting_advice(sheet: Sheet, limit: int, config_values: Mapping[str, str]) -> str:
    """Options that make the plan fit: settings of these devices, a search, or another machine."""
    task = SearchTask(sheet.job, sheet.job.layout.spec)
    fit = first_fit(task)
    # The mesh is part of the settings, so that --count leaves it as it is.
    lines = option_lines(fitting_settings(sheet.job, limit=limit), config_values)
    if fit is not None and fit.mesh.size == sheet.machine.count:
        lines.insert(0, "  --search")
    else:
        suggestions = suggest_changes(task, None, fixed=False)
        lines += [
            f"  --search {suggestion}"
            for suggestion in suggestions
            if not (lines and suggestion.startswith("--set"))
        ]
    return "Any of these fits:\n" + "\n".join(lines) if lines else "Set a smaller model."
