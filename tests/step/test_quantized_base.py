"""Steps beside a frozen base in blocks: those beside the numbers of the blocks, and blocks that stay."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.layout.layout import OffloadSpec
from jtrain.model.adapters.block_quantization import dequantize, is_quantized
from jtrain.model.adapters.lora import LoRA
from jtrain.model.param import at_path
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.step.state import abstract_state
from jtrain.step.train_step import make_train_step
from tests.adapters import ADAMW, Adapted, adapted, trained
from tests.losses import SIZES

STEPS = 5
QLORA = LoRA(rank=4, alpha=8.0, targets=("q", "o", "mlp.*"), train=("*norm*",), base_dtype="nf4")
WIDE: dict[str, Any] = SIZES | dict(d_model=256, num_heads=4, head_dim=64, d_ff=256)


def quantized(
    axes: dict[str, int], dtype: Any = "nf4", sizes: dict[str, Any] = WIDE, **layout: Any
) -> Adapted:
    return adapted(axes, lora=dataclasses.replace(QLORA, base_dtype=dtype), sizes=sizes, **layout)


@functools.cache
def one_device(dtype: str = "nf4") -> tuple[Any, Any, Any, str]:
    return trained(quantized({}, dtype), STEPS)


def numbers(params: Any) -> Any:
    """The parameters with the numbers of blocks in place of the blocks."""

    def of(leaf: Any) -> np.ndarray:
        leaf = dequantize(jax.tree.map(jnp.asarray, leaf), "float32") if is_quantized(leaf) else leaf
        return np.asarray(leaf, np.float32)

    return jax.tree.map(of, params, is_leaf=is_quantized)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_it_trains_as_beside_the_numbers_of_the_blocks(dtype: str) -> None:
    """Losses and parameters of a run whose base is the dequantised one in float32."""
    losses, before, after, _ = one_device(dtype)
    assert sum(map(is_quantized, jax.tree.leaves(before, is_leaf=is_quantized))) == 7
    plain_losses, _, plain_after, _ = trained(quantized({}, None), STEPS, numbers(before))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(numbers(after)), jax.tree.leaves(plain_after), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(data=2, tensor=2), dict(zero_stage=3, microbatches=2)),
        (dict(data=4), dict(zero_stage=1)),
        (dict(data=4), dict(zero_stage=2)),
        (dict(data=2, context=2), dict(zero_stage=3)),
        (dict(tensor=4), dict()),  # two devices share a key head
        (dict(stage=2), dict(microbatches=4)),
        (dict(stage=2, data=2), dict(zero_stage=3, microbatches=4, pipeline=PipelineSpec(gather="step"))),
        ({}, dict(offload=OffloadSpec(optimizer=1.0, activations=1.0), remat="full")),
    ],
    ids=str,
)
def test_a_layout_is_not_a_model(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Losses of one device, and its blocks, bit for bit, before and after."""
    want_losses, *_, want_hash = one_device()
    run = quantized(axes, **layout)
    losses, before, after, base_hash = trained(run, STEPS)
    assert base_hash == want_hash
    for info in run.infos:
        same = jax.tree.map(np.array_equal, at_path(before, info.path), at_path(after, info.path))
        assert all(jax.tree.leaves(same)) == info.frozen, info.path
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "axes", "zero_stage"), [("nf4", {}, 0), ("int8", dict(data=2, tensor=2), 3)], ids=str
)
def test_the_plan_has_the_bytes_of_blocks(dtype: str, axes: dict[str, int], zero_stage: int) -> None:
    """A byte for one number or two, and 4 bytes for 64: those of the state's arrays on a device."""
    run = quantized(axes, dtype, zero_stage=zero_stage)
    state = abstract_state(run.layout, run.optimizer, run.mesh)
    shards = [(leaf, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.params)]
    plan = memory(Job(run.model, run.layout, ADAMW, *run.batch.token_BL.shape))
    assert plan.parameters == sum(leaf.dtype.itemsize * int(np.prod(shape)) for leaf, shape in shards)
    [q] = [p for p in run.layout.params if p.info.path == "layers.attention.q_DNH"]
    blocks = at_path(state.params, q.info.path)
    bits = sum(8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(blocks))
    assert bits / q.info.size == {"nf4": 4.5, "int8": 8.5}[dtype]
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(blocks)} == {q.param_partition}


@pytest.mark.slow
def test_the_plan_has_the_compilers_arguments_and_no_whole_model_is_made() -> None:
    """Numbers are of a layer at a time: temporaries are far below all layers in float32, also without remat."""
    run = quantized({}, sizes=WIDE | dict(num_layers=24))
    step: Any = make_train_step(run.model, run.optimizer, run.layout, run.mesh)
    lowered = step.lower(abstract_state(run.layout, run.optimizer, run.mesh), run.batch)
    sizes = lowered.compile().memory_analysis()
    plan = memory(Job(run.model, run.layout, ADAMW, *run.batch.token_BL.shape))
    assert sizes.argument_size_in_bytes == plan.parameters + plan.optimizer + plan.batch + 8 * 4
    assert sizes.alias_size_in_bytes >= plan.parameters + plan.optimizer
    plain = quantized({}, "float32", sizes=WIDE | dict(num_layers=24))
    step = make_train_step(plain.model, plain.optimizer, plain.layout, plain.mesh)
    lowered = step.lower(abstract_state(plain.layout, plain.optimizer, plain.mesh), plain.batch)
    matrices = 4 * sum(p.info.size for p in run.layout.params if p.info.dtype == "nf4")
    excess = sizes.temp_size_in_bytes - lowered.compile().memory_analysis().temp_size_in_bytes
    assert excess < matrices / 4


@pytest.mark.parametrize(
    ("axes", "sizes", "layout", "message"),
    [
        ({}, dict(d_ff=96), {}, r"down_FD has 96 inputs \(F\), which blocks of 64 do not divide"),
        (
            dict(tensor=2),
            dict(d_ff=64),
            {},
            r"device has 32 of 64 inputs \(F\) of layers\.mlp\.down_FD, .* along tensor",
        ),
        (
            dict(data=8),
            {},
            dict(zero_stage=3),
            r"device has 32 of 256 inputs \(D\) of layers\.attention\.k_DKH, .* along data",
        ),
        (
            {},
            {},
            dict(offload=OffloadSpec(params=1.0)),
            r"layout\.offload\.params with adapter\.base_dtype=nf4",
        ),
    ],
    ids=str,
)
def test_what_no_block_divides_is_refused(
    axes: dict[str, int], sizes: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        quantized(axes, sizes=WIDE | sizes, **layout)
