"""Verdict on a run's processes: is it a hang, which process causes it, and which ones wait for that one."""

import dataclasses
from collections.abc import Sequence

from jtrain.supervise.heart import STEPPING, Beat, HeartPhase
from jtrain.supervise.spec import SuperviseSpec

SILENT_S = 10.0
"""A process without a beat for longer than this, ten beats, does not answer."""

MEETING: tuple[HeartPhase, ...] = (*STEPPING, "joining", "restore", "evaluation", "checkpoint", "ending")
"""Phases in which a process may wait for others."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """One process at one moment.

    name: its number, host and process id, for messages.
    stopped_s: time for which a signal has stopped it (state T in /proc); None if it runs.
    beat: newest heartbeat; None before the first.
    beat_age_s: time since that beat came, or since the process was started.
    """

    name: str
    stopped_s: float | None
    beat: Beat | None
    beat_age_s: float

    @property
    def phase(self) -> HeartPhase:
        return "start-up" if self.beat is None else self.beat.phase

    @property
    def step(self) -> int:
        return 0 if self.beat is None else self.beat.step

    @property
    def quiet_s(self) -> float:
        """Time since the process entered its phase, or its step."""
        return self.beat_age_s + (0.0 if self.beat is None else self.beat.quiet_s)


@dataclasses.dataclass(frozen=True)
class Hang:
    """A run that makes no progress.

    reason: which limit is exceeded.
    culprits: processes that cause it; empty if all wait for each other.
    waiting: processes that wait for the culprits.
    """

    reason: str
    culprits: tuple[Watched, ...]
    waiting: tuple[Watched, ...]

    def lines(self) -> list[str]:
        """The verdict in words: the culprits first."""
        named = [f"{one.name} causes it: {describe(one)}" for one in self.culprits]
        if not named:
            named = ["no process stands out: all wait for each other"]
        collectives = next(
            (one.beat.collectives for one in self.waiting if one.beat and one.beat.collectives), ""
        )
        waiting = [f"{one.name} waits: {describe(one)}" for one in self.waiting]
        return [
            f"hang: {self.reason}",
            *named,
            *waiting,
            *([f"collectives: {collectives}"] if collectives else []),
        ]


def describe(one: Watched) -> str:
    """State, phase and step of a process in words."""
    if one.stopped_s is not None:
        state = f"stopped by a signal (state T) for {one.stopped_s:.0f} s"
    elif one.beat_age_s > SILENT_S:
        state = f"no sign of life for {one.beat_age_s:.0f} s"
    else:
        state = "alive"
    step = f" of step {one.step}" if one.step else ""
    return f"{state}, in phase {one.phase}{step} for {one.quiet_s:.0f} s"


def limit_s(beat: Beat | None, spec: SuperviseSpec) -> float:
    """Limit of the phase that a process is in."""
    if beat is None:
        return spec.setup_s
    if beat.phase in STEPPING:
        return spec.compile_s if beat.step_s is None else max(spec.step_s, spec.step_factor * beat.step_s)
    if beat.phase == "data_wait":
        return spec.data_s if beat.step_s is not None else max(spec.setup_s, spec.data_s)
    limits: dict[HeartPhase, float] = {
        "compile": spec.compile_s,
        "evaluation": spec.evaluation_s,
        "profile": spec.evaluation_s,
        "checkpoint": spec.checkpoint_s,
    }
    return limits.get(beat.phase, spec.setup_s)


def is_overdue(one: Watched, spec: SuperviseSpec) -> bool:
    """True if a process has been in its phase for longer than the limit."""
    return one.quiet_s > limit_s(one.beat, spec)


def find_hang(processes: Sequence[Watched], spec: SuperviseSpec) -> Hang | None:
    """Returns the hang of a run, or None while it may still make progress.

    A process that waits in a collective is excused as long as another one is within the limit of its own
    phase: it may be waiting for that one's compilation, save or batch.
    """
    stopped = [one for one in processes if one.stopped_s is not None and one.stopped_s > spec.stopped_s]
    if stopped:
        reason = f"a process is stopped for more than supervise.stopped_s={spec.stopped_s:g} s"
        return Hang(reason, tuple(stopped), tuple(one for one in processes if one not in stopped))
    if not processes or not all(is_overdue(one, spec) for one in processes):
        return None
    return Hang(_reason(processes, spec), *_divided(processes))


def _reason(processes: Sequence[Watched], spec: SuperviseSpec) -> str:
    one = max(processes, key=lambda one: one.quiet_s - limit_s(one.beat, spec))
    limit = f"{limit_s(one.beat, spec):.0f} s"
    if one.beat is not None and one.beat.phase in STEPPING and one.beat.step_s is not None:
        return (
            f"no step for {one.quiet_s:.0f} s, limit {limit} (supervise.step_s={spec.step_s:g}, or "
            f"supervise.step_factor={spec.step_factor:g} median steps of {one.beat.step_s:.2f} s)"
        )
    return f"{one.quiet_s:.0f} s in phase {one.phase}, limit {limit} (supervise.*_s)"


def _divided(processes: Sequence[Watched]) -> tuple[tuple[Watched, ...], tuple[Watched, ...]]:
    """Divides overdue processes into culprits and waiting ones, by the first rule that tells them apart.

    The rules: no sign of life; work of its own, where nobody waits for others; an earlier step.
    """
    first_step = min(one.step for one in processes)
    rules = (
        lambda one: one.beat_age_s > SILENT_S,
        lambda one: one.phase not in MEETING,
        lambda one: one.step == first_step,
    )
    for rule in rules:
        culprits = tuple(one for one in processes if rule(one))
        if culprits and (len(culprits) < len(processes) or len(processes) == 1):
            return culprits, tuple(one for one in processes if one not in culprits)
    own_work = tuple(one for one in processes if one.phase not in MEETING)
    return own_work, tuple(one for one in processes if one not in own_work)
