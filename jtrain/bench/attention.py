"""Attention on one GPU: TFLOP/s of every implementation that runs there, forward and backward, after a check.

    python -m jtrain.bench attention --json attention.json

Needs an NVIDIA GPU, and refuses elsewhere. One layer's block in bfloat16, causal: two rows of 8192 tokens and
heads of 128, with as many key heads as query heads, with grouped heads, and of packed documents; and
llama1b's microbatch. FLOPs are 4 B N L^2 H / 2 forward and 2.5 times that backward, also for documents, so
skipped blocks count as speed. Each implementation is first compared with plain JAX in float32; one with wrong
results is not timed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import difference, gpu, seconds
from jtrain.errors import UserError
from jtrain_kernels import registry
from jtrain_kernels.attention.api import ATTENTION
from jtrain_kernels.compile_only import aot
from jtrain_kernels.device import live

BARS = {
    "h100": {"forward": ">= 550", "backward": ">= 400"},
    "h200": {"forward": ">= 620", "backward": ">= 470"},
}
"""TFLOP/s to reach on a GPU by the fastest implementation, with heads of 128 and one document a row."""

TOLERANCE = 2e-2
"""Tolerance relative to the largest element: a bfloat16 result of sums of thousands of terms, each rounded by
2^-9."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of one device's block, with `documents` of different lengths per row."""

    B: int
    L: int
    N: int
    K: int
    H: int = 128
    documents: int = 1

    def __str__(self) -> str:
        packed = f", {self.documents} documents a row" if self.documents > 1 else ""
        return f"{self.B} x {self.L}, {self.N}/{self.K} heads of {self.H}{packed}"

    @property
    def forward_flops(self) -> float:
        # Two matmuls of 2 B N L^2 H FLOPs, of which a causal mask needs half.
        return 2.0 * self.B * self.N * self.L**2 * self.H


SHAPES = {
    "plain": Shape(2, 8192, 16, 16),
    "llama8b": Shape(2, 8192, 32, 8),
    "documents": Shape(2, 8192, 32, 8, documents=12),
    "llama1b": Shape(8, 4096, 32, 8, 64),
}
REHEARSED = Shape(1, 128, 4, 2, 8, documents=3)
STATICS = dict(chunk=512, window=None, causal=True)


OPTIONS = (
    option("--calls", type=int, default=20, help="timed calls of each, after one that is not"),
    option("--only", help="one implementation"),
    option("--shape", choices=tuple(SHAPES), help="one of the shapes"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """TFLOP/s by shape, direction and implementation; a rehearsal on a CPU takes plain JAX for each one.

    Raises:
      UserError: the first device is no NVIDIA GPU; or `--only` names none that runs there.
    """
    _, spec = gpu("attention", rehearse=args.rehearse, needs="an NVIDIA GPU")
    # No kernel of a GPU runs on a CPU, so plain JAX stands for whichever was asked for.
    only = "xla" if args.rehearse and spec.platform == "cpu" else args.only
    shapes = list(SHAPES.values()) if args.shape is None else [SHAPES[args.shape]]
    for shape in [REHEARSED] if args.rehearse else shapes:
        arrays = draw_arrays(shape)
        avals = registry.avals_of(arrays | STATICS)
        reasons = {i.name: i.obstacle(spec, avals) for i in registry.implementations(ATTENTION)}
        names = [name for name, reason in reasons.items() if reason is None and only in (None, name)]
        if not names:
            raise UserError(f"--only {only}: {reasons.get(str(only), 'no such implementation')}.")
        best: dict[str, float] = {}
        for name in names:
            label = f"{shape}: {name}"
            # One row of at most 1024 tokens: the float32 reference materialises its scores.
            error = largest_error(name, draw_arrays(dataclasses.replace(shape, B=1, L=min(shape.L, 1024))))
            # `not <`, so that nan fails too.
            if not error < TOLERANCE:
                yield row(f"{label} IS WRONG by this share of the largest element", error, "", bar="<= 0.02")
                continue
            forward_s, both_s = (
                seconds(program(name, gradients=gradients), arrays, calls=args.calls)
                for gradients in (False, True)
            )
            # The backward pass is not timed alone, because JAX has no program of it alone.
            seconds_of = {"forward": forward_s, "backward": both_s - forward_s}
            for direction, times in (("forward", 1.0), ("backward", 2.5)):
                rate = times * shape.forward_flops / seconds_of[direction] / 1e12
                best[direction] = max(best.get(direction, 0.0), rate)
                yield row(f"{label}, {direction}", rate, "TFLOP/s")
        for direction, rate in best.items():
            # Bars were set for heads of 128 and one document per row.
            bar = BARS.get(spec.name, {}).get(direction) if (shape.H, shape.documents) == (128, 1) else None
            yield row(f"{shape}: the fastest, {direction}", rate, "TFLOP/s", bar=bar)


def draw_arrays(shape: Shape) -> dict[str, jax.Array]:
    """Normal queries, keys and values, and segments of documents of different lengths."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((shape.B, shape.L, heads, shape.H), np.float32), jnp.bfloat16)
        for heads in (shape.N, shape.K, shape.K)
    )
    # Random document ends, sorted; position p is in document 1 + the number of ends before it.
    ends = [np.sort(rng.choice(shape.L, shape.documents - 1, replace=False)) for _ in range(shape.B)]
    segment = np.stack([np.searchsorted(e, np.arange(shape.L), side="right") + 1 for e in ends])
    segment_BL = jnp.asarray(segment, jnp.int32)
    return dict(q_BLNH=q, k_BMKH=k, v_BMKP=v, segment_BL=segment_BL, segment_BM=segment_BL)


def program(name: str, *, gradients: bool) -> Callable[[dict[str, jax.Array]], Any]:
    """The jitted op of an implementation on this device; with the gradients of q, k and v, or without."""
    function = aot.op_function(ATTENTION, STATICS, gradients=gradients)

    def forced(arrays: dict[str, jax.Array]) -> Any:
        # The registry's target is read while tracing, so the context is inside of the jitted function.
        with registry.on(live(jax.devices()[0]), forced={ATTENTION.name: name}):
            return function(arrays)

    return jax.jit(forced)


def largest_error(name: str, arrays: dict[str, jax.Array]) -> float:
    """Largest difference from plain JAX in float32, of value and gradients, relative to each maximum."""
    wide = {key: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for key, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        # Highest precision: a GPU's float32 matmuls are TF32 otherwise.
        want = program("xla", gradients=True)(wide)
    return difference(program(name, gradients=True)(arrays), want)
