"""Registry of ops and their implementations: selects the one that runs on a device, and explains the choice.

Order of choice: forced > cost model > reference. A forced implementation that cannot run is an error. Every
choice has a reason, and so has every implementation that was not chosen, so there is no silent fallback.

An op's `api.py` has its public functions and `OPS`, a tuple of `Op`, each with the plain JAX implementation
last. The public functions call `registry.call(OP, name=argument, ...)`. Chips and implementations of other
distributions come through the entry point group `jtrain_kernels`; `jtrain_kernels.examples.new_backend` is a
complete example in one file.
"""

import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jtrain_kernels.device import ENTRY_POINTS, DeviceSpec, live
from jtrain_kernels.errors import UserError, did_you_mean
from jtrain_kernels.installed import is_installed

type Static = int | float | bool | str | tuple[str, ...] | None
"""Argument of an op that is no array; a tuple names mesh axes."""

type Avals = Mapping[str, jax.ShapeDtypeStruct | Static]
"""Arguments of an op by name: shapes of arrays (one device's block), and the values of static arguments."""

REFERENCE = "xla"


def cost_unknown(device: DeviceSpec, avals: Avals) -> float | None:
    """Predicts nothing."""
    del device, avals


def no_configs(device: DeviceSpec, avals: Avals) -> Sequence[Mapping[str, int]]:
    """The single, empty configuration of an implementation that has nothing to tune."""
    del device, avals
    return ({},)


def anywhere(device: DeviceSpec, avals: Avals) -> str | None:
    """Runs on every device."""
    del device, avals


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation of an op.

    name: xla, cudnn, tokamax, splash, pallas_tpu, mosaic_gpu, triton, fp8, or a vendor's own.
    call: takes the op's arguments by name, and the entries of a configuration as further keywords.
    supports: None if the implementation runs for these arguments on the device, else the reason, one sentence
      without a full stop. It must not compile, query live devices or ask what is installed, because the
      device may be in another machine.
    modules: optional modules that the implementation needs, which the extra for its chip installs.
    cost_s: predicted seconds, of the same passes for all implementations of an op: the op and its gradients
      in `jtrain_kernels.cost`, the forward pass in `overlap.overlap_cost`. None if unknown.
    configs: configurations to try, the best first, which is taken: measured where a comment says so; at least
      one.
    only_forced: reason why a prediction does not choose the implementation, one sentence without a full stop;
      None if it does.
    compiler_options: options with which XLA must compile every program that has the implementation;
      `compiler_options` of this module collects them before a program is traced, so only an `only_forced`
      implementation may have any.
    """

    name: str
    call: Callable[..., Any]
    supports: Callable[[DeviceSpec, Avals], str | None] = anywhere
    cost_s: Callable[[DeviceSpec, Avals], float | None] = cost_unknown
    configs: Callable[[DeviceSpec, Avals], Sequence[Mapping[str, int]]] = no_configs
    only_forced: str | None = None
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.only_forced or not self.compiler_options, (
            f"{self.name}: a prediction would come without options"
        )

    def obstacle(self, device: DeviceSpec, avals: Avals, *, installed: bool = False) -> str | None:
        """Reason why the implementation cannot run for these arguments on the device; None if it can.

        Args:
          installed: True if the device's machine has the implementation's modules, whatever this process has.
        """
        if (reason := self.supports(device, avals)) is not None:
            return reason
        missing = [] if installed else [name for name in self.modules if not is_installed(name)]
        return f"not installed: {', '.join(missing)} (pip install 'jtrain[cuda]')" if missing else None


# Compared by identity: an op is one object, and its cases cannot be hashed.
@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op and its implementations.

    implementations: the last one is `xla`, plain JAX, which runs on every device.
    cases: name -> arguments (one device's block), used to explain a choice, to tune, and to compile without
      hardware.
    """

    name: str
    implementations: tuple[Implementation, ...]
    cases: Mapping[str, Avals] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [i.name for i in self.implementations]
        if not names or names[-1] != REFERENCE or len(set(names)) < len(names):
            raise UserError(
                f"kernels.{self.name}: {names} must be different names, the last one {REFERENCE}."
            )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen implementation, and the reasons.

    config: further keywords of the implementation's `call`.
    because: reason for the choice, one sentence.
    rejected: name of each other implementation, and the reason why it was not chosen.
    """

    implementation: Implementation
    config: Mapping[str, int]
    because: str
    rejected: tuple[tuple[str, str], ...]


def choose(
    op: Op, device: DeviceSpec, avals: Avals, *, forced: str | None = None, installed: bool = False
) -> Choice:
    """Chooses the implementation of `op` for these arguments on `device`.

    The cost model compares predictions only: if the reference has no prediction, the reference is chosen.

    Args:
      forced: name of an implementation that must be used.
      installed: True for a machine that is not this one, such as a plan's: its install has the optional
        modules of every implementation. A program that is compiled or run here takes what is installed here.

    Raises:
      UserError: the forced implementation does not exist or cannot run, or no implementation can run.
    """
    candidates = {i.name: i for i in implementations(op)}
    # Every implementation is asked, also when one is forced: the answers are the reasons in the choice.
    reasons = {name: i.obstacle(device, avals, installed=installed) for name, i in candidates.items()}

    def chosen(name: str, because: str, losers: Callable[[str], str]) -> Choice:
        # The first configuration is the preferred one; tuning passes its own.
        config = next(iter(candidates[name].configs(device, avals)))
        rejected = tuple(
            (n, f"it cannot run: {r}" if r else losers(n)) for n, r in reasons.items() if n != name
        )
        return Choice(candidates[name], config, because, rejected)

    if forced is not None:
        # A forced implementation that cannot run is an error, never a fallback to another one.
        reason = reasons[forced] if forced in candidates else "there is no such implementation"
        if reason is not None:
            raise UserError(f"kernels.{op.name}={forced}: {reason}. There are: {', '.join(candidates)}.")
        return chosen(forced, "it is forced", lambda _: f"{forced} is forced")
    if reasons[REFERENCE] is not None:
        raise UserError(f"kernels.{op.name}: not even {REFERENCE} runs: {reasons[REFERENCE]}.")
    able = [name for name, reason in reasons.items() if reason is None]
    # Nothing to compare, so nothing is predicted: a cost function may assume a supported shape.
    if able == [REFERENCE]:
        return chosen(
            REFERENCE, "no other runs" if len(candidates) > 1 else "it is the only one", lambda _: ""
        )
    cost = {name: candidates[name].cost_s(device, avals) for name in able}
    predicted_s = {name: seconds for name, seconds in cost.items() if seconds is not None}
    # A prediction alone proves nothing: without the reference's there is no evidence of a gain.
    if REFERENCE not in predicted_s:
        no_comparison = f"nothing is predicted for {REFERENCE} to compare it with"
        return chosen(
            REFERENCE, "it is the reference, and nothing says that another is faster", lambda _: no_comparison
        )
    # `only_forced` says why a prediction is not enough, such as that no hardware has run the kernel.
    eligible = [name for name in predicted_s if candidates[name].only_forced is None or name == REFERENCE]
    # In a tie the reference is chosen.
    best = min(eligible, key=lambda name: (predicted_s[name], name != REFERENCE))

    def slower(name: str) -> str:
        if name not in predicted_s:
            return "nothing is predicted for it"
        if name not in eligible:
            return f"it is chosen only if it is forced: {candidates[name].only_forced}"
        return f"predicted {microseconds(predicted_s[name])} against {microseconds(predicted_s[best])}"

    return chosen(best, f"the cost model predicts {microseconds(predicted_s[best])}, the least", slower)


def compiler_options(forced: Mapping[str, str]) -> dict[str, Any]:
    """Options with which XLA must compile a program with these forced implementations (op ->
    implementation).
    """
    options: dict[str, Any] = {}
    for op, name in forced.items():
        for implementation in implementations(find(op)):
            options |= implementation.compiler_options if implementation.name == name else {}
    return options


def shapes(avals: Avals) -> str:
    """Arguments as text, such as `factor=2 x=100x64:bfloat16`."""

    def describe(value: jax.ShapeDtypeStruct | Static) -> str:
        if not isinstance(value, jax.ShapeDtypeStruct):
            return str(value)
        return f"{'x'.join(map(str, value.shape)) or 'scalar'}:{value.dtype}"

    return " ".join(f"{name}={describe(value)}" for name, value in sorted(avals.items()))


def microseconds(seconds: float) -> str:
    """Seconds as text, such as `24.5 us`."""
    return f"{seconds * 1e6:.4g} us"


@dataclasses.dataclass(frozen=True)
class _Target:
    """Device for which code is traced, and the forced implementations."""

    device: DeviceSpec
    forced: tuple[tuple[str, str], ...]


# The target is part of the key of JAX's caches, so a jitted function is traced again under another target.
_target = jax.make_user_context(None)


@contextmanager
def on(device: DeviceSpec, *, forced: Mapping[str, str] | None = None) -> Iterator[None]:
    """Context in which code is traced for `device`, with forced implementations (op -> implementation).

    Enter it around tracing; inside a jitted function works too. A pullback that `jax.vjp` returned is traced
    where it is called.

    Raises:
      UserError: an op or its implementation does not exist.
    """
    forced = dict(forced or {})
    check(forced)
    # Sorted, because the target is a cache key and the order of a dict means nothing.
    with _target(_Target(device, tuple(sorted(forced.items())))):
        yield


def check(forced: Mapping[str, str]) -> None:
    """Checks the names of forced implementations (op -> implementation); whether one can run depends on the
    arguments.

    Raises:
      UserError: an op or its implementation does not exist.
    """
    for name, implementation in forced.items():
        names = [i.name for i in implementations(find(name))]
        if implementation not in names:
            raise UserError(
                f"kernels.{name}={implementation}: there is no such implementation. There are: "
                f"{', '.join(names)}."
            )


_recorded: contextvars.ContextVar[list[tuple[Op, Avals]] | None] = contextvars.ContextVar(
    "recorded", default=None
)


@contextmanager
def recording() -> Iterator[list[tuple[Op, Avals]]]:
    """Context that collects the op and arguments of every choice made while code is traced, repetitions
    included.
    """
    choices: list[tuple[Op, Avals]] = []
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def select(op: Op, avals: Avals) -> Choice:
    """Choice for the code being traced: on the device of `on`, else on the default backend's device."""
    # Recorded before the choice, so that a choice that raises is in the list too.
    if (recorded := _recorded.get()) is not None:
        recorded.append((op, avals))
    target: _Target | None = _target.value
    forced = dict(target.forced).get(op.name) if target is not None else None
    return choose(op, device(), avals, forced=forced)


def device() -> DeviceSpec:
    """Device for which code is being traced: the device of `on`, else the default backend's first device."""
    target: _Target | None = _target.value
    return live(jax.devices()[0]) if target is None else target.device


def call(op: Op, /, **arguments: Any) -> Any:
    """Calls the chosen implementation with `arguments`: arrays, and statics (numbers, strings, names of axes,
    None).
    """
    choice = select(op, avals_of(arguments))
    # The scope's name stays in the compiled program, where a profile reads which kernel an op is of.
    with jax.named_scope(f"kernel.{op.name}.{choice.implementation.name}"):
        # A configuration's entries are keywords of the implementation, which no caller of the op knows.
        return choice.implementation.call(**arguments, **choice.config)


def avals_of(arguments: Mapping[str, Any]) -> Avals:
    """Arguments with arrays replaced by shapes (one device's block under `shard_map`); static values stay.

    Raises:
      UserError: an argument is neither an array nor a number, string, tuple or None.
    """

    def aval_of(name: str, value: Any) -> jax.ShapeDtypeStruct | Static:
        if value is None or isinstance(value, int | float | str | tuple):
            # bool is an int; tuples name mesh axes.
            return value
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise UserError(
                f"kernels: argument {name} is a {type(value).__name__}; ops take arrays and plain values."
            )
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    return {name: aval_of(name, value) for name, value in arguments.items()}


def implementations(op: Op) -> tuple[Implementation, ...]:
    """All implementations of an op: those of other distributions first, then the op's own."""
    return (*plugins().get(op.name, ()), *op.implementations)


@functools.cache
def plugins() -> Mapping[str, tuple[Implementation, ...]]:
    """Op -> implementations that other distributions provide through the entry point group `jtrain_kernels`.

    Each entry point names a module whose `IMPLEMENTATIONS` maps an op's name to an `Implementation`.

    Raises:
      UserError: two implementations of an op have the same name.
    """
    by_op: dict[str, tuple[Implementation, ...]] = {}
    # Loaded once per process: plugins do not change while it runs.
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        for name, implementation in getattr(entry.load(), "IMPLEMENTATIONS", {}).items():
            taken_names = [i.name for i in (*by_op.get(name, ()), *find(name).implementations)]
            if implementation.name in taken_names:
                raise UserError(
                    f"entry point {entry.name} = {entry.value}: {name} already has an implementation called "
                    f"{implementation.name}. Give it another name; taken are: {', '.join(taken_names)}."
                )
            by_op[name] = (*by_op.get(name, ()), implementation)
    return by_op


@functools.cache
def ops() -> Mapping[str, Op]:
    """All ops by name, from `OPS` of each folder's `api.py`; a folder without it has no implementations to
    choose.
    """
    folder = Path(__file__).parent
    # Folders are found, not listed, so a new op needs no line here.
    modules = [
        m.name
        for m in pkgutil.iter_modules([str(folder)])
        if m.ispkg and (folder / m.name / "api.py").exists()
    ]
    op_list = [
        op
        for m in sorted(modules)
        for op in getattr(importlib.import_module(f"jtrain_kernels.{m}.api"), "OPS", ())
    ]
    return {op.name: op for op in op_list}


def find(name: str) -> Op:
    """The op called `name`.

    Raises:
      UserError: the op does not exist; the message lists the names.
    """
    if name in ops():
        return ops()[name]
    raise UserError(
        f"kernels: no op is called {name!r}. {did_you_mean(name, ops())}There are: {', '.join(ops())}."
    )
