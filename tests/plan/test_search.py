"""The search finds the fastest layout that fits, the host gets no more than it must, and a miss says the way
out.
"""

import dataclasses
import itertools
import re
from typing import Any

import pytest

from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.job import Job
from jtrain.plan.nothing_fits import nearest_miss, no_point
from jtrain.plan.search import meshes, resolve_as_needed, search
from jtrain.plan.search_task import SearchTask, evaluate, fits
from jtrain.plan.smaller_settings import smaller_states, with_state
from jtrain.step.layout_choices import EVERY, REMATS

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
LLAMA70B: dict[str, Any] = LLAMA8B | dict(num_layers=80, d_model=8192, num_heads=64, d_ff=28672)
GIB = 2**30


def task(
    device: str = "h100",
    count: int = 8,
    *,
    host: int | None = None,
    sizes: dict[str, Any] = LLAMA8B,
    global_batch: int = 16,
    seq_len: int = 4096,
    optimizer: AdamW | Muon | None = None,
    **spec: Any,
) -> SearchTask:
    model = Transformer(**sizes)
    machine = make_machine(device, count, host_memory_bytes=host)
    adam = optimizer or AdamW(peak_lr=1e-4)
    plain = make_layout(LayoutSpec(), MeshSpec(), model.param_infos())
    return SearchTask(Job(model, plain, adam, global_batch, seq_len, machine), LayoutSpec(**spec))


def test_the_search_finds_what_trying_everything_finds() -> None:
    """Every mesh, stage, remat and number of microbatches, one by one."""
    it = task(count=4)
    times: list[float] = []
    for mesh, stage, kept in itertools.product(meshes(it), (0, 1, 2, 3), REMATS):
        for parts in (1, 2, 4, 8, 16):
            remat = "none" if kept is None else "named" if kept else "full"
            spec = LayoutSpec(zero_stage=stage, remat=remat, remat_save=kept or (), microbatches=parts)
            try:
                point = evaluate(it, spec, mesh)
            except ValueError:
                continue  # does not split evenly
            if fits(it, point.plan):
                times.append(point.step_s)
    points = search(it, meshes(it))
    assert len(times) > 20, "few fit, so equality would say little"
    assert points[0].step_s == min(times) < max(times)
    assert [p.step_s for p in points] == sorted(p.step_s for p in points)
    assert all(fits(it, p.plan) for p in points)


@pytest.mark.smoke
def test_every_mesh_splits_the_model_and_uses_every_device() -> None:
    """Eight devices: tensor up to the key heads, the rest data or replicas."""
    found = list(meshes(task()))
    assert all(mesh.size == 8 and 8 % mesh.tensor == 0 for mesh in found)
    assert len(found) == len(set(found)) == 10
    assert MeshSpec(replica=2, data=2, tensor=2) in found


def test_tensor_goes_beyond_the_key_heads() -> None:
    """Llama 8B has 8 key heads and 32 query heads: 16 and 32 devices share key heads, 64 would split query
    heads.
    """
    widths = {mesh.tensor for mesh in meshes(task(count=64, global_batch=64))}
    assert widths == {1, 2, 4, 8, 16, 32}


def test_a_70b_on_128_v5p_is_sized_without_hardware() -> None:
    """ZeRO-3, and a prediction that beats plain full remat over data alone."""
    it = task("v5p", 128, sizes=LLAMA70B, global_batch=512, seq_len=8192)
    best = search(it, [mesh for mesh in meshes(it) if mesh.replica == 1 and mesh.tensor <= 2])[0]
    assert best.mesh.size == 128
    assert best.spec.zero_stage == 3
    plain = evaluate(it, LayoutSpec(zero_stage=3, remat="full", microbatches=4), MeshSpec(data=128))
    assert fits(it, plain.plan)
    assert best.step_s < plain.step_s


@pytest.mark.slow
def test_the_host_gets_the_smallest_share_that_fits() -> None:
    """An 8B on one H200 with float32 moments does not fit alone; a twentieth less on the host would not
    do.
    """
    alone = task("h200", 1)
    assert search(alone, meshes(alone)) == []
    it = task("h200", 1, host=256 * GIB)
    best = search(it, meshes(it))[0]
    shares = [getattr(best.spec.offload, name) for name in ("optimizer", "activations", "params")]
    numbers = [share for share in shares if share != "none"]
    assert numbers
    assert 0 < best.plan.host_bytes <= 256 * GIB
    assert fits(it, best.plan)
    least = best.spec.offload
    name = next(n for n in ("params", "activations", "optimizer") if getattr(least, n) != "none")
    less = round(getattr(least, name) - 0.05, 2) or "none"
    spec = dataclasses.replace(best.spec, offload=dataclasses.replace(least, **{name: less}))
    assert not fits(it, evaluate(it, spec, best.mesh).plan)


@pytest.mark.slow
def test_a_host_that_is_too_small_is_no_help() -> None:
    """Forty GiB of moments do not fit into ten."""
    it = task("h200", 1, host=10 * GIB)
    assert search(it, meshes(it)) == []


def test_muon_keeps_its_state_on_the_device() -> None:
    """Its update takes whole matrices, so nothing is proposed that the step would refuse."""
    it = task("h200", 1, host=1024 * GIB, optimizer=Muon(peak_lr=1e-3))
    assert all(point.spec.offload.optimizer == "none" for point in search(it, meshes(it)))


def test_as_needed_is_nothing_where_all_fits() -> None:
    """And the shares that are numbers stay as they are."""
    offload = OffloadSpec(optimizer="as_needed", params=0.5)
    it = task("h200", 8, host=256 * GIB, zero_stage=3, offload=offload)
    got = resolve_as_needed(it, MeshSpec(data=8))
    assert got.offload == OffloadSpec(optimizer="none", params=0.5)


def test_as_needed_is_the_smallest_share() -> None:
    """Optimizer first, and a twentieth less does not fit."""
    offload = OffloadSpec(optimizer="as_needed", params="as_needed")
    it = task("h200", 1, host=256 * GIB, remat="full", microbatches=16, offload=offload)
    got = resolve_as_needed(it, MeshSpec())
    assert isinstance(got.offload.optimizer, float)
    assert 0 < got.offload.optimizer < 1
    assert got.offload.params == "none"
    assert fits(it, evaluate(it, got, MeshSpec()).plan)
    less = OffloadSpec(optimizer=round(got.offload.optimizer - 0.05, 2))
    assert not fits(it, evaluate(it, dataclasses.replace(got, offload=less), MeshSpec()).plan)


def test_as_needed_gradients_leave_the_device_after_all_else() -> None:
    """A 70B model on one H100: sums of gradients are on the host where moments and parameters are not
    enough.
    """
    offload = OffloadSpec(optimizer="as_needed", params="as_needed", gradients="as_needed")
    it = task("h100", 1, sizes=LLAMA70B, host=2048 * GIB, remat="full", microbatches=16, offload=offload)
    got = resolve_as_needed(it, MeshSpec())
    assert (got.offload.optimizer, got.offload.params) == (1.0, 1.0)
    assert isinstance(got.offload.gradients, float)
    point = evaluate(it, got, MeshSpec())
    assert fits(it, point.plan)
    assert point.plan.host_gradients > 100 * GIB
    without = dataclasses.replace(got, offload=dataclasses.replace(got.offload, gradients="none"))
    assert not fits(it, evaluate(it, without, MeshSpec()).plan)
    assert evaluate(it, without, MeshSpec()).step_s < point.step_s


def test_as_needed_that_cannot_be_met_says_what_is_missing() -> None:
    """Where even all of it on the host is not enough."""
    it = task("h100", 1, host=256 * GIB, offload=OffloadSpec(optimizer="as_needed"))
    with pytest.raises(
        ValueError, match=r"as_needed: with all of it on the host a device needs [\d.]+ GiB of 63.3"
    ):
        resolve_as_needed(it, MeshSpec())


def test_where_nothing_fits_the_nearest_miss_says_what_would() -> None:
    """The count that is offered does fit."""
    it = task("h100", 8, sizes=LLAMA70B)
    with pytest.raises(
        ValueError, match=r"nothing fits into 8 x h100: the nearest miss takes [\d.]+ GiB"
    ) as error:
        raise no_point(it)
    count = re.search(r"--count (\d+)", str(error.value))
    assert count is not None
    larger = task("h100", int(count[1]), sizes=LLAMA70B, global_batch=max(16, int(count[1])))
    assert search(larger, meshes(larger))
    miss = nearest_miss(it, meshes(it))
    assert miss.plan.total_bytes > it.budget_bytes


def test_where_a_host_would_do_its_size_is_said() -> None:
    """And with a host of that size something fits."""
    it = task("h200", 1, global_batch=1)
    with pytest.raises(ValueError, match="--host-memory") as error:
        raise no_point(it)
    size = re.search(r"--host-memory (\d+)GiB", str(error.value))
    assert size is not None
    helped = task("h200", 1, global_batch=1, host=int(size[1]) * GIB)
    assert search(helped, meshes(helped))


def test_a_smaller_state_is_offered_and_fits() -> None:
    """An 8B with float32 moments does not fit one H200 alone; with 8-bit moments, which are offered first, it
    does.
    """
    it = task("h200", 1)
    with pytest.raises(ValueError, match=r"any of: --set optimizer\.moment_dtype=int8; ") as error:
        raise no_point(it)
    assert "--set data.global_batch=1" not in str(error.value), "one sequence alone would not fit"
    assert search(dataclasses.replace(it, job=with_state(it.job, smaller_states(it.job)[0])), meshes(it))


def test_a_smaller_batch_is_offered_where_it_needs_no_accumulator() -> None:
    """Sixteen sequences of an 8B in bfloat16 on one H100 need float32 sums of gradients; one sequence does
    not.
    """
    small = with_state(
        task("h100", 1).job, (("precision.param_dtype", "bfloat16"), ("optimizer.moment_dtype", "int8"))
    )
    it = dataclasses.replace(task("h100", 1), job=small)
    with pytest.raises(ValueError, match=r"--set data\.global_batch=1") as error:
        raise no_point(it)
    assert "moment_dtype" not in str(error.value), "it is in 8 bits already"
    assert search(it.changed(global_batch=1), meshes(it.changed(global_batch=1)))


@pytest.mark.slow
@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_long_sequences_are_split_over_context(every: bool) -> None:
    """An 8B at 262,144 tokens on 8 H100: tensor parallelism over all 8 sends more; short sequences are never
    split.
    """
    it = task("h100", 8, global_batch=8, seq_len=262_144)
    # Each mesh and ZeRO stage is a trace of its own. Replicas only send more; without them half of the meshes are left.
    split = [mesh for mesh in meshes(it) if mesh.replica == 1]
    if not every:
        split = [mesh for mesh in split if (mesh.context, mesh.tensor) in ((1, 8), (4, 2))]
        assert len(split) == 2
    best = search(it, split, zero=EVERY if every else (3,))[0]
    assert best.settings["mesh.context"] == best.mesh.context > 1
    assert {mesh.context for mesh in meshes(task())} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_experts_are_split_where_gathering_all_of_them_takes_longer(every: bool) -> None:
    """Few tokens per device: Qwen3 30B-A3B over 16 H100 with one sequence each."""
    sizes: dict[str, Any] = dict(
        num_layers=48, d_model=2048, num_heads=32, num_kv_heads=4, head_dim=128, d_ff=768, vocab_size=151_936
    )
    it = task("h100", 16, sizes=sizes | dict(moe=MoESpec(num_experts=128, top_k=8)))
    # Each way to split experts is a trace of its own, so only the meshes without replicas and tensor parallelism.
    split = [
        mesh for mesh in meshes(it) if mesh.replica == mesh.tensor == 1 and (every or mesh.expert in (1, 8))
    ]
    assert {mesh.expert for mesh in split} > {1}
    assert search(it, split, zero=EVERY if every else (3,))[0].mesh.expert > 1


def test_a_host_keeps_a_part_of_its_memory() -> None:
    """A fifth, for data, checkpoints and the system."""
    assert make_machine("h100", 8, host_memory_bytes=1000 * GIB).host_bytes_per_device == 100 * GIB


def test_a_batch_that_no_mesh_splits_is_refused() -> None:
    """Seven sequences over eight devices, with two key heads."""
    it = task("h100", 8, sizes=LLAMA8B | dict(num_kv_heads=2, num_heads=2), global_batch=7)
    with pytest.raises(ValueError, match=r"no mesh of 8 devices splits data.global_batch=7"):
        raise no_point(it)


def test_long_sequences_of_a_model_with_windows_are_split_by_heads() -> None:
    """A ring does not compute windows: the search once ended at its refusal."""
    blocks = BlockSpec(AttentionSpec(window=4096)), BlockSpec()
    sizes = LLAMA8B | dict(num_layers=2, pattern=blocks)
    it = task(count=8, sizes=sizes, seq_len=65_536, global_batch=1)
    points = search(it, (mesh for mesh in meshes(it) if mesh.context == 8), keep=1, zero=(3,))
    assert points
    assert {point.spec.context_attention for point in points} == {"ulysses"}
