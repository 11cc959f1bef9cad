"""Efficiency of every pipeline schedule with equal stages, measured, against the simulator's lockstep clock.

    python -m jtrain.bench pipeline_efficiency

The executor's own loop over ticks runs on emulated devices: its table, conditionals, slots, permutes, embedding and
loss. Only the layers are synthetic: F, I and W each rest for a fixed time in a callback of the host. Rests of different
devices overlap whatever the number of cores, as the work of real devices does. Efficiency is the time that all
workers rest over workers x wall time; the best of the rounds counts, since other load can only add to wall time. It
contains what the clock leaves out: dispatch of the step, embedding and loss, copies of slots, permutes; over 8 stages
these take 3 ms of processor time in a tick.

About 8 minutes. Other load makes every meeting of the stages wait for processors, so run it on an idle machine.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jtrain.bench import Options, Row, option, row
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.forward_placement import Placement
from jtrain.model.layer_scan import Layer
from jtrain.model.param import Params, map_params
from jtrain.model.split_backward import multiplied
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.clocks import equal_costs, lockstep
from jtrain.pipeline.families import FAMILIES
from jtrain.pipeline.spec import PipelineSpec
from jtrain.runtime.platform import start_jax
from jtrain.step.pipeline_ticks import relative_costs, ticks_of
from jtrain.step.pipelined import pipelined_gradients
from jtrain.step.state import abstract_state
from jtrain.step.zero import param_tree

type Remat = Literal["none", "full"]

type Rest = Callable[[int], None]
"""Called on the host with the number of the worker; returns when its rest is over."""


@dataclasses.dataclass(frozen=True)
class Rests:
    """Rests of a layer in its forward pass, in its backward pass by input, and in that by weight."""

    forward: Rest
    by_input: Rest
    by_weight: Rest


class RestingTransformer(Transformer):
    """Transformer whose layers rest instead of computing; embedding and loss are real."""

    def __init__(self, rests: Rests, num_layers: int) -> None:
        sizes: Any = dict(d_model=8, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8, vocab_size=16)
        super().__init__(num_layers=num_layers, **sizes)
        self.rests = rests

    def layer(self, placement: Placement) -> Layer:
        rests = self.rests

        def product(x_BLD: Array, kernel: Array) -> tuple[Array]:
            # The kernel must be used, or it would have no gradient that could rest.
            return (x_BLD + jnp.mean(_rested(None, rests.by_weight, kernel)),)

        def layer(carry: Any, weights: Params, shared: Any) -> Any:
            del shared
            x_BLD, losses = carry
            (y_BLD,) = multiplied(product, x_BLD, [weights["mlp"]["down_FD"]])
            return _rested(rests.forward, rests.by_input, y_BLD), losses

        return layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rested(forward: Rest | None, backward: Rest, x: Array) -> Array:
    """Returns x after a rest; its gradient comes after one too."""
    del backward
    return x if forward is None else _after(forward, x)


def _after(rest: Rest, x: Array) -> Array:
    def call(worker: Any, x: Any) -> Any:
        rest(int(worker))
        return x

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("stage"), x)


_rested.defvjp(
    lambda forward, backward, x: (_rested(forward, backward, x), None),
    lambda _, backward, __, dx: (_after(backward, dx),),
)


def make_step(rests: Rests, stages: int, pipeline: PipelineSpec, *, remat: Remat = "none") -> tuple[Layout, Any]:
    """Layout of a step with 2 microbatches per stage and a layer per virtual stage, and a function that runs it."""
    spec, microbatches = MeshSpec(stage=stages), 2 * stages
    model = RestingTransformer(rests, stages * pipeline.chunks_per_worker)
    infos = model.param_infos()
    layout = make_layout(
        LayoutSpec(microbatches=microbatches, remat=remat),
        spec,
        infos,
        precision=PrecisionSpec(compute_dtype="float32"),
        pipeline=pipeline,
    )
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    optimizer = build(AdamW(peak_lr=1e-3), num_steps=1, params=map_params(lambda info: info, infos))
    like = abstract_state(layout, optimizer, mesh).params
    params = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), like)
    ids = jax.device_put(np.zeros((microbatches, 1, 8), np.int32), NamedSharding(mesh, jax.P()))

    def local(params: Params, ids: Array) -> Float[Array, ""]:
        grads, _, nats = pipelined_gradients(model, layout, params, {}, Batch(ids, ids, ids, ids), jnp.float32(1.0))
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(grads))  # or XLA would drop the gradients
        return jax.lax.psum(nats + total, "stage")

    specs = (param_tree(layout, lambda p: p.param), jax.P())
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))
    compiled = step.lower(params, ids).compile()
    return layout, lambda: compiled(params, ids).block_until_ready()


OPTIONS = (
    option("--rest-ms", type=float, default=100.0, help="rest of an F; long against a tick's overhead"),
    option("--rounds", type=int, default=2, help="measured steps of each schedule; the fastest counts"),
    option("--stages", type=int, nargs="+", default=[2, 4, 8], help="numbers of stages"),
    option("--schedules", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="default: all"),
)


def run(args: Options) -> Iterator[Row]:
    """Two rows per schedule and number of stages: I as long as F, and twice as long, as with full recomputation."""
    start_jax(os.environ, emulate_devices=max(args.stages))
    for stages in args.stages:
        for name in args.schedules:
            for remat in ("none", "full"):
                yield efficiency(name, stages, remat, rest_s=args.rest_ms / 1e3, rounds=args.rounds)


def efficiency(name: str, stages: int, remat: Remat, *, rest_s: float, rounds: int) -> Row:
    """Measures one schedule in the packing that a run takes."""
    by_input_s = (2.0 if remat == "full" else 1.0) * rest_s
    rests = Rests(*(functools.partial(_sleep, seconds) for seconds in (rest_s, by_input_s, rest_s)))
    spec = PipelineSpec(schedule=name, chunks=2 if name == "interleaved" else 1)
    layout, step = make_step(rests, stages, spec, remat=remat)
    assert relative_costs(layout) == (1.0, by_input_s / rest_s, 1.0), "the packing is chosen for other times"
    ticks = ticks_of(layout)
    clock = lockstep(ticks, equal_costs(ticks.schedule, rest_s, by_input_s, rest_s))
    took_s = min(_seconds(step) for _ in range(rounds))
    sizes = f"{stages} stages, {ticks.schedule.microbatches} microbatches"
    return row(
        f"{name}, {sizes}, I = {by_input_s / rest_s:.0f} F, ticks {ticks.packing}",
        sum(clock.busy) / (stages * took_s),
        "efficiency",
        baseline=1 - clock.bubble,
        bar=">= 0.9",
    )


def _sleep(seconds: float, worker: int) -> None:
    del worker
    time.sleep(seconds)  # the layer's work: stages that rest overlap on any number of cores


def _seconds(step: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s
