"""Bytes that the guard and the checksums add to llama1b's step, by the compilers of an H200 and a v5p.

    python -m jtrain.bench integrity_cost_compiled [--device v5p]

The step is compiled as it ships and without any check. Bytes are those of all operands and results, with loops
counted. Seconds are the additional bytes at the chip's bandwidth, beside the plan's seconds of a step; FLOPs are not
counted, because the checks have no matmul. Nothing runs, so nothing is measured. About 5 minutes on two cores.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from jtrain.bench import Options, Row, option, row

TOPOLOGIES = {"h200": "h200:1", "v5p": "v5p:2x2x1"}


OPTIONS = (option("--device", action="append", choices=tuple(TOPOLOGIES), help="only of this device"),)
ABSENT_CHIPS = True


def run(args: Options) -> Iterator[Row]:
    """Rows of each device as its programs are compiled.

    Raises:
      UserError: a compiler is not installed.
    """
    for device in args.device or TOPOLOGIES:
        yield from _compiled(device)


def _compiled(device: str) -> Iterator[Row]:
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.plan.compile.compiled_step import topology_devices
    from jtrain.plan.estimate.machine import machine_of
    from jtrain.plan.estimate.memory import memory
    from jtrain.plan.estimate.step_time import step_time
    from jtrain.plan.from_run import plan_job

    devices = topology_devices(TOPOLOGIES[device])[:1]
    run = build_run(load_config("llama1b"))
    machine = machine_of(devices)
    job = plan_job(run, machine)
    step_s = step_time(job, memory(job)).step_s
    moved, temporaries = _figures(run, devices, checks=True)
    plain, plain_temporaries = _figures(run, devices, checks=False)
    bandwidth = machine.device.hbm_bytes_per_s
    assert bandwidth is not None
    what = f"llama1b, {device}, guard and checksums"
    yield row(f"{what}: bytes read and written", moved / 1e9, "GB", baseline=plain / 1e9, bar="<= 1.01")
    yield row(f"{what}: temporaries", temporaries / 1e9, "GB", baseline=plain_temporaries / 1e9)
    share = (moved - plain) / bandwidth / step_s
    yield row(f"{what}: those bytes at the full bandwidth, of a step of {step_s:.2f} s by the plan", 100 * share, "%",
              bar="<= 1")  # fmt: skip


def _figures(run: Any, devices: list[Any], *, checks: bool) -> tuple[int, int]:
    """Bytes that the compiled step moves, and bytes of its temporaries."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jtrain.bench.integrity_cost import no_guard
    from jtrain.config.run import run_layout
    from jtrain.layout.dims import Batch
    from jtrain.layout.mesh import make_mesh
    from jtrain.plan.from_run import make_optimizer
    from jtrain.step.state import abstract_state
    from jtrain.step.train_step import BATCH_SPEC, make_train_step
    from jtrain_kernels.compat import lowering_for, no_compile_cache
    from jtrain_kernels.device import live

    mesh, layout, optimizer = make_mesh(run.mesh, devices), run_layout(run), make_optimizer(run)
    shape = (run.data.global_batch, run.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    with contextlib.nullcontext() if checks else no_guard(), lowering_for(mesh, live(devices[0])):
        step: Any = make_train_step(run.model, optimizer, layout, mesh, checksums=checks)
        lowered = step.lower(abstract_state(layout, optimizer, mesh), Batch(ids, ids, ids, ids))
    with no_compile_cache():
        program = lowered.compile()
    memory = program.memory_analysis()
    return _moved_bytes(program.as_text()), memory.total_allocation_bytes - memory.indefinite_allocations


def _moved_bytes(hlo: str) -> int:
    """Bytes that a program's instructions read and write, with loops counted as often as they run."""
    from jtrain.hlo.flops import bytes_accessed
    from jtrain.hlo.memory_traffic import NO_ACCESS
    from jtrain.hlo.parser import read

    program = read(hlo)
    no_traffic = {*NO_ACCESS, "opt-barrier", "iota"}

    def moved(name: str) -> int:
        total = 0
        for i in program.computations[name]:
            if i.opcode == "while":
                body = re.search(r"body=%([\w.-]+)", i.line)
                trips = program.trip_count(i.line)
                assert body is not None, i.line[:200]
                assert trips is not None, i.line[:200]
                total += trips * moved(body[1])
            elif i.opcode in ("call", "conditional"):
                total += sum(moved(inside) for inside in i.called)
            elif i.opcode not in no_traffic and not i.opcode.endswith(("-update", "-done")):
                total += bytes_accessed(i, program)
        return total

    return moved(program.entry)
