"""Predicted steps: their parts, what hides behind what, and what a run then costs."""

import dataclasses
from typing import Any

import pytest

from jtrain.layout import OffloadSpec
from jtrain.mesh import MeshSpec
from jtrain.model.transformer import SAVEABLE, Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import CPU_ADAM_S_PER_PARAM, Assumptions, StepTime, cost, step_time
from jtrain.plan.job import Job
from tests.layouts import layout_from

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
BATCH: dict[str, Any] = dict(global_batch=16, seq_len=4096)


def predicted(
    axes: dict[str, int],
    *,
    device: str = "h200",
    assume: Assumptions | None = None,
    batch: dict[str, Any] = BATCH,
    optimizer: AdamW | None = None,
    tied: bool = False,
    **spec: Any,
) -> StepTime:
    model, mesh = Transformer(**LLAMA8B, tie_embeddings=tied), MeshSpec(**axes)
    adam = optimizer or AdamW(peak_lr=1e-4)
    layout = layout_from(spec, mesh, model.param_infos())
    job = Job(model, layout, adam, **batch)
    plan = memory(job)  # a GPU's, whatever the machine
    machine = make_machine(device, mesh.size)
    return step_time(dataclasses.replace(job, machine=machine), plan, assume=assume or Assumptions())


@pytest.mark.parametrize("tied", (True, False))
def test_the_parts_are_the_step_and_the_mfu_is_the_one_that_runs_report(tied: bool) -> None:
    """One definition of FLOPs, in `flops.py`; the sum of the parts is the step."""
    timed = predicted(dict(data=8), zero_stage=3, tied=tied)
    assert timed.step_s == pytest.approx(sum(timed.parts.values()))
    assert timed.step_s > 0
    flops = flops_per_token(Transformer(**LLAMA8B, tie_embeddings=tied), seq_len=4096)
    want = mfu(flops, tokens_per_s=timed.tokens_per_s, num_devices=8, peak_flops=989.4e12)
    assert timed.mfu == pytest.approx(want)
    assert 0.1 < timed.mfu < 0.65


def test_without_traffic_and_memory_a_step_is_its_flops() -> None:
    """Infinitely fast memory: what is left is 6 FLOPs a parameter and attention's, its backward pass 2.5 times."""
    timed = predicted({}, assume=Assumptions(matmul=1.0, memory=1e9))
    flops = flops_per_token(Transformer(**LLAMA8B), seq_len=4096)
    executed = flops.total_flops + flops.attention_flops / 6
    assert timed.step_s == pytest.approx(16 * 4096 * executed / 989.4e12, rel=1e-6)


def test_recomputing_costs_what_is_not_kept() -> None:
    """Full remat repeats a forward pass but for the last product; keeping every name repeats nothing."""
    none, full, named = (
        predicted({}, remat=remat, remat_save=SAVEABLE if remat == "named" else ()).matmul_s
        for remat in ("none", "full", "named")
    )
    assert named == none
    forward = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    attention = 2 * 32 * 4096 * 4096
    again = forward - 2 * 32 * 4096 * 14336 + attention
    assert full - none == pytest.approx(16 * 4096 * again / (989.4e12 * 0.65))


@pytest.mark.parametrize("remat", ("none", "full"))
def test_8_bit_matmuls_halve_what_the_layers_weights_take(remat: str) -> None:
    """Attention and the unembedding take what they took; a chip without them is refused."""
    plain, eight = (predicted({}, remat=remat, matmul_dtype=m).matmul_s for m in ("compute", "fp8_delayed"))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    products = 3 * layer + (layer - 4096 * 14336 if remat == "full" else 0)
    saved = 2 * 32 * products * (1 / 989.4e12 - 1 / 1978.9e12)
    assert plain - eight == pytest.approx(16 * 4096 * saved / 0.65)
    with pytest.raises(ValueError, match=r"precision\.matmul_dtype=fp8_delayed: v5p has no 8-bit matmuls.*=compute"):
        predicted({}, device="v5p", matmul_dtype="fp8_delayed")


def test_twice_the_devices_take_half_the_compute() -> None:
    """Over data and over tensor alike."""
    one = predicted({}).matmul_s
    assert predicted(dict(data=8), zero_stage=3).matmul_s == pytest.approx(one / 8)
    assert predicted(dict(tensor=8)).matmul_s == pytest.approx(one / 8)


def test_gathers_hide_behind_the_layers_and_the_rest_does_not() -> None:
    """ZeRO-3 within a host is hidden, stage 0 waits for its all-reduce, tensor parallelism for every layer."""
    gathered = predicted(dict(data=8), zero_stage=3)
    reduced = predicted(dict(data=8), zero_stage=0)
    split = predicted(dict(tensor=8))
    hidden = {row.axes: row.total_s - row.exposed_s for row in gathered.network}
    assert hidden["data",] > 0.05
    assert gathered.parts["network, data"] < reduced.parts["network, data"]
    assert split.parts["network, tensor"] == split.network[0].total_s > 0


def test_fused_kernels_expose_every_collective_but_their_own() -> None:
    """They take a GPU's every core, so weights are gathered before or after them; what they send stays hidden."""
    forced = (("all_gather_matmul", "mosaic_gpu"), ("matmul_reduce_scatter", "mosaic_gpu"))
    permutes, fused = (
        predicted(dict(data=2, tensor=4), zero_stage=3, tensor_overlap=True, kernels=kernels)
        for kernels in ((), forced)
    )
    weights = {row.axes: row for row in fused.network}["data",]
    assert permutes.parts["network, data"] < 0.5 * weights.total_s
    assert fused.parts["network, data"] == weights.total_s
    assert fused.parts["network, tensor"] == pytest.approx(permutes.parts["network, tensor"])


def test_a_slow_network_is_exposed() -> None:
    """Sixty-four hosts of one GPU each: tokens per device too few to hide the gathers."""
    batch = dict(global_batch=64, seq_len=512)
    fast = predicted(dict(data=8), zero_stage=3, batch=batch)
    slow = predicted(dict(data=64), zero_stage=3, batch=batch)
    assert fast.parts["network, data"] / fast.step_s < slow.parts["network, data"] / slow.step_s
    assert slow.parts["network, data"] / slow.step_s > 0.5


def test_offloaded_state_costs_what_the_link_cannot_hide() -> None:
    """64.2 GB of moments over 51.2 GB/s, less the update itself; and Adam on the host's cores costs more."""
    plain, streamed = predicted({}), predicted({}, offload=OffloadSpec(optimizer=1.0))
    on_host = predicted({}, offload=OffloadSpec(optimizer=1.0, update="host"))
    state = 8 * 8_030_261_248
    assert streamed.host_copy_s == pytest.approx(state / (64e9 * 0.8), rel=1e-3)
    assert streamed.step_s - plain.step_s == pytest.approx(streamed.host_copy_s - streamed.optimizer_s)
    assert on_host.optimizer_s == pytest.approx(8_030_261_248 * CPU_ADAM_S_PER_PARAM, rel=0.01)
    assert on_host.step_s > streamed.step_s > plain.step_s


def test_streamed_weights_hide_behind_enough_tokens() -> None:
    """Their copies take as long whatever the batch; the layers do not. Those of the update stick out of both."""
    spec: dict[str, Any] = dict(remat="full", offload=OffloadSpec(params=1.0))
    few = predicted({}, batch=dict(global_batch=1, seq_len=1024), **spec)
    many = predicted({}, batch=dict(global_batch=16, seq_len=4096), **spec)
    assert few.host_copy_s == many.host_copy_s > 1
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096  # the layers': embeddings and scales stay
    update_s = 4 * matrices / (64e9 * 0.8) - many.optimizer_s
    assert many.exposed_host_s == pytest.approx(update_s, rel=1e-3)
    assert few.exposed_host_s > update_s + 0.1


def test_microbatches_are_never_free() -> None:
    """Each one reads and adds all gradients, and ZeRO-3 gathers again."""
    times = [predicted(dict(data=8), zero_stage=3, microbatches=parts).step_s for parts in (1, 2)]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_a_dtype_without_a_published_peak_is_refused() -> None:
    """Nobody says what float32 products reach."""
    with pytest.raises(ValueError, match=r"precision.compute_dtype=float32: its peak on h200 is not published"):
        predicted({}, compute_dtype="float32")


def test_offload_without_a_known_host_link_is_refused() -> None:
    """A plan that took the link to be infinitely fast would be a lie."""
    with pytest.raises(ValueError, match=r"speed of that link is not published for tpu7x\. Set layout\.offload"):
        predicted({}, device="tpu7x", offload=OffloadSpec(optimizer=1.0))


def test_cost_counts_goodput_devices_money_and_energy() -> None:
    """A billion tokens on eight H200 at $3 an hour; a TPU v5p's watts are not known."""
    timed = predicted(dict(data=8), zero_stage=3)
    machine = make_machine("h200", 8)
    got = cost(timed, machine, tokens=10**9, goodput=0.5, usd_per_hour=3.0)
    assert got.wall_s == pytest.approx(10**9 / timed.tokens_per_s / 0.5)
    assert got.device_hours == pytest.approx(8 * got.wall_s / 3600)
    assert got.usd == pytest.approx(3 * got.device_hours)
    assert got.energy_j == pytest.approx(got.wall_s * 8 * 700)
    assert got.days == pytest.approx(got.wall_s / 86400)
    unpriced = cost(timed, make_machine("v5p", 8), tokens=10**9, goodput=1.0)
    assert unpriced.usd is None
    assert unpriced.energy_j is None
    assert unpriced.wall_s == pytest.approx(got.wall_s / 2)


def test_the_sheet_states_what_is_assumed() -> None:
    """Shares are in the text that is printed, whatever they are."""
    assert "assumed: 50% of peak" in str(dataclasses.replace(Assumptions(), matmul=0.5))
