"""Search among layouts with pipeline stages, beside those of `search.py`.

Stages send activations where ZeRO sends weights, so they can win where the gathers of weights cross the slow network
between hosts; inside one host or slice they only add a bubble. Stages are therefore tried on machines of several hosts.
"""

import dataclasses
from collections.abc import Iterator

from jtrain.dims import splits_heads
from jtrain.mesh import MeshSpec
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.search import Point, SearchTask, divisors, search

SCHEDULES = (PipelineSpec("1f1b"), PipelineSpec("interleaved", chunks=2), PipelineSpec("zb-h1"))
"""Schedules that are tried: the least memory, a smaller bubble, and gradients of weights in place of the bubble."""


def staged_meshes(task: SearchTask, *, chunks: int) -> Iterator[MeshSpec]:
    """Yields the (stage, replica, data, tensor) meshes of the machine with several stages.

    Each stage has whole hosts, or a whole number of stages is in each. Experts stay on one axis of one device.
    """
    model, machine, job = task.job.model, task.machine, task.job
    if machine.count <= machine.device.linked:
        return
    for stage in divisors(machine.count)[1:]:
        if stage * chunks > model.num_layers:
            break
        inside = machine.count // stage
        for tensor in divisors(min(inside, machine.device.linked)):
            if inside % tensor or model.d_ff % tensor or model.vocab_size % (tensor * stage) or job.seq_len % tensor:
                continue
            if not splits_heads(model.num_heads, model.num_kv_heads, tensor) or job.global_batch % (inside // tensor):
                continue
            for data in divisors(inside // tensor):
                width = data * tensor if tensor > model.num_kv_heads else data
                if model.d_model % width == 0:
                    yield MeshSpec(replica=inside // tensor // data, stage=stage, data=data, tensor=tensor)


def search_with_stages(task: SearchTask) -> list[Point]:
    """Returns the layouts with stages that fit, the fastest first."""
    found: list[Point] = []
    for pipeline in SCHEDULES:
        layout = dataclasses.replace(task.job.layout, pipeline_spec=pipeline)
        each = task.changed(layout=layout)
        found += search(each, staged_meshes(each, chunks=pipeline.chunks))
    return sorted(found, key=lambda point: (point.step_s, point.plan.total_bytes))
