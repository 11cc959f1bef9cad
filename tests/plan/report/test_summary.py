"""The printed plan, FLOPs, and the HLO parser's corners."""

import io
from typing import Any

import pytest
from rich.console import Console

from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.plan.job import Job
from jtrain.plan.report.summary import print_plan

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)


@pytest.mark.parametrize("width", (80, 120))
def test_the_plan_is_readable_in_a_pipe(width: int) -> None:
    """No line is wider than asked, no escape codes, and every part is there."""
    model = Transformer(**LLAMA8B)
    lay = make_layout(LayoutSpec(zero_stage=3, remat="full"), MeshSpec(data=8), model.param_infos())
    out = io.StringIO()
    job = Job(model, lay, AdamW(peak_lr=1e-3), global_batch=8, seq_len=8192)
    print_plan(job, available=80 * 10**9, console=Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for part in ("8,030,261,248 parameters", "mlp.gate_DF", "available", "reduce-scatter", "GFLOP per token"):
        assert part in text, part


def test_flops_of_llama_8b() -> None:
    """7,504,658,432 matrix parameters without the embedding; 6 * 32 * 4096 * L of attention."""
    model = Transformer(**LLAMA8B)
    flops = flops_per_token(model, seq_len=8192)
    assert flops.matmul_params == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops.attention_flops == 6 * 32 * 4096 * 8192
    assert flops.total_flops == 6 * flops.matmul_params + flops.attention_flops


def test_a_tied_unembedding_is_counted() -> None:
    """The matmul runs, whoever owns the weights."""
    tied, untied = (
        flops_per_token(Transformer(**LLAMA8B, tie_embeddings=t), seq_len=128) for t in (True, False)
    )
    assert tied == untied


def test_mfu_is_none_without_a_peak() -> None:
    """Half of the peak is half."""
    flops = flops_per_token(Transformer(**LLAMA8B), seq_len=8192)
    rate = 4 * 0.5 * 989e12 / flops.total_flops
    assert mfu(flops, tokens_per_s=rate, num_devices=4, peak_flops=989e12) == pytest.approx(0.5)
    assert mfu(flops, tokens_per_s=rate, num_devices=4, peak_flops=None) is None
