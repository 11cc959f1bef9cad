"""The kinds of faults, in one list: each module below registers its own with `@fault(...)`."""

from collections.abc import Callable
from typing import Any

from jtrain.bench.fault_trials.trial import Kind, Trial

KINDS: dict[str, Kind] = {}
"""Name -> kind, in the order of the table."""


def fault(name: str, what: str, **more: Any) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Decorator that registers `inject(trial)` as a kind of fault; `more` are further fields of `Kind`."""

    def register(inject: Callable[[Trial], None]) -> Callable[[Trial], None]:
        assert name not in KINDS, name
        KINDS[name] = Kind(name, what, inject, **more)
        return inject

    return register


def register_all() -> dict[str, Kind]:
    """Imports all modules with kinds; returns name -> kind."""
    from jtrain.bench.fault_trials import damage, kills, notes_and_signals  # noqa: F401

    return KINDS
