"""Bytes alive while each op runs, against hand counts and the compiler's own number."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.hlo.parser import read
from jtrain.layout.dims import Batch
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.profile.analysis.hlo_ops import read_ops
from jtrain.profile.analysis.memory_timeline import CLASSES, MAX_POINTS, buffers_alive, live_bytes, track
from jtrain.profile.analysis.records import OpEvent, StepSpan, Trace
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.profile.traced import SIZES

MESH = MeshSpec().shape

PROGRAM = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%update (p: f32[4,256], q: f32[256], i: s32[]) -> f32[4,256] {
  %p = f32[4,256]{1,0} parameter(0)
  %q = f32[256]{0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,256]{1,0} bitcast(%q)
  ROOT %dus = f32[4,256]{1,0} dynamic-update-slice(%p, %row, %i, %i)
}

%body (c: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %c = (s32[], f32[4,256]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %kept = f32[4,256]{1,0} get-tuple-element(%c), index=1
  %made = f32[256]{0} iota(), iota_dimension=0, metadata={op_name="jit(f)/jvp(layers)/while/body/mlp/iota"}
  %in_place = f32[4,256]{1,0} fusion(%kept, %made, %n), kind=kLoop, calls=%update
  ROOT %next = (s32[], f32[4,256]{1,0}) tuple(%n, %in_place)
}

%cond (c.1: (s32[], f32[4,256])) -> pred[] {
  %c.1 = (s32[], f32[4,256]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %less = pred[] compare(%n.1, %n.1), direction=LT
}

ENTRY %main (w: f32[256], x: f32[256]) -> (f32[256], f32[4,256]) {
  %w = f32[256]{0} parameter(0)
  %x = f32[256]{0} parameter(1)
  %zero = s32[] constant(0)
  %space = f32[4,256]{1,0} broadcast(%zero), dimensions={}, metadata={op_name="jit(f)/jvp(layers)/broadcast"}
  %in = (s32[], f32[4,256]{1,0}) tuple(%zero, %space)
  %loop = (s32[], f32[4,256]{1,0}) while(%in), condition=%cond, body=%body
  %stack = f32[4,256]{1,0} get-tuple-element(%loop), index=1
  %pair = (f32[256]{0}, f32[512]{0}) custom-call(%x, %stack), metadata={op_name="transpose(jvp(loss))/dot"}
  %grad = f32[256]{0} multiply(%pair#0, %x), metadata={op_name="jit(f)/transpose(jvp(loss))/mul"}
  %step = f32[256]{0} add(%grad, %w), metadata={op_name="jit(f)/optimizer/add"}
  ROOT %out = (f32[256]{0}, f32[4,256]{1,0}) tuple(%step, %stack)
}
"""


def test_of_two_operands_of_one_size_the_first_one_gives_its_buffer() -> None:
    """In every process alike: operands are taken in their order, not in that of a set of names."""
    made = "f32[256]{0} broadcast(%zero), dimensions={}, metadata={op_name="
    triples = (
        f'  %f.{k} = {made}"jit(f)/jvp(layers)/broadcast"}}\n'
        f'  %b.{k} = {made}"jit(f)/transpose(jvp(layers))/broadcast"}}\n'
        f'  %s.{k} = f32[256]{{0}} add(%f.{k}, %b.{k}), metadata={{op_name="jit(f)/optimizer/add"}}\n'
        for k in range(12)
    )
    program = read(
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main (w: f32[]) -> (f32[256]) {\n"
        f"  %zero = f32[] parameter(0)\n{''.join(triples)}  ROOT %out = (f32[256]{{0}}) tuple(%s.11)\n}}\n"
    )
    alive = live_bytes(program, read_ops(program, MESH))
    assert [(alive[f"s.{k}"] / 1024).tolist() for k in range(12)] == 12 * [[0, 1, 1, 0]]


def test_a_buffer_lives_from_its_maker_to_its_last_reader() -> None:
    """In KiB: loop state is not counted twice, tuple elements die one by one, an in-place result is free."""
    alive = live_bytes(read(PROGRAM), read_ops(read(PROGRAM), MESH))
    kib = {name: (row / 1024).tolist() for name, row in alive.items()}
    assert list(CLASSES) == ["forward", "backward", "optimizer", "other"]
    assert kib["space"] == [4, 0, 0, 0]
    assert kib["made"] == [4 + 1, 0, 0, 0], "the stack outside, and what the loop's body made"
    assert kib["in_place"] == [4 + 1, 0, 0, 0], "the update is written into the stack"
    assert kib["pair"] == [4, 1 + 2, 0, 0]
    assert kib["grad"] == [4, 1, 0, 0], (
        "the pair's second array has no reader, and its first gives its place up"
    )
    assert kib["step"] == [4, 1, 0, 0], "the new w takes the old one's place"


def test_the_buffers_at_a_moment_are_those_that_its_bytes_count() -> None:
    """By name and shape, largest first, with those around the loop; together the bytes of the curve."""
    program = read(PROGRAM)
    ops = read_ops(program, MESH)
    alive = live_bytes(program, ops)
    for name in ("space", "made", "in_place", "pair", "grad", "step"):
        assert sum(buffer.bytes for buffer in buffers_alive(program, ops, name)) == alive[name].sum(), name
    named = [(b.op, b.layer, b.phase, b.shape, b.bytes) for b in buffers_alive(program, ops, "pair")]
    assert named == [
        ("space", "layers", "forward", "f32[4,256]", 4096),
        ("pair", "loss", "backward", "f32[512]", 2048),
        ("pair", "loss", "backward", "f32[256]", 1024),
    ]


def test_the_curve_is_that_of_the_median_step_on_the_first_device() -> None:
    """Points are ops in order of their start; with more than 500 ops, the maximum of each run of ops is
    kept.
    """
    program = read(PROGRAM)
    ops = read_ops(program, MESH)
    steps = tuple(StepSpan(n, 1000 * n, 1000 * n + took) for n, took in ((1, 900), (2, 500), (3, 700)))
    names = ("space", "made", "pair", "grad")
    events = [
        OpEvent(d, s.step, name, s.start_ns + 100 * i, 50)
        for s in steps
        for d in (1, 0)
        for i, name in enumerate(names)
    ]
    found = track(Trace("cpu", "cpu", 2, steps, tuple(events), ()), program, ops)
    assert found is not None
    assert found.step == 3
    assert found.time_s == pytest.approx([0.0, 1e-7, 2e-7, 3e-7])
    assert found.bytes["made by the forward pass"] == [4096, 5120, 4096, 4096]
    assert found.bytes["made by the backward pass"] == [0, 0, 3072, 1024]
    many = tuple(OpEvent(0, 1, "pair" if i == 777 else "space", i, 1) for i in range(1200))
    thinned = track(Trace("cpu", "cpu", 1, steps[:1], many, ()), program, ops)
    assert thinned is not None
    assert len(thinned.time_s) <= MAX_POINTS
    assert max(thinned.bytes["made by the backward pass"]) == 3072
    assert track(Trace("cpu", "cpu", 1, steps[:1], (), ()), program, ops) is None


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        (MeshSpec(data=4, tensor=2), LayoutSpec(zero_stage=3, remat="full")),
        pytest.param(MeshSpec(data=8), LayoutSpec(zero_stage=2, microbatches=2), marks=pytest.mark.slow),
    ],
    ids=["zero 3 and tensor", "zero 2, two microbatches"],
)
def test_the_most_that_is_alive_is_what_the_compiler_allocates(mesh: MeshSpec, spec: LayoutSpec) -> None:
    """Within 10% of `temp_size_in_bytes` for the real train step; measured 6%."""
    devices = make_mesh(mesh, jax.devices()[: mesh.size])
    model = Transformer(**SIZES)
    infos = model.param_infos()
    layout = make_layout(spec, mesh, infos)
    optimizer = build(
        AdamW(peak_lr=3e-3, warmup_steps=4), num_steps=20, params=map_params(lambda i: i, infos)
    )
    ids = jax.ShapeDtypeStruct((64, 64), np.int32, sharding=NamedSharding(devices, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, layout, devices)
    compiled = step.lower(abstract_state(layout, optimizer, devices), Batch(ids, ids, ids, ids)).compile()
    hlo = compiled.as_text()
    alive = live_bytes(read(hlo), read_ops(read(hlo), mesh.shape))
    most = max(int(row.sum()) for row in alive.values())
    assert most == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)
