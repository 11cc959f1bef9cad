"""Predicted steps: their parts, what hides behind what, and what a run then costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jtrain.layout.layout import OffloadSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.matmul_time import rate_of
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import CPU_ADAM_S_PER_PARAM, Assumptions, StepTime, cost, step_time
from jtrain.plan.job import Job
from jtrain_kernels import cost as cost_model
from jtrain_kernels import registry
from jtrain_kernels.device import from_name
from tests.layouts import layout_from

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
BATCH: dict[str, Any] = dict(global_batch=16, seq_len=4096)
FLAT = Assumptions(matmul=0.65, memory=1e9)
"""One rate for matmuls of every shape and precision, and no time for memory, so that seconds are FLOPs."""


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
    """Infinitely fast memory: what is left beside attention is 6 FLOPs a parameter."""
    timed = predicted({}, assume=Assumptions(matmul=1.0, memory=1e9))
    flops = flops_per_token(Transformer(**LLAMA8B), seq_len=4096)
    assert timed.step_s - timed.attention_s == pytest.approx(
        16 * 4096 * flops.matmul_flops / 989.4e12, rel=1e-6
    )


def attention_avals(rows: int, length: int, heads: int, kv_heads: int, **changes: Any) -> registry.Avals:
    query, key = (jax.ShapeDtypeStruct((rows, length, n, 128), jnp.bfloat16) for n in (heads, kv_heads))
    segment = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKP=key, segment_BL=segment, segment_BM=segment)
    return dict(arrays, chunk=512, window=None, causal=True) | changes


@pytest.mark.parametrize(("forced", "name"), (((), "tokamax"), ((("attention", "xla"),), "xla")))
def test_attention_takes_what_the_kernels_cost_model_says_of_the_chosen_one(forced: Any, name: str) -> None:
    """On an H100: 32 layers of 4 microbatches, as the registry chooses; with remat each forward pass
    twice.
    """
    spec, calls = from_name("h100"), 32 * 4
    of_call = attention_avals(4, 4096, 32, 8)
    choice = registry.choose(registry.find("attention"), spec, of_call, forced=dict(forced).get("attention"))
    assert choice.implementation.name == name
    both = choice.implementation.cost_s(spec, of_call)
    passes = cost_model.attention_passes_s(spec, of_call, name)
    assert both is not None
    assert passes is not None
    assert both == pytest.approx(sum(passes))
    layout: Any = dict(device="h100", microbatches=4, kernels=forced)
    assert predicted({}, **layout).attention_s == pytest.approx(calls * both)
    assert predicted({}, remat="full", **layout).attention_s == pytest.approx(calls * (both + passes[0]))
    assert predicted({}, remat="named", remat_save=("attention",), **layout).attention_s == pytest.approx(
        calls * both
    )


def test_attention_of_split_heads_and_rows_is_that_of_one_devices_blocks() -> None:
    """Over tensor a device has its heads, at least one key head; a ring has its own block and pairs of
    halves.
    """
    spec = from_name("h200")

    def both(rows: int, length: int, heads: int, kv_heads: int, **changes: Any) -> float:
        return (
            cost_model.attention_s(spec, attention_avals(rows, length, heads, kv_heads, **changes), "tokamax")
            or 0.0
        )

    assert predicted(dict(tensor=16), device="h200").attention_s == pytest.approx(32 * both(16, 4096, 2, 1))
    ring = both(16, 1024, 32, 8) + 3 * both(32, 512, 32, 8, causal=False)
    assert predicted(dict(context=4)).attention_s == pytest.approx(32 * ring)
    by_heads = predicted(dict(context=4), context_attention="ulysses").attention_s
    assert by_heads == pytest.approx(32 * both(16, 4096, 8, 2))


def test_devices_that_share_a_key_head_repeat_its_projections() -> None:
    """Sixteen devices of 8 key heads compute 16; the MFU counts 8, and the exchange of kernels is on the
    network.
    """
    eight, sixteen = predicted(dict(tensor=8), assume=FLAT), predicted(dict(tensor=16), assume=FLAT)
    repeated = 3 * 32 * 2 * (2 * 4096 * 8 * 128)
    extra = 16 * 4096 * repeated / 16 / (989.4e12 * 0.65)
    assert sixteen.matmul_s - eight.matmul_s / 2 == pytest.approx(extra, rel=1e-6)
    assert sixteen.mfu * sixteen.step_s == pytest.approx(eight.mfu * eight.step_s / 2)


def test_recomputing_costs_what_is_not_kept() -> None:
    """Full remat repeats a forward pass but for the last product; keeping every name repeats nothing."""
    none, full, named = (
        predicted({}, assume=FLAT, remat=remat, remat_save=SAVEABLE if remat == "named" else ()).matmul_s
        for remat in ("none", "full", "named")
    )
    assert named == none
    forward = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    again = forward - 2 * 32 * 4096 * 14336
    assert full - none == pytest.approx(16 * 4096 * again / (989.4e12 * 0.65))


@pytest.mark.parametrize("remat", ("none", "full"))
def test_8_bit_matmuls_halve_what_the_layers_weights_take(remat: str) -> None:
    """Attention and the unembedding take what they took; a chip without them is refused."""
    plain, eight = (
        predicted({}, assume=FLAT, remat=remat, matmul_dtype=m).matmul_s for m in ("compute", "fp8_delayed")
    )
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    products = 3 * layer + (layer - 4096 * 14336 if remat == "full" else 0)
    saved = 2 * 32 * products * (1 / 989.4e12 - 1 / 1978.9e12)
    assert plain - eight == pytest.approx(16 * 4096 * saved / 0.65)
    with pytest.raises(
        ValueError, match=r"precision\.matmul_dtype=fp8_delayed: v5p has no 8-bit matmuls.*=compute"
    ):
        predicted({}, device="v5p", matmul_dtype="fp8_delayed")


def test_twice_the_devices_take_half_the_compute() -> None:
    """Over data and over tensor alike; ZeRO-3 computes logits twice, because it gathers the unembedding in
    parts.
    """
    one = predicted({}, assume=FLAT).matmul_s
    sharded = predicted(dict(data=8), assume=FLAT, zero_stage=2).matmul_s
    assert sharded == pytest.approx(one / 8)
    logits_s = 16 * 4096 // 8 * 2 * 4096 * 128256 / (989.4e12 * 0.65)
    assert predicted(dict(data=8), assume=FLAT, zero_stage=3).matmul_s == pytest.approx(
        sharded + logits_s, rel=1e-4
    )
    assert predicted(dict(tensor=8), assume=FLAT).matmul_s == pytest.approx(one / 8)


def test_gathers_hide_behind_the_layers_and_the_rest_does_not() -> None:
    """ZeRO-3 within a host is hidden, stage 0 waits for its all-reduce, `tensor` for all but a sum a
    layer.
    """
    gathered = predicted(dict(data=8), zero_stage=3)
    reduced = predicted(dict(data=8), zero_stage=0)
    split = predicted(dict(tensor=8))
    hidden = {row.axes: row.total_s - row.exposed_s for row in gathered.network}
    assert hidden["data",] > 0.05
    assert gathered.parts["network, data"] < reduced.parts["network, data"]
    [over_tensor] = split.network
    assert 0.8 < over_tensor.waits_s / over_tensor.total_s < 0.9, (
        "one of eight collectives of a layer is hidden"
    )


def test_fused_kernels_expose_every_collective_but_their_own() -> None:
    """They take a GPU's every core, so weights are gathered before or after them; what they send stays
    hidden.
    """
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
    """Their copies take as long whatever the batch; the layers do not. Those of the update stick out of
    both.
    """
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
    with pytest.raises(
        ValueError, match=r"precision.compute_dtype=float32: its peak on h200 is not published"
    ):
        predicted({}, compute_dtype="float32")


def test_offload_without_a_known_host_link_is_refused() -> None:
    """A plan that took the link to be infinitely fast would be a lie."""
    with pytest.raises(
        ValueError, match=r"speed of that link is not published for tpu7x\. Set layout\.offload"
    ):
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
    """Shares are in the text that is printed: those of the chip, or the one that was given."""
    h100 = from_name("h100")
    assert f"up to {rate_of(h100).bf16:.0%} of peak" in Assumptions().of(h100, devices=1, in_8_bits=False)
    assert "assumed: 50% of peak" in Assumptions(matmul=0.5).of(h100, devices=1, in_8_bits=False)
    of_several = Assumptions().of(h100, devices=8, in_8_bits=True)
    assert f"up to {rate_of(h100).fp8:.0%} of peak in 8-bit matrix products" in of_several
    assert "the slowest device has 94% of the others' speed" in of_several
    assert "90% of the network's" in Assumptions().of(from_name("v5p"), devices=8, in_8_bits=False)


def test_several_gpus_wait_for_the_slowest() -> None:
    """One GPU and a slice of TPUs wait for nobody; the part of eight GPUs is in the step."""
    alone, eight, slice_ = predicted({}), predicted(dict(data=8)), predicted(dict(data=8), device="v5p")
    assert alone.slowest_s == slice_.slowest_s == 0
    assert eight.parts["slowest device"] == pytest.approx(
        (eight.matmul_s + eight.attention_s + eight.passes_s) * 6 / 94
    )


def test_activations_on_the_host_cost_what_the_layers_cannot_hide() -> None:
    """Copies of the layers' inputs hide. Those of everything that layers keep hide in part.

    All hide on a chip of a thousandth of the FLOP/s, and none if computation takes no time.
    """

    def added(assume: Assumptions, **spec: Any) -> tuple[float, float]:
        plain = predicted({}, assume=assume, **spec)
        offloaded = predicted({}, assume=assume, **spec, offload=OffloadSpec(activations=1.0))
        assert offloaded.host_copy_s > 0.1
        return offloaded.step_s - plain.step_s, offloaded.host_copy_s

    everything: dict[str, Any] = dict(remat="named", remat_save=SAVEABLE)
    assert added(FLAT, remat="full")[0] == pytest.approx(0, abs=1e-9)
    assert added(dataclasses.replace(FLAT, matmul=1e-3), **everything)[0] == pytest.approx(0, abs=1e-6)
    seconds, copies_s = added(FLAT, **everything)
    assert 0.1 * copies_s < seconds < 0.5 * copies_s
    seconds, copies_s = added(dataclasses.replace(FLAT, matmul=1e9, computation=1e-9), **everything)
    assert seconds == pytest.approx(copies_s, rel=1e-3)
