"""Causal, segment-aware attention, by the implementation that the registry selects for the device."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.attention import cudnn, splash, tokamax, xla
from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.attention.sinks import sink_gradient, with_sink
from jtrain_kernels.errors import UserError

PASSES = {"cudnn": cudnn.PASSES, "tokamax": tokamax.PASSES, "splash": splash.PASSES, "xla": xla.PASSES}
"""Forward and backward pass of each implementation."""

ATTENTION_FORWARD, ATTENTION_BACKWARD, UNMASKED = "attention_forward", "attention_backward", "_unmasked"
"""Scopes of the passes, and what they add without a causal mask."""

_ARRAYS = ("q_BLNH", "k_BMKH", "v_BMKP", "segment_BL", "segment_BM")

type _Config = tuple[tuple[str, int], ...]


def attention(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    chunk: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B L N P"]:
    """Softmax attention of each query to the keys of its segment up to its own index, at most `window`.

    The plain JAX implementation holds the scores of `chunk` queries at a time, B * N * chunk * M * 4 bytes.
    The backward pass recomputes them from q, k, v and the log-partition of each query. Scores are divided by
    sqrt(H). The softmax is float32, matmuls and result have q's dtype. Query head n uses key head n * K // N.
    With `soft_cap` they are bounded by it, before the mask, through tanh. `sink_N` is a score of each head
    that takes part in the softmax's denominator, as one more key without a value (arXiv:2309.17453).
    Heads of values may have another size P than those of queries and keys.
    Segment 0 is padding: its queries attend among themselves, so their rows are finite but meaningless.

    The results that the backward pass needs carry the checkpoint name "attention".

    Raises:
      UserError: chunk, window or soft_cap is not positive, K does not divide N, or L is not M; or a forced
        implementation cannot run.
    """
    L, N = q_BLNH.shape[1:3]
    M, K = k_BMKH.shape[1:3]
    if L != M:
        raise UserError(
            f"attention: L={L} queries but M={M} keys; causal attention by index needs equally many."
        )
    if N % K:
        raise UserError(f"attention: num_heads={N} is no multiple of num_kv_heads={K}.")
    if chunk < 1:
        raise UserError(f"attention: chunk={chunk} must be at least 1.")
    if window is not None and window < 1:
        raise UserError(
            f"attention: window={window} must be at least 1, the query's own key. Set None for no window."
        )
    if soft_cap is not None and soft_cap <= 0:
        raise UserError(f"attention: soft_cap={soft_cap} must be above 0. Set None for no cap.")
    # A window that covers all keys is none: implementations without windows can then run.
    window = window if window is not None and window < M else None
    arrays = q_BLNH, k_BMKH, v_BMKP, segment_BL, segment_BM
    settings: Any = dict(chunk=chunk, window=window, soft_cap=soft_cap, causal=True)
    if sink_N is not None:
        # Sinks join a pass by its log-partition, so implementations without passes are refused here.
        return _attention(
            passes_for(*arrays, **settings), Mask(True, window, soft_cap), chunk, *arrays, sink_N
        )
    return registry.call(ATTENTION, **dict(zip(_ARRAYS, arrays, strict=True)), **settings)


def passes_for(
    *shapes: jax.ShapeDtypeStruct | Array,
    chunk: int,
    causal: bool,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Passes:
    """Passes of the implementation selected for these shapes, to combine blocks, or with sinks.

    Args:
      shapes: q_BLNH, k_BMKH, v_BMKP, segment_BL and segment_BM, or their shapes.

    Raises:
      UserError: a forced implementation cannot run, or has no passes.
    """
    settings = dict(chunk=chunk, window=window, soft_cap=soft_cap, causal=causal)
    avals = registry.avals_of(dict(zip(_ARRAYS, shapes, strict=True)) | settings)
    choice = registry.select(ATTENTION, avals)
    name = choice.implementation.name
    if name not in PASSES:
        raise UserError(
            f"kernels.attention={name}: this implementation has no passes that a ring could combine, "
            f"or sinks join. Implementations with passes: {', '.join(PASSES)}. Force one of them, or, "
            "without sinks, set layout.context_attention=ulysses."
        )
    # Sorted, because the tuple is a cache key.
    return configured(name, tuple(sorted(choice.config.items())))


@functools.cache
def configured(name: str, config: _Config) -> Passes:
    """Passes of an implementation with a configuration; cached, so that equal arguments give the same
    object.
    """
    passes = PASSES[name]
    return Passes(
        partial(_in_scope, ATTENTION_FORWARD, partial(passes.forward, **dict(config))),
        partial(_in_scope, ATTENTION_BACKWARD, partial(passes.backward, **dict(config))),
    )


def _in_scope(scope: str, run_pass: Callable[..., Any], *arrays: Array, mask: Mask, chunk: int) -> Any:
    """A pass in a named scope, by which readers of a trace find it whatever computes it."""
    with jax.named_scope(f"{scope}{'' if mask.causal else UNMASKED}"):
        return run_pass(*arrays, mask=mask, chunk=chunk)


# Arguments 0 to 2 are no arrays: passes, mask, chunk.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(passes: Passes, mask: Mask, chunk: int, *arrays: Array) -> Float[Array, "B L N P"]:
    """Attention of `arrays`: those that `Passes.forward` takes, and last the sinks if there are any."""
    return _vjp_forward(passes, mask, chunk, *arrays)[0]


def _vjp_forward(passes: Passes, mask: Mask, chunk: int, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    # q, k, v and both segments; sinks are the sixth array.
    result = passes.forward(*arrays[:5], mask=mask, chunk=chunk)
    # No sinks or one array of them.
    for sink_N in arrays[5:]:
        result = with_sink(*result, sink_N)
    # Named outside of the implementations, so that a remat policy saves the results of any of them.
    y_BLNP, lse_BNL = (checkpoint_name(x, "attention") for x in result)
    return y_BLNP, (*arrays, y_BLNP, lse_BNL)


def _vjp_backward(
    passes: Passes, mask: Mask, chunk: int, saved: tuple[Array, ...], dy_BLNP: Array
) -> tuple[Array | None, ...]:
    *_, y_BLNP, lse_BNL = saved
    dq, dk, dv = passes.backward(*saved[:5], y_BLNP, lse_BNL, dy_BLNP, mask=mask, chunk=chunk)
    # Between the five arrays and the two results of the forward pass.
    dsinks = [sink_gradient(y_BLNP, lse_BNL, dy_BLNP, sink_N) for sink_N in saved[5:-2]]
    q_BLNH, k_BMKH, v_BMKP = saved[:3]
    # Passes may return other dtypes; gradients must have those of the arrays.
    return dq.astype(q_BLNH.dtype), dk.astype(k_BMKH.dtype), dv.astype(v_BMKP.dtype), None, None, *dsinks


_attention.defvjp(_vjp_forward, _vjp_backward)


def _call(
    name: str,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
    *,
    chunk: int,
    window: int | None,
    causal: bool,
    soft_cap: float | None = None,
    **config: int,
) -> Float[Array, "B L N P"]:
    passes = configured(name, tuple(sorted(config.items())))
    return _attention(
        passes, Mask(causal, window, soft_cap), chunk, q_BLNH, k_BMKH, v_BMKP, segment_BL, segment_BM
    )


def _llama8b() -> registry.Avals:
    # Llama 3 8B: 32 query heads and 8 key heads of 128, one sequence of 8192.
    query, key = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    segment = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKP=key, segment_BL=segment, segment_BM=segment)
    return dict(arrays, chunk=512, window=None, soft_cap=None, causal=True)


ATTENTION = registry.Op(
    "attention",
    (
        registry.Implementation(
            "cudnn",
            partial(_call, "cudnn"),
            cudnn.supports,
            partial(cost.attention_s, name="cudnn"),
            modules=("jax_plugins.xla_cuda13",),
        ),
        registry.Implementation(
            "tokamax",
            partial(_call, "tokamax"),
            tokamax.supports,
            partial(cost.attention_s, name="tokamax"),
            tokamax.configs,
            modules=("tokamax",),
        ),
        registry.Implementation(
            "splash",
            partial(_call, "splash"),
            splash.supports,
            partial(cost.attention_s, name="splash"),
            splash.configs,
        ),
        registry.Implementation("xla", partial(_call, "xla"), cost_s=partial(cost.attention_s, name="xla")),
    ),
    cases={"llama8b": _llama8b()},
)
OPS = (ATTENTION,)
