"""llama8b over 128 x v5p, compiled without one: temporaries, estimated and compiling seconds, network, by MaxText's.

    python -m jtrain.bench tpu_memory

Sequences of 4096, two per device, full remat, everything sharded over 128 chips, gradients summed in bfloat16; the
options are those that training on v5p uses (`jtrain.step.xla_options`). Nothing runs: the compiler of the extra [aot]
says what it would allocate and send. Temporaries are the block that it packs them into. libtpu's `temp_size_in_bytes`
is that for MaxText, and for jtrain 1.4 times of it (NOTES.md). MaxText's figures
were recorded, not measured again.
The compiler's estimate is that of each instruction, summed over the step. It has none for attention's kernels, and says
nothing of waits.
"""

import os
import re
import time
from pathlib import Path

from jtrain.bench import Options, Row, row
from jtrain.hlo.parser import visits

TOPOLOGY = "v5p:4x4x8"
SETTINGS = (
    "mesh.data=128",
    "layout.zero_stage=3",
    "layout.remat=full",
    "layout.microbatches=1",
    "precision.reduce_dtype=bfloat16",
    "data.global_batch=256",
    "data.seq_len=4096",
)
RECORDED = {"temporaries": 7.59, "arguments": 0.756, "process": 105.0, "network": 58.7, "estimate": 1.40}
"""MaxText 0.2.5's llama3.1-8b on v5p-256 by JAX 0.11.2 and libtpu 0.0.48.1, two idle cores, its default flags: GB per
device, seconds of the whole process, GB on the wire per device and step, the compiler's estimate
in seconds (whether its attention kernels are in it was not recorded)."""

UNKNOWN_CYCLES = 10**12
"""Estimates from here on say that there is none."""

CLOCK_HZ = 1.75e9
"""Cycles per second of a v5p: 4 units of 128 x 128 on each of two cores at this clock are its 459 TFLOP/s."""

RECORDED_ASYNC = {"default flags": 0.0, "SparseCore offload": 0.51}
"""Share of MaxText's network bytes in pairs of start and done."""


ABSENT_CHIPS = True


def run(args: Options) -> list[Row]:
    """Rows of ours over MaxText's.

    Raises:
      UserError: the compiler is not installed.
    """
    del args
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.hlo.traffic import overlap
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.from_run import make_optimizer, plan_job

    devices = topology_devices(TOPOLOGY)
    built = build_run(load_config("llama8b", sets=SETTINGS))
    program = compile_step(plan_job(built), make_optimizer(built), devices=devices)
    process_s = seconds_since_start()
    sent = overlap(program.traffic)
    what = "llama8b, 128 x v5p, 2 x 4096 per device, full remat; MaxText 0.2.5 as recorded"
    return [
        row(f"{what}: temporaries", program.temp_bytes / 1e9, "GB", baseline=RECORDED["temporaries"], bar="<= 0.6"),
        row("arguments", program.argument_bytes / 1e9, "GB", baseline=RECORDED["arguments"]),
        row("peak", program.peak_bytes / 1e9, "GB"),
        row("whole process, to the compiled program", process_s, "s", baseline=RECORDED["process"], bar="<= 0.6"),
        row("of it tracing and lowering", program.lower_s, "s"),
        row("of it compiling", program.compile_s, "s"),
        row("sent per device and step", sent.wire_bytes / 1e9, "GB", baseline=RECORDED["network"], bar="<= 0.78"),
        row("share of it asynchronous", sent.async_bytes / sent.wire_bytes, "", bar=">= 0.9"),
        row(
            "compiler's estimate of the step without attention's kernels",
            estimated_cycles(program.hlo) / CLOCK_HZ,
            "s",
            baseline=RECORDED["estimate"],
            bar="<= 0.95",
        ),
        row("share of it beside a matmul", sent.hidden_bytes / sent.wire_bytes, ""),
        *(row(f"MaxText, share asynchronous, {flags}", share, "") for flags, share in RECORDED_ASYNC.items()),
    ]


def estimated_cycles(hlo: str) -> int:
    """Sum of XLA:TPU's `estimated_cycles` over all instructions of a step, those in loops once per iteration.

    Asynchronous instructions are left out.

    Raises:
      RuntimeError: a loop has no known number of iterations.
    """
    total = 0
    for visit in visits(hlo):
        found = re.search(r'"estimated_cycles":"(\d+)"', visit.instruction.line)
        if found is None or visit.asynchronous or int(found[1]) >= UNKNOWN_CYCLES:
            continue
        if visit.times is None:
            raise RuntimeError(f"{visit.instruction.name} is in a loop whose number of iterations is not known.")
        total += int(found[1]) * visit.times
    return total


def seconds_since_start() -> float:
    """Since this process began, imports and all."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
