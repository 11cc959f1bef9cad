"""Ops of a compiled program: scope, FLOPs and bytes, network traffic."""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jtrain.hlo.parser import read
from jtrain.hlo.scopes import scope_mark
from jtrain.layout.mesh import AXES
from jtrain.profile.analysis.hlo_ops import is_recomputed, read_ops, unknown_op
from jtrain.profile.analysis.records import HloOp, OpTraffic
from jtrain.profile.trace_dir import read_facts
from tests.profile.traced import MODULE, SIZES, traced

MESH = dict.fromkeys(AXES, 1) | {"data": 4, "tensor": 2}

SCOPES = {
    "jit(train_step)/shard_map/jvp(layers)/while/body/eval_jaxpr/attention/dot_general": (
        "forward",
        "layers/attention",
    ),
    "jit(train_step)/shard_map/while/body/transpose(jvp(layers))/while/body/mlp/dot_general": (
        "backward",
        "layers/mlp",
    ),
    "jit(f)/transpose(jvp(layers))/checkpoint/rematted_computation/layers/mlp_norm/scale_D/all_gather": (
        "backward",
        "layers/mlp",
    ),
    "jit(f)/layers/while/body/checkpoint/rematted_computation/attention/exp": (
        "backward",
        "layers/attention",
    ),
    "jit(f)/jvp(layers)/while/body/dynamic_slice": ("forward", "layers"),
    "jit(f)/transpose(jvp(loss))/reduce_scatter": ("backward", "loss"),
    "jit(train_step)/optimizer/mul": ("optimizer", "optimizer"),
    "jit(train_step)/shard_map/reduce_gradients/psum": ("backward", "reduce_gradients"),
    "jit(train_step)/shard_map/batch/psum": ("data", "batch"),
    "jit(loss)/mul": ("other", ""),
    "jit(train_step)/shard_map/psum": ("other", ""),
    "": ("other", ""),
}


@pytest.mark.parametrize(("scope", "mark"), SCOPES.items(), ids=lambda value: str(value)[-40:])
def test_a_scope_says_phase_and_layer(scope: str, mark: tuple[str, str]) -> None:
    """Transposed and recomputed ops belong to the backward pass; a jitted function's name is not a scope."""
    assert scope_mark(scope) == mark


PROGRAM = Path(__file__).with_name("program.hlo.txt").read_text()


def ops() -> dict[str, HloOp]:
    return read_ops(read(PROGRAM), MESH)


def test_what_the_compiler_adds_belongs_to_what_it_is_for() -> None:
    """A fusion without a path takes that of its contents, a copy its user's or operand's, the rest their
    loop's.
    """
    found = {name: (op.phase, op.layer) for name, op in ops().items()}
    assert found["fusion.1"] == ("forward", "layers/mlp"), "from inside: its root has no path"
    assert found["copy.1"] == ("forward", "layers/mlp"), "of what it copies"
    assert found["nothing"] == ("forward", "layers"), "of the loop around it"
    assert found["copied"] == ("forward", "layers"), "of the loop that uses it"
    assert found["less"] == ("forward", "layers"), "in the loop's condition"
    assert found["agd"] == ("backward", "layers/attention"), "of its start"
    assert found["ad"] == ("backward", "reduce_gradients"), "the most frequent one of joined paths"
    assert found["as"] == ("backward", "reduce_gradients"), "of its done"
    assert "mul" not in found, "what is inside a fusion does not run by itself"


def test_kinds_tell_what_computes_from_what_communicates_and_what_only_holds_others() -> None:
    """A wrapped collective is communication, both its start and its done."""
    kinds = {name: op.kind for name, op in ops().items()}
    assert kinds["while.1"] == kinds["in"] == kinds["i"] == "control"
    assert kinds["ag"] == kinds["agd"] == kinds["as"] == kinds["ad"] == "communication"
    assert kinds["fusion.1"] == kinds["gemm"] == kinds["conv"] == "compute"
    assert kinds["copied"] == "copy"
    assert unknown_op("MemcpyH2D").kind == "copy"
    assert unknown_op("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)").kind == "communication"


def test_flops_and_bytes_are_those_of_the_shapes() -> None:
    """FLOPs of products in fusions, cuBLAS calls and TPU convolutions; bytes of slices of a stack, not of the
    stack.
    """
    found = ops()
    assert found["fusion.1"].flops == 2 * 16 * 32 * 64
    assert found["fusion.1"].bytes == 2 * 64 * 16 + 4 + 2 * 64 * 32 + 2 * 16 * 32, "one layer of eight"
    assert found["gemm"].flops == 2 * 16 * 8 * 32
    assert found["conv"].flops == 2 * 16 * 8 * 32
    assert found["batched"].flops == 4 * 2 * 128 * 32 * 64, (
        "four products, though the window slides over 13 places"
    )
    assert found["kernel"].flops == 12345
    assert found["copied"].bytes == 2 * 2 * 64 * 32
    assert found["while.1"].flops == 0, "what it holds is counted by itself"


ALONG_DATA = ((0, 2, 4, 6), (1, 3, 5, 7))


def test_a_collective_says_its_axes_and_what_a_device_sends() -> None:
    """On a ring it is (n - 1) / n of the whole array; the done instruction sends nothing more."""
    found = ops()
    assert found["ag"].collective == OpTraffic("all-gather", ("data",), 64 * 32 * 2 * 3 // 4, ALONG_DATA)
    assert found["agd"].collective == OpTraffic("all-gather", ("data",), 0)
    assert found["as"].collective == OpTraffic(
        "reduce-scatter", ("data", "tensor"), 64 * 4 * 7 // 8, (tuple(range(8)),)
    )
    assert found["ad"].collective == OpTraffic("reduce-scatter", ("data", "tensor"), 0)
    assert [name for name in ("ag", "agd", "as", "ad") if found[name].is_async] == ["ag", "as"]
    assert is_recomputed(found["ag"])
    assert not is_recomputed(found["conv"])


RAGGED = """
ENTRY %main (x: bf16[8,4], room: bf16[16,4], o: s32[4]) -> bf16[16,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %room = bf16[16,4]{1,0} parameter(1)
  %o = s32[4]{0} parameter(2)
  ROOT %sent = bf16[16,4]{1,0} ragged-all-to-all(%x, %room, %o, %o, %o, %o), replica_groups=GROUPS
}
""".replace("GROUPS", "{{0,2,4,6},{1,3,5,7}}")


def test_a_ragged_exchange_sends_its_operand_not_the_room_for_it() -> None:
    """Experts' rows: the result has room for more rows than a device has."""
    found = read_ops(read(RAGGED), MESH)["sent"]
    assert found.kind == "communication"
    assert found.collective == OpTraffic("ragged-all-to-all", ("data",), 8 * 4 * 2 * 3 // 4, ALONG_DATA)


def test_a_text_without_a_program_is_refused() -> None:
    """Refuses half a file, and a file that is not HLO."""
    with pytest.raises(ValueError, match="no entry computation"):
        read_ops(read("HloModule jit_f\n\n%add (a: f32[]) -> f32[] {\n"), MESH)


def test_flops_of_a_compiled_program_are_those_of_its_products() -> None:
    """A loop of four products and one outside; the trace counts each execution."""
    w = jnp.ones((4, 16, 16))

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.sum(x @ jnp.ones((16, 128)))

    found = read_ops(read(f.lower(jnp.ones((8, 16))).compile().as_text() or ""), MESH)
    flops = collections.Counter(op.flops for op in found.values() if op.flops)
    assert flops == {2 * 8 * 16 * 16: 1, 2 * 8 * 16 * 128: 1}


def program(folder: Path) -> dict[str, HloOp]:
    return read_ops(read((folder / f"{MODULE}.hlo.txt").read_text()), read_facts(folder)["mesh"])


def test_every_collective_of_a_real_step_finds_its_layer() -> None:
    """With parameters sharded over eight devices, every weight is gathered in its layer, forward and
    backward.
    """
    found = [op for op in program(traced(data=8)).values() if op.collective is not None]
    assert {op.layer for op in found} >= {
        "embed",
        "layers/attention",
        "layers/mlp",
        "loss",
        "optimizer",
        "batch",
    }
    gathers = collections.Counter((op.phase, op.layer) for op in found if op.opcode == "all-gather")
    weights = {"layers/attention": 4, "layers/mlp": 3}
    for (phase, layer), count in gathers.items():
        if layer in weights:
            assert count == weights[layer], (phase, layer)
    sent = {op.collective.wire_bytes for op in found if op.collective and op.layer == "layers/mlp"}
    assert sent == {SIZES["d_model"] * SIZES["d_ff"] * 4 * 7 // 8}


SLICED = """HloModule m

%inside (p0: bf16[32,4,8], p1: s32[]) -> bf16[4,8] {
  %p0 = bf16[32,4,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = bf16[32,32]{1,0} bitcast(%p0)
  %slice = bf16[1,32]{1,0} dynamic-slice(%flat, %p1, %zero), dynamic_slice_sizes={1,32}
  ROOT %one = bf16[4,8]{1,0} bitcast(%slice)
}

%update (p0: bf16[32,32], p1: bf16[1,32], p2: s32[]) -> bf16[32,4,8] {
  %p0 = bf16[32,32]{1,0} parameter(0)
  %p1 = bf16[1,32]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %put = bf16[32,32]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
  ROOT %all = bf16[32,4,8]{2,1,0} bitcast(%put)
}

ENTRY %main (x: bf16[32,4,8], i: s32[]) -> bf16[32,4,8] {
  %x = bf16[32,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %whole = bf16[32,32]{1,0} parameter(2)
  %row = bf16[1,32]{1,0} parameter(3)
  %taken = bf16[4,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%inside
  ROOT %given = bf16[32,4,8]{2,1,0} fusion(%whole, %row, %i), kind=kLoop, calls=%update
}
"""


def test_a_slice_behind_a_bitcast_is_all_that_is_read_or_written() -> None:
    """One layer's 64 bytes of 32 layers', in and out, and the index; XLA bitcasts stacked arrays before it
    slices.
    """
    found = read_ops(read(SLICED), MESH)
    assert found["taken"].bytes == 64 + 4 + 64
    assert found["given"].bytes == 64 + 4 + 64
