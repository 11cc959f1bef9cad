"""Choice of kernels on a device, with reasons; on a live accelerator also the times of every configuration.

    python -m jtrain.bench kernels --explain attention --device h200     the choice, and why the others lost
    python -m jtrain.bench kernels --explain rms_norm --device v5p --compile     what the compiler makes of it
    python -m jtrain.bench kernels --explain attention --device h200 --config=llama1b     at a config's shapes
    python -m jtrain.bench kernels --tune --config=llama8b     times every configuration of its step's calls
    python -m jtrain.bench kernels --tune     the same at the shapes of the ops' cases

Times are of an op with its gradients.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.bench import Options, Row, option, row
from jtrain.bench._live import difference
from jtrain.errors import UserError
from jtrain_kernels import device, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals, Choice, Implementation, Op

TOLERANCE = 5e-2
"""Largest difference from the reference, relative to its largest element, of results in 16 bits, and of
gradients."""

MIN_TIMED_S = 0.2
"""Minimum seconds over which calls are repeated; at least five calls."""


OPTIONS = (
    option("--explain", metavar="OP", help="say which implementation an op takes, and why; runs nothing"),
    option("--device", help="explain for this device, such as h200; by default the one here"),
    option("--compile", action="store_true", help="explain: by the device's compiler"),
    option("--tune", action="store_true", help="time every configuration, and name the fastest"),
    option("--op", help="time only this op"),
    option("--case", help="only this case of it, such as llama8b"),
    option("--config", metavar="NAME", help="the shapes of this config's train step, instead of cases"),
    option("--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER"),
    option("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE"),
)
ABSENT_CHIPS = ("--device", "--compile")


def run(args: Options) -> list[Row]:
    """Rows of the requested predictions, compilations or times.

    Raises:
      UserError: options that do not go together, an unknown op, case or device; or no accelerator to time.
    """
    if args.case is not None and args.config is not None:
        raise UserError(
            f"kernels: --case {args.case} and --config {args.config} both say which shapes. Give one."
        )
    if (args.fiddlers or args.sets) and args.config is None:
        raise UserError("kernels: --with and --set change a config. Add --config NAME.")
    if args.explain is None and (args.device is not None or args.compile):
        raise UserError(
            "kernels: --device and --compile are for --explain OP; times are of the device that is here."
        )
    if args.explain is not None:
        if args.tune:
            raise UserError("kernels: --explain runs nothing and --tune runs everything. Give one of them.")
        spec = device.from_name(args.device) if args.device else device.live(jax.devices()[0])
        op = registry.find(args.explain)
        selected = config_cases(args, spec, op) if args.config else _cases(op, args.case)
        return [r for case in selected for r in _explain(case, spec, args.compile)]
    spec = device.live(jax.devices()[0])
    ops = [registry.find(args.op)] if args.op else list(registry.ops().values())
    # Named shapes may be timed on a CPU: whoever names them knows what they want.
    named = args.config is not None or (args.op and args.case)
    if spec.platform == "cpu" and not named:
        raise UserError(
            "kernels: times of a CPU are no accelerator's, and the ops' cases are of an 8B model. Run the "
            "same command on a GPU or TPU, or name --config, or --op and --case."
        )
    if args.config:
        of_step = config_cases(args, spec, ops[0] if args.op else None)
        # One candidate leaves nothing to tune.
        selected = [case for case in of_step if _candidates(case, spec) > 1]
    else:
        selected = [case for op in ops for case in _cases(op, args.case if args.op else None)]
    cases: list[Case] = []
    for case in selected:
        # An op that communicates needs as many live devices as its axis; others are run.
        if (shortage := too_few_devices(case)) is None:
            cases.append(case)
        # Asked for by name, so it is an error; among all cases it is left out with a line.
        elif args.op and not args.config:
            raise UserError(f"kernels: {shortage}.")
        else:
            print(f"left out: {shortage}")
    return [r for case in cases for r in (tune_case(case, spec) if args.tune else _time(case, spec))]


class Case(NamedTuple):
    """One case of an op: its name and arguments."""

    op: Op
    name: str
    avals: Avals


def _cases(op: Op, case: str | None) -> list[Case]:
    if case is not None and case not in op.cases:
        raise UserError(f"kernels: {op.name} has no case {case}. There are: {', '.join(op.cases) or 'none'}.")
    return [Case(op, name, avals) for name, avals in op.cases.items() if case in (None, name)]


def config_cases(args: Options, spec: DeviceSpec, op: Op | None = None) -> list[Case]:
    """Cases that a config's train step has on a device, of one op or of all; the mesh is the config's.

    Raises:
      UserError: the config is wrong, the step does not call the op, or the mesh's devices cannot be traced
        for.
    """
    # Lazy: times of an op's own cases need no config, and so no fiddle.
    from jtrain.config.devices import resolve_mesh
    from jtrain.config.load import load_config, mesh_size
    from jtrain.config.run import build_run
    from jtrain.plan import auto_layout
    from jtrain.plan.compile.kernel_calls import devices_like, kernel_calls

    config = load_config(args.config, args.fiddlers, args.sets)
    # The config's mesh is laid over devices of the named kind, which need not be present.
    devices, _ = resolve_mesh(config, devices_like(spec, mesh_size(config)))
    for line in auto_layout.choose_layout(config, devices=devices, workdir=None):
        print(line)
    calls = kernel_calls(build_run(config), devices)
    cases: list[Case] = []
    for called_op, avals in calls:
        if op is None or called_op is op:
            # Calls of one op are numbered in the order in which the step makes them.
            name = f"{args.config} {1 + sum(case.op.name == called_op.name for case in cases)}"
            cases.append(Case(dataclasses.replace(called_op, cases={name: avals}), name, avals))
    if not cases and op is not None:
        called = ", ".join(sorted({called_op.name for called_op, _ in calls}))
        raise UserError(f"kernels: the step of {args.config} does not call {op.name}. It calls: {called}.")
    return cases


def _candidates(case: Case, spec: DeviceSpec) -> int:
    """Configurations of all implementations that run for a case on a device."""
    able = [i for i in registry.implementations(case.op) if i.obstacle(spec, case.avals) is None]
    # Every implementation has at least one configuration.
    return sum(len(i.configs(spec, case.avals)) for i in able)


def too_few_devices(case: Case) -> str | None:
    """Reason why an op that communicates cannot be timed here; None if it can."""
    axis, num_devices = aot.axis_of(case.avals), len(jax.devices())
    if axis is None or axis[1] <= num_devices:
        return None
    return f"{case.op.name} {case.name} needs {axis[1]} devices along {axis[0]}, and {num_devices} are here"


def _explain(explained_case: Case, spec: DeviceSpec, compiled: bool) -> Iterator[Row]:
    """Prints the choice, and yields rows of predicted or compiled figures."""
    op, case, avals = explained_case
    choice = registry.choose(op, spec, avals)
    for line in explanation(op, case, spec, avals, choice):
        print(line)
    for implementation in registry.implementations(op):
        # What cannot run has no prediction, and nothing to compile.
        if implementation.obstacle(spec, avals) is not None:
            continue
        label = f"{op.name} {case}, {implementation.name} on {spec.name}"
        predicted = implementation.cost_s(spec, avals)
        if predicted is not None:
            yield row(f"{label}: predicted", predicted * 1e3, "ms")
        if compiled and (missing := aot.missing_library(implementation.name)):
            print(f"  {implementation.name} is not compiled: {missing}")
        elif compiled:
            report = aot.compile_op(op, case, spec.name, implementation.name)
            print(f"  {implementation.name} calls {', '.join(report.calls) or 'nothing'}; kernels:")
            for k in report.kernels:
                print(f"    {k.name}: {k.registers} registers, {k.stack_bytes} bytes of stack")
            yield row(f"{label}: temporary memory", report.temp_bytes / 2**20, "MiB")
            yield row(f"{label}: largest scratch memory", report.scratch_bytes / 2**10, "KiB")
            yield row(f"{label}: kernels that spill", float(len(report.spilled)), "", bar="<= 0")


def explanation(
    op: Op,
    case: str,
    spec: DeviceSpec,
    avals: Avals,
    choice: Choice,
) -> list[str]:
    """Lines that explain a choice: the implementation, the others with reasons, and how to force one."""
    config = " ".join(f"{name}={value}" for name, value in choice.config.items())
    chosen = choice.implementation.name
    # An implementation that cannot run has no cost: its function may assume a supported shape.
    able = [
        i.name for i in registry.implementations(op) if i.name != chosen and i.obstacle(spec, avals) is None
    ]
    cost = {i.name: i.cost_s(spec, avals) for i in registry.implementations(op) if i.name in (chosen, *able)}

    def predicted(name: str, reason: str) -> str:
        seconds = cost.get(name)
        return (
            # Reasons that quote a prediction already have the number.
            "" if seconds is None or "predict" in reason else f"; predicted {registry.microseconds(seconds)}"
        )

    return [
        f"{op.name} on {spec.name}, {case}: {registry.shapes(avals)}",
        f"  {chosen} is taken{f' with {config}' if config else ''}: "
        f"{choice.because}{predicted(chosen, choice.because)}",
        *(f"  {name} is not: {reason}{predicted(name, reason)}" for name, reason in choice.rejected),
        # One example is enough to show the syntax.
        *(f"""  to force it: --set "kernels=(('{op.name}','{name}'),)\"""" for name in able[:1]),
    ]


def _time(timed_case: Case, spec: DeviceSpec) -> Iterator[Row]:
    """Times each implementation that runs here in its first configuration, against XLA."""
    op, case, avals = timed_case
    able = [i for i in registry.implementations(op) if i.obstacle(spec, avals) is None]
    times_s = {
        # The first configuration is the one that a run would take.
        i.name: time_call(
            _call(op, i, next(iter(i.configs(spec, avals))), avals),
            draw_inputs(avals),
            options=i.compiler_options,
        )[1]
        for i in able
    }
    for name, value in times_s.items():
        baseline = times_s["xla"] * 1e6 if name != "xla" else None
        yield row(f"{op.name} {case}, {name}: forward and backward", value * 1e6, "us", baseline=baseline)


def tune_case(tuned_case: Case, spec: DeviceSpec) -> Iterator[Row]:
    """Times every configuration of every implementation that runs here, and yields a row of the fastest.

    One whose results are not the reference's is said to be wrong and left out.
    """
    op, case, avals = tuned_case
    best: tuple[float, str] | None = None
    reference: float | None = None
    want: Any = None
    # The reference is first, so that the others can be compared with it.
    for implementation in sorted(
        registry.implementations(op), key=lambda candidate: candidate.name != registry.REFERENCE
    ):
        if implementation.obstacle(spec, avals) is not None:
            continue
        for config in implementation.configs(spec, avals):
            call = _call(op, implementation, config, avals)
            results, call_s = time_call(call, draw_inputs(avals), options=implementation.compiler_options)
            want = results if want is None else want
            label = f"  {op.name} {case}, {implementation.name} {dict(config)}"
            error = difference(results, want)
            # Compared before it can win: a wrong kernel may be the fastest.
            if not error <= TOLERANCE:  # also NaN
                print(f"{label}: WRONG by {error:.2g} of the largest element, left out")
                continue
            print(f"{label}: {call_s * 1e6:.4g} us")
            if best is None or call_s < best[0]:
                best = call_s, f"{implementation.name} {dict(config)}"
            if implementation.name == registry.REFERENCE:
                reference = call_s
    # The reference always runs, so both are set.
    assert best is not None
    assert reference is not None
    yield row(f"{op.name} {case}: {best[1]}", best[0] * 1e6, "us", baseline=reference * 1e6, bar="<= 1")


def _call(
    op: Op,
    implementation: Implementation,
    config: Mapping[str, int],
    avals: Avals,
) -> Callable[[dict[str, Any]], Any]:
    """Function that computes an op and its gradients with one implementation and configuration."""
    # A single implementation named `xla`: the op then has no choice, and no other one can run.
    fixed = Implementation("xla", functools.partial(implementation.call, **config))
    function = aot.op_function(Op(op.name, (fixed,)), avals, gradients=True)
    mesh = _mesh(avals)
    return function if mesh is None else aot.over(mesh, function)


def _mesh(avals: Avals) -> jax.sharding.Mesh | None:
    """Mesh of live devices for an op that communicates; None for other ops."""
    if (axis := aot.axis_of(avals)) is None:
        return None
    return jax.sharding.Mesh(np.array(jax.devices()[: axis[1]]), axis[:1])


def draw_inputs(avals: Avals) -> dict[str, Any]:
    """Arrays for a case: floats are normal, integers are 1 (segment, token, target); groups differ."""
    import numpy as np

    def draw(name: str, key: Any, x: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(key, x.shape, x.dtype)
        if name == "group_size":  # uneven, as a router's are: kernels differ in the rows at a group's ends
            # Dirichlet with concentration 4: groups differ by factors of two or three.
            share = np.random.default_rng(0).dirichlet(np.full(x.size, 4.0))
            return jnp.asarray(np.floor(share * arrays["x"].shape[0]), x.dtype).reshape(x.shape)
        return jnp.full(x.shape, 1, x.dtype)

    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    keys = jax.random.split(jax.random.key(0), len(arrays))
    drawn = {name: draw(name, key, x) for key, (name, x) in zip(keys, arrays.items(), strict=True)}
    mesh = _mesh(avals)
    replicated = jax.sharding.PartitionSpec()
    # Replicated: a case holds one device's blocks, and all devices get the same.
    return drawn if mesh is None else jax.device_put(drawn, jax.sharding.NamedSharding(mesh, replicated))


def time_call(function: Callable[..., Any], *args: Any, options: Mapping[str, Any]) -> tuple[Any, float]:
    """Results, and the median seconds of one call after one call that compiles and one more.

    Args:
      options: compiler options.
    """
    jitted = jax.jit(function, compiler_options=dict(options))
    # The first call compiles, the second runs with warm caches and gives the results.
    jax.block_until_ready(jitted(*args))
    results = jax.block_until_ready(jitted(*args))
    times_s: list[float] = []
    while len(times_s) < 5 or sum(times_s) < MIN_TIMED_S:
        start = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        times_s.append(time.perf_counter() - start)
    return results, statistics.median(times_s)
