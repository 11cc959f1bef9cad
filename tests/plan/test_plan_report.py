"""The printed plan, FLOPs, and the HLO parser's corners."""

import io
from typing import Any

import pytest
from rich.console import Console

from jtrain.layout import LayoutSpec, make_layout
from jtrain.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.flops import flops_per_token, mfu
from jtrain.plan.hlo import traffic
from jtrain.plan.report import Parts, print_plan

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)


@pytest.mark.parametrize("width", (80, 120))
def test_the_plan_is_readable_in_a_pipe(width: int) -> None:
    """No line is wider than asked, no escape codes, and every part is there."""
    model = Transformer(**LLAMA8B)
    lay = make_layout(LayoutSpec(zero_stage=3, remat="full"), MeshSpec(data=8), model.param_infos())
    out = io.StringIO()
    parts = Parts(model, lay, AdamW(peak_lr=1e-3), global_batch=8, seq_len=8192)
    print_plan(parts, available=80 * 10**9, console=Console(file=out, width=width))
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
    tied, untied = (flops_per_token(Transformer(**LLAMA8B, tie_embeddings=t), seq_len=128) for t in (True, False))
    assert tied == untied


def test_mfu_is_none_without_a_peak() -> None:
    """Half of the peak is half."""
    flops = flops_per_token(Transformer(**LLAMA8B), seq_len=8192)
    rate = 4 * 0.5 * 989e12 / flops.total_flops
    assert mfu(flops, tokens_per_s=rate, num_devices=4, peak_flops=989e12) == pytest.approx(0.5)
    assert mfu(flops, tokens_per_s=rate, num_devices=4, peak_flops=None) is None


HLO = """HloModule m

%cond (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  %bound = s32[] constant(5)
  ROOT %lt = pred[] compare(%p, %bound), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %ag = ((bf16[2,4]{1,0}), bf16[16,4]{1,0:T(8,128)(2,1)}) all-gather-start(%x), replica_groups=[1,8]<=[8]
  %done = bf16[16,4]{1,0} all-gather-done(%ag)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %ar = (f32[8]{0}, /*index=1*/f32[]) all-reduce(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %rs = f32[2]{0} reduce-scatter(%a), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}
"""
SHAPE = dict(replica=2, stage=1, data=4, expert=1, context=1, tensor=1)


def test_hlo_loops_tuples_and_groups_are_counted() -> None:
    """A loop without a noted trip count, asynchronous pairs, joined arrays and groups that are no mesh axis."""
    got = {(t.kind, t.axes): (t.dtype, t.count, t.array_bytes) for t in traffic(HLO, SHAPE)}
    assert got == {
        ("all-gather", ("replica", "data")): ("bf16", 5, 5 * 16 * 4 * 2),
        ("all-reduce", ("replica",)): ("f32", 2, 9 * 4),
        ("reduce-scatter", None): ("f32", 1, 2 * 4 * 4),
    }


def test_a_loop_of_unknown_length_around_a_collective_is_refused() -> None:
    """Rather than counted once."""
    with pytest.raises(ValueError, match="trip count the HLO does not say"):
        traffic(HLO.replace("direction=LT", "direction=NE"), SHAPE)
