"""Efficiency of every pipeline schedule with equal stages, measured, against the simulator's lockstep clock.

    python -m jtrain.bench pipeline_efficiency

The executor's own loop over ticks runs on emulated devices: its table, conditionals, slots, permutes, embedding and
loss. Only the layers are synthetic: F, I and W each rest for a fixed time in a callback of the host. Rests of different
devices overlap whatever the number of cores, as the work of real devices does. Efficiency is the time that all
workers rest over workers x wall time; the best of the rounds counts, since other load can only add to wall time. It
contains what the clock leaves out: dispatch of the step, embedding and loss, copies of slots, permutes.

About 6 minutes; the processor is mostly idle.
"""

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jtrain.bench import Row, row
from jtrain.dims import Batch
from jtrain.layout import Layout, LayoutSpec, make_layout
from jtrain.mesh import MeshSpec, make_mesh
from jtrain.model.forward_placement import Placement
from jtrain.model.layer_scan import Layer
from jtrain.model.param import Params, map_params
from jtrain.model.split_backward import multiplied
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.clocks import equal_costs, lockstep
from jtrain.pipeline.families import FAMILIES
from jtrain.pipeline.spec import PipelineSpec
from jtrain.precision import PrecisionSpec
from jtrain.runtime.platform import start_jax
from jtrain.step.pipeline_ticks import ticks_of
from jtrain.step.pipelined import pipelined_gradients
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC
from jtrain.step.zero import param_tree

WITHIN = 0.10
"""Largest relative difference between measured efficiency and the clock's."""


@dataclasses.dataclass(frozen=True)
class Rests:
    """Seconds that a layer rests in its forward pass, in its backward pass by input, and in that by weight."""

    forward: float
    by_input: float
    by_weight: float


class RestingTransformer(Transformer):
    """Transformer whose layers rest instead of computing; embedding and loss are real."""

    def __init__(self, rests: Rests, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rests = rests

    def layer(self, placement: Placement) -> Layer:
        rests = self.rests

        def product(x_BLD: Array, kernel: Array) -> tuple[Array]:
            # The kernel must be used, or it would have no gradient that could rest.
            return (x_BLD + jnp.mean(_rest(0.0, rests.by_weight, kernel)).astype(x_BLD.dtype),)

        def layer(carry: Any, weights: Params, shared: Any) -> Any:
            del shared
            x_BLD, losses = carry
            (y_BLD,) = multiplied(product, x_BLD, [weights["mlp"]["down_FD"]])
            return _rest(rests.forward, rests.by_input, y_BLD), losses

        return layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rest(forward_s: float, backward_s: float, x: Array) -> Array:
    """Returns x after a rest; its gradient rests too."""
    del backward_s
    return _rested(x, forward_s)


def _rested(x: Array, seconds: float) -> Array:
    if not seconds:
        return x

    def rest(x: Any) -> Any:
        time.sleep(seconds)
        return x

    return jax.pure_callback(rest, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


_rest.defvjp(
    lambda forward_s, backward_s, x: (_rest(forward_s, backward_s, x), None),
    lambda forward_s, backward_s, _, dx: (_rested(dx, backward_s),),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rest-ms", type=float, default=40.0, help="rest of an F; long against a tick's overhead")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each schedule; the fastest counts")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="numbers of stages")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Two rows per schedule and number of stages, on one process with emulated devices."""
    start_jax(os.environ, emulate_devices=max(args.stages))
    for stages in args.stages:
        for name in os.environ.get("FAM", ",".join(FAMILIES)).split(","):
            for recomputed in (0.0, 1.0):
                yield efficiency(name, stages, recomputed, rest_s=args.rest_ms / 1e3, rounds=args.rounds)


def efficiency(name: str, stages: int, recomputed: float, *, rest_s: float, rounds: int) -> Row:
    """Measures one schedule with 2 microbatches per stage.

    Args:
      recomputed: part of the forward pass that I computes again, as a rest.
    """
    spec = PipelineSpec(schedule=name, chunks=2 if name == "interleaved" else 1)
    microbatches, chunks = 2 * stages, spec.chunks_per_worker
    rests = Rests(rest_s, (1.0 + recomputed) * rest_s, rest_s)
    model = RestingTransformer(
        rests,
        num_layers=stages * chunks,
        d_model=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        d_ff=8,
        vocab_size=16,
    )
    mesh_spec = MeshSpec(stage=stages)
    layout = make_layout(
        LayoutSpec(microbatches=microbatches, remat="full" if recomputed else "none"),
        mesh_spec,
        model.param_infos(),
        precision=PrecisionSpec(compute_dtype="float32"),
        pipeline=spec,
    )
    ticks = ticks_of(layout)
    costs = equal_costs(ticks.schedule, rests.forward, rests.by_input, rests.by_weight)
    clock = lockstep(ticks, costs)
    step = _step(model, layout, mesh_spec)
    step()  # compiles
    took_s = min(_seconds(step) for _ in range(rounds))
    measured = sum(clock.busy) / (stages * took_s)
    what = f"{name}, {stages} stages, {microbatches} microbatches, I = {1 + recomputed:.0f} F, ticks {ticks.packing}"
    return row(what, measured, "efficiency", baseline=1 - clock.bubble, bar=f">= {1 - WITHIN}")


def _step(model: Transformer, layout: Layout, spec: MeshSpec) -> Callable[[], Any]:
    """Gradients of a step, from parameters that are zeros."""
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    infos = tuple(p.info for p in layout.params)
    optimizer = build(AdamW(peak_lr=1e-3), num_steps=1, params=map_params(lambda info: info, infos))
    like = abstract_state(layout, optimizer, mesh).params
    ids = jnp.zeros((layout.spec.microbatches, 8), jnp.int32)

    def local(params: Params, batch: Batch) -> Float[Array, ""]:
        parts = jax.tree.map(lambda x: x[:, None], batch)
        grads, _, nats = pipelined_gradients(model, layout, params, {}, parts, jnp.float32(1.0))
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(grads))  # or XLA would drop the gradients
        return jax.lax.psum(nats + total, "stage")

    specs = (param_tree(layout, lambda p: p.param), BATCH_SPEC)
    each = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))
    params = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), like)
    return lambda: each(params, Batch(ids, ids, ids, ids)).block_until_ready()


def _seconds(step: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s
