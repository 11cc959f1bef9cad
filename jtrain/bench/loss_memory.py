"""Temporary bytes of the loss and its gradient at 16384 x 4096 x 128256 bf16, compiled for an H200 and a v5p.

Nothing runs: the compilers of the extra [aot] say what they would allocate. The baseline is the same loss with all
logits at once.
"""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jtrain.bench import Row, row
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    import jax

TOKENS, D, V = 16384, 4096, 128256
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens whose logits exist at a time")
    os.environ.update(AOT_ENVIRONMENT)  # jax reads it when it is imported, which no import above does


def run(args: argparse.Namespace) -> list[Row]:
    """One row per chip and dtype of the unembedding; its gradient, an output, has the same dtype."""
    from jtrain.plan.aot import topology_devices
    from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy
    from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

    rows = []
    for chip, topology in (("H200", "h200:1"), ("v5p", "v5p:2x2x1")):
        device = topology_devices(topology)[0]
        whole = temp_bytes(linear_cross_entropy_reference, device, "bfloat16") / GIB
        for dtype in ("float32", "bfloat16"):
            chunked = temp_bytes(
                lambda x, w, t: linear_cross_entropy(x, w, t, chunk_tokens=args.chunk_tokens), device, dtype
            )
            what = f"{chip}, {args.chunk_tokens} tokens at a time, unembedding {dtype}"
            rows.append(row(what, chunked / GIB, "GiB", bar="<= 3"))
        rows.append(row(f"{chip}, all logits at once, unembedding bfloat16", whole, "GiB"))
    return rows


def temp_bytes(loss: Callable[..., Any], device: "jax.Device", unembed_dtype: str) -> int:
    """What a compiled `value_and_grad(loss)` allocates beside arguments and results."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jtrain.plan.aot import no_compile_cache

    whole = NamedSharding(Mesh(np.array([device]), ("one",)), P())

    def abstract(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    arguments = abstract((1, TOKENS, D), "bfloat16"), abstract((D, V), unembed_dtype), abstract((1, TOKENS), "int32")
    lowered = step.lower(*arguments)
    with no_compile_cache():
        memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
