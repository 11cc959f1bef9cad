"""The kinds of faults, in one list: each module below registers its own with `@fault(...)`."""

import importlib
from collections.abc import Callable
from typing import Any

from jtrain.bench.fault_trials.trial import FaultKind, Trial

MODULES = (
    "kills",
    "damage",
    "notes_and_signals",
    "disks",
    "supervised",
    "numbers",
    "hosts",
    "commands",
)

KINDS: dict[str, FaultKind] = {}
"""Name -> kind, in the order of the table."""


def fault(
    name: str, description: str, **fields: Any
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Decorator that registers `inject(trial)` as a kind of fault; `fields` are further ones of it."""

    def register(inject: Callable[[Trial], None]) -> Callable[[Trial], None]:
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
