"""Matmuls of a step: rates by chip, precision and shape."""

import dataclasses
from typing import Any

import pytest

from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.matmul_time import NVIDIA, RATES, StepMatmuls, matmuls, rate_of
from jtrain.plan.job import Job
from jtrain_kernels.device import DEVICES, from_name

WIDE: dict[str, Any] = dict(
    num_layers=2, d_model=8192, num_heads=64, num_kv_heads=64, head_dim=128, d_ff=32768, vocab_size=131_072
)


def job_of(device: str = "h100", *, axes: dict[str, int] | None = None, rows: int = 16, **fields: Any) -> Job:
    model, mesh = Transformer(**WIDE | fields), MeshSpec(**axes or {})
    layout = make_layout(LayoutSpec(), mesh, model.param_infos())
    return Job(model, layout, AdamW(peak_lr=1e-4), rows, 4096, make_machine(device, mesh.size))


def timed(device: str = "h100", **fields: Any) -> StepMatmuls:
    return matmuls(job_of(device, **fields), memory=0.8)


def reached(job: Job) -> float:
    """Fraction of the peak in all matmuls of a job."""
    assert job.machine is not None
    flops = flops_per_token(job.model, seq_len=job.seq_len).matmul_flops * job.tokens / job.layout.mesh.size
    peak = job.machine.device.peak_bf16_flops
    assert peak is not None
    return flops / (matmuls(job, memory=0.8).all_s * peak)


@pytest.mark.parametrize("device", ("h100", "h200", "b200", "v5p", "v6e", "tpu7x"))
def test_large_shapes_reach_the_rate_of_their_chip(device: str) -> None:
    """Within 3 %: what is left is the time to fill the matrix unit."""
    rate = rate_of(from_name(device)).bf16
    assert 0.97 * rate < reached(job_of(device)) < rate


def test_narrow_shapes_are_slower() -> None:
    """Heads and hidden width split over 32 devices, and a model of an eighth of the width."""
    wide = reached(job_of())
    assert reached(job_of(axes=dict(tensor=32))) < 0.97 * wide
    small: dict[str, Any] = dict(d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096, vocab_size=16384)
    assert reached(job_of(**small)) < 0.96 * wide


def test_few_rows_are_bound_by_memory() -> None:
    """Four tokens read all weights three times, whatever the chip's peak."""
    job = dataclasses.replace(job_of(rows=1), seq_len=4)
    weights = sum(info.size for info in job.model.param_infos() if info.is_matrix and info.path != "embed_VD")
    assert matmuls(job, memory=0.8).all_s == pytest.approx(3 * 2 * weights / (3.35e12 * 0.8), rel=1e-3)


def test_dimensions_are_padded_to_tiles() -> None:
    """A width of 8192 + 1 takes as long as the next multiple of the matrix unit's side."""
    one, all_of_it = (timed("v6e", d_ff=d_ff).layers["by_weight"] for d_ff in (32768 + 1, 32768 + 256))
    assert one == pytest.approx(all_of_it)
    assert one > timed("v6e", d_ff=32768).layers["by_weight"]


def test_experts_have_partly_filled_tiles_and_split_over_their_axis() -> None:
    """As many FLOPs in 64 experts as in a dense layer take longer; split over `expert`, a device has fewer
    experts.
    """
    experts = MoESpec(num_experts=64, top_k=8)
    dense = timed(d_ff=8 * 4096, rows=1)
    mixture = timed(d_ff=4096, rows=1, moe=experts)
    split = timed(d_ff=4096, rows=8, axes=dict(expert=8), moe=experts)
    dense_s, mixture_s = (sum(found.layers.values()) for found in (dense, mixture))
    assert 1.05 * dense_s < mixture_s < 1.5 * dense_s
    assert split.experts_s < mixture.experts_s < mixture_s
    assert dense.experts_s == 0


def test_every_rate_is_of_a_known_chip() -> None:
    """A misspelt name would silently have NVIDIA's rate; 8 bits never have more of their peak than 16."""
    assert set(RATES) <= set(DEVICES)
    assert all(rate.fp8 <= rate.bf16 < 1 for rate in (*RATES.values(), NVIDIA))
