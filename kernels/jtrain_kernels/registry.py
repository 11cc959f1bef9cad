"""One op, many implementations: which one runs on a device, and why the others do not.

Order of choice: forced > tuned > cost model > reference. A forced implementation that cannot run is an error, and every
choice says why it was made and why each other lost, so nothing falls back in silence.

An op's `api.py` has its public functions and `OPS`, a tuple of `Op`, the plain JAX form last; its function calls
`registry.call(OP, name=argument, ...)`. Chips and implementations that are not in this repository come through the
entry point group `jtrain_kernels`; `jtrain_kernels.examples.new_backend` is a whole back end in one file.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jtrain_kernels import tuned
from jtrain_kernels.device import ENTRY_POINTS, DeviceSpec, live

type Avals = Mapping[str, jax.ShapeDtypeStruct | int | float | bool | str | None]
"""An op's arguments by name: arrays as shapes (of one device's block), statics as they are."""

REFERENCE = "xla"


def cost_unknown(device: DeviceSpec, avals: Avals) -> float | None:
    """No prediction."""
    del device, avals


def no_configs(device: DeviceSpec, avals: Avals) -> Sequence[Mapping[str, int]]:
    """Nothing to tune: one configuration, empty."""
    del device, avals
    return ({},)


def anywhere(device: DeviceSpec, avals: Avals) -> str | None:
    """Runs on every device."""
    del device, avals


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    name: xla, cudnn, tokamax, splash, pallas_tpu, mosaic_gpu, triton, fp8, or a vendor's own.
    call: takes the op's arguments by name and a configuration's entries as further keywords.
    supports: None if it runs for these arguments on that device, else the reason, one sentence without a full stop.
      It must not compile or ask what devices there are: the device may not be here.
    cost_s: predicted seconds, None if unknown.
    configs: what to try when tuning, the best guess first; at least one.
    """

    name: str
    call: Callable[..., Any]
    supports: Callable[[DeviceSpec, Avals], str | None] = anywhere
    cost_s: Callable[[DeviceSpec, Avals], float | None] = cost_unknown
    configs: Callable[[DeviceSpec, Avals], Sequence[Mapping[str, int]]] = no_configs


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op and what computes it.

    implementations: the last is `xla`, plain JAX, which runs everywhere.
    cases: arguments by the name of a case, for explaining, tuning and compiling without hardware; one device's block.
    """

    name: str
    implementations: tuple[Implementation, ...]
    cases: Mapping[str, Avals] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [i.name for i in self.implementations]
        if not names or names[-1] != REFERENCE or len(set(names)) < len(names):
            raise ValueError(f"kernels.{self.name}: {names} must be different names, of which the last is {REFERENCE}.")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs.

    config: further keywords of the implementation's `call`.
    because: why this one, one sentence.
    others: name and reason of each that lost.
    """

    implementation: Implementation
    config: Mapping[str, int]
    because: str
    others: tuple[tuple[str, str], ...]


def choose(
    op: Op,
    device: DeviceSpec,
    avals: Avals,
    *,
    forced: str | None = None,
    measured: Mapping[tuple[str, str, str], tuned.Entry] | None = None,
) -> Choice:
    """The implementation of `op` for these arguments on `device`.

    The cost model decides only between predictions: where the reference has none, it stays.

    Args:
      measured: what was tuned; by default what is committed for the device.

    Raises:
      ValueError: the forced implementation does not exist or cannot run; or nothing can.
    """
    found = {i.name: i for i in implementations(op)}
    reasons = {name: i.supports(device, avals) for name, i in found.items()}
    entry = (tuned.load(device.name) if measured is None else measured).get(tuned.key(op.name, avals))

    def chosen(name: str, because: str, losers: Callable[[str], str]) -> Choice:
        tuned_for = entry is not None and entry.implementation == name
        config = entry.config if entry is not None and tuned_for else next(iter(found[name].configs(device, avals)))
        others = tuple((n, f"it cannot run: {r}" if r else losers(n)) for n, r in reasons.items() if n != name)
        return Choice(found[name], config, because, others)

    if forced is not None:
        reason = reasons[forced] if forced in found else "there is no such implementation"
        if reason is not None:
            raise ValueError(f"kernels.{op.name}={forced}: {reason}. There are: {', '.join(found)}.")
        return chosen(forced, "it is forced", lambda _: f"{forced} is forced")
    if reasons[REFERENCE] is not None:
        raise ValueError(f"kernels.{op.name}: not even {REFERENCE} runs: {reasons[REFERENCE]}.")
    able = [name for name, reason in reasons.items() if reason is None]
    if entry is not None and entry.implementation in able:
        because = (
            f"it was the fastest measured on {device.name} for {tuned.bucket(avals)}: {entry.seconds * 1e6:.4g} us"
        )
        return chosen(entry.implementation, because, lambda _: f"{entry.implementation} was measured to be faster")
    if able == [REFERENCE]:
        return chosen(REFERENCE, "no other runs" if len(found) > 1 else "it is the only one", lambda _: "")
    cost = {name: found[name].cost_s(device, avals) for name in able}
    known = {name: seconds for name, seconds in cost.items() if seconds is not None}
    if REFERENCE not in known:
        why = f"nothing is measured for this shape, and nothing is predicted for {REFERENCE} to compare it with"
        return chosen(REFERENCE, "it is the reference, and nothing says that another is faster", lambda _: why)
    # At a tie the reference stays: it is last in the list, and others must win.
    best = min(known, key=lambda name: (known[name], name != REFERENCE))

    def slower(name: str) -> str:
        if name not in known:
            return "nothing is measured or predicted for it"
        return f"predicted {known[name] * 1e6:.4g} us against {known[best] * 1e6:.4g}"

    return chosen(best, f"the cost model predicts {known[best] * 1e6:.4g} us, the least", slower)


@dataclasses.dataclass(frozen=True)
class _Target:
    """What traced code is for."""

    device: DeviceSpec
    forced: tuple[tuple[str, str], ...]


# Part of the key of JAX's caches: a jitted function is traced anew under another target.
_target = jax.make_user_context(None)


@contextmanager
def on(device: DeviceSpec, *, forced: Mapping[str, str] | None = None) -> Iterator[None]:
    """Code traced within is for `device`, with these implementations forced: op -> implementation.

    Enter it around tracing, also inside a jitted function. A pullback that `jax.vjp` returned is traced where it is
    called.

    Raises:
      ValueError: no such op, or no such implementation of it.
    """
    forced = dict(forced or {})
    check(forced)
    with _target(_Target(device, tuple(sorted(forced.items())))):
        yield


def check(forced: Mapping[str, str]) -> None:
    """Refuses names that mean nothing: op -> implementation; whether it can run, only the arguments say.

    Raises:
      ValueError: no such op, or no such implementation of it.
    """
    for name, implementation in forced.items():
        known = [i.name for i in implementations(find(name))]
        if implementation not in known:
            raise ValueError(
                f"kernels.{name}={implementation}: there is no such implementation. There are: {', '.join(known)}."
            )


def select(op: Op, avals: Avals) -> Choice:
    """The choice where code is being traced: for the device of `on`, else for the default backend's."""
    target: _Target | None = _target.value
    forced = dict(target.forced).get(op.name) if target is not None else None
    return choose(op, device(), avals, forced=forced)


def device() -> DeviceSpec:
    """What is traced now is for this device: that of `on`, else the default backend's first."""
    target: _Target | None = _target.value
    return live(jax.devices()[0]) if target is None else target.device


def call(op: Op, /, **arguments: Any) -> Any:
    """Calls the chosen implementation with `arguments`: arrays, and statics (numbers, strings, None)."""
    choice = select(op, avals_of(arguments))
    return choice.implementation.call(**arguments, **choice.config)


def avals_of(arguments: Mapping[str, Any]) -> Avals:
    """Arrays as shapes, of one device's block under `shard_map`; the rest as it is.

    Raises:
      ValueError: an argument is neither an array nor a number, string or None.
    """

    def one(name: str, value: Any) -> jax.ShapeDtypeStruct | int | float | bool | str | None:
        if value is None or isinstance(value, int | float | str):
            return value
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"kernels: argument {name} is a {type(value).__name__}; ops take arrays and plain values.")
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    return {name: one(name, value) for name, value in arguments.items()}


def implementations(op: Op) -> tuple[Implementation, ...]:
    """Those of the op, and before them those that other distributions bring."""
    return (*plugins().get(op.name, ()), *op.implementations)


@functools.cache
def plugins() -> Mapping[str, tuple[Implementation, ...]]:
    """Op -> implementations brought by other distributions through the entry point group `jtrain_kernels`.

    Each entry point names a module, whose `IMPLEMENTATIONS` maps an op's name to an `Implementation`.

    Raises:
      ValueError: two implementations of an op have one name.
    """
    found: dict[str, tuple[Implementation, ...]] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        for name, implementation in getattr(entry.load(), "IMPLEMENTATIONS", {}).items():
            taken = [i.name for i in (*found.get(name, ()), *find(name).implementations)]
            if implementation.name in taken:
                raise ValueError(
                    f"entry point {entry.name} = {entry.value}: {name} already has an implementation called "
                    f"{implementation.name}. Give it another name; taken are: {', '.join(taken)}."
                )
            found[name] = (*found.get(name, ()), implementation)
    return found


@functools.cache
def ops() -> Mapping[str, Op]:
    """Every op by name: `OPS` of each folder's `api.py`; one without has nothing to choose."""
    folder = Path(__file__).parent
    modules = [m.name for m in pkgutil.iter_modules([str(folder)]) if m.ispkg and (folder / m.name / "api.py").exists()]
    found = [
        op for m in sorted(modules) for op in getattr(importlib.import_module(f"jtrain_kernels.{m}.api"), "OPS", ())
    ]
    return {op.name: op for op in found}


def find(name: str) -> Op:
    """The op called `name`.

    Raises:
      ValueError: no such op, with the names there are.
    """
    if name in ops():
        return ops()[name]
    near = difflib.get_close_matches(name, ops(), n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ValueError(f"kernels: no op is called {name!r}. {hint}There are: {', '.join(ops())}.")
