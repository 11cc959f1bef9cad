"""RMSNorm, SwiGLU, RoPE and AdamW: fraction of a copy's bandwidth on a GPU, or with `--compiled` the bytes XLA moves.

On a GPU each implementation that runs there is timed, forward and backward, for 8192 tokens of llama8b: programs of
ten calls each, because a single call may end before Python has dispatched the next program. With `--compiled` nothing
runs: programs of the compilers in the extra [aot] show the bytes that are read and written, beside the minimum of one
pass over each array.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain_kernels.registry import Op

SIZES = TOKENS, D, F, HEADS, HEAD = 8192, 4096, 14336, 32, 128
REHEARSED = 64, 64, 128, 4, 16
BARS = {"rms_norm forward": ">= 0.85", "rms_norm backward": ">= 0.75", "rms_norm_branch backward": ">= 0.75"}
CHIPS = ("h200", "v5p")
CALLS = 10
"""Calls in one timed program."""

type Case = tuple[str, Callable[..., Any], tuple[Any, ...], "Op | None"]


OPTIONS = (
    option("--compiled", action="store_true", help="bytes that compilers say, for an H200 and a v5p"),
    option("--repeats", type=int, default=50, help="timed programs of each, of ten calls"),
    option("--only", metavar="TEXT", help="only ops whose name contains this, such as rms_norm"),
    REHEARSE,
)
ABSENT_CHIPS = ("compiled",)


def run(args: Options) -> Iterator[Row]:
    """Rows of every op, pass and implementation.

    Raises:
      UserError: the first device is no GPU, and `--compiled` is not given.
    """
    if args.compiled:
        yield from (one for chip in CHIPS for one in compiled_rows(chip))
        return
    import jax

    gpu = jax.devices()[0]
    if gpu.platform != "gpu" and not args.rehearse:
        raise UserError(
            f"elementwise times kernels on a GPU, but the device here is {gpu.device_kind!r}. Run the same command on "
            "one, or add --compiled for the bytes that compilers say."
        )
    chosen = [case for case in cases(REHEARSED if args.rehearse else SIZES) if (args.only or "") in case[0]]
    if not chosen:
        raise UserError(f"--only {args.only}: no op's name contains it. There are: {', '.join(c[0] for c in cases())}.")
    yield from timed_rows(chosen, args.repeats, copied=2**16 if args.rehearse else 2**28)


def cases(sizes: tuple[int, int, int, int, int] = SIZES) -> Iterator[Case]:
    """Cases: name, function, shapes of its arguments, and the op if there is one.

    Args:
      sizes: tokens, width, hidden width, heads and their width.
    """
    import jax
    import jax.numpy as jnp

    from jtrain_kernels.fp8.formats import FORWARD, quantised
    from jtrain_kernels.rms_norm.api import RMS_NORM, RMS_NORM_BRANCH, rms_norm, rms_norm_branch
    from jtrain_kernels.rope.api import ROPE, rope
    from jtrain_kernels.swiglu.api import SWIGLU, swiglu

    def wide(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    tokens, d_model, d_ff, heads, head = sizes
    x, scale, hidden = wide(1, tokens, d_model), wide(d_model, dtype="float32"), wide(1, tokens, d_ff)
    q, table = wide(1, tokens, heads, head), wide(1, tokens, head // 2, dtype="float32")
    weight, scalar = wide(d_model, d_ff, dtype="float32"), wide(dtype="float32")
    norm, branch = functools.partial(rms_norm, eps=1e-5), functools.partial(rms_norm_branch, eps=1e-5)
    yield "rms_norm forward", norm, (x, scale), RMS_NORM
    yield "rms_norm backward", backward(norm), (x, x, scale), RMS_NORM
    yield "rms_norm_branch backward", backward(branch), ((x, x), x, scale), RMS_NORM_BRANCH
    yield "x + branch, rms_norm forward", lambda x, b, s: (x + b, norm(x + b, s)), (x, x, scale), RMS_NORM

    def to_8bit(x: jax.Array, branch: jax.Array, scale: jax.Array, factor: jax.Array) -> tuple[jax.Array, ...]:
        y = norm(x + branch, scale)
        return x + branch, y, quantised(y, factor, FORWARD)

    yield "x + branch, rms_norm and its e4m3 cast", to_8bit, (x, x, scale, scalar), RMS_NORM
    yield "swiglu forward", swiglu, (hidden, hidden), SWIGLU
    yield "swiglu backward", backward(swiglu), (hidden, hidden, hidden), SWIGLU
    yield "rope forward", rope, (q, table, table), ROPE
    yield "rope backward", lambda dy, c, s: backward(lambda x: rope(x, c, s))(dy, dy), (q, table, table), ROPE
    yield "AdamW", adamw, (weight, weight, weight, weight, scalar), None


def backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Function `f(cotangent, *arguments)` that computes only the gradients."""
    import jax

    return lambda given, *arguments: jax.vjp(function, *arguments)[1](given)


def adamw(param: Any, mu: Any, nu: Any, grad: Any, rate: Any) -> tuple[Any, Any, Any]:
    """One AdamW update in float32, as in `jtrain.optim`."""
    import jax.numpy as jnp

    mu, nu = 0.9 * mu + 0.1 * grad, 0.95 * nu + 0.05 * grad * grad
    return param - rate * (mu / (jnp.sqrt(nu) + 1e-8) + 0.1 * param), mu, nu


def needed_bytes(arguments: Any, results: Any) -> int:
    """Minimum bytes: every argument read once and every result written once; a duplicate result counts once."""
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments, results)))


def compiled_rows(chip: str) -> list[Row]:
    """Rows of bytes that XLA's fusions and the kernels for a chip move; baseline: each array once."""
    import jax

    from jtrain.hlo.memory_traffic import passes
    from jtrain_kernels.compile_only import aot
    from jtrain_kernels.device import from_name
    from jtrain_kernels.registry import implementations

    rows = []
    for name, function, arguments, op in cases():
        needed = needed_bytes(arguments, jax.eval_shape(function, *arguments))
        for one in ["xla"] if op is None else [i.name for i in implementations(op)]:
            if op is not None and _refusal(op, one, from_name(chip)) is not None:
                continue
            report = aot.compile_for(chip, function, *arguments, forced={} if op is None else {op.name: one})
            moved = sum(p.read_bytes + p.written_bytes for p in passes(report.hlo))
            rows.append(row(f"{chip}, {name}, {one}", moved / 2**20, "MiB", baseline=needed / 2**20))
    return rows


def timed_rows(chosen: list[Case], repeats: int, *, copied: int) -> Iterator[Row]:
    """Rows of GB/s over the minimum bytes, and the fraction of the bandwidth of copying so many bfloat16 numbers."""
    import jax
    import jax.numpy as jnp

    from jtrain_kernels import registry
    from jtrain_kernels.device import live

    here = live(jax.devices()[0])
    large = jax.ShapeDtypeStruct((copied,), jnp.bfloat16)
    copy = 2 * large.size * 2 / seconds(jax.jit(lambda x: x + 1), (large,), repeats)
    yield row(f"copy, {here.name}", copy / 1e9, "GB/s")
    for name, function, arguments, op in chosen:
        needed = needed_bytes(arguments, jax.eval_shape(function, *arguments))
        for one in ["xla"] if op is None else [i.name for i in registry.implementations(op)]:
            if op is not None and _refusal(op, one, here) is not None:
                continue
            with registry.on(here, forced={} if op is None else {op.name: one}):
                rate = CALLS * needed / seconds(jax.jit(several(function)), (arguments,) * CALLS, repeats)
            yield row(f"{name}, {one}", rate / 1e9, "GB/s", baseline=copy / 1e9, bar=BARS.get(name))


def _refusal(op: "Op", name: str, device: Any) -> str | None:
    from jtrain_kernels.registry import implementations

    (found,) = [i for i in implementations(op) if i.name == name]
    return found.supports(device, next(iter(op.cases.values())))


def several(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Function that calls `function` with each of several tuples of arguments, and returns all results.

    Each call has arrays and results of its own, so XLA can neither merge calls nor drop one, and their bytes add up.
    """
    return lambda *calls: [function(*arguments) for arguments in calls]


def seconds(function: Callable[..., Any], shapes: tuple[Any, ...], repeats: int) -> float:
    """Mean wall seconds of one call of a compiled function, after one call that is not timed.

    Calls are dispatched one after the other, and the clock stops once the last result is there. The device works
    without pause only if a call takes it longer than Python needs to dispatch one: 49 us for the smallest program
    beside one H100 (2026-11-22, JAX 0.11.2), where a copy of 64 MiB reached 2265 GB/s alone and 2778 with ten in a
    program. For shorter work time `several` calls in one program.

    Args:
      shapes: arguments, with a shape in place of each array; each array is one of its own, filled with 0.5.
    """
    import jax
    import jax.numpy as jnp

    arguments = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), shapes)
    jax.block_until_ready(function(*arguments))
    start_s = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start_s) / repeats
