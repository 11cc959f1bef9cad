"""Compiled programs of pipelined steps: what lies in conditionals, what permutes, and how much memory slots
take.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.hlo.device_groups import groups_of
from jtrain.hlo.parser import read
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.estimate.collectives import collectives as planned_collectives
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.step.pipeline_ticks import ticks_of
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.layouts import layout_from
from tests.pipeline.pipelined_runs import SIZES, settings

ADAMW = AdamW(peak_lr=1e-3)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: the conditional that it lies in, by the name of what was traced, or
    None.
    """

    kind: str
    groups: list[list[int]]
    conditional: str | None
    line: str


def collectives(hlo: str, mesh: dict[str, int]) -> list[Collective]:
    """Every collective, once per place from which it is reached."""
    program = read(hlo)

    def walk(name: str, conditional: str | None) -> Iterator[Collective]:
        for instruction in program.computations[name]:
            if kind := instruction.collective:
                yield Collective(kind, groups_of(instruction, mesh), conditional, instruction.line)
            inside = conditional
            if instruction.opcode == "conditional" and conditional is None:
                inside = instruction.op_name
            for callee in instruction.called:
                yield from walk(callee, inside)

    return list(walk(program.entry, None))


def check_program(hlo: str, mesh: MeshSpec) -> None:
    """A worker's own conditionals have groups within its stage; permutes are chains, outside of all
    conditionals.
    """
    stage_of = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    stage_of = np.argsort(np.moveaxis(stage_of, 1, 0).ravel()) // (mesh.size // mesh.stage)
    found = collectives(hlo, mesh.shape)
    own = [one for one in found if one.conditional is not None and "/layers/" in one.conditional]
    assert any(one.kind == "all-gather" for one in own), "ZeRO-3 gathers the layers' weights in the branches"
    for one in own:
        assert one.kind != "collective-permute", one.line
        assert one.groups, one.line
        for group in one.groups:
            assert len({int(stage_of[device]) for device in group}) == 1, one.line
    others = [one for one in found if one.conditional is not None and one not in own]
    assert any(len({int(stage_of[d]) for d in group}) > 1 for one in others for group in one.groups), (
        "embedding and loss are summed over stages, in conditionals on the tick"
    )
    permutes = [one for one in found if one.kind == "collective-permute"]
    assert permutes
    for one in permutes:
        assert one.conditional is None, one.line
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", one.line)]
        later = {stage_of[b] > stage_of[a] for a, b in pairs}
        assert len(later) == 1, f"a chain goes one way: {one.line}"


def slots_of(hlo: str, dtype: str, block: tuple[int, ...]) -> set[int]:
    """Lengths of all arrays of residual streams of this shape that the loop over ticks carries."""
    carried = [line for line in hlo.splitlines() if " while(" in line]
    ticks = max(carried, key=len)
    return {int(n) for n in re.findall(rf"{dtype}\[(\d+),{','.join(map(str, block))}\]", ticks)}


def layout_of(axes: dict[str, int], sizes: dict[str, Any], **layout: Any) -> tuple[Transformer, Layout]:
    model = Transformer(**sizes)
    return model, layout_from(layout, MeshSpec(**axes), model.param_infos())


def on_cpu(axes: dict[str, int], sizes: dict[str, Any], **layout: Any) -> tuple[str, Layout]:
    """The optimized HLO of a step as XLA:CPU compiles it, for microbatches of [3, 16] per device along
    `data`.
    """
    model, lay = layout_of(axes, sizes, compute_dtype="float32", **layout)
    mesh = make_mesh(lay.mesh, jax.devices()[: lay.mesh.size])
    infos = model.param_infos()
    optimizer = build(ADAMW, num_steps=10, params=map_params(lambda info: info, infos))
    rows = axes.get("data", 1) * 3 * lay.spec.microbatches
    ids = jax.ShapeDtypeStruct((rows, 16), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, lay, mesh)
    return step.lower(
        abstract_state(lay, optimizer, mesh), Batch(ids, ids, ids, ids)
    ).compile().as_text(), lay


@pytest.mark.slow
def test_branches_stay_within_stages_and_slots_are_the_schedules() -> None:
    """1F1B over four stages and data=2 with ZeRO-3, as XLA:CPU compiles it."""
    hlo, lay = on_cpu(dict(stage=4, data=2), SIZES, zero_stage=3, microbatches=8, remat="full")
    check_program(hlo, lay.mesh)
    ticks = ticks_of(lay)
    block = (3, 16, SIZES["d_model"])
    assert (ticks.num_inputs, ticks.num_cotangents) == (7, 1)
    assert slots_of(hlo, "f32", block) == {7, 1}
    assert slots_of(hlo, "f32", (1, *block)) == {7}, "what one layer keeps"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PUBLISHED_SCHEDULES)
def test_a_compiled_step_has_the_slots_of_its_schedule(schedule: str) -> None:
    """The loop over ticks carries as many inputs, cotangents and stashes as the schedule's peaks say.

    Where only some backward passes are split, the others use one more stash for a moment.
    """
    spec = PipelineSpec(**settings(schedule))
    sizes = SIZES | dict(num_layers=4 * spec.chunks_per_worker, d_model=40)
    hlo, lay = on_cpu(dict(stage=4), sizes, microbatches=12, remat="full", pipeline=spec)
    ticks, block = ticks_of(lay), (3, 16, sizes["d_model"])
    assert slots_of(hlo, "f32", block) == {ticks.num_inputs, ticks.num_cotangents}
    mixed = schedule == "dualpipev"
    stashes = {ticks.num_stashes + mixed} if ticks.num_stashes else set()
    assert bool(stashes) == (schedule in ("zb-h1", "zbv", "dualpipev"))
    assert slots_of(hlo, "f32", (1, *block)) == {ticks.num_inputs} | stashes, (
        "inputs of layers, and of products"
    )
    assert slots_of(hlo, "f32", (1, 3, 16, sizes["d_ff"])) == stashes, "with remat=full only W keeps them"


@pytest.mark.slow
def test_split_backward_passes_compute_nothing_twice() -> None:
    """ZB-H1 has the matrix products of 1F1B: W takes the arrays that I leaves, and recomputes none."""
    counts = []
    for schedule in ("1f1b", "zb-h1"):
        hlo, _ = on_cpu(dict(stage=2), SIZES, microbatches=4, pipeline=PipelineSpec(schedule=schedule))
        computations = read(hlo).computations
        counts.append(
            sum(one.opcode == "dot" for instructions in computations.values() for one in instructions)
        )
    layer = 7 * 3
    assert counts[0] > layer, "a layer has seven matrices, with three products each"
    assert counts[1] == counts[0]


def loops(jaxpr: Any) -> Iterator[Any]:
    """Yields every loop of a traced program, also those inside others."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from loops(getattr(inner, "jaxpr", inner))


def test_a_slot_keeps_no_weights() -> None:
    """Of each layer its input, also if the backward pass is split."""
    axes, pipeline = dict(stage=2, data=2), PipelineSpec("zb-h1")
    settings: dict[str, Any] = dict(zero_stage=3, microbatches=4, remat="full", compute_dtype="float32")
    model, lay = layout_of(axes, SIZES, **settings, pipeline=pipeline)
    mesh = make_mesh(lay.mesh, jax.devices()[:4])
    optimizer = build(ADAMW, num_steps=10, params=map_params(lambda info: info, model.param_infos()))
    ids = jax.ShapeDtypeStruct((24, 16), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, lay, mesh)
    traced = step.trace(abstract_state(lay, optimizer, mesh), Batch(ids, ids, ids, ids))
    ticks = ticks_of(lay)
    assert lay.pipeline is not None
    slots = (ticks.num_inputs, lay.pipeline.layers_per_chunk)
    [loop] = [loop for loop in loops(traced.jaxpr.jaxpr) if loop.params["length"] == ticks.num_ticks]
    carried = [x.aval.shape for x in loop.outvars]
    assert [shape for shape in carried if shape[:2] == slots] == [(*slots, 3, 16, SIZES["d_model"])]


AOT: dict[str, Any] = dict(
    num_layers=4, d_model=512, num_heads=4, num_kv_heads=1, head_dim=128, d_ff=1792, vocab_size=4096
)


def compiled(topology: str, microbatches: int, schedule: str) -> tuple[Any, Layout]:
    """1F1B or another schedule over four stages of the machine, data on the rest, ZeRO-3."""
    devices = topology_devices(topology)
    axes = dict(stage=4, data=len(devices) // 4)
    pipeline = PipelineSpec(schedule=schedule)
    model, lay = layout_of(
        axes, AOT, zero_stage=3, microbatches=microbatches, remat="full", pipeline=pipeline
    )
    optimizer = build(ADAMW, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, ADAMW, microbatches * axes["data"], 512, machine_of(devices))
    options = {"xla_gpu_enable_triton_gemm": False} if topology.startswith("h200") else {}
    return compile_step(job, optimizer, devices=devices, compiler_options=options), lay


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ("h200:8", "v5p:2x2x4"))
def test_temporaries_do_not_grow_with_microbatches(topology: str) -> None:
    """1F1B for 8, 16 and 64 microbatches: nothing but the batch and the table grows."""
    programs = [compiled(topology, microbatches, "1f1b") for microbatches in (8, 16, 64)]
    for program, lay in programs:
        check_program(program.hlo, lay.mesh)
        assert slots_of(program.hlo, "bf16", (1, 512, 512)) == {
            ticks_of(lay).num_inputs,
            ticks_of(lay).num_cotangents,
        }
    temps = [program.temp_bytes for program, _ in programs]
    assert max(temps) < 1.02 * min(temps), temps
    assert min(temps) > 0


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "schedule"), (("h200:8", "zb-h1"), ("v5p:2x2x4", "zb-h1")))
def test_split_backward_passes_compile_for_machines_not_here(topology: str, schedule: str) -> None:
    """Their W has conditionals of its own, under the same rules."""
    program, lay = compiled(topology, 8, schedule)
    check_program(program.hlo, lay.mesh)


@pytest.mark.aot
@pytest.mark.slow
def test_a_gpus_compiler_leaves_rings_and_chains_whole() -> None:
    """Layers that permute over `tensor` and `context` beside `stage`: no cycle is cut, and none lies in a
    conditional.

    A pass of XLA:GPU that decomposes cyclic permutes zeroes those of more than one cycle (openxla/xla#45222),
    which is every ring beside another axis.
    """
    devices = topology_devices("h200:8")
    axes = dict(stage=2, context=2, tensor=2)
    kernels = (("all_gather_matmul", "permute"), ("matmul_reduce_scatter", "permute"))
    model, lay = layout_of(axes, AOT, microbatches=4, remat="full", tensor_overlap=True, kernels=kernels)
    optimizer = build(ADAMW, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, ADAMW, 4, 1024, machine_of(devices))
    options = {"xla_gpu_enable_triton_gemm": False}
    hlo = compile_step(job, optimizer, devices=devices, compiler_options=options).hlo
    rings = chains = 0
    for one in collectives(hlo, lay.mesh.shape):
        if one.kind != "collective-permute":
            continue
        assert one.conditional is None, one.line
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", one.line)]
        sources, targets = ({pair[i] for pair in pairs} for i in (0, 1))
        if sources == targets:
            rings += 1
            assert sources == set(range(8)), one.line
        else:
            chains += 1
            assert {(a < 4, b < 4) for a, b in pairs} in ({(True, False)}, {(False, True)}), one.line
            assert len(pairs) == 4, one.line
    assert rings
    assert chains


LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
LLAMA70B: dict[str, Any] = LLAMA8B | dict(num_layers=80, d_model=8192, num_heads=64, d_ff=28672)
NAMES = {"float32": "f32", "bfloat16": "bf16"}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "axes", "sizes", "pipeline"),
    [
        ("h200:8", dict(stage=4, data=2), LLAMA8B, PipelineSpec()),
        ("h200:8", dict(stage=4, data=2), LLAMA8B, PipelineSpec("zb-h1")),
        ("h200:8", dict(stage=4, data=2), LLAMA8B, PipelineSpec("interleaved", chunks=2, gather="step")),
        ("v5p:2x2x4", dict(stage=4, data=4), LLAMA8B, PipelineSpec()),
        ("h200:16", dict(stage=8, data=2), LLAMA70B, PipelineSpec()),
        ("v5p:2x2x4", dict(stage=8, data=2), LLAMA70B, PipelineSpec()),
    ],
    ids=str,
)
def test_compilers_agree_with_the_plan_about_bytes(
    topology: str, axes: dict[str, int], sizes: dict[str, Any], pipeline: PipelineSpec
) -> None:
    """Peak memory within 10 %; what stages and ZeRO-3 send, to the byte. Llama 8B and 70B, rows of 4096
    tokens.
    """
    devices = topology_devices(topology)
    model, lay = layout_of(axes, sizes, zero_stage=3, microbatches=8, remat="full", pipeline=pipeline)
    optimizer = build(ADAMW, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, ADAMW, 8 * axes["data"], 4096, machine_of(devices))
    program = compile_step(job, optimizer, devices=devices)
    plan = memory(job)
    assert program.argument_bytes == plan.argument_bytes
    assert plan.total_bytes == pytest.approx(program.peak_bytes, rel=0.1)
    if pipeline.gather == "tick":
        check_program(program.hlo, lay.mesh)
    want, got = collections.Counter(), collections.Counter()
    for c in planned_collectives(
        dataclasses.replace(job, layout=dataclasses.replace(lay, rings=program.rings))
    ):
        want[c.kind, c.axes, NAMES.get(c.dtype)] += c.array_bytes
    for t in program.traffic:
        got[t.kind, t.axes, t.dtype] += t.array_bytes
    # Scalars may be summed over more axes at once.
    large = {key: size for key, size in got.items() if size > 2**20}
    assert large == {key: size for key, size in want.items() if size > 2**20}
    assert {("collective-permute", ("stage",), "bf16"), ("all-gather", ("data",), "bf16")} <= set(large)
