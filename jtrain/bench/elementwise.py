"""RMSNorm, SwiGLU, RoPE and AdamW on a GPU: share of a copy's bandwidth, by implementation and direction.

Each implementation that runs there is timed for 8192 tokens of llama8b, by the bytes of one pass over each
array: programs of ten calls each, because a single call may end before Python has dispatched the next
program. The published `kernel_bytes` has the bytes that are really read and written, for chips that are not
here.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import gpu, make_filled, seconds
from jtrain.errors import UserError
from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.fp8.formats import FORWARD, quantise
from jtrain_kernels.registry import Op
from jtrain_kernels.rms_norm.api import RMS_NORM, RMS_NORM_BRANCH, rms_norm, rms_norm_branch
from jtrain_kernels.rope.api import ROPE, rope
from jtrain_kernels.swiglu.api import SWIGLU, swiglu

SIZES = TOKENS, D, F, HEADS, HEAD = 8192, 4096, 14336, 32, 128
REHEARSED = 64, 64, 128, 4, 16
BARS = {"rms_norm forward": ">= 0.85", "rms_norm backward": ">= 0.75", "rms_norm_branch backward": ">= 0.75"}
CALLS = 10
"""Calls in one timed program."""


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """A function to time, the shapes of its arguments, and the op whose implementations it can take."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    op: Op | None

    def needed_bytes(self) -> int:
        """Every argument read once and every result written once; a duplicate result counts once."""
        arrays = jax.tree.leaves((self.arguments, jax.eval_shape(self.function, *self.arguments)))
        return sum(x.size * x.dtype.itemsize for x in arrays)


OPTIONS = (
    option("--repeats", type=int, default=50, help="timed programs of each, of ten calls"),
    option("--only", metavar="TEXT", help="only ops whose name contains this, such as rms_norm"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of every op, pass and implementation, in GB/s; baseline: a copy.

    Raises:
      UserError: the first device is no GPU, or no op has the name of `--only`.
    """
    _, spec = gpu("elementwise", rehearse=args.rehearse)
    # Part of a name, so that `rms_norm` also selects the branch.
    chosen = [case for case in cases(REHEARSED if args.rehearse else SIZES) if (args.only or "") in case.name]
    if not chosen:
        raise UserError(
            f"--only {args.only}: no op's name contains it. There are: {', '.join(c.name for c in cases())}."
        )
    large = jax.ShapeDtypeStruct((2**16 if args.rehearse else 2**28,), jnp.bfloat16)
    # Two bytes per number, read and written.
    copy = 2 * large.size * 2 / seconds(jax.jit(lambda x: x + 1), make_filled(large), calls=args.repeats)
    yield row(f"copy, {spec.name}", copy / 1e9, "GB/s")
    for case in chosen:
        for name in implementations_on(spec, case.op):
            # The implementation is chosen while the call is traced, so the context encloses the timing.
            with registry.on(spec, forced={} if case.op is None else {case.op.name: name}):
                # Arrays of its own for each call: shared ones would stay in the cache.
                calls = make_filled((case.arguments,) * CALLS)
                program_s = seconds(jax.jit(call_several(case.function)), *calls, calls=args.repeats)
            # A rate of the least possible bytes: passes beyond the necessary ones lower it.
            rate = CALLS * case.needed_bytes() / program_s
            yield row(
                f"{case.name}, {name}", rate / 1e9, "GB/s", baseline=copy / 1e9, bar=BARS.get(case.name)
            )


def implementations_on(device: DeviceSpec, op: Op | None) -> list[str]:
    """Names of an op's implementations that run on a device; plain XLA where there is no op."""
    if op is None:
        return ["xla"]
    # By the op's first case, which is llama8b's, as the timed shapes are.
    avals = next(iter(op.cases.values()))
    return [
        implementation.name
        for implementation in registry.implementations(op)
        if implementation.obstacle(device, avals) is None
    ]


def cases(sizes: tuple[int, int, int, int, int] = SIZES) -> Iterator[TimedCall]:
    """Functions that are timed.

    Args:
      sizes: tokens, width, hidden width, heads and their width.
    """

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    tokens, d_model, d_ff, heads, head = sizes
    x, scale, hidden = array(1, tokens, d_model), array(d_model, dtype="float32"), array(1, tokens, d_ff)
    q, table = array(1, tokens, heads, head), array(1, tokens, head // 2, dtype="float32")
    weight, scalar = array(d_model, d_ff, dtype="float32"), array(dtype="float32")
    norm, branch = functools.partial(rms_norm, eps=1e-5), functools.partial(rms_norm_branch, eps=1e-5)
    yield TimedCall("rms_norm forward", norm, (x, scale), RMS_NORM)
    yield TimedCall("rms_norm backward", backward(norm), (x, x, scale), RMS_NORM)
    # The first argument of a backward case is the cotangent, here of both results.
    yield TimedCall("rms_norm_branch backward", backward(branch), ((x, x), x, scale), RMS_NORM_BRANCH)
    yield TimedCall(
        "x + branch, rms_norm forward", lambda x, b, s: (x + b, norm(x + b, s)), (x, x, scale), RMS_NORM
    )

    def to_8bit(
        x: jax.Array, branch: jax.Array, scale: jax.Array, factor: jax.Array
    ) -> tuple[jax.Array, ...]:
        y = norm(x + branch, scale)
        # The quantised array is one more result, as a matmul in FP8 would read it.
        return x + branch, y, quantise(y, factor, FORWARD)

    yield TimedCall("x + branch, rms_norm and its e4m3 cast", to_8bit, (x, x, scale, scalar), RMS_NORM)
    yield TimedCall("swiglu forward", swiglu, (hidden, hidden), SWIGLU)
    yield TimedCall("swiglu backward", backward(swiglu), (hidden, hidden, hidden), SWIGLU)
    yield TimedCall("rope forward", rope, (q, table, table), ROPE)
    yield TimedCall(
        # The rotation is linear in x, so dy also serves as the point of differentiation.
        "rope backward",
        lambda dy, c, s: backward(lambda x: rope(x, c, s))(dy, dy),
        (q, table, table),
        ROPE,
    )
    yield TimedCall("AdamW", adamw, (weight, weight, weight, weight, scalar), None)


def backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Function `f(cotangent, *arguments)` that computes only the gradients."""
    return lambda cotangent, *arguments: jax.vjp(function, *arguments)[1](cotangent)


def adamw(param: Any, mu: Any, nu: Any, grad: Any, rate: Any) -> tuple[Any, Any, Any]:
    """One AdamW update in float32, as in `jtrain.optim`."""
    mu, nu = 0.9 * mu + 0.1 * grad, 0.95 * nu + 0.05 * grad * grad
    return param - rate * (mu / (jnp.sqrt(nu) + 1e-8) + 0.1 * param), mu, nu


def call_several(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Function that calls `function` with each of several tuples of arguments, and returns all results.

    Each call has arrays and results of its own, so XLA can neither merge calls nor drop one, and their bytes
    add up.
    """
    return lambda *calls: [function(*arguments) for arguments in calls]
