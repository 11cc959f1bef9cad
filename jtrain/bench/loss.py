"""Loss and gradient at 16384 x 4096 x 128256 bf16 on a GPU: ms and temporary bytes, chunked and whole.

Needs a GPU, and refuses without one; the published `kernel_bytes` has the bytes for an absent H200.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import gpu, make_filled, seconds
from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.chunking import CANDIDATES, best_chunk, predict
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

TOKENS, D, V = 16384, 4096, 128256
GIB = 2**30

BARS = {"h100": "<= 110", "h200": "<= 90"}
"""GPU -> milliseconds to keep to."""

REHEARSED = (128, 32, 256)
"""Tokens, width and vocabulary of a rehearsal."""


OPTIONS = (
    option("--repeats", type=int, default=10, help="timed calls of each"),
    option("--all-chunks", action="store_true", help="every size of chunks, not the predicted best alone"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of every chunk size; the baseline is the loss with all logits at once.

    Raises:
      UserError: the first device is no GPU.
    """
    way_out = "; for bytes without one, run kernel_bytes in a checkout"
    _, spec = gpu("loss", rehearse=args.rehearse, way_out=way_out)
    sizes = tokens, d_model, vocab = REHEARSED if args.rehearse else (TOKENS, D, V)
    whole_s, whole_bytes = measure_loss(linear_cross_entropy_reference, args.repeats, sizes)
    # The chunk size that a run on this device would take.
    best, because = best_chunk(spec, tokens=tokens, d_model=d_model, vocab=vocab)
    yield row(f"all logits at once: {whole_bytes / GIB:.2f} GiB of temporaries", whole_s * 1e3, "ms")
    # Sizes that divide the tokens, since a padded chunk would be timed with its padding.
    for chunk in [c for c in CANDIDATES if tokens % c == 0] if args.all_chunks else (best,):
        took_s, temp = measure_loss(
            functools.partial(linear_cross_entropy, chunk_tokens=chunk), args.repeats, sizes
        )
        predicted = predict(spec, chunk, tokens=tokens, d_model=d_model, vocab=vocab)
        prediction = f", {predicted.seconds * 1e3:.3g} ms predicted" if predicted else ""
        # Only the predicted best has bars: it is the claim.
        is_best, bar = chunk == best, BARS.get(spec.name)
        label = f"{chunk} tokens at a time{prediction}{f' ({because})' if is_best else ''}"
        yield row(label, took_s * 1e3, "ms", bar=bar if is_best else None)
        yield row(f"{chunk} tokens at a time", temp / GIB, "GiB", bar="<= 2" if is_best else None)
        yield row(f"{chunk} tokens at a time, against all at once", took_s, "s", baseline=whole_s)


def program_of(
    loss: Any, sizes: tuple[int, int, int], unembed_dtype: str = "float32"
) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Loss and gradient for (tokens, width, vocabulary), and its arguments' shapes."""
    tokens, d_model, vocab = sizes
    shapes = (
        jax.ShapeDtypeStruct((1, tokens, d_model), jnp.bfloat16),
        jax.ShapeDtypeStruct((d_model, vocab), jnp.dtype(unembed_dtype)),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    # has_aux: the second result, the nats for reporting, has no gradient.
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), shapes


def measure_loss(loss: Any, repeats: int, sizes: tuple[int, int, int]) -> tuple[float, int]:
    """Seconds of loss and gradient, and temporary bytes of the compiled program."""
    function, shapes = program_of(loss, sizes)
    program = jax.jit(function).lower(*shapes).compile()
    # Temporary bytes are known after compilation, before anything is allocated.
    memory = program.memory_analysis()
    assert memory is not None
    return seconds(program, *make_filled(shapes), calls=repeats), memory.temp_size_in_bytes
