"""Cost of a run over the size of its cluster: time, money, energy and CO2, with failures.

For every number of devices the fastest layout that fits is searched for (without pipeline stages), so the
curve is that of a run with `layout.auto`. More devices finish sooner, but wait longer for the network and for
each other's failures.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.config.run import Run
from jtrain.plan.economics.failures import Failures, Uptime, save_seconds, uptime
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.step_time import Cost, StepTime, cost
from jtrain.plan.from_run import search_task
from jtrain.plan.search import meshes, search
from jtrain.plan.search_task import Point

CARBON_G_PER_KWH = 473.0
"""CO2 of a kWh, in g: the world's mean of 2024 (Ember, Global Electricity Review 2025)."""

J_PER_KWH = 3.6e6

LEAST_GOODPUT = 0.01
"""Goodput below which a run counts as never ending."""


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One size of the cluster.

    point: fastest layout; None where none fits, as are `uptime` and `cost`.
    cost: None also where failures come so often that hardly any interval between saves ends.
    """

    count: int
    point: Point | None = None
    uptime: Uptime | None = None
    cost: Cost | None = None

    @property
    def timed(self) -> StepTime:
        """The predicted step."""
        assert self.point is not None
        assert self.point.timed is not None
        return self.point.timed

    def to_json(self, carbon_g_per_kwh: float) -> dict[str, Any]:
        """The row as `--json` writes it; without figures where there is no cost."""
        # `fits` tells a size that nothing fits from one that fails too often.
        if self.point is None or self.uptime is None or self.cost is None:
            return {"count": self.count, "fits": self.point is not None}
        # None where the chip's power is not published.
        energy = self.cost.energy_j
        return {
            "count": self.count,
            "fits": True,
            "settings": self.point.settings,
            "step_s": self.timed.step_s,
            "tokens_per_s": self.timed.tokens_per_s,
            "mfu": self.timed.mfu,
            "goodput": self.uptime.goodput,
            "checkpoint_every_steps": self.uptime.every_steps,
            "mtbf_s": self.uptime.mtbf_s,
            "days": self.cost.days,
            "device_hours": self.cost.device_hours,
            "usd": self.cost.usd,
            "mwh": None if energy is None else energy / J_PER_KWH / 1000,
            "joules_per_token": None if energy is None else energy / self.cost.tokens,
            # A tonne is 1e6 g.
            "co2_tonnes": None if energy is None else energy / J_PER_KWH * carbon_g_per_kwh / 1e6,
        }


def cost_row(
    run: Run, machine: Machine, *, tokens: int, failures: Failures, usd_per_hour: float | None = None
) -> CostRow:
    """Cost of training a run's model on `tokens` with the fastest layout that fits the machine.

    Raises:
      UserError: the machine lacks a figure that a prediction needs.
    """
    task = search_task(run, machine)
    # One point is enough, and lets the search stop at the first slower group.
    points = search(task, meshes(task), keep=1)
    if not points:
        return CostRow(machine.count)
    point = points[0]
    assert point.timed is not None
    save_s = save_seconds(point.plan, machine, task.assume)
    # The interval between saves is never longer than the run.
    steps = tokens // point.job.tokens
    run_uptime = uptime(failures, devices=machine.count, steps=steps, step_s=point.step_s, save_s=save_s)
    # The cost would be divided by a goodput of nearly 0.
    if run_uptime.goodput < LEAST_GOODPUT:
        return CostRow(machine.count, point, run_uptime)
    run_cost = cost(
        point.timed, machine, tokens=tokens, goodput=run_uptime.goodput, usd_per_hour=usd_per_hour
    )
    return CostRow(machine.count, point, run_uptime, run_cost)


@dataclasses.dataclass(frozen=True)
class ChipComparison:
    """Another chip beside the first, on as many devices; ratios are the other's by the first's.

    speed: tokens per second of wall time. cost: money per token. energy: joules per token; None if unknown.
    """

    count: int
    speed: float
    cost: float
    energy: float | None


def compare(
    rows: Sequence[CostRow], others: Sequence[CostRow], *, price_ratio: float
) -> list[ChipComparison]:
    """Compares two curves over the same counts, where both have a cost.

    Args:
      price_ratio: price of the other device by that of the first.
    """
    comparisons: list[ChipComparison] = []
    for row, other_row in zip(rows, others, strict=True):
        if row.cost is None or other_row.cost is None:
            continue
        # By wall time, so failures and saves count as well.
        speed = row.cost.wall_s / other_row.cost.wall_s
        energy = None
        if row.cost.energy_j is not None and other_row.cost.energy_j is not None:
            energy = other_row.cost.energy_j / row.cost.energy_j
        # Money per token: the price by the speed.
        comparisons.append(ChipComparison(row.count, speed, price_ratio / speed, energy))
    return comparisons


def cheapest(rows: Sequence[CostRow]) -> CostRow | None:
    """The size with the fewest device hours; None if none has a cost."""
    return min((row for row in rows if row.cost is not None), key=_device_hours, default=None)


def fastest(rows: Sequence[CostRow]) -> CostRow | None:
    """The size that finishes first; None if none has a cost."""
    return min((row for row in rows if row.cost is not None), key=_days, default=None)


def _device_hours(row: CostRow) -> float:
    assert row.cost is not None
    return row.cost.device_hours


def _days(row: CostRow) -> float:
    assert row.cost is not None
    return row.cost.days


def mesh_text(settings: Mapping[str, object]) -> str:
    """The mesh and the ZeRO stage of a layout's settings in a few words, such as `data=64 zero=3`."""
    # 5 is the length of "mesh.".
    axes = [f"{path[5:]}={size}" for path, size in settings.items() if path.startswith("mesh.") and size != 1]
    return " ".join([*axes, f"zero={settings['layout.zero_stage']}"])
