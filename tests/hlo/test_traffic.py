"""Traffic of compiled programs: collectives, trip counts of loops, overlap."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.hlo.traffic import HostCopies, Overlap, Traffic, host_copies, overlap, traffic
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.plan.compile.compiled_step import no_compile_cache, topology_devices
from jtrain.step.torus_collectives import along_torus, gather_shards, scatter_shards
from jtrain.step.xla_options import compiler_options

HLO = """HloModule m, is_scheduled=true

%cond (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  %bound = s32[] constant(5)
  ROOT %lt = pred[] compare(%p, %bound), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %ag = ((bf16[2,4]{1,0}), bf16[16,4]{1,0:T(8,128)(2,1)}) all-gather-start(%x), replica_groups=[1,8]<=[8]
  %done = bf16[16,4]{1,0} all-gather-done(%ag)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %ar = (f32[8]{0}, /*index=1*/f32[]) all-reduce(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %rs = f32[2]{0} reduce-scatter(%a), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
  %aa = (f32[1]{0}, f32[1]{0}) all-to-all(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %cp = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}
"""
SHAPE = dict(replica=2, stage=1, data=4, expert=1, context=1, tensor=1)


@pytest.mark.smoke
def test_loops_tuples_and_groups_are_counted() -> None:
    """A loop without an annotated trip count, asynchronous pairs, combined arrays, groups over some of the
    axes.
    """
    found = traffic(HLO, SHAPE)
    assert {(t.kind, t.axes, t.group): (t.dtype, t.count, t.array_bytes) for t in found} == {
        ("all-gather", ("replica", "data"), 8): ("bf16", 5, 5 * 16 * 4 * 2),
        ("all-reduce", ("replica",), 2): ("f32", 2, 9 * 4),
        ("reduce-scatter", ("replica", "data"), 4): ("f32", 1, 2 * 4 * 4),
        ("all-to-all", ("replica",), 2): ("f32", 1, 8),
        ("collective-permute", ("data",), 2): ("f32", 1, 32),
    }
    wire = {t.kind: t.wire_bytes for t in found}
    assert wire["all-gather"] == 5 * 16 * 4 * 2 * 7 / 8
    assert wire["all-reduce"] == 9 * 4
    assert wire["reduce-scatter"] == 2 * 4 * 4 * 3 / 4
    assert wire["all-to-all"] == 4
    assert wire["collective-permute"] == 32


def test_a_loop_of_unknown_length_around_a_collective_is_refused() -> None:
    """Otherwise it would count only once."""
    with pytest.raises(ValueError, match="trip count is not in the HLO"):
        traffic(HLO.replace("direction=LT", "direction=NE"), SHAPE)


PAIRS = """HloModule m, is_scheduled=true

%multiply (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sparse (x: bf16[8]) -> bf16[64] {
  %x = bf16[8]{0} parameter(0)
  ROOT %g = bf16[64]{0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%wrapped (x: f32[64]) -> f32[8] {
  %x = f32[64]{0} parameter(0)
  ROOT %r = f32[8]{0} reduce-scatter(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %sc = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%sparse
  %up = ((bf16[8]{0}), bf16[64]{0}) call-update(%sc), to_apply=%sparse
  MATMUL
  %sd = bf16[64]{0} call-done(%up), to_apply=%sparse
  %as = ((f32[64]{0}), f32[8]{0}) async-start(%b), calls=%wrapped
  %el = f32[8]{0} add(%a, %a)
  %ad = f32[8]{0} async-done(%as)
  %rs = f32[64]{0} all-reduce-start(%b), replica_groups=[1,8]<=[8], SYNC
  %f2 = f32[8,8]{1,0} fusion(%m), kind=kOutput, calls=%multiply
  %rd = f32[64]{0} all-reduce-done(%rs)
  %plain = f32[8]{0} reduce-scatter(%b), replica_groups=[1,8]<=[8], to_apply=%add
}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}
"""
MATMUL = "%f = f32[8,8]{1,0} fusion(%m), kind=kOutput, calls=%multiply"
ELEMENTWISE = "%f = f32[8,8]{1,0} add(%m, %m)"


def pairs(between: str, sync: bool) -> dict[tuple[str, int], tuple[int, int]]:
    hlo = PAIRS.replace("MATMUL", between).replace(
        "SYNC", f'backend_config={{"is_sync":{str(sync).lower()}}}'
    )
    return {(t.kind, t.array_bytes): (t.async_bytes, t.hidden_bytes) for t in traffic(hlo, SHAPE)}


def test_a_pair_is_asynchronous_and_hidden_if_a_matmul_lies_between() -> None:
    """Pairs on a sparse core, wrapped, and in the GPU's form; the planted synchronous ones are neither."""
    got = pairs(MATMUL, sync=False)
    assert got == {
        ("all-gather", 128): (128, 128),
        ("reduce-scatter", 256 + 256): (
            256,
            0,
        ),  # a wrapped one, with elementwise work beside it; and a plain one
        ("all-reduce", 256): (256, 256),
    }
    assert pairs(ELEMENTWISE, sync=False)["all-gather", 128] == (128, 0)
    assert pairs(MATMUL, sync=True)["all-reduce", 256] == (0, 0)


def test_nothing_is_hidden_before_a_sparse_core_has_the_data() -> None:
    """A start without operands only wakes it: the update brings the data, here after the matmul."""
    update = "%up = ((bf16[8]{0}), bf16[64]{0}) call-update(%sc), to_apply=%sparse"
    late = PAIRS.replace(f"  {update}\n  MATMUL", f"  {MATMUL}\n  {update}").replace("SYNC", "to_apply=%add")
    gathered = next(t for t in traffic(late, SHAPE) if t.kind == "all-gather")
    assert (gathered.async_bytes, gathered.hidden_bytes) == (128, 0)


def test_overlap_is_in_bytes_on_the_wire() -> None:
    """An all-reduce counts twice."""
    rows = [
        Traffic("all-gather", ("data",), 8, "bf16", 1, 800, 800, 400),
        Traffic("all-reduce", ("data",), 8, "f32", 1, 800, 0, 0),
    ]
    assert overlap(rows) == Overlap(700 + 1400, 700, 350)


HOST = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0:S(5)} parameter(0)
  %in = (f32[64]{0}, f32[64]{0:S(5)}, u32[]{:S(2)}) copy-start(%a)
  %f = f32[8,8]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %ind = f32[64]{0} copy-done(%in)
  %vmem = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%ind)
  %vd = f32[64]{0:S(1)} copy-done(%vmem)
  %part = f32[16]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={16}
  %back = f32[64]{0:S(5)} dynamic-update-slice(%a, %part, %i)
  ROOT %out = f32[64]{0:S(5)} copy(%ind)
}
"""


def test_copies_to_and_from_the_host_are_told_from_others() -> None:
    """A pair with a matmul in between, a slice read, one written in place, a plain copy; VMEM is not host
    memory.
    """
    assert host_copies(HOST) == [
        HostCopies("to device", count=2, bytes=256 + 64, async_bytes=256, hidden_bytes=256, duplex_bytes=0),
        HostCopies("to host", count=2, bytes=256 + 64, async_bytes=0, hidden_bytes=0, duplex_bytes=0),
    ]


DUPLEX = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0:S(5)} parameter(0)
  %b = f32[64]{0} parameter(1)
  %in = (f32[64]{0}, f32[64]{0:S(5)}, u32[]{:S(2)}) copy-start(%a)
  EARLY
  %ind = f32[64]{0} copy-done(%in)
  LATE
  ROOT %outd = f32[64]{0:S(5)} copy-done(%out)
}
"""


def test_copies_both_ways_at_once_are_told_from_one_after_the_other() -> None:
    """A streamed update hides one direction behind the other, without a matmul."""
    start = "%out = (f32[64]{0:S(5)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%b)"
    both = host_copies(DUPLEX.replace("EARLY", start).replace("LATE", ""))
    assert [c.duplex_bytes for c in both] == [256, 256]
    assert [c.hidden_bytes for c in both] == [0, 0]
    after = host_copies(DUPLEX.replace("LATE", start).replace("EARLY", ""))
    assert [(c.duplex_bytes, c.async_bytes) for c in after] == [(0, 256), (0, 256)]


WRAPPED = """HloModule m, is_scheduled=true

%slice (h: f32[8,16], i: s32[]) -> f32[1,16] {
  %h = f32[8,16]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,16]{1,0} dynamic-slice(%h, %i, %i), dynamic_slice_sizes={1,16}
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:S(5)} parameter(0)
  %u = ((f32[8,16]{1,0:S(5)}, f32[1,16]{1,0}, s32[]), f32[8,16]{1,0:S(5)}, u32[]) dynamic-update-slice-start(%a, %x, %i)
  %s = ((f32[8,16]{1,0:S(5)}, s32[]), f32[1,16]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%slice
  %ud = f32[8,16]{1,0:S(5)} dynamic-update-slice-done(%u)
  %sd = f32[1,16]{1,0} fusion-done(%s)
}
"""


def test_slices_of_host_memory_count_as_slices() -> None:
    """In the forms of XLA:GPU (wrapped) and XLA:TPU: 64 bytes each way, each counted once."""
    assert host_copies(WRAPPED) == [
        HostCopies("to device", count=1, bytes=64, async_bytes=64, hidden_bytes=0, duplex_bytes=64),
        HostCopies("to host", count=1, bytes=64, async_bytes=64, hidden_bytes=0, duplex_bytes=64),
    ]


def compiled_gathers(topology: str, *, options: bool) -> tuple[list[Traffic], int]:
    """Compiles the gradient of three layers with gathered weights; returns it with the bytes sent by the
    formula.
    """
    devices = topology_devices(topology)
    spec = MeshSpec(data=len(devices))
    mesh = make_mesh(spec, devices)
    layout = along_torus(make_layout(LayoutSpec(), spec, ()), mesh)
    size = 2048

    @jax.custom_vjp
    def whole(w: jax.Array) -> jax.Array:
        return gather_shards(layout, w, 0)

    whole.defvjp(lambda w: (whole(w), None), lambda _, grad: (scatter_shards(layout, grad, 0),))

    def loss(ws: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ whole(w))
        return jnp.sum(x.astype(jnp.float32))

    split = P("data", None)
    step = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=((split,) * 3, split), out_specs=(split,) * 3, check_vma=False
    )
    w = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, split))
    x = jax.ShapeDtypeStruct((4096 * len(devices), size), jnp.bfloat16, sharding=NamedSharding(mesh, split))
    lowered = jax.jit(step, compiler_options=compiler_options(mesh) if options else None).lower((w,) * 3, x)
    with no_compile_cache():
        found = traffic(lowered.compile().as_text() or "", spec.shape)
    # Three weights, gathered once (nothing is recomputed here), and their gradients scattered.
    return found, 6 * size * size * 2 * (len(devices) - 1) // len(devices)


@pytest.mark.aot
def test_weights_come_and_gradients_go_beside_matmuls() -> None:
    """Compiled for the chip: not a byte more than the formula, all asynchronous, most hidden by a matmul."""
    found, want = compiled_gathers("v5p:2x2x1", options=True)
    assert {t.kind for t in found} == {"all-gather", "reduce-scatter"}
    sent = overlap(found)
    assert sent.wire_bytes == want
    assert sent.async_bytes == want
    assert sent.hidden_bytes > want / 3


@pytest.mark.aot
def test_arrays_that_xla_joins_are_counted_one_by_one() -> None:
    """XLA:GPU combines the three small gathers into one, and the scatters, which leaves nothing to overlap
    them.
    """
    found, want = compiled_gathers("h200:8", options=True)
    assert [(t.kind, t.count) for t in found] == [("all-gather", 3), ("reduce-scatter", 3)]
    assert overlap(found) == Overlap(want, 0, 0)


@pytest.mark.slow
@pytest.mark.aot
def test_without_its_options_a_tpu_does_one_thing_at_a_time() -> None:
    """Planted failure: the same bytes, none of them asynchronous."""
    found, want = compiled_gathers("v5p:2x2x1", options=False)
    assert overlap(found) == Overlap(want, 0, 0)


@pytest.mark.parametrize(
    "written", ("branch_computations={%skip, %gather}", "true_computation=%gather, false_computation=%skip")
)
def test_collectives_in_conditionals_count(written: str) -> None:
    """However a compiler writes the branches; each runs as often as the conditional does."""
    hlo = f"""
%gather (x: f32[2]) -> f32[4] {{
  %x = f32[2] parameter(0)
  ROOT %all-gather = f32[4] all-gather(%x), channel_id=1, replica_groups={{{{0,1}}}}, dimensions={{0}}
}}

%skip (y: f32[2]) -> f32[4] {{
  %y = f32[2] parameter(0)
  ROOT %zeros = f32[4] broadcast(%y), dimensions={{0}}
}}

ENTRY %main (p: pred[], z: f32[2]) -> f32[4] {{
  %p = pred[] parameter(0)
  %z = f32[2] parameter(1)
  ROOT %one = f32[4] conditional(%p, %z, %z), {written}
}}
"""
    (found,) = traffic(hlo, MeshSpec(data=2).shape)
    assert (found.kind, found.axes, found.count, found.array_bytes) == ("all-gather", ("data",), 1, 16)
