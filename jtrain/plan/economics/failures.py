"""Goodput of a run on devices that fail, and the best number of steps between checkpoints.

Every failure of one device ends the whole run: the work since the last checkpoint is done again, after a
restart. A run saves after every `interval_s` of training, and each save stops training for `save_s`. With
failures at random (a Poisson process) the expected wall time of one interval is M e^(R/M) (e^((interval +
save) / M) - 1), with M the mean time between failures of all devices together and R the time of a restart;
saves and restarts can fail, too.

Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22
  (2006).
"""

import dataclasses
import math

from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.step_time import Assumptions
from jtrain_kernels.device import DeviceSpec

MTBF_HOURS = 50_700.0
"""Mean time between failures of one device, with its share of the host and the network: 419 unexpected
interruptions in 54 days on 16,384 H100 (Llama 3 405B, arXiv:2407.21783, table 5)."""

RESTART_S = 600.0
"""Seconds from a failure to the first step of the next attempt; an assumption, the same for every machine."""

SLOWEST_HOST_LINK = 15e9
"""Bytes/s to the host where they are not published: the slowest of all chips of the table."""

_LARGEST_EXPONENT = 700.0


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often devices fail, and what that costs.

    mtbf_hours: mean time between failures of one device.
    restart_s: seconds from a failure to the first step of the next attempt.
    save_s: seconds for which a save stops training; None for the copy of the state to the host
      (`save_seconds`).
    """

    mtbf_hours: float = MTBF_HOURS
    restart_s: float = RESTART_S
    save_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Uptime:
    """Share of a run's wall time that failures leave, and the interval between saves behind it.

    goodput: fraction of wall time that trains, in expectation.
    every_steps: steps between saves; the value for `checkpoint.every_steps`.
    mtbf_s: mean time between failures of all devices together. save_s, restart_s: as in `Failures`.
    """

    goodput: float
    every_steps: int
    mtbf_s: float
    save_s: float
    restart_s: float

    def line(self) -> str:
        """The uptime in one sentence, with what it is computed from."""
        return (
            f"failures: one every {duration(self.mtbf_s)} on all devices together, {self.restart_s:,.0f} s "
            f"for a restart, {self.save_s:.2g} s for a save: a goodput of {self.goodput:.1%}. Best interval "
            f"(Daly): checkpoint.every_steps={self.every_steps}"
        )


def duration(seconds: float) -> str:
    """`3.1 hours`, `12 days`, `50 minutes`."""
    for unit, size in (("years", 365 * 86_400), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.2g} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.2g} seconds"


def save_seconds(plan: MemoryPlan, machine: Machine, assume: Assumptions) -> float:
    """Seconds for which a save stops training: the copy of parameters and optimizer state to the host.

    They are written from there while training goes on. State that is on the host already needs no copy.
    """
    # A slow link makes saves longer, so the assumption is on the safe side.
    link = machine.device.host.link_bytes_per_s or SLOWEST_HOST_LINK
    return (plan.parameters + plan.optimizer) / (link * assume.host_link)


def assumed_link(device: DeviceSpec) -> str:
    """Sentence for a device whose link to the host is not published."""
    return (
        f"a save copies the state to the host at an assumed {SLOWEST_HOST_LINK / 1e9:g} GB/s: that link of a "
        f"{device.name} is not published"
    )


def goodput(*, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected fraction of wall time that trains; 0 where failures come so often that no interval ever ends.

    Args:
      interval_s: seconds of training between two saves.
      mtbf_s: mean time between failures of all devices together.
    """
    # exp of more than 709 overflows a float64.
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > _LARGEST_EXPONENT:
        return 0.0
    # expm1, because the exponent is small on reliable devices.
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves with which a run ends soonest, by Daly's series.

    Its first term is Young's sqrt(2 save M). Where a save takes over twice the time between failures, it is
    M.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    # Daly's series in powers of sqrt(save / 2M), to the second order.
    root = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - save_s


def uptime(failures: Failures, *, devices: int, steps: int, step_s: float, save_s: float) -> Uptime:
    """Goodput of a run of so many steps that saves as often as is best, in whole steps.

    Args:
      save_s: seconds of a save where `failures` says none.
    """
    save_s = save_s if failures.save_s is None else failures.save_s
    mtbf_s = failures.mtbf_hours * 3600 / devices
    # At least one step, and no more than the run has.
    every_steps = min(max(1, steps), max(1, round(best_interval_s(save_s, mtbf_s) / step_s)))
    trained_share = goodput(
        interval_s=every_steps * step_s, save_s=save_s, restart_s=failures.restart_s, mtbf_s=mtbf_s
    )
    return Uptime(trained_share, every_steps, mtbf_s, save_s, failures.restart_s)
