"""Bytes that attention moves as compiled, against each of its arrays once, by the implementation that a chip chooses.

    python -m jtrain.bench attention_bytes --json attention_bytes.json

Nothing runs: the programs are those of the compilers in the extra [aot]. One layer of llama8b, one row of 8192 tokens,
forward and backward; the compiler chooses the layouts of arguments and results, as it does inside a step. "Once" is
the sum of the arrays that the two passes must read and write: q, k, v, the result and its log-partitions forward; all
of these, dy, dq, dk and dv backward. Each chip is compiled in a process of its own, because Mosaic compiles for one
generation of GPUs per process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain.bench import Options, Row, option, row
from jtrain.errors import UserError

if TYPE_CHECKING:  # full names in annotations, so that runtime type checks can resolve them
    import jtrain_kernels.registry

CHIPS = ("h100", "h200", "b200", "v5p", "v6e")

BAR_GIB = 1.0
"""Twice the arrays (0.47 GiB), and a margin: kernels read keys and values more than once, and pad log-partitions."""


OPTIONS = (option("--chip", help="compile for this chip only, in this process"),)
ABSENT_CHIPS = True


def run(args: Options) -> list[Row]:
    """GiB read and written by chip, beside the arrays once; and the number of arrays of scores.

    Raises:
      UserError: the compiler of a chip is not installed, or failed.
    """
    if args.chip is None:
        return [one for chip in CHIPS for one in _in_a_process(chip)]
    from jtrain_kernels import registry
    from jtrain_kernels.attention.api import ATTENTION
    from jtrain_kernels.device import from_name

    avals = ATTENTION.cases["llama8b"]
    name = registry.choose(ATTENTION, from_name(args.chip), avals).implementation.name
    hlo = compiled_hlo(args.chip, avals)
    what = f"{args.chip}, attention of a llama8b layer, {name}"
    return [
        row(f"{what}: read and written", moved_bytes(hlo) / 2**30, "GiB", bar=f"<= {BAR_GIB}"),
        row(f"{what}: over each array once", moved_bytes(hlo) / needed_bytes(avals), "x"),
        row(f"{what}: arrays of queries x keys", float(len(score_arrays(hlo, avals))), "", bar="<= 0"),
    ]


def _in_a_process(chip: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "jtrain.bench", "attention_bytes", "--chip", chip, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise UserError(f"attention_bytes --chip {chip} failed: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(file.read_text())["rows"]


def compiled_hlo(chip: str, avals: "jtrain_kernels.registry.Avals") -> str:
    """Program of attention and its gradients on a chip, with the implementation that the registry chooses."""
    import jax
    from jax.experimental.layout import Format, Layout

    from jtrain_kernels import compat, registry
    from jtrain_kernels.attention.api import ATTENTION
    from jtrain_kernels.compile_only import aot
    from jtrain_kernels.device import from_name

    mesh, spec = aot.virtual_device(chip), from_name(chip)
    any_layout = Format(Layout.AUTO, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    function: Any = jax.jit(
        aot.op_function(ATTENTION, avals, gradients=True), in_shardings=any_layout, out_shardings=any_layout
    )
    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    with registry.on(spec), compat.lowering_for(mesh, spec), compat.no_compile_cache():
        return function.lower(arrays).compile().as_text()


def moved_bytes(hlo: str) -> int:
    """Bytes that the instructions of a program read and write; each distinct operand of an instruction counts once."""
    from jtrain.hlo.memory_traffic import passes

    return sum(one.read_bytes + one.written_bytes for one in passes(hlo))


def needed_bytes(avals: "jtrain_kernels.registry.Avals") -> int:
    """Bytes of the arrays that both passes must read and write, each once per pass."""
    from jtrain_kernels.cost import array, size_bytes

    q, k = array(avals, "q_BLNH"), array(avals, "k_BMKH")
    B, L, N, _ = q.shape
    lse = 4 * B * N * L
    return 2 * size_bytes(q) + 2 * size_bytes(k) + lse + 4 * size_bytes(q) + 4 * size_bytes(k) + lse


def score_arrays(hlo: str, avals: "jtrain_kernels.registry.Avals") -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Arrays in memory with a dimension of all queries and another of all keys, such as `bf16[1,8192,8192]`."""
    from jtrain.hlo.memory_traffic import written_arrays
    from jtrain_kernels.cost import array

    L, M = (array(avals, name).shape[1] for name in ("q_BLNH", "k_BMKH"))
    return tuple(
        sorted(
            (dtype, dims)
            for dtype, dims in written_arrays(hlo)
            if L in dims and M in dims and (L != M or dims.count(L) > 1)
        )
    )
