"""A frozen base in the program that XLA compiles for 8 x H100: no gradient, moment, sum or reduction of its sizes."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from jtrain.hlo.parser import arrays, visits
from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, local_shape
from jtrain.model.adapters.lora import LoRA
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step, topology_devices
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.job import Job

# No size of a matrix has the factor 5 of the tokens, so that no activation is taken for a weight.
SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=512, num_heads=4, num_kv_heads=1, head_dim=128, d_ff=1792, vocab_size=4096
)
SIZES |= dict(loss_chunk_tokens=320, attention_chunk=128)
SEQ_LEN, ROWS, MICROBATCHES, DEVICES = 640, 32, 2, 8


def compiled(lora: LoRA | None) -> tuple[Layout, CompiledStep, MemoryPlan]:
    model, optimizer = Transformer(**SIZES), AdamW(peak_lr=1e-3)
    infos = model.param_infos() if lora is None else lora.infos(model.param_infos())
    spec = LayoutSpec(zero_stage=3, remat="full", microbatches=MICROBATCHES)
    scale = None if lora is None else lora.scale
    layout = make_layout(spec, MeshSpec(data=DEVICES), infos, adapter_scale=scale)
    built = build(optimizer, num_steps=100, params=map_params(lambda info: info, infos))
    devices = topology_devices(f"h100:{DEVICES}")
    job = Job(model, layout, optimizer, ROWS, SEQ_LEN, machine_of(devices))
    # With no GPU to tune on, XLA has Triton split the sums of small matmuls.
    options = {"xla_gpu_enable_triton_gemm": False}
    return layout, compile_step(job, built, devices=devices, compiler_options=options), memory(job)


def float32_of_the_base(layout: Layout, program: CompiledStep) -> Iterator[str]:
    """Opcodes of instructions with a float32 array as large as a matrix of the base, its shard, or a layer of it."""
    sizes = set[int]()
    for p in layout.params:
        if p.info.is_matrix and not p.info.is_adapter:
            shards = {p.info.size, math.prod(local_shape(p.param_partition, p.info.shape, layout.mesh.shape))}
            sizes |= shards | {size // SIZES["num_layers"] for size in shards if p.info.is_stacked}
    for visit in visits(program.hlo):
        for dtype, shape in arrays(visit.instruction.type):
            if dtype == "f32" and math.prod(shape) in sizes:
                yield visit.instruction.opcode


@pytest.mark.aot
@pytest.mark.slow
def test_a_frozen_base_has_no_gradient_moment_sum_or_reduction_as_compiled() -> None:
    """0 bytes of each, by the compiled program; trained, the same matrices have all of them."""
    layout, program, plan = compiled(LoRA(rank=8, alpha=16.0, base_dtype="bfloat16"))
    trained = sum(p.info.size for p in layout.trained)
    # The base is bfloat16, so a float32 array of its sizes would be a gradient, a sum or a moment.
    assert not list(float32_of_the_base(layout, program))
    reduced = {t.kind: t.array_bytes for t in program.traffic if t.dtype == "f32" and t.kind != "all-gather"}
    # A and B are reduced, once per microbatch; beside them the loss and the number of bad elements.
    assert reduced.pop("reduce-scatter") == MICROBATCHES * 4 * trained
    assert sum(reduced.values()) <= 16
    assert not [t for t in program.traffic if "reduce" in t.kind and t.dtype == "bf16"]
    # Arguments: the base, A and B and two moments of these, and the hash of the base.
    assert plan.optimizer == 2 * 4 * trained // DEVICES
    assert program.argument_bytes == plan.argument_bytes + 32
    assert 0.87 < plan.total_bytes / program.peak_bytes < 1.15

    layout, program, plan = compiled(None)
    assert {"parameter", "fusion", "reduce-scatter-start"} <= set(float32_of_the_base(layout, program))
    assert plan.optimizer > 50 * 2 * 4 * trained // DEVICES
