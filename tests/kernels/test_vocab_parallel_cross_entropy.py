"""The loss with positions and vocabulary split over devices, against all logits in float64 on one."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain_kernels.linear_cross_entropy.api import vocab_parallel_linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.parts import NO_COLUMN, linear_cross_entropy_in_parts
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.kernels.gradients import agree_with, in_float32, normal

B, L, D, V = 2, 16, 8, 40


def targets() -> jax.Array:
    """Targets in every device's columns; a third are ignored, and all positions of one device."""
    target = np.random.default_rng(0).integers(0, V, (B, L), dtype=np.int32)
    target[np.random.default_rng(1).random((B, L)) < 1 / 3] = -1
    target[:, 4:8] = -1
    return jnp.asarray(target)


def split(loss: Any, num_devices: int) -> Any:
    """Runs `loss(x, w, target)` on the blocks of several devices and adds up the sums."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))

    def local(x: jax.Array, w: jax.Array, target: jax.Array) -> Any:
        return jax.lax.psum(loss(x, w, target), "tensor")

    specs = P(None, "tensor"), P(None, "tensor"), P()
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


def whole_columns(chunk: int, z_loss: float, soft_cap: float | None = None) -> Any:
    return lambda x, w, t: vocab_parallel_linear_cross_entropy(
        x, w, t, axis="tensor", chunk_tokens=chunk, z_loss=z_loss, soft_cap=soft_cap
    )


def in_parts(parts: int, chunk: int, z_loss: float) -> Any:
    """Loss with each device's columns in parts, the last one padded with columns that must not count."""

    def loss(x: jax.Array, w: jax.Array, t: jax.Array) -> Any:
        local = w.shape[1]
        missing = -local % parts
        column = jax.lax.axis_index("tensor") * local + jnp.arange(local)
        column = jnp.pad(column, (0, missing), constant_values=NO_COLUMN).reshape(parts, -1)
        given = jnp.pad(w, ((0, 0), (0, missing)), constant_values=7).reshape(D, parts, -1).swapaxes(0, 1)
        return linear_cross_entropy_in_parts(
            x, given / 2, column, t, fetch=lambda p: p * 2, chunk_tokens=chunk, z_loss=z_loss, axis="tensor"
        )

    return loss


def agree(loss: Any, num_devices: int, dtype: str, z_loss: float, soft_cap: float | None = None) -> None:
    target = targets()
    op = split(loss, num_devices)
    agree_with(
        lambda x, w: op(x, w, target)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, target, z_loss=z_loss, soft_cap=soft_cap)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        dtype,
    )


def test_capped_logits_of_a_split_vocabulary_are_all_capped_logits() -> None:
    """Values and gradients, with a cap that logits come near."""
    agree(whole_columns(3, 0.1, 1.5), 4, "float32", 0.1, 1.5)


@in_float32("num_devices,chunk", (4, 3), (2, 8), (8, 1024), (8, 1))
def test_a_split_vocabulary_has_the_loss_and_gradients_of_all_logits(
    dtype: str, num_devices: int, chunk: int
) -> None:
    """On any number of devices and for any chunk, float32 agrees to 1e-5: only the order of sums differs."""
    agree(whole_columns(chunk, 0.1), num_devices, dtype, 0.1)


@in_float32("num_devices,parts,chunk", (4, 4, 5), (2, 3, 8), (8, 1, 1024))
def test_so_has_one_whose_columns_come_in_parts(dtype: str, num_devices: int, parts: int, chunk: int) -> None:
    """Also where a device's columns do not divide into parts, or its tokens into chunks."""
    agree(in_parts(parts, chunk, 0.1), num_devices, dtype, 0.1)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(whole_columns(4, 0.1), marks=pytest.mark.slow), in_parts(2, 4, 0.1)],
    ids=["whole", "parts"],
)
def test_each_device_reports_its_own_positions(loss: Any) -> None:
    """The reported sums have no z-loss and no gradient; together they are what one device would report."""
    x, w, target = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, D, V)), targets()
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    each = jax.jit(
        jax.shard_map(
            lambda x, w, t: tuple(s[None] for s in loss(x, w, t)),
            mesh=mesh,
            in_specs=(P(None, "tensor"), P(None, "tensor"), P()),
            out_specs=(P("tensor"), P("tensor")),
            check_vma=False,
        )
    )
    total, nats = each(x, w, target)
    for device in range(4):
        own = slice(4 * device, 4 * device + 4)
        want = linear_cross_entropy_reference(x[:, own], w, target[:, own], z_loss=0.1)
        np.testing.assert_allclose([total[device], nats[device]], want, rtol=1e-5, atol=1e-6)
    assert nats[1] == 0, "the device without targets"
    assert nats[0] > 1
    summed = split(loss, 4)
    assert not np.any(jax.grad(lambda x: summed(x, w, target)[1])(x))


def test_the_unembedding_is_never_gathered() -> None:
    """The network carries hidden states, their gradient, and three numbers per token and device, chunk by
    chunk.
    """
    n, tokens, width, vocab, chunk = 8, 256, 48, 4096, 8
    mesh = Mesh(np.array(jax.devices()), ("tensor",))

    def abstract(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    x = abstract((1, tokens, width), jnp.float32, None, "tensor")
    w = abstract((width, vocab), jnp.float32, None, "tensor")
    loss = split(lambda x, w, t: whole_columns(chunk, 0.0)(x, w, t)[0], n)
    step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(x.sharding, w.sharding))
    text = step.lower(x, w, abstract((1, tokens), jnp.int32)).compile().as_text()
    assert text is not None
    sent = re.findall(r"= f32\[([\d,]+)\]\S* (all-gather|reduce-scatter|all-to-all|all-reduce)\(", text)
    assert set(sent) == {
        (f"{chunk},{width}", "reduce-scatter"),
        (f"{n * chunk},{width}", "all-gather"),
        (f"{n},3,{n * chunk}", "all-gather"),
    }
    assert len(sent) == 3
    assert f"[{width},{vocab // n}]" in text
    assert f"[{width},{vocab}]" not in text


def test_targets_of_this_device_alone_are_refused() -> None:
    """The message has both lengths."""
    loss = split(whole_columns(4, 0.0), 4)
    with pytest.raises(
        ValueError, match=r"x has 4 positions on each of 4 devices along `tensor`.* 4 targets, not 16"
    ):
        loss(jnp.zeros((B, L, D)), jnp.zeros((D, V)), jnp.zeros((B, 4), jnp.int32))


def test_a_split_chunk_of_no_tokens_is_refused() -> None:
    """A chunk of no tokens is refused as on one device."""
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        split(whole_columns(0, 0.0), 4)(jnp.zeros((B, L, D)), jnp.zeros((D, V)), targets())
