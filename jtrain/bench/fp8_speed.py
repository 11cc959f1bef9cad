"""FP8 against bfloat16 on one GPU: a matmul of 8192^3 with its casts, and layers of the 8B model.

    python -m jtrain.bench fp8_speed --json bench/results/fp8_speed-h200.json

Needs a GPU with FP8 matmuls, and refuses elsewhere. XLA autotunes each program when it is compiled. The casts
of both operands are part of every call, and with current scaling the computation of their amax too.

The layers are a step's loop over its layers, as the config runs it (float32 weights, full rematerialisation),
on one row of 8192 tokens, with the casts of the weights and the next scales. Embedding, loss and optimizer,
which compute alike in all modes, are left out. Two layers, because XLA removes a loop of one and its
rematerialisation with it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import seconds
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import MatmulDtype, PrecisionSpec
from jtrain.model import ops
from jtrain.model.fp8_scaling import advance_scaling, amax_probes, first_scaling, with_fp8
from jtrain.model.layer_scan import scan_layers
from jtrain.model.param import init_params
from jtrain.model.transformer import Transformer
from jtrain.step.xla_options import compiler_options, kernels_for
from jtrain.step.zero import placement_of
from jtrain_kernels import device

SIZE = 8192
LAYERS = 2
LENGTH = 8192
LLAMA8B = dict(d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336)
REHEARSED = dict(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128)
SCALES = (64.0, 64.0, 64.0)
MODES: tuple[MatmulDtype, ...] = ("compute", "fp8_current", "fp8_delayed")


OPTIONS = (
    option("--calls", type=int, default=30, help="timed matmuls, and steps (default: %(default)s)"),
    option("--only", choices=("matmul", "layers"), help="one of the two"),
    REHEARSE,
)


def matmul(mode: MatmulDtype, x: Array, kernel: Array) -> Array:
    """`x @ kernel` as the model's layers compute it with `precision.matmul_dtype`."""
    if mode == "compute":
        return ops.linear(x, kernel)
    # Delayed scaling needs scales and a place for the new amax; current scaling finds its own.
    delayed = mode == "fp8_delayed"
    return ops.linear(x, ops.Fp8Kernel(kernel, *((jnp.asarray(SCALES), jnp.zeros(3)) if delayed else ())))


def run(args: Options) -> Iterator[Row]:
    """Rows of TFLOP/s of the matmul and tokens/s of the step, each compared with bfloat16.

    Raises:
      UserError: the first device is no GPU that multiplies in 8 bits.
    """
    gpu = jax.devices()[0]
    spec = device.from_device(gpu)
    if not args.rehearse and (gpu.platform != "gpu" or spec is None or ops.fp8_unsupported(spec) is not None):
        raise UserError(
            f"8-bit matmuls are timed on an H100, H200 or B200, but the device here is {gpu.device_kind!r}. "
            "Run the same command on one."
        )
    # Bars are for Hopper only; on a Blackwell the rows are without bars.
    hopper = spec is not None and spec.name in ("h100", "h200")
    size, length, sizes = (64, 64, REHEARSED) if args.rehearse else (SIZE, LENGTH, LLAMA8B)
    if args.only != "layers":
        square = tuple(jax.random.normal(jax.random.key(k), (size, size), jnp.bfloat16) for k in range(2))
        flops: dict[MatmulDtype, float] = {}
        one_device_mesh = make_mesh(MeshSpec(), [gpu])
        for mode in MODES:
            # The options with which a train step in this mode is compiled.
            multiply = jax.jit(
                functools.partial(matmul, mode), compiler_options=compiler_options(one_device_mesh, mode)
            )
            # 2 size^3 FLOPs, in TFLOP/s.
            flops[mode] = 2e-12 * size**3 / seconds(multiply, *square, calls=args.calls)
        yield from _rows(f"matmul {size}^3 with casts", "TFLOP/s", flops, ">= 1.6" if hopper else None)
    if args.only != "matmul":
        rates: dict[MatmulDtype, float] = {}
        for mode in MODES:
            step, arrays = layers(mode, length, sizes, gpu)
            # A step takes much longer than a matmul, so fewer calls are enough.
            rates[mode] = LAYERS * length / seconds(step, *arrays(), calls=max(1, args.calls // 3))
        yield from _rows(
            f"a layer of llama8b, {length} tokens", "tokens/s", rates, ">= 1.2" if hopper else None
        )


def _rows(what: str, unit: str, rates: dict[MatmulDtype, float], bar: str | None) -> list[Row]:
    # MODES[0] is bfloat16, the baseline of the others.
    return [
        row(f"{what}: {mode}", rates[mode], unit, baseline=rates["compute"], bar=bar) for mode in MODES[1:]
    ]


def layers(
    mode: MatmulDtype, length: int, sizes: dict[str, Any], on: jax.Device
) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
    """The jitted forward and backward pass of `LAYERS` layers, and a function that makes its arguments.

    Args:
      length: tokens of the one row.
      sizes: those of `Transformer`.
      on: device to compile for; it need not be present.
    """
    # A vocabulary of 16: the embedding exists but is not part of the measured loop.
    model = Transformer(num_layers=LAYERS, vocab_size=16, **sizes)
    infos = tuple(info for info in model.param_infos() if info.path.startswith("layers."))
    precision = PrecisionSpec(matmul_dtype=mode)
    layout = make_layout(LayoutSpec(zero_stage=0, remat="full"), MeshSpec(), infos, precision=precision)
    mesh = make_mesh(layout.mesh, [on])
    layer = model.layer(placement_of(layout))

    def step(x_BLD: Array, dy_BLD: Array, params: Any, scaling: Any) -> Any:
        # One document of `length` tokens, so all segments are 1.
        position_BL = jnp.arange(length)[None]
        ones_BL = jnp.ones_like(position_BL)
        shared = model.shared(Batch(ones_BL, ones_BL, position_BL, ones_BL))

        # The casts of the weights belong to the step, so they are inside of what is differentiated.
        def forward(x_BLD: Array, params: Any, seen: Any) -> Array:
            if mode != "compute":
                params = with_fp8(params, infos, scaling, seen, jnp.float32(1 / length))
            return scan_layers(layer, (x_BLD, None), params["layers"], shared, unroll=1)[0]

        # The choice of kernels is made while tracing.
        with kernels_for(layout, mesh):
            y_BLD, backward = jax.vjp(forward, x_BLD, params, amax_probes(scaling))
            dx_BLD, gradients, amax = backward(dy_BLD)
            return y_BLD, dx_BLD, gradients, advance_scaling(scaling, amax)

    def arrays() -> tuple[Any, ...]:
        x_BLD, dy_BLD = (
            jax.random.normal(jax.random.key(k), (1, length, model.d_model), jnp.bfloat16) for k in (0, 1)
        )
        params = init_params(infos, seed=0, dtype=precision.param_dtype)
        # A gradient of the size that a mean over tokens has: FP8's range depends on it.
        return x_BLD, dy_BLD / length, params, first_scaling(infos) if mode == "fp8_delayed" else {}

    return jax.jit(step, compiler_options=compiler_options(mesh, mode)), arrays
