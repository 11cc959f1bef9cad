"""Number formats of every sum in the traced step: none is narrower than what `precision` and the
documentation say.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=4, d_model=32, num_heads=4, num_kv_heads=1, head_dim=8, d_ff=64, vocab_size=112, z_loss=1e-4
)
MIXTURE = SIZES | dict(moe=MoESpec(num_experts=12, top_k=2, balance_loss=1e-2, router_z_loss=1e-3))
EXACT = {
    *(
        "reduce_sum",
        "reduce_max",
        "cumsum",
        "scatter-add",
        "exp",
        "log",
        "log1p",
        "logistic",
        "rsqrt",
        "sqrt",
        "div",
    ),
    *("integer_pow", "square", "top_k", "sort"),
}
"""Sums of one device, and what softmax, norms, losses and the optimizer are made of: float32, always."""


class Operation(NamedTuple):
    """One operation of a traced program.

    axes: mesh axes of a collective.
    scope: names around it.
    """

    name: str
    axes: tuple[str, ...]
    scope: str
    shape: tuple[int, ...]
    dtype: str


def operations(jaxpr: Any) -> Iterator[Operation]:
    """Every operation with a floating-point result, also those of inner programs."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from operations(inner)
        axes = equation.params.get("axes" if equation.primitive.name.startswith("psum") else "axis_name", ())
        axes = axes if isinstance(axes, tuple) else (axes,)
        result: Any = equation.outvars[0].aval if equation.outvars else None
        if result is None or not jnp.issubdtype(getattr(result, "dtype", jnp.int32), jnp.floating):
            continue
        if equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == result.size:
            continue  # a dimension of 1 is removed
        scope = str(equation.source_info.name_stack)
        yield Operation(equation.primitive.name, axes, scope, result.shape, result.dtype.name)


def traced(
    axes: dict[str, int], sizes: dict[str, Any], pipeline: dict[str, Any], **layout: Any
) -> list[Operation]:
    spec = MeshSpec(**axes)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    model = Transformer(**sizes)
    infos = model.param_infos()
    lay = layout_from(layout, spec, infos, pipeline=PipelineSpec(**pipeline))
    optimizer = build(AdamW(peak_lr=1e-3), num_steps=10, params=map_params(lambda info: info, infos))
    ids = jax.ShapeDtypeStruct((16, 24), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, lay, mesh)
    return list(
        operations(step.trace(abstract_state(lay, optimizer, mesh), Batch(ids, ids, ids, ids)).jaxpr.jaxpr)
    )


@pytest.mark.parametrize(
    ("axes", "sizes", "pipeline", "layout"),
    [
        (
            dict(replica=2, data=2, tensor=2),
            SIZES,
            {},
            dict(zero_stage=3, microbatches=2, reduce_dtype="bfloat16"),
        ),
        (
            dict(replica=2, data=2, tensor=2),
            SIZES,
            {},
            dict(zero_stage=1, sequence_groups=2, reduce_dtype="bfloat16"),
        ),
        (dict(replica=2, context=2, expert=2), MIXTURE, {}, dict(zero_stage=2, microbatches=2)),
        (
            dict(stage=2, data=2, tensor=2),
            SIZES,
            dict(schedule="zbv", gather="step"),
            dict(zero_stage=3, microbatches=4, reduce_dtype="bfloat16"),
        ),
    ],
    ids=("zero 3", "zero 1", "experts", "stages"),
)
def test_every_sum_has_the_format_that_it_should(
    axes: dict[str, int], sizes: dict[str, Any], pipeline: dict[str, Any], layout: dict[str, Any]
) -> None:
    """Parameters and activations are bfloat16.

    Gradients are added up over microbatches in float32 and over devices in `reduce_dtype`; activations over
    `tensor` and `stage` in bfloat16; all else in float32: the loss, the norm, softmax, the router, and the
    logits.
    """
    program = traced(axes, sizes, pipeline, param_dtype="bfloat16", **layout)
    reduce_dtype = layout.get("reduce_dtype", "float32")
    assert {op for op in program if op.name in EXACT and op.dtype != "float32"} == set()
    added = [op for op in program if op.name in ("add", "add_any") and "reduce_gradients" in op.scope]
    assert {op for op in added if op.dtype != "float32"} == set()
    assert bool(added) == ("microbatches" in layout)

    sums = [op for op in program if op.name in ("psum", "psum_invariant", "reduce_scatter")]
    scalars = [op for op in sums if math.prod(op.shape) == 1]
    activations = [op for op in sums if op not in scalars and set(op.axes) <= {"tensor", "stage"}]
    activations = [op for op in activations if "reduce_gradients" not in op.scope]
    gradients = [op for op in sums if op not in scalars and op not in activations]
    whole = tuple(axis for axis, size in MeshSpec(**axes).shape.items() if size > 1)
    assert whole in {op.axes for op in scalars}, "the loss"
    assert {op.dtype for op in scalars} == {"float32"}
    assert {op.dtype for op in gradients} == {reduce_dtype}
    assert {axis for op in gradients for axis in op.axes} >= set(whole) - {"stage"}
    assert {op.dtype for op in activations} <= {"bfloat16", "float32"}

    products = [op for op in program if op.name == "dot_general"]
    logits = [op for op in products if op.shape[-1] == sizes["vocab_size"] // axes.get("tensor", 1)]
    scores = [op for op in products if "->bkqm" in op.scope]
    assert {op.dtype for op in scores} == {"float32"}
    assert {op.dtype for op in logits} == {"float32"} or "stage" in axes
    if sizes is MIXTURE:
        routed = [op for op in products if op.shape[-1] == sizes["moe"].num_experts]
        assert {op.dtype for op in routed} == {"float32"}
