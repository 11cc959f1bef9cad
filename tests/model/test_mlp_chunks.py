"""A dense feed-forward layer in chunks of positions: the same numbers, and hidden units of one chunk at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.errors import UserError
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.block import BlockSpec, check_blocks
from jtrain.model.mlp import MLPSpec, in_chunks
from jtrain.model.param import init_params, param_infos
from jtrain.model.router import MoESpec
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis
from jtrain.model.transformer import Transformer
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.pipeline_ticks import counts_of
from tests.layouts import layout_from
from tests.losses import SIZES

D, F = 32, 256


def layer(spec: MLPSpec, dtype: str) -> tuple[Any, Any]:
    """Structure and weights of a layer; vectors, which begin at 0 or 1, are drawn too."""
    sizes = ModelSizes(2, D, 4, 2, 8, F, 1e-5, 512)
    module = spec.module(sizes, layers=0)
    infos = param_infos(module)
    weights = init_params(infos, seed=0, dtype="float32")
    for number, info in enumerate(infos):
        if not info.is_matrix:
            weights[info.path] += 0.3 * jax.random.normal(jax.random.key(number), info.shape)
    return nnx.split(module)[0], jax.tree.map(lambda x: x.astype(dtype), weights)


def outputs(
    definition: Any, weights: Any, x_BLD: jax.Array, chunk: int | None
) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    """Output, and gradients of a random sum of it by the weights and x."""
    # Drawn in float32, so that it is the same in every dtype.
    dy_BLD = jax.random.normal(jax.random.key(9), x_BLD.shape).astype(x_BLD.dtype)

    def loss(weights: Any, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BLD = in_chunks(nnx.merge(definition, weights), x_BLD, TensorAxis(), chunk)
        return jnp.sum((y_BLD * dy_BLD).astype(jnp.float32)), y_BLD

    (_, y_BLD), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(weights, x_BLD)
    return y_BLD, grads


@pytest.mark.parametrize(
    "spec",
    [
        MLPSpec(bias=True, inner_norm=True, gate_scale=0.5, out_scale=2.0),
        MLPSpec(gated=False, activation="xielu"),
    ],
    ids=["gated", "xielu"],
)
def test_chunks_are_the_whole(spec: MLPSpec) -> None:
    """Of 10 positions in chunks of 4, two positions are left over."""
    definition, weights = layer(spec, "float32")
    x_BLD = jax.random.normal(jax.random.key(1), (3, 10, D))
    got, want = (outputs(definition, weights, x_BLD, chunk) for chunk in (4, None))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, atol=2e-6 * np.abs(w).max())


def test_gradients_of_weights_are_summed_in_float32() -> None:
    """In bfloat16 with 256 chunks: not further from float32 than without chunks, where a sum in bfloat16 is five
    times as far.
    """
    definition, weights = layer(MLPSpec(), "bfloat16")
    x_BLD = jax.random.normal(jax.random.key(1), (1, 512, D), jnp.bfloat16)
    exact_weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    _, (exact, _) = outputs(definition, exact_weights, x_BLD.astype(jnp.float32), None)

    def error(chunk: int | None) -> float:
        _, (grads, _) = outputs(definition, weights, x_BLD, chunk)
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
        return max(float(jnp.linalg.norm(g - e) / jnp.linalg.norm(e)) for g, e in pairs)

    assert error(2) < 1.2 * error(None) < 0.02


def test_the_hidden_units_of_one_chunk_exist_at_a_time() -> None:
    """Temporaries of both passes, as compiled: below the hidden units of all positions, of which a layer at once
    has several.
    """
    definition, weights = layer(MLPSpec(), "float32")
    x_BLD = jax.ShapeDtypeStruct((1, 8192, D), jnp.float32)

    def temporaries(chunk: int | None) -> int:
        gradients = jax.jit(lambda w, x: outputs(definition, w, x, chunk)[1])
        sizes = gradients.lower(weights, x_BLD).compile().memory_analysis()
        assert sizes is not None
        return sizes.temp_size_in_bytes

    hidden = 8192 * F * 4
    assert temporaries(None) > 3 * hidden
    # Four arrays of the residual stream's width, an eighth of the hidden units'.
    assert temporaries(256) < 0.8 * hidden


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mlp_chunk=0, remat="full"), "mlp_chunk=0 must be at least 1"),
        (dict(mlp_chunk=2), "mlp_chunk=2 with layout.remat=none, which saves"),
        (
            dict(mlp_chunk=2, remat="named", remat_save=("attention", "mlp_up")),
            r"mlp_chunk=2 with layout.remat_save=\('attention', 'mlp_up'\), which saves",
        ),
        (dict(mlp_chunk=2, remat="full", sequence_groups=2), "mlp_chunk=2 with layout.sequence_groups=2"),
        (dict(mlp_chunk=2, remat="full", tensor_overlap=True), "mlp_chunk=2 with layout.tensor_overlap=True"),
    ],
    ids=str,
)
def test_settings_that_exclude_chunks_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LayoutSpec(**fields)


def test_models_and_schedules_without_such_a_layer_are_refused() -> None:
    """Each by its own field, with the way out."""
    full: dict[str, Any] = dict(mlp_chunk=2, remat="full")
    infos = Transformer(**SIZES).param_infos()
    with pytest.raises(
        UserError, match=r"mlp_chunk=2 with precision.matmul_dtype=fp8_current.*mlp_chunk=None"
    ):
        layout_from(full | dict(matmul_dtype="fp8_current"), MeshSpec(), infos)
    with pytest.raises(UserError, match=r"a model without a dense feed-forward layer.*mlp_chunk=None"):
        check_blocks([BlockSpec(feed_forward=MoESpec(4, 2))], LayoutSpec(**full), MeshSpec())
    staged = layout_from(
        full | dict(microbatches=4, pipeline=PipelineSpec("zb-h1")), MeshSpec(stage=2), infos
    )
    with pytest.raises(UserError, match=r"mlp_chunk=2 with pipeline.schedule=zb-h1.*pipeline.schedule=1f1b"):
        counts_of(staged)
