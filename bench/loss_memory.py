"""Temporary bytes of the loss and its gradient at 16384 x 4096 x 128256 bf16, compiled for an H200 and a v5p.

Nothing runs: the compilers of the extra [aot] report their allocations. The baseline is the same loss with all logits
at once. With eight devices along `tensor`, the bytes that each device sends are compared with gathering the
unembedding.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jtrain.bench import Options, Row, option, row

if TYPE_CHECKING:
    import jax

GIB = 2**30


OPTIONS = (option("--chunk-tokens", type=int, help="tokens whose logits exist at a time; else the predicted best"),)
ABSENT_CHIPS = True


def run(args: Options) -> list[Row]:
    """Rows of every chip and dtype of the unembedding; its gradient, an output, has the same dtype."""
    from jtrain.bench.loss import TOKENS, D, V  # lazy, as below: it imports jax
    from jtrain_kernels.compile_only.targets import topology_devices
    from jtrain_kernels.device import live
    from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy
    from jtrain_kernels.linear_cross_entropy.chunking import best_chunk
    from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

    rows = []
    for chip, topology in (("H200", "h200:1"), ("v5p", "v5p:2x2x1")):
        device = topology_devices(topology)[0]
        chunk = args.chunk_tokens or best_chunk(live(device), tokens=TOKENS, d_model=D, vocab=V)[0]
        whole = temp_bytes(linear_cross_entropy_reference, device, "bfloat16") / GIB
        for dtype in ("float32", "bfloat16"):
            loss = functools.partial(linear_cross_entropy, chunk_tokens=chunk)
            chunked = temp_bytes(loss, device, dtype)
            what = f"{chip}, {chunk} tokens at a time, unembedding {dtype}"
            # The sum of a bfloat16 gradient is float32 until the end: 1.96 GiB that are no output.
            rows.append(row(what, chunked / GIB, "GiB", bar="<= 2" if dtype == "float32" else "<= 3"))
        rows.append(row(f"{chip}, all logits at once, unembedding bfloat16", whole, "GiB"))
    split, sent = split_bytes("h200:8", 8)
    rows.append(row("8 x H200 along tensor, unembedding float32", split / GIB, "GiB", bar="<= 1.5"))
    gathered = 2 * D * V * 2 * 7 // 8
    rows.append(row("8 x H200, sent by each", sent / 2**20, "MiB", baseline=gathered / 2**20, bar="<= 0.25"))
    return rows


def split_bytes(topology: str, num_devices: int) -> tuple[int, int]:
    """Temporary and sent bytes of a device, with tokens and a float32 unembedding split over devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jtrain.bench.loss import TOKENS, D, V
    from jtrain.hlo.traffic import traffic
    from jtrain_kernels.compile_only import aot
    from jtrain_kernels.linear_cross_entropy.api import vocab_parallel_linear_cross_entropy

    mesh = aot.virtual_mesh(topology, {"tensor": num_devices})

    def local(x: jax.Array, w: jax.Array, t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return vocab_parallel_linear_cross_entropy(x, w, t, axis="tensor", chunk_tokens=None)

        sums, gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
        return jax.lax.psum(sums, "tensor"), gradients

    specs = P(None, "tensor"), P(None, "tensor"), P()
    shapes = (
        jax.ShapeDtypeStruct((1, TOKENS, D), jnp.bfloat16, sharding=NamedSharding(mesh, specs[0])),
        jax.ShapeDtypeStruct((D, V), jnp.float32, sharding=NamedSharding(mesh, specs[1])),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=NamedSharding(mesh, specs[2])),
    )
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=((P(), P()), specs[:2]), check_vma=False)
    report = aot.compile_for(mesh, step, *shapes)
    return report.temp_bytes, sum(t.wire_bytes for t in traffic(report.hlo, dict(mesh.shape)))


def temp_bytes(loss: Callable[..., Any], device: "jax.Device", unembed_dtype: str) -> int:
    """Temporary bytes of a compiled `value_and_grad(loss)`, without arguments and results."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jtrain.bench.loss import TOKENS, D, V
    from jtrain.plan.compile.compiled_step import no_compile_cache

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
