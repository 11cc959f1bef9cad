"""The kinds of faults, in one list: each module below registers its own with `@fault(...)`."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Inject = Callable[[Any], None]
"""Function of a `Trial`, whose module imports this one."""


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """Kind of fault.

    name: as after `--only`.
    description: of what happens, for the list of kinds.
    inject: starts the training, or takes a half-done one, and does the damage; the harness starts it again
      afterwards.
    processes: numbers of processes with which it makes sense.
    refused: regular expression that the message of a right refusal matches (it names the way out); None where
      the run has to go on.
    must_refuse: True if going on would be wrong.
    mend: takes the way out that the message names; called after a right refusal.
    says: regular expression that the output has to match; None where nothing has to be said.
    lines_lost: True if lines of metrics.jsonl may be missing, because the fault keeps them from being
      written.
    lost_steps: steps beyond one interval that the fault may take.
    may_keep_others: True if older checkpoints may stay and others be of a later step: none is deleted while
      numbers are in doubt, a save waits for good ones, and a run that is stopped saves at that step.
    leaves: regular expression of the names (`Workdir.entries`) that the fault may leave and an unbroken run
      does not.
    needs: returns why this machine cannot do it, None if it can.
    sets: `--set` texts that the training needs beside those of the recipe.
    chains: True if it can follow other faults in the same workdir, as in `--hours`.
    in_store: True if the workdir has to be in an object store.
    on_disk: True if the workdir has to be on a disk.
    parts: kinds that follow each other in this one, a sequence; empty for a single kind.
    """

    name: str
    description: str
    inject: Inject
    processes: tuple[int, ...] = (1, 2, 4)
    refused: str | None = None
    must_refuse: bool = False
    mend: Inject | None = None
    says: str | None = None
    lines_lost: bool = False
    lost_steps: int = 0
    may_keep_others: bool = False
    leaves: str | None = None
    needs: Callable[[], str | None] = lambda: None
    sets: tuple[str, ...] = ()
    chains: bool = False
    in_store: bool = False
    on_disk: bool = False
    parts: tuple["FaultKind", ...] = ()


@dataclasses.dataclass
class FaultResult:
    """Outcome of a trial.

    wrong: what is wrong, empty if nothing is.
    lost_steps: steps that were done again.
    recoveries: attempts that went on from a checkpoint.
    refused: True if the run refused to start before step 1.
    shortest: of a sequence that failed, the shortest part that fails, as after `--sequence`.
    times_s: name -> seconds, such as `again`: from the start of the next attempt to its first new step.
    """

    kind: str
    seed: int
    num_processes: int
    wrong: list[str] = dataclasses.field(default_factory=list)
    lost_steps: int = 0
    recoveries: int = 0
    refused: bool = False
    skipped: str | None = None
    shortest: str | None = None
    seconds: float = 0.0
    times_s: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    failed_folder: Path | None = None

    @property
    def group(self) -> str:
        """Row of the table: the kind, or the number of faults of a sequence."""
        return f"sequences of {self.kind.count(':')}" if ":" in self.kind else self.kind


# In the order of the table: importing a module registers its kinds.
MODULES = (
    "kills",
    "damage",
    "notes_and_signals",
    "disks",
    "supervised",
    "numbers",
    "hosts",
    "commands",
    "partitions",
)

KINDS: dict[str, FaultKind] = {}
"""Name -> kind, in the order of the table."""


def fault(name: str, description: str, **fields: Any) -> Callable[[Inject], Inject]:
    """Decorator that registers `inject(trial)` as a kind of fault; `fields` are further ones of it."""

    def register(inject: Inject) -> Inject:
        # `--only` selects by name, so a second kind of that name would hide the first.
        assert name not in KINDS, name
        KINDS[name] = FaultKind(name, description, inject, **fields)
        return inject

    return register


def register_all() -> dict[str, FaultKind]:
    """Imports all modules with kinds; returns name -> kind."""
    for name in MODULES:
        importlib.import_module(f"jtrain.bench.fault_trials.{name}")
    return KINDS
