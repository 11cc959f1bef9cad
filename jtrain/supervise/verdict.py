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
        # What has passed since the beat came, and what the process itself had counted by then.
        return self.beat_age_s + (0.0 if self.beat is None else self.beat.quiet_s)


@dataclasses.dataclass(frozen=True)
class Hang:
    """A run that makes no progress.

    reason: which limit is exceeded.
    culprits: processes that cause it; empty if all wait for each other.
    waiting_processes: processes that wait for the culprits.
    """

    reason: str
    culprits: tuple[Watched, ...]
    waiting_processes: tuple[Watched, ...]

    def lines(self) -> list[str]:
        """The verdict in words: the culprits first."""
        culprit_lines = [f"{process.name} causes it: {describe(process)}" for process in self.culprits]
        if not culprit_lines:
            culprit_lines = ["no process stands out: all wait for each other"]
        # All run the same program, so the first that tells its collectives speaks for all.
        collectives = next(
            (
                process.beat.collectives
                for process in self.waiting_processes
                if process.beat and process.beat.collectives
            ),
            "",
        )
        waiting_lines = [f"{process.name} waits: {describe(process)}" for process in self.waiting_processes]
        return [
            f"hang: {self.reason}",
            *culprit_lines,
            *waiting_lines,
            *([f"collectives: {collectives}"] if collectives else []),
        ]


def describe(process: Watched) -> str:
    """State, phase and step of a process in words."""
    if process.stopped_s is not None:
        state = f"stopped by a signal (state T) for {process.stopped_s:.0f} s"
    elif process.beat_age_s > SILENT_S:
        state = f"no sign of life for {process.beat_age_s:.0f} s"
    else:
        state = "alive"
    step = f" of step {process.step}" if process.step else ""
    return f"{state}, in phase {process.phase}{step} for {process.quiet_s:.0f} s"


def limit_s(beat: Beat | None, spec: SuperviseSpec) -> float:
    """Limit of the phase that a process is in."""
    if beat is None:
        return spec.setup_s
    if beat.phase in STEPPING:
        # Without a median of step times the first steps may still compile.
        return spec.compile_s if beat.step_s is None else max(spec.step_s, spec.step_factor * beat.step_s)
    if beat.phase == "data_wait":
        # The first batch waits for the data plane to start.
        return spec.data_s if beat.step_s is not None else max(spec.setup_s, spec.data_s)
    limits: dict[HeartPhase, float] = {
        "compile": spec.compile_s,
        "evaluation": spec.evaluation_s,
        "profile": spec.evaluation_s,
        "checkpoint": spec.checkpoint_s,
    }
    # All other phases are before the first step or after the last one.
    return limits.get(beat.phase, spec.setup_s)


def is_overdue(process: Watched, spec: SuperviseSpec) -> bool:
    """True if a process has been in its phase for longer than the limit."""
    return process.quiet_s > limit_s(process.beat, spec)


def find_hang(processes: Sequence[Watched], spec: SuperviseSpec) -> Hang | None:
    """Returns the hang of a run, or None while it may still make progress.

    A process that waits in a collective is excused as long as another one is within the limit of its own
    phase: it may be waiting for that one's compilation, save or batch.
    """
    # A stopped process has a cause of its own, so the limits of phases need not pass first.
    stopped = [
        process
        for process in processes
        if process.stopped_s is not None and process.stopped_s > spec.stopped_s
    ]
    if stopped:
        reason = f"a process is stopped for more than supervise.stopped_s={spec.stopped_s:g} s"
        return Hang(reason, tuple(stopped), tuple(process for process in processes if process not in stopped))
    # One process within its limit excuses all: the others may wait for it.
    if not processes or not all(is_overdue(process, spec) for process in processes):
        return None
    return Hang(_reason(processes, spec), *_split_culprits(processes))


def _reason(processes: Sequence[Watched], spec: SuperviseSpec) -> str:
    # The limit that is exceeded by the most seconds names the setting to change.
    process = max(processes, key=lambda process: process.quiet_s - limit_s(process.beat, spec))
    limit = f"{limit_s(process.beat, spec):.0f} s"
    if process.beat is not None and process.beat.phase in STEPPING and process.beat.step_s is not None:
        return (
            f"no step for {process.quiet_s:.0f} s, limit {limit} (supervise.step_s={spec.step_s:g}, or "
            f"supervise.step_factor={spec.step_factor:g} median steps of {process.beat.step_s:.2f} s)"
        )
    return f"{process.quiet_s:.0f} s in phase {process.phase}, limit {limit} (supervise.*_s)"


def _split_culprits(processes: Sequence[Watched]) -> tuple[tuple[Watched, ...], tuple[Watched, ...]]:
    """Divides overdue processes into culprits and waiting ones, by the first rule that tells them apart.

    The rules: no sign of life; work of its own, where nobody waits for others; an earlier step.
    """
    # Who is a step behind has not yet come to the collective in which the others wait.
    first_step = min(process.step for process in processes)
    rules = (
        lambda process: process.beat_age_s > SILENT_S,
        lambda process: process.phase not in MEETING,
        lambda process: process.step == first_step,
    )
    for rule in rules:
        culprits = tuple(process for process in processes if rule(process))
        # A rule that holds for all, or for none, tells nothing apart.
        if culprits and (len(culprits) < len(processes) or len(processes) == 1):
            return culprits, tuple(process for process in processes if process not in culprits)
    # No rule tells them apart: all have work of their own, or all wait for each other.
    own_work = tuple(process for process in processes if process.phase not in MEETING)
    return own_work, tuple(process for process in processes if process not in own_work)
