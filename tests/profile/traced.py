"""Trace window of a real run: a tiny model on eight emulated devices, traced like in the training loop."""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.job import Job
from jtrain.profile.analysis.pipeline_trace import facts_of
from jtrain.profile.capture.trace import Window, compiled_text
from jtrain.step.pipeline_ticks import relative_costs, ticks_of
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.compilations import with_source_lines
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=64, vocab_size=64, z_loss=1e-4
)
ROWS, COLS = 32, 16
STEPS = (11, 12, 13)
WAIT_S = 0.004
"""Seconds of sleep before each step but the first, which simulate late data."""

MODULE = "jit_train_step"
PEAKS: dict[str, Any] = dict(flops=None, hbm_bytes_per_s=None, ref_mhz=None, max_mhz=None)


@functools.cache
def traced(
    data: int = 8,
    tensor: int = 1,
    zero_stage: Any = 3,
    microbatches: int = 1,
    *,
    stage: int = 1,
    schedule: str = "1f1b",
    remat: str = "full",
    num_layers: int = 2,
    **more: Any,
) -> Path:
    """The folder of a window of three steps, with the loop over layers scanned; `more` are fields of
    LayoutSpec.
    """
    spec = MeshSpec(stage=stage, data=data, tensor=tensor)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    sizes: dict[str, Any] = SIZES | dict(num_layers=num_layers)
    model = Transformer(**sizes)
    infos = model.param_infos()
    fields = (
        dict(zero_stage=zero_stage, remat=remat, microbatches=microbatches, compute_dtype="float32") | more
    )
    layout = layout_from(fields, spec, infos, pipeline=PipelineSpec(schedule=schedule))
    workers = [index * stage // spec.size for index in range(spec.size)]
    adam = AdamW(peak_lr=3e-3, warmup_steps=4)
    optimizer = build(adam, num_steps=20, params=map_params(lambda i: i, infos))
    token = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, COLS), np.int32)
    position = np.tile(np.arange(COLS, dtype=np.int32), (ROWS, 1))
    batch = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)),
        Batch(token, np.roll(token, -1, 1), position, np.ones_like(token)),
    )
    planned = collectives(Job(model, layout, adam, ROWS, COLS))
    window = Window(
        Path(tempfile.mkdtemp(prefix="jtrain-traced-")),
        facts={
            "platform": "cpu",
            "device_kind": jax.devices()[0].device_kind,
            "num_devices": spec.size,
            "process": 0,
            "num_processes": 1,
            "tokens_per_step": ROWS * COLS,
            "mesh": spec.shape,
            "peaks": PEAKS,
            "partitions": list(range(spec.size)),
            "planned": [dict(kind=c.kind, axes=c.axes, wire_bytes=c.wire_bytes) for c in planned],
            "memory": [dict(name="params", bytes=1, source="plan")],
            "step_flops": flops_per_token(model, seq_len=COLS).total_flops * ROWS * COLS,
            "module": MODULE,
            "pipeline": facts_of(ticks_of(layout), relative_costs(layout), workers) if stage > 1 else None,
            "settings": {"layout.remat": remat, "layout.microbatches": microbatches},
            "goodput": {"startup": 2.0, "compute": 1.0},
        },
    )
    step = make_train_step(model, optimizer, layout, mesh)
    with with_source_lines():
        state, metrics = step(init_state(layout, optimizer, mesh, seed=0), batch)
    jax.block_until_ready((state, metrics))
    window.start()
    for index in STEPS:
        if index != STEPS[0]:
            with jax.profiler.TraceAnnotation("jtrain:data_wait"):
                time.sleep(WAIT_S)
        with window.step(index):
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
    window.stop(compiled_text(MODULE))
    return window.folder
