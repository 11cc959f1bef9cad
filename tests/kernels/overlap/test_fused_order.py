"""Collectives of a compiled program and the fused Hopper kernels take turns: none is under way while a kernel
runs.

A fused kernel fills every core of its GPU and waits for the other ranks' kernels. See `mosaic_gpu/op.py` for
the deadlock that follows if XLA lets a collective run beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jtrain.hlo.parser import Instruction, done_of, read
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.step import train_step
from jtrain.step.state import abstract_state
from jtrain.step.xla_options import compiler_options
from jtrain_kernels import compat, device, registry
from jtrain_kernels.compile_only.targets import topology_devices
from jtrain_kernels.overlap.mosaic_gpu import op
from tests.layouts import layout_from
from tests.step.test_host_offload import ADAMW

FORCED = (("all_gather_matmul", "mosaic_gpu"), ("matmul_reduce_scatter", "mosaic_gpu"))


def beside_fused(hlo: str) -> list[tuple[str, str]]:
    """Names of each asynchronous collective and each fused kernel that runs between its start and its
    done.
    """
    program = read(hlo)

    def has(instruction: Instruction, wanted: Any) -> bool:
        return wanted(instruction) or any(has(inner, wanted) for inner in program.inside(instruction))

    found: list[tuple[str, str]] = []
    for instructions in program.computations.values():
        for index, start in enumerate(instructions):
            begins = start.opcode.endswith("-start") or start.opcode in ("send", "recv")
            if not begins or '"is_sync":true' in start.line or not has(start, is_collective):
                continue
            stop = done_of(instructions, index)
            # A done in another computation is that of another turn of a loop, with all of this one in
            # between.
            between = instructions if stop is None else instructions[index:stop]
            found += [(start.name, other.name) for other in between if has(other, is_fused)]
    return found


def is_collective(instruction: Instruction) -> bool:
    return bool(instruction.collective) or instruction.opcode in ("send", "recv")


def is_fused(instruction: Instruction) -> bool:
    return 'custom_call_target="mosaic_gpu' in instruction.line and "xla_replica_ids" in instruction.line


KERNEL = '%k = bf16[8] custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config={xla_replica_ids = "0,1"}'
START = "%s = (bf16[8], bf16[16]) all-gather-start(%x), dimensions={0}"
DONE = "%d = bf16[16] all-gather-done(%s)"
WRAPPED = "%s = ((bf16[8]), bf16[8], u32[]) async-start(%x), calls=%inner"
OTHERS = """
%inner (p: bf16[8]) -> bf16[8] {
  ROOT %a = bf16[8] all-to-all(%p), dimensions={0}
}

%body (p: bf16[8]) -> bf16[8] {
  KERNEL
}
""".replace("KERNEL", KERNEL)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((START, DONE, KERNEL), []),
        ((KERNEL, START, DONE), []),
        ((START, KERNEL, DONE), [("s", "k")]),
        ((START + ', backend_config={"is_sync":true}', KERNEL, DONE), []),
        ((START, "%w = bf16[8] while(%x), condition=%c, body=%body", DONE), [("s", "w")]),
        ((WRAPPED, KERNEL, "%d = bf16[8] async-done(%s)"), [("s", "k")]),
        ((KERNEL, "%s = (bf16[8], u32[], token[]) send(%x)"), [("s", "k")]),
        ((START, KERNEL.replace("xla_replica_ids", "module"), DONE), []),
    ],
)
def test_a_kernel_between_start_and_done_is_found(
    lines: tuple[str, ...], found: list[tuple[str, str]]
) -> None:
    """Also in a loop, with the collective in a computation of its own, or without a done; not a lone GPU's
    kernel.
    """
    body = "\n".join(f"  {line}" for line in lines)
    assert beside_fused(f"{OTHERS}\nENTRY %main (x: bf16[8]) -> bf16[8] {{\n{body}\n}}\n") == found


@pytest.mark.aot
@pytest.mark.parametrize("of_one", (0, 1))
def test_a_program_that_may_run_the_kernels_is_compiled_in_order(of_one: int) -> None:
    """Forced for either op the options are there, beside those of 8-bit matmuls; otherwise collectives may
    overlap.
    """
    mesh = make_mesh(MeshSpec(tensor=8), topology_devices("h200:8"))
    assert compiler_options(mesh, kernels=FORCED[of_one:][:1]) == dict(op.IN_ORDER)
    assert compiler_options(mesh, "fp8_current", FORCED).items() > op.IN_ORDER.items()
    assert compiler_options(mesh, kernels=(("all_gather_matmul", "permute"), ("rope", "xla"))) == {}


def test_a_prediction_never_chooses_what_needs_compiler_options() -> None:
    """The options are fixed before anything is traced, so the choice must be known by then."""
    with pytest.raises(AssertionError, match="fast: a prediction would come without options"):
        registry.Implementation("fast", print, compiler_options={"xla_gpu_autotune_level": 0})
    assert registry.compiler_options({}) == {}
    assert registry.compiler_options({"matmul_reduce_scatter": "xla"}) == {}
    assert registry.compiler_options({"matmul_reduce_scatter": "mosaic_gpu"}) == dict(op.IN_ORDER)


@pytest.mark.slow
@pytest.mark.aot
def test_all_collectives_of_a_step_with_fused_kernels_are_in_order() -> None:
    """Those of ZeRO-3 over `data`, of the loss and of the kernels' own gradients, on eight H200.

    `test_gpu_compiled` has a program in which XLA would gather beside a kernel. In this step XLA happens not
    to, but without the options several collectives are asynchronous.
    """
    text = compiled_step(data=2, tensor=4)
    computations = read(text).computations
    every = [one for instructions in computations.values() for one in instructions]
    assert sum(map(is_fused, every)) >= 8, "both products of attention and of the feed-forward, both passes"
    assert {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"} <= {one.opcode for one in every}
    assert [one.name for one in every if one.opcode.endswith("-start") and is_collective(one)] == []
    assert beside_fused(text) == []


def compiled_step(**mesh: int) -> str:
    """Scheduled HLO of a small model's train step with the fused kernels, for eight H200."""
    sizes: Any = dict(
        num_layers=2, d_model=512, num_heads=8, num_kv_heads=4, head_dim=128, d_ff=1024, vocab_size=512
    )
    model, mesh_spec = Transformer(**sizes), MeshSpec(**mesh)
    layout = layout_from(
        dict(tensor_overlap=True, kernels=FORCED, zero_stage=3), mesh_spec, model.param_infos()
    )
    optimizer = build(ADAMW, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    there = make_mesh(mesh_spec, topology_devices("h200:8"))
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=NamedSharding(there, train_step.BATCH_SPEC))
    step: Any = train_step.make_train_step(model, optimizer, layout, there)
    with compat.lowering_for(there, device.from_name("h200")), compat.no_compile_cache():
        lowered = step.lower(abstract_state(layout, optimizer, there), Batch(ids, ids, ids, ids))
        return lowered.compile().as_text()
