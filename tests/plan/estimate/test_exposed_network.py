"""Seconds of the network that a step waits for."""

import dataclasses
from typing import Any

import pytest

from jtrain.layout.mesh import MeshSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.collectives import DURING_WEIGHT_GRADIENTS, REGATHERED, Collective, collectives
from jtrain.plan.estimate.exposed_network import (
    EXCHANGE,
    Hiding,
    NetworkTime,
    by_axes,
    exposed_network,
    hideable_fraction,
)
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.network import seconds
from jtrain.plan.job import Job
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=1024, num_heads=8, num_kv_heads=8, head_dim=128, vocab_size=32768
)


def job_of(
    axes: dict[str, int], *, seq_len: int = 4096, moe: MoESpec | None = None, chip: str = "h200", **spec: Any
) -> Job:
    model, mesh = Transformer(**SIZES, d_ff=4096, moe=moe), MeshSpec(**axes)
    layout = layout_from(spec, mesh, model.param_infos())
    return Job(model, layout, AdamW(peak_lr=1e-4), mesh.size, seq_len, make_machine(chip, mesh.size))


def exposed(job: Job, behind: Hiding, *, slowdown: float = 0.0) -> dict[tuple[str, ...], NetworkTime]:
    assert job.machine is not None
    return {
        row.axes: row
        for row in by_axes(exposed_network(job, job.machine, behind, efficiency=1.0, slowdown=slowdown))
    }


def of_purpose(job: Job, purpose: str) -> Collective:
    return next(one for one in collectives(job) if one.purpose == purpose)


def test_gathers_of_the_forward_pass_hide_behind_the_forward_pass_only() -> None:
    """However long the backward pass is."""
    job = job_of(dict(data=8), zero_stage=3)
    both, none = exposed(job, Hiding(1.0, 1.0)), exposed(job, Hiding(0.0, 0.0))
    late = exposed(job, Hiding(0.0, 1.0))
    total_s = none["data",].total_s
    assert none["data",].exposed_s == total_s
    assert both["data",].exposed_s < late["data",].exposed_s < total_s
    gathered_s = late["data",].exposed_s - both["data",].exposed_s
    assert gathered_s == pytest.approx(total_s / 5, rel=0.4)  # bf16 twice gathered, float32 once reduced


def test_a_hidden_collective_is_not_free() -> None:
    """The step is longer by a fraction of it."""
    job = job_of(dict(data=8), zero_stage=3)
    free, costly = (
        exposed(job, Hiding(1.0, 1.0))["data",],
        exposed(job, Hiding(1.0, 1.0), slowdown=0.4)["data",],
    )
    hidden_s = free.total_s - free.exposed_s
    assert hidden_s > 0
    assert costly.exposed_s - free.exposed_s == pytest.approx(0.4 * hidden_s)


def test_an_exchange_hides_behind_the_experts_but_for_one_piece() -> None:
    """Four pieces of 32,768 rows: three quarters; a single piece waits, and other layers hide nothing of
    it.
    """
    moe = MoESpec(num_experts=16, top_k=8)
    long, short = (job_of(dict(expert=4), seq_len=n, moe=moe) for n in (4096, 1024))
    assert long.machine is not None
    device = long.machine.device
    assert hideable_fraction(of_purpose(long, EXCHANGE), long, device) == 0.75
    assert hideable_fraction(of_purpose(short, EXCHANGE), short, device) == 0
    by_layers, by_experts = (exposed(long, b)["expert",] for b in (Hiding(1.0, 1.0), Hiding(0.0, 0.0, 1.0)))
    assert by_layers.exposed_s == by_layers.total_s
    exchange_s = seconds(of_purpose(long, EXCHANGE), long.machine, long.layout.mesh.shape)
    assert by_experts.total_s - by_experts.exposed_s == pytest.approx(0.75 * exchange_s)


def test_a_second_of_computation_hides_one_second() -> None:
    """Taken by one collective, it is no longer there for the next."""
    job = job_of(dict(data=8), zero_stage=3)
    gather = of_purpose(job, "parameters, backward")
    behind = Hiding(0.0, 3.0)
    assert [behind.take(gather, 2.0) for _ in range(3)] == [2.0, 1.0, 0.0]
    ring = dataclasses.replace(gather, kind="collective-permute", purpose="keys and values")
    assert Hiding(1.0, 1.0).take(ring, 3.0) == 2.0


def test_on_gpus_only_the_last_reductions_have_nothing_beside_them() -> None:
    """Those of the last of two layers, and of the last of two parts of the unembedding."""
    job = job_of(dict(data=8), zero_stage=3)
    assert job.machine is not None
    shares = {
        one: hideable_fraction(of_purpose(job, one), job, job.machine.device)
        for one in ("parameters, forward", "unembedding")
    }
    assert shares == {"parameters, forward": 1.0, "unembedding": 0.0}
    reductions = [one for one in collectives(job) if one.kind == "reduce-scatter"]
    found = {one.purpose: hideable_fraction(one, job, job.machine.device) for one in reductions}
    assert found == {"gradients": 0.5, "unembedding": 0.5}


def test_a_tpu_ends_each_layer_with_a_reduction_and_hides_sums_behind_gradients_of_weights() -> None:
    """0.6 of one feed-forward matrix of 4 x 1 + 3 x 4 parts of the layer's weights; a GPU hides one sum of
    two.
    """
    sharded = job_of(dict(data=4, tensor=2), zero_stage=3, chip="v5p")
    assert sharded.machine is not None
    gradients = next(
        one for one in collectives(sharded) if one.kind == "reduce-scatter" and one.purpose == "gradients"
    )
    assert hideable_fraction(gradients, sharded, sharded.machine.device) == pytest.approx(1 - 0.6 * 4 / 16)
    sums = [one for one in collectives(sharded) if one.purpose == DURING_WEIGHT_GRADIENTS]
    assert [hideable_fraction(one, sharded, sharded.machine.device) for one in sums] == [1, 1]
    on_gpu = job_of(dict(data=4, tensor=2), zero_stage=3)
    assert on_gpu.machine is not None
    shares = {one.kind: hideable_fraction(one, on_gpu, on_gpu.machine.device) for one in sums}
    assert shares == {"reduce-scatter": 0.5, "all-gather": 0}


@pytest.mark.parametrize(
    ("save", "share"), [(("attention_q", "attention_k", "attention_v"), 1.0), (("attention",), 0.5)]
)
def test_inputs_are_gathered_again_beside_gradients_of_weights(save: tuple[str, ...], share: float) -> None:
    """If attention's input is needed for nothing else; else a layer is recomputed step by step."""
    job = job_of(dict(tensor=8), remat="named", remat_save=save)
    assert job.machine is not None
    assert hideable_fraction(of_purpose(job, REGATHERED), job, job.machine.device) == share


def test_a_gpus_kernel_hides_one_array_of_a_turn_of_the_ring() -> None:
    """Two of three hops are in the loop, with keys or values exposed; of four sends of gradients two are,
    exposed.
    """
    job = job_of(dict(context=4))
    assert job.machine is not None
    sent = {one.dtype: one for one in collectives(job) if one.purpose == "keys and values"}
    assert hideable_fraction(sent["bfloat16"], job, job.machine.device) == pytest.approx(2 / 3)
    assert hideable_fraction(sent["float32"], job, job.machine.device) == pytest.approx(1 / 2)
