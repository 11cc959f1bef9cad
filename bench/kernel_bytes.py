"""Bytes of attention, loss, norms and the like as chips' own compilers make them, against each array once.

    python -m jtrain.bench kernel_bytes --json bench/results/kernel_bytes-aot.json
    python -m jtrain.bench kernel_bytes --only attention --chip h200

Nothing runs: the programs are those of the compilers in the extra [aot]. `attention`: one layer of llama8b,
one row of 8192 tokens, forward and backward, by the implementation that a chip chooses; "once" is the sum of
the arrays that the two passes must read and write: q, k, v, the result and its log-partitions forward; all of
these, dy, dq, dk and dv backward. `loss`: temporary bytes of the loss and its gradient at 16384 x 4096 x
128256, beside all logits at once; with eight devices along `tensor`, the bytes that each sends beside
gathering the unembedding. `elementwise`: bytes that XLA's fusions and the kernels move, beside one pass over
each array. Each chip is compiled in a process of its own, because Mosaic compiles for one generation of GPUs
per process.
"""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.bench import Options, Row, option, row
from jtrain.bench.elementwise import cases, implementations_on
from jtrain.bench.loss import TOKENS, D, V, program_of
from jtrain.errors import UserError
from jtrain.hlo.memory_traffic import passes, written_arrays
from jtrain.hlo.traffic import traffic
from jtrain_kernels import compat, registry
from jtrain_kernels.attention.api import ATTENTION
from jtrain_kernels.compile_only import aot
from jtrain_kernels.cost import array, size_bytes
from jtrain_kernels.device import from_name
from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.chunking import best_chunk
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from jtrain_kernels.registry import Avals

GIB = 2**30
BAR_GIB = 1.0
"""Of attention: twice its arrays (0.47 GiB) and a margin, as kernels pad and read keys repeatedly."""


OPTIONS = (
    option("--only", nargs="+", choices=("attention", "loss", "elementwise"), help="these only"),
    option("--chip", help="compile for this chip only, in this process"),
)
ABSENT_CHIPS = True


def run(args: Options) -> Iterator[Row]:
    """Rows of each part and chip.

    Raises:
      UserError: the compiler of a chip is not installed, or failed.
    """
    for part in args.only or PARTS:
        chips, rows_of = PARTS[part]
        for chip in [args.chip] if args.chip else chips:
            yield from rows_of(chip) if args.chip else _in_a_process(part, chip)


def _in_a_process(part: str, chip: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        # Mosaic compiles for one generation of GPUs per process.
        command = [sys.executable, "-m", "jtrain.bench", "kernel_bytes", "--only", part, "--chip", chip]
        process = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
        if not file.exists():
            # The last line of a traceback has its message.
            raise UserError(
                f"kernel_bytes of {part} for {chip} failed: {process.stderr.strip().splitlines()[-1]}"
            )
        return json.loads(file.read_text())["rows"]


def attention_rows(chip: str) -> Iterator[Row]:
    """GiB read and written, beside the arrays once; and the number of arrays of scores."""
    avals = ATTENTION.cases["llama8b"]
    name = registry.choose(ATTENTION, from_name(chip), avals).implementation.name
    hlo = attention_hlo(chip, avals)
    label = f"{chip}, attention of a llama8b layer, {name}"
    yield row(f"{label}: read and written", moved_bytes(hlo) / GIB, "GiB", bar=f"<= {BAR_GIB}")
    yield row(f"{label}: over each array once", moved_bytes(hlo) / needed_bytes(avals), "x")
    yield row(f"{label}: arrays of queries x keys", float(len(score_arrays(hlo, avals))), "", bar="<= 0")


def attention_hlo(chip: str, avals: Avals) -> str:
    """Program of attention and its gradients on a chip, with the implementation that the registry chooses.

    The compiler chooses the layouts of arguments and results, as it does inside a step.
    """
    # No chip is needed: the compiler takes a description.
    mesh, spec = aot.virtual_device(chip), from_name(chip)
    any_layout = Format(Layout.AUTO, NamedSharding(mesh, P()))
    function: Any = jax.jit(
        aot.op_function(ATTENTION, avals, gradients=True), in_shardings=any_layout, out_shardings=any_layout
    )
    # Scalars among the case's arguments are compiled in.
    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    with registry.on(spec), compat.lowering_for(mesh, spec), compat.no_compile_cache():
        return function.lower(arrays).compile().as_text()


def moved_bytes(hlo: str) -> int:
    """Bytes that a program's instructions read and write; a distinct operand counts once per instruction."""
    return sum(array_pass.read_bytes + array_pass.written_bytes for array_pass in passes(hlo))


def needed_bytes(avals: Avals) -> int:
    """Bytes of the arrays that both passes of attention must read and write, each once per pass."""
    q, k = array(avals, "q_BLNH"), array(avals, "k_BMKH")
    B, L, N, _ = q.shape
    lse = 4 * B * N * L
    # Forward: q, the result, k, v and lse; backward: all of these, dy, dq, dk and dv.
    return 2 * size_bytes(q) + 2 * size_bytes(k) + lse + 4 * size_bytes(q) + 4 * size_bytes(k) + lse


def score_arrays(hlo: str, avals: Avals) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Arrays in memory with a dimension of all queries and one of all keys, such as `bf16[1,8192,8192]`."""
    L, M = (array(avals, name).shape[1] for name in ("q_BLNH", "k_BMKH"))
    return tuple(
        sorted(
            (dtype, dims)
            for dtype, dims in written_arrays(hlo)
            # With as many queries as keys, one dimension of that size does not make an array of scores.
            if L in dims and M in dims and (L != M or dims.count(L) > 1)
        )
    )


def loss_rows(chip: str) -> Iterator[Row]:
    """GiB of temporaries by the dtype of the unembedding, whose gradient, an output, has the same dtype."""
    chunk = best_chunk(from_name(chip), tokens=TOKENS, d_model=D, vocab=V)[0]
    # The gradient of the unembedding is summed in float32 in both.
    for dtype in ("float32", "bfloat16"):
        chunked_bytes = loss_temp_bytes(
            functools.partial(linear_cross_entropy, chunk_tokens=chunk), chip, dtype
        )
        label = f"{chip}, {chunk} tokens at a time, unembedding {dtype}"
        # The sum of a bfloat16 gradient is float32 until the end: 1.96 GiB that are no output.
        yield row(label, chunked_bytes / GIB, "GiB", bar="<= 2" if dtype == "float32" else "<= 3")
    full_logits_bytes = loss_temp_bytes(linear_cross_entropy_reference, chip, "bfloat16")
    yield row(f"{chip}, all logits at once, unembedding bfloat16", full_logits_bytes / GIB, "GiB")
    if chip == "h200":
        split_temp_bytes, sent_bytes = split_loss_bytes("h200:8", 8)
        yield row("8 x h200 along tensor, unembedding float32", split_temp_bytes / GIB, "GiB", bar="<= 1.5")
        # Two gatherings (forward, backward) of a bfloat16 unembedding; each device has an eighth already.
        gathered_bytes = 2 * D * V * 2 * 7 // 8
        yield row(
            "8 x h200, sent by each",
            sent_bytes / 2**20,
            "MiB",
            baseline=gathered_bytes / 2**20,
            bar="<= 0.25",
        )


def loss_temp_bytes(loss: Callable[..., Any], chip: str, unembed_dtype: str) -> int:
    """Temporary bytes of a compiled loss and its gradient, without arguments and results."""
    function, shapes = program_of(loss, (TOKENS, D, V), unembed_dtype)
    return aot.compile_for(chip, function, *shapes).temp_bytes


def split_loss_bytes(topology: str, num_devices: int) -> tuple[int, int]:
    """Temporary and sent bytes of a device, with tokens and a float32 unembedding split over devices."""
    mesh = aot.virtual_mesh(topology, {"tensor": num_devices})
    loss = functools.partial(vocab_parallel_linear_cross_entropy, axis="tensor", chunk_tokens=None)
    value_and_gradients, shapes = program_of(loss, (TOKENS, D, V), "float32")

    def local(*arrays: jax.Array) -> Any:
        sums, gradients = value_and_gradients(*arrays)
        return jax.lax.psum(sums, "tensor"), gradients

    specs = P(None, "tensor"), P(None, "tensor"), P()
    sharded_arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=((P(), P()), specs[:2]), check_vma=False)
    report = aot.compile_for(mesh, step, *sharded_arrays)
    return report.temp_bytes, sum(t.wire_bytes for t in traffic(report.hlo, dict(mesh.shape)))


def elementwise_rows(chip: str) -> Iterator[Row]:
    """MiB that each implementation of norms, SwiGLU, RoPE and AdamW moves; baseline: each array once."""
    for case in cases():
        for name in implementations_on(from_name(chip), case.op):
            forced = {} if case.op is None else {case.op.name: name}
            report = aot.compile_for(chip, case.function, *case.arguments, forced=forced)
            needed_mib = case.needed_bytes() / 2**20
            yield row(
                f"{chip}, {case.name}, {name}", moved_bytes(report.hlo) / 2**20, "MiB", baseline=needed_mib
            )


PARTS: dict[str, tuple[tuple[str, ...], Callable[[str], Iterator[Row]]]] = {
    "attention": (("h100", "h200", "b200", "v5p", "v6e"), attention_rows),
    "loss": (("h200", "v5p"), loss_rows),
    "elementwise": (("h200", "v5p"), elementwise_rows),
}
"""Part -> the chips that it is compiled for, and its rows."""
