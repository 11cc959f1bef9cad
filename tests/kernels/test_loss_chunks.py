"""Default chunk size of the loss."""

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from jtrain.config.load import set_values
from jtrain.model.ops import linear_cross_entropy, linear_cross_entropy_in_parts
from jtrain.model.unembedding import loss_chunk
from jtrain.plan.auto_layout import choose_loss_chunk
from jtrain_kernels import registry
from jtrain_kernels.device import DEVICES
from jtrain_kernels.linear_cross_entropy.api import LINEAR_CROSS_ENTROPY
from jtrain_kernels.linear_cross_entropy.chunking import CANDIDATES, best_chunk, predict
from tests.kernels.gradients import normal

LLAMA8B: dict[str, int] = dict(tokens=16384, d_model=4096, vocab=128256)


def seconds(device: str, chunk: int, **sizes: int) -> float:
    found = predict(DEVICES[device], chunk, **(LLAMA8B | sizes))
    assert found is not None
    return found.seconds


def test_small_chunks_cost_the_sum_of_the_gradient_and_large_ones_nothing() -> None:
    """On an H200, chunks of 128 take twice as long as chunks of 1024 or more, where matmuls hide the
    accumulation.
    """
    assert seconds("h200", 128) > 2 * seconds("h200", 1024)
    assert seconds("h200", 1024) == pytest.approx(seconds("h200", 4096), rel=0.01)
    three_matmuls = 3 * 2 * 16384 * 4096 * 128256 / 989.4e12
    assert 1.2 < seconds("h200", 1024) / three_matmuls < 1.5


@pytest.mark.parametrize("name", ("a100", "h100", "h200", "b200", "mi300x", "v5e", "v5p", "v6e", "tpu7x"))
@pytest.mark.parametrize("shards", (1, 8))
def test_the_best_chunk_is_the_smallest_that_nothing_in_the_budget_beats_by_more_than_1_percent(
    name: str, shards: int
) -> None:
    """The best chunk is compared with all candidates and is within the budget."""
    sizes = LLAMA8B | dict(tokens=16384 // shards, shards=shards)
    best, because = best_chunk(DEVICES[name], **sizes)
    found = [p for c in CANDIDATES if (p := predict(DEVICES[name], c, **sizes)) is not None]
    fitting = {p.tokens: p for p in found if p.temp_bytes <= 2 * 2**30}
    fastest = min(p.seconds for p in fitting.values())
    assert fitting[best].seconds <= 1.01 * fastest
    assert all(p.seconds > 1.01 * fastest for tokens, p in fitting.items() if tokens < best)
    assert f"ms predicted on a {name}" in because


def test_a_chip_with_more_flops_per_byte_takes_larger_chunks() -> None:
    """A v6e has 560 FLOPs per byte of its memory, an H200 206."""
    assert best_chunk(DEVICES["v6e"], **LLAMA8B)[0] > best_chunk(DEVICES["h200"], **LLAMA8B)[0]


def test_a_smaller_budget_gives_smaller_chunks_down_to_the_smallest() -> None:
    """If even the smallest chunk is over the budget, the reason says so."""
    assert (
        best_chunk(DEVICES["h200"], **LLAMA8B, budget_bytes=2**29)[0]
        < best_chunk(DEVICES["h200"], **LLAMA8B)[0]
    )
    tokens, because = best_chunk(DEVICES["h200"], **LLAMA8B, budget_bytes=1)
    assert tokens == min(CANDIDATES)
    assert "is over the budget, but no chunk takes less" in because


def test_where_no_peak_is_published_the_usual_size_is_taken_and_said() -> None:
    """CPUs and float32 have no published peak."""
    assert best_chunk(DEVICES["cpu"], **LLAMA8B) == (
        1024,
        "no peaks are published for a cpu, so the default size",
    )
    assert best_chunk(DEVICES["cpu"], tokens=64, d_model=8, vocab=40)[0] == 64
    assert predict(DEVICES["h200"], 1024, **LLAMA8B, itemsize=4) is None


def avals(**more: Any) -> dict[str, Any]:
    return dict(LINEAR_CROSS_ENTROPY.cases["llama8b"]) | more


def test_the_registry_hands_out_the_chunk_and_what_it_costs() -> None:
    """Configurations are the predicted best first, then the others for tuning; a requested size is the only
    one.
    """
    h200 = DEVICES["h200"]
    choice = registry.choose(LINEAR_CROSS_ENTROPY, h200, avals())
    assert choice.config == {"chunk": 1024}
    (xla,) = LINEAR_CROSS_ENTROPY.implementations
    assert len(xla.configs(h200, avals())) == len(CANDIDATES)
    assert xla.configs(h200, avals(chunk_tokens=77)) == ({"chunk": 77},)
    assert xla.cost_s(h200, avals()) == pytest.approx(seconds("h200", 1024))
    split = avals(
        x_BLD=jax.ShapeDtypeStruct((2, 1024, 4096), jnp.bfloat16),
        unembed_DV=jax.ShapeDtypeStruct((4096, 16032), jnp.bfloat16),
        axis="tensor",
    )
    assert xla.cost_s(h200, split) == pytest.approx(seconds("h200", 1024, tokens=2048, shards=8))


def test_a_loss_without_a_size_of_chunks_is_the_same_loss() -> None:
    """The loss is the same, whole and in parts."""
    x, w = jnp.asarray(normal(0, 2, 16, 8)), jnp.asarray(normal(1, 8, 40))
    target = jnp.asarray(np.random.default_rng(0).integers(-1, 40, (2, 16), dtype=np.int32))
    want = linear_cross_entropy(x, w, target, chunk_tokens=32)[0]
    assert linear_cross_entropy(x, w, target, chunk_tokens=None)[0] == want
    parts = w.reshape(8, 2, 20).swapaxes(0, 1)
    got = linear_cross_entropy_in_parts(
        x, parts, jnp.arange(40).reshape(2, 20), target, fetch=lambda part: part, chunk_tokens=None
    )[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_auto_in_a_config_becomes_a_number_for_the_devices() -> None:
    """`auto` is replaced before planning; a number stays, without a message."""
    run_config = tiny.tiny()
    assert choose_loss_chunk(run_config, DEVICES["h200"]) == []
    set_values(run_config, {"model.loss_chunk_tokens": "auto", "data.global_batch": 512})
    run = fdl.build(run_config)
    with pytest.raises(ValueError, match=r"model\.loss_chunk_tokens=auto has to be chosen first"):
        loss_chunk(run.model.loss_chunk_tokens)
    (said,) = choose_loss_chunk(run_config, DEVICES["h200"])
    chunk_tokens = loss_chunk(fdl.build(run_config).model.loss_chunk_tokens)
    assert said.startswith(f"model.loss_chunk_tokens=auto: {chunk_tokens}, ")
    assert chunk_tokens in CANDIDATES


@pytest.mark.parametrize("value", (0, "many"))
def test_neither_a_size_nor_auto_is_refused(value: Any) -> None:
    """The message has the field's path."""
    run_config = tiny.tiny()
    set_values(run_config, {"model.loss_chunk_tokens": value})
    with pytest.raises((ValueError, TypeError), match="loss_chunk_tokens"):
        fdl.build(run_config)
