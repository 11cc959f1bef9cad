"""Which kernel an op takes on a device, and why; on a live accelerator the time of each, and their tuning.

    python -m jtrain.bench kernels --explain attention --device h200     the choice, and why the others lost
    python -m jtrain.bench kernels --explain rms_norm --device v5p --compile     and what its compiler makes of it
    python -m jtrain.bench kernels --tune     times every configuration here, and keeps the fastest

Times are of an op with its gradients, at the shapes of its cases.
"""

import argparse
import datetime
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain.bench import Row, row
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    from jtrain_kernels.device import DeviceSpec
    from jtrain_kernels.registry import Avals, Choice, Implementation, Op

MIN_TIMED_S = 0.2
"""Calls are repeated for at least so long, and at least five times."""


class _Compile(argparse.Action):
    """Makes jax's environment fit for compiling, which it reads when it is imported; no import above does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        os.environ.update(AOT_ENVIRONMENT)
        setattr(namespace, self.dest, True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--explain", metavar="OP", help="say which implementation an op takes, and why; runs nothing")
    parser.add_argument("--device", help="explain for this device, such as h200; by default the one here")
    parser.add_argument("--compile", action=_Compile, nargs=0, default=False, help="explain: by the device's compiler")
    parser.add_argument("--tune", action="store_true", help="time every configuration, and write the fastest to --out")
    parser.add_argument("--op", help="time only this op")
    parser.add_argument("--case", help="only this case of it, such as llama8b")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where tuned entries go; by default where they ship")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of what was asked.

    Raises:
      ValueError: options that do not go together, an unknown op, case or device; or no accelerator to time.
    """
    import jax

    from jtrain_kernels import device, registry

    if args.explain is None and (args.device is not None or args.compile):
        raise ValueError("kernels: --device and --compile are for --explain OP; times are of the device that is here.")
    if args.explain is not None:
        if args.tune:
            raise ValueError("kernels: --explain runs nothing and --tune runs everything. Give one of them.")
        spec = device.from_name(args.device) if args.device else device.live(jax.devices()[0])
        return [
            r for case in _cases(registry.find(args.explain), args.case) for r in _explain(case, spec, args.compile)
        ]
    spec = device.live(jax.devices()[0])
    ops = [registry.find(args.op)] if args.op else list(registry.ops().values())
    if spec.platform == "cpu" and not (args.op and args.case and (args.out or not args.tune)):
        raise ValueError(
            "kernels: times of a CPU are no accelerator's, and the ops' cases are of an 8B model. Run the same command "
            "on a GPU or TPU, or name --op, --case and, with --tune, --out DIR."
        )
    cases = [case for op in ops for case in _cases(op, args.case if args.op else None)]
    return [r for case in cases for r in (_tune(case, spec, args.out) if args.tune else _time(case, spec))]


type _Case = tuple[Op, str, Avals]


def _cases(op: "Op", case: str | None) -> list[_Case]:
    if case is not None and case not in op.cases:
        raise ValueError(f"kernels: {op.name} has no case {case}. There are: {', '.join(op.cases) or 'none'}.")
    return [(op, name, avals) for name, avals in op.cases.items() if case in (None, name)]


def _explain(of: _Case, spec: "DeviceSpec", compiled: bool) -> Iterator[Row]:
    """Prints the choice; the rows are predicted or compiled figures."""
    from jtrain_kernels import aot, registry

    op, case, avals = of
    choice = registry.choose(op, spec, avals)
    for line in explanation(op, case, spec, avals, choice):
        print(line)
    for implementation in registry.implementations(op):
        if implementation.supports(spec, avals) is not None:
            continue
        what = f"{op.name} {case}, {implementation.name} on {spec.name}"
        predicted = implementation.cost_s(spec, avals)
        yield row(f"{what}: predicted", None if predicted is None else predicted * 1e6, "us")
        if compiled:
            report = aot.compile_op(op, case, spec.name, implementation.name)
            print(f"  {implementation.name} calls {', '.join(report.calls) or 'nothing'}; kernels:")
            for k in report.kernels:
                print(f"    {k.name}: {k.registers} registers, {k.stack_bytes} bytes of stack")
            yield row(f"{what}: temporary memory", report.temp_bytes / 2**20, "MiB")
            yield row(f"{what}: largest scratch memory", report.scratch_bytes / 2**10, "KiB")
            yield row(f"{what}: kernels that spill", float(len(report.spilled)), "", bar="<= 0")


def explanation(op: "Op", case: str, spec: "DeviceSpec", avals: "Avals", choice: "Choice") -> list[str]:
    """What is taken and why, then why each other is not, a line each."""
    from jtrain_kernels import tuned

    config = " ".join(f"{name}={value}" for name, value in choice.config.items())
    return [
        f"{op.name} on {spec.name}, {case}: {tuned.bucket(avals)}, {tuned.dtype(avals)}",
        f"  {choice.implementation.name} is taken{f' with {config}' if config else ''}: {choice.because}",
        *(f"  {name} is not: {reason}" for name, reason in choice.others),
    ]


def _time(of: _Case, spec: "DeviceSpec") -> Iterator[Row]:
    """Each implementation that runs here in its first configuration, against XLA."""
    from jtrain_kernels import registry

    op, case, avals = of
    able = [i for i in registry.implementations(op) if i.supports(spec, avals) is None]
    found = {i.name: seconds(_call(op, i, next(iter(i.configs(spec, avals))), avals), inputs(avals)) for i in able}
    for name, value in found.items():
        baseline = found["xla"] * 1e6 if name != "xla" else None
        yield row(f"{op.name} {case}, {name}: forward and backward", value * 1e6, "us", baseline=baseline)


def _tune(of: _Case, spec: "DeviceSpec", out: Path | None) -> Iterator[Row]:
    """Times every configuration of every implementation that runs here, and writes the fastest."""
    from jtrain_kernels import registry, tuned

    op, case, avals = of
    best: tuned.Entry | None = None
    reference: float | None = None
    today = f"{datetime.date.today()}, jax {importlib.metadata.version('jax')}"
    for implementation in registry.implementations(op):
        if implementation.supports(spec, avals) is not None:
            continue
        for config in implementation.configs(spec, avals):
            taken = seconds(_call(op, implementation, config, avals), inputs(avals))
            print(f"  {op.name} {case}, {implementation.name} {dict(config)}: {taken * 1e6:.4g} us")
            if best is None or taken < best.seconds:
                best = tuned.Entry(*tuned.key(op.name, avals), implementation.name, config, taken, today)
            if implementation.name == registry.REFERENCE:
                reference = taken
    assert best is not None
    assert reference is not None
    tuned.write((out or tuned.FOLDER) / f"{spec.name}.json", [best])
    what = f"{op.name} {case}: {best.implementation} {dict(best.config)}"
    yield row(what, best.seconds * 1e6, "us", baseline=reference * 1e6, bar="<= 1")


def _call(
    op: "Op", implementation: "Implementation", config: Mapping[str, int], avals: "Avals"
) -> Callable[[dict[str, Any]], Any]:
    """The op and its gradients by one implementation and configuration."""
    import functools

    from jtrain_kernels import aot, registry

    fixed = registry.Implementation("xla", functools.partial(implementation.call, **config))
    return aot.op_function(registry.Op(op.name, (fixed,)), avals, gradients=True)


def inputs(avals: "Avals") -> dict[str, Any]:
    """Arrays for a case: floats are normal, integers are 1 (one segment, one token, one target)."""
    import jax
    import jax.numpy as jnp

    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    keys = jax.random.split(jax.random.key(0), len(arrays))
    return {
        name: jax.random.normal(key, x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.ones(x.shape, x.dtype)
        for key, (name, x) in zip(keys, arrays.items(), strict=True)
    }


def seconds(function: Callable[..., Any], *args: Any) -> float:
    """Of one call, the median, after one that compiles and one more."""
    import jax

    jitted = jax.jit(function)
    for _ in range(2):
        jax.block_until_ready(jitted(*args))
    found: list[float] = []
    while len(found) < 5 or sum(found) < MIN_TIMED_S:
        start = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        found.append(time.perf_counter() - start)
    return statistics.median(found)
