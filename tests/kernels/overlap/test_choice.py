"""The form of each overlapped collective that shipped configs take over eight GPUs, and the table of it in
the docs.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jtrain.config.load import load_config
from jtrain_kernels import device, registry
from jtrain_kernels.overlap import api
from jtrain_kernels.registry import Avals, Op

DOCS = (Path(__file__).parents[3] / "docs/kernels.md").read_text()
CONFIGS = ("llama1b", "llama8b", "qwen3_8b", "llama70b")
TENSOR = 8


def of_a_layer(config: str) -> list[tuple[Op, Avals]]:
    """The four overlapped collectives of a layer: one sequence over `TENSOR` devices."""
    run = load_config(config)
    model, rows = run.model, run.data.seq_len
    heads, kv_heads = (
        model.num_heads * model.head_dim // TENSOR,
        model.num_kv_heads * model.head_dim // TENSOR,
    )
    return [
        _gather(rows, model.d_model, heads, kv_heads, kv_heads),
        _scatter(rows, heads, model.d_model),
        _gather(rows, model.d_model, model.d_ff // TENSOR, model.d_ff // TENSOR),
        _scatter(rows, model.d_ff // TENSOR, model.d_model),
    ]


def _gather(rows: int, contracted: int, *columns: int) -> tuple[Op, Avals]:
    kernels = {f"kernel_{i}": _bf16(contracted, n) for i, n in enumerate(columns)}
    x = _bf16(1, rows // TENSOR, contracted)
    return api.ALL_GATHER_MATMUL, {"x": x, **kernels, "axis_name": "tensor", "axis_size": TENSOR}


def _scatter(rows: int, contracted: int, columns: int) -> tuple[Op, Avals]:
    x, kernel = _bf16(1, rows, contracted), _bf16(contracted, columns)
    return api.MATMUL_REDUCE_SCATTER, {"x": x, "kernel": kernel, "axis_name": "tensor", "axis_size": TENSOR}


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def predicted_us(op: Op, avals: Avals, chip: str) -> dict[str, float]:
    """Microseconds that the cost model predicts for each implementation that runs."""
    spec = device.from_name(chip)
    able = [one for one in registry.implementations(op) if one.supports(spec, avals) is None]
    return {one.name: 1e6 * (one.cost_s(spec, avals) or float("nan")) for one in able}


@pytest.mark.parametrize("chip", ("h100", "h200"))
@pytest.mark.parametrize("config", CONFIGS)
def test_the_docs_say_what_a_config_takes(config: str, chip: str) -> None:
    """The faster of the plain collective and the permutes, by the model; the fused kernel runs, but is never
    taken.
    """
    cells: list[str] = []
    for op, avals in of_a_layer(config):
        us = predicted_us(op, avals, chip)
        assert set(us) == {"xla", "permute", "mosaic_gpu"}
        choice = registry.choose(op, device.from_name(chip), avals)
        taken = choice.implementation.name
        assert taken == min(("xla", "permute"), key=lambda name: us[name])
        assert "no GPUs have run the kernel yet" in dict(choice.rejected)["mosaic_gpu"]
        figures = {name: f"{seconds:.0f}" for name, seconds in us.items()}
        figures[taken] = f"**{figures[taken]}**"
        cells.append(" / ".join(figures[name] for name in ("xla", "permute", "mosaic_gpu")))
    assert f"| `{config}` | {' | '.join(cells)} |" in DOCS


def test_permutes_tie_where_matmuls_are_large() -> None:
    """In llama70b's gate and up fewer multiplying cores cost what fewer launches save."""
    _, _, up, _ = (predicted_us(op, avals, "h200") for op, avals in of_a_layer("llama70b"))
    assert up["permute"] < 1.02 * up["mosaic_gpu"]
