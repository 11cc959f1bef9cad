"""The cost model: numbers by hand, and the attention that every shipped config takes on every chip."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.kernel_bytes import needed_bytes
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain_kernels import cost, device, registry
from jtrain_kernels.attention.api import ATTENTION

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("[a-z]*.py"))
CHIPS = ("h100", "h200", "b200", "a100", "v5e", "v5p", "v6e", "tpu7x", "mi300x")
EXPECTED = {
    **dict.fromkeys(("h100", "h200", "b200"), "tokamax"),
    **dict.fromkeys(("v5e", "v5p", "v6e", "tpu7x"), "splash"),
    "a100": "cudnn",  # tokamax has no backward kernel for it; the mask is [B, 1, L, M]
    "mi300x": "xla",  # nothing else runs on it
}
EXPECTED_OF_WIDE_HEADS = EXPECTED | {"h100": "cudnn", "h200": "cudnn", "b200": "xla", "a100": "xla"}
"""With heads of 256 cuDNN is the cheaper of the two on Hopper, and no other GPU has either."""
H100 = device.from_name("h100")


def shapes(
    B: int, L: int, N: int, K: int, H: int, *, dtype: str = "bfloat16", **changes: Any
) -> registry.Avals:
    """Arguments of causal attention."""
    query, key = (jax.ShapeDtypeStruct((B, L, heads, H), jnp.dtype(dtype)) for heads in (N, K))
    segment = jax.ShapeDtypeStruct((B, L), jnp.int32)
    arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKP=key, segment_BL=segment, segment_BM=segment)
    return dict(arrays, chunk=512, window=None, causal=True) | changes


def of_config(name: str) -> registry.Avals:
    """Attention of one row of a config."""
    run = build_run(load_config(name))
    model = run.model
    return shapes(1, run.data.seq_len, model.num_heads, model.num_kv_heads, model.head_dim)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_config_takes_the_fused_attention_of_its_chip(chip: str) -> None:
    """Only where nothing else runs is plain XLA taken; all that run have a cost, and the choice has the
    least.
    """
    assert {"llama1b", "llama8b", "llama70b", "qwen3_8b", "qwen3_30b_a3b", "tiny"} <= set(CONFIGS)
    spec = device.from_name(chip)
    for name in CONFIGS:
        avals: Any = of_config(name)
        choice = registry.choose(ATTENTION, spec, avals)
        expected = EXPECTED_OF_WIDE_HEADS if avals["q_BLNH"].shape[-1] > 128 else EXPECTED
        assert choice.implementation.name == expected[chip], name
        able = [i for i in registry.implementations(ATTENTION) if i.supports(spec, avals) is None]
        costs = {i.name: i.cost_s(spec, avals) for i in able}
        assert None not in costs.values()
        assert min(costs, key=lambda one: costs[one] or 0.0) == expected[chip]


def test_every_implementation_predicts_its_seconds_on_every_chip() -> None:
    """For every op and case, wherever the implementation runs."""
    checked = 0
    for op in registry.ops().values():
        for implementation in registry.implementations(op):
            for spec in map(device.from_name, CHIPS):
                for avals in op.cases.values():
                    if implementation.supports(spec, avals) is None:
                        predicted = implementation.cost_s(spec, avals)
                        assert 0 < (predicted or 0.0) < 10, (op.name, implementation.name, spec.name)
                        checked += 1
    assert checked > 100


def test_a_fused_kernels_seconds_are_its_flops_at_the_rate_it_reaches() -> None:
    """Causal llama8b on an H100: 4 N L^2 H / 2 FLOPs forward at 62 % of the peak, 2.5 times that backward at
    41.5 %.
    """
    avals = ATTENTION.cases["llama8b"]
    flops = 4 * 32 * 8192 * 8193 / 2 * 128
    want = flops / 989.4e12 * (1 / 0.62 + 2.5 / 0.415) + 3 * cost.LAUNCH_S["gpu"]
    assert cost.attention_s(H100, avals, "tokamax") == pytest.approx(want)
    # Of 1024 keys a query sees at most 1024, of the first queries fewer.
    assert cost.visible(shapes(1, 8192, 1, 1, 64, window=1024)) == pytest.approx(
        (1024 * 7168 + 1024 * 1025 / 2) / 8192**2
    )
    assert cost.visible(shapes(1, 8192, 1, 1, 64, causal=False)) == 1.0


def test_cudnn_pays_for_its_mask() -> None:
    """Writing and reading [B, 1, L, M] costs more than its faster matmuls save, also for short rows and short
    heads.
    """
    for length in (256, 1024, 8192, 131072):
        for head_dim in (16, 64, 128):
            avals = shapes(1, length, 32, 8, head_dim)
            assert (cost.attention_s(H100, avals, "cudnn") or 0) > (
                cost.attention_s(H100, avals, "tokamax") or 9
            )
    # With a window most of the mask is only written: 32 GiB for a row of 131072 take 12.8 ms in each pass.
    narrow = shapes(1, 131072, 32, 8, 128, window=256)
    assert (cost.attention_s(H100, narrow, "cudnn") or 0) > 2 * 2 * 131072**2 / (3.35e12 * 0.8)


LLAMA8B, LLAMA1B = (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64)


@pytest.mark.parametrize(
    ("name", "shape", "forward", "backward"),
    (
        ("tokamax", LLAMA8B, 618, 411),
        ("tokamax", LLAMA1B, 382, 257),
        ("cudnn", LLAMA8B, 309, 214),
        ("cudnn", LLAMA1B, 229, 217),
        ("xla", LLAMA8B, 64.4, 118.8),
    ),
)
def test_predictions_are_those_of_an_h100(name: str, shape: Any, forward: float, backward: float) -> None:
    """Within 8 % of the TFLOP/s of one H100 (2026-11-22, JAX 0.11.2, tokamax 0.0.17, cuDNN 9.19)."""
    B, L, N, _, H = shape
    took = cost.attention_passes_s(H100, shapes(*shape), name)
    assert took is not None
    flops = 2e-12 * B * N * L**2 * H
    assert flops / took[0] == pytest.approx(forward, rel=0.08)
    assert 2.5 * flops / took[1] == pytest.approx(backward, rel=0.08)


def test_both_passes_together_are_those_of_an_h100() -> None:
    """At the shape of llama1b on the same H100: 39.3 ms by XLA, 9.27 by cuDNN, 7.19 by tokamax; within 10
    %.
    """
    for name, want in (("xla", 39.3e-3), ("cudnn", 9.27e-3), ("tokamax", 7.19e-3)):
        assert cost.attention_s(H100, shapes(*LLAMA1B), name) == pytest.approx(want, rel=0.1)


def test_plain_scores_cost_their_bytes() -> None:
    """38 bytes for each visible score: 40 GiB for a llama8b layer, which take more than half of its
    seconds.
    """
    avals = ATTENTION.cases["llama8b"]
    scores = 32 * 8192**2 * (0.5 * 8193 / 8192 + 512 / 2 / 8192)
    passes = scores * 38 / (3.35e12 * 0.8)
    plain = cost.attention_s(H100, avals, "xla")
    assert plain is not None
    assert 0.5 * plain < passes < plain


def test_a_chip_without_peaks_predicts_nothing() -> None:
    """A CPU runs the reference; in float32 a GPU has half of its 16-bit peak, a TPU a sixth."""
    assert cost.attention_s(device.from_name("cpu"), ATTENTION.cases["llama8b"], "splash") is None
    assert cost.matmul_rate(H100, "float32") == 989.4e12 / 2
    assert cost.matmul_rate(device.from_name("v5p"), "float32") == 459e12 / 6
    assert cost.matmul_rate(H100, "float8_e4m3fn") == 1978.9e12


def test_the_arrays_of_a_layer_once() -> None:
    """q, k, v and y forward; q, k, v, y, dy, dq, dk and dv backward; log-partitions in both."""
    q, k, lse = 8192 * 32 * 128 * 2, 8192 * 8 * 128 * 2, 8192 * 32 * 4
    assert needed_bytes(ATTENTION.cases["llama8b"]) == 6 * q + 6 * k + 2 * lse
