"""llama8b over 128 v5p, as libtpu compiles it, within MaxText's figures of the same shape.

Sequences of 4096, two per device, full remat, everything sharded over 128 chips, gradients summed in
bfloat16; the options are those that training on v5p uses (`jtrain.step.xla_options`). Temporaries are the
block that the compiler packs them into: libtpu's `temp_size_in_bytes` is that for MaxText, and for jtrain 1.4
times of it (bench/NOTES.md).
"""

import re

import pytest

from jtrain.config.load import load_config
from jtrain.config.run import build_run, build_run_optimizer
from jtrain.hlo.parser import visits
from jtrain.hlo.traffic import overlap
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.from_run import plan_job

SETTINGS = (
    "mesh.data=128",
    "layout.zero_stage=3",
    "layout.remat=full",
    "layout.microbatches=1",
    "precision.reduce_dtype=bfloat16",
    "data.global_batch=256",
    "data.seq_len=4096",
)
MAXTEXT_TEMPORARIES, MAXTEXT_NETWORK, MAXTEXT_ESTIMATE_S = 7.59e9, 58.7e9, 1.40
"""MaxText 0.2.5's llama3.1-8b on v5p-256 by JAX 0.11.2 and libtpu 0.0.48.1, its default flags: bytes per
device, bytes on the wire per device and step, the compiler's estimate of the step (whether its attention
kernels are in it was not recorded; ours has none for attention's kernels)."""

UNKNOWN_CYCLES = 10**12
"""Estimates from here on say that there is none."""

CLOCK_HZ = 1.75e9
"""Cycles per second of a v5p: 4 units of 128 x 128 on each of two cores at this clock are its 459 TFLOP/s."""

HLO = f"""HloModule m, is_scheduled=true

%cond (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  %bound = s32[] constant(5)
  ROOT %lt = pred[] compare(%p, %bound), direction=LT
}}

%body (p: (s32[])) -> (s32[]) {{
  %dot = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%fused, backend_config={{"estimated_cycles":"100"}}
}}

%fused (x: f32[8]) -> f32[8] {{
  ROOT %x = f32[8]{{0}} parameter(0)
}}

%sent (x: f32[8]) -> f32[8] {{
  ROOT %add = f32[8]{{0}} add(%x, %x), backend_config={{"estimated_cycles":"3000"}}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %copy = f32[8]{{0}} copy(%a), backend_config={{"estimated_cycles":"20"}}
  %kernel = f32[8]{{0}} custom-call(%a), backend_config={{"estimated_cycles":"{UNKNOWN_CYCLES}"}}
  %start = ((f32[8]{{0}}), f32[8]{{0}}) async-start(%a), calls=%sent
  %done = f32[8]{{0}} async-done(%start)
}}
"""


def estimated_cycles(hlo: str) -> int:
    """Sum of XLA:TPU's `estimated_cycles` over all instructions of a step, those in loops once per iteration.

    Asynchronous instructions are left out.

    Raises:
      RuntimeError: a loop has no known number of iterations.
    """
    total = 0
    for visit in visits(hlo):
        found = re.search(r'"estimated_cycles":"(\d+)"', visit.instruction.line)
        if found is None or visit.is_async or int(found[1]) >= UNKNOWN_CYCLES:
            continue
        if visit.num_runs is None:
            raise RuntimeError(
                f"{visit.instruction.name} is in a loop whose number of iterations is not known."
            )
        total += int(found[1]) * visit.num_runs
    return total


def test_cycles_are_added_up_as_often_as_they_are_spent() -> None:
    """Five iterations and a copy; neither what is asynchronous nor an estimate that is none."""
    assert estimated_cycles(HLO) == 5 * 100 + 20


def test_a_loop_of_unknown_length_is_refused() -> None:
    """A sum would be wrong without a word."""
    with pytest.raises(RuntimeError, match="dot is in a loop whose number of iterations is not known"):
        estimated_cycles(HLO.replace("constant(5)", "parameter(1)"))


@pytest.mark.aot
@pytest.mark.slow
def test_llama8b_over_128_v5p_stays_small_and_fast() -> None:
    """Temporaries, network, asynchronous share, and the estimate of the step."""
    built = build_run(load_config("llama8b", sets=SETTINGS))
    program = compile_step(plan_job(built), build_run_optimizer(built), devices=topology_devices("v5p:4x4x8"))
    sent = overlap(program.traffic)
    assert 3.0e9 < program.temp_bytes < min(4.5e9, 0.6 * MAXTEXT_TEMPORARIES)
    assert sent.wire_bytes <= 0.78 * MAXTEXT_NETWORK
    assert sent.async_bytes >= 0.9 * sent.wire_bytes
    assert estimated_cycles(program.hlo) / CLOCK_HZ <= 0.95 * MAXTEXT_ESTIMATE_S
