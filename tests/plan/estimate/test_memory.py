"""What a run is given is known to the byte; what cannot fit is refused with a way out."""

import dataclasses
import shlex
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.layout.layout import Layout, OffloadSpec
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.estimate.machine import Machine, machine_of, make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.tpu_padding import tiled
from jtrain.plan.fit_check import available_bytes, check_fits
from jtrain.plan.job import Job
from jtrain.step.state import abstract_state
from jtrain_kernels.device import DEVICES
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96, vocab_size=128
)
WIDER: dict[str, Any] = SIZES | dict(d_model=256, d_ff=512, vocab_size=2048)
LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)
OPTIMIZERS = (
    AdamW(peak_lr=1e-3),
    AdamW(peak_lr=1e-3, b2=0.9, moment_dtype="bfloat16"),
    Muon(peak_lr=1e-3),
)


def layout_of(model: Transformer, axes: dict[str, int], **spec: Any) -> Layout:
    return layout_from(spec, MeshSpec(**axes), model.param_infos())


def shard_bytes(tree: Any, memory_kind: str = "device") -> int:
    here = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == memory_kind]
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in here)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{type(o).__name__}-{o.moment_dtype}")
@pytest.mark.parametrize("zero_stage", (0, 1, 2, 3))
@pytest.mark.parametrize(
    "axes", (dict(data=8), dict(replica=2, data=2, context=2), dict(data=2, tensor=4)), ids=str
)
def test_argument_bytes_are_those_of_the_shards(
    axes: dict[str, int], zero_stage: int, optimizer: AdamW | Muon
) -> None:
    """Parameters and moments as `abstract_state` shards them, byte by byte."""
    model = Transformer(**SIZES, qk_norm=True)
    lay = layout_of(
        model, axes, zero_stage=zero_stage, param_dtype="bfloat16" if zero_stage == 2 else "float32"
    )
    built = build(optimizer, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    state = abstract_state(lay, built, make_mesh(lay.mesh, jax.devices()))
    plan = memory(Job(model, lay, optimizer, global_batch=16, seq_len=32))
    assert plan.parameters == shard_bytes(state.params) > 0
    assert plan.optimizer == shard_bytes(state.opt_state) > 0
    shards = lay.mesh.replica * lay.mesh.zero_shards
    assert plan.batch == 4 * 4 * 16 * 32 // shards + state.step.dtype.itemsize + shard_bytes(state.guard)


def test_amax_histories_are_arguments() -> None:
    """Of delayed scaling: three rows of 16 steps for each layer of seven weights, whole on every device."""
    model = Transformer(**SIZES)
    plain, delayed = (
        layout_of(model, dict(data=8), zero_stage=3, matmul_dtype=m) for m in ("compute", "fp8_delayed")
    )
    optimizer = AdamW(peak_lr=1e-3)
    built = build(optimizer, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    scaling = abstract_state(delayed, built, make_mesh(delayed.mesh, jax.devices())).scaling
    found = [
        memory(Job(model, lay, optimizer, global_batch=16, seq_len=32)).batch for lay in (plain, delayed)
    ]
    assert found[1] - found[0] == shard_bytes(scaling) == 7 * 3 * 3 * 16 * 4


@pytest.mark.parametrize("moment_dtype", ("float32", "int8"))
@pytest.mark.parametrize(
    "offload",
    (dict(optimizer=1.0), dict(optimizer=0.4, params=0.5), dict(params=1.0, activations=1.0)),
    ids=str,
)
def test_host_bytes_are_those_of_the_shards(offload: dict[str, Any], moment_dtype: Any) -> None:
    """What `abstract_state` puts into host memory is what the plan counts there, and the rest what it counts
    here.
    """
    model = Transformer(**SIZES)
    lay = layout_of(model, dict(replica=4, data=2), zero_stage=3, offload=OffloadSpec(**offload))
    optimizer = AdamW(peak_lr=1e-3, moment_dtype=moment_dtype)
    built = build(optimizer, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    state = abstract_state(lay, built, make_mesh(lay.mesh, jax.devices()))
    plan = memory(Job(model, lay, optimizer, global_batch=16, seq_len=32))
    assert plan.parameters == shard_bytes(state.params) > 0
    assert plan.optimizer == shard_bytes(state.opt_state)
    assert plan.host_parameters == shard_bytes(state.params, "pinned_host")
    assert plan.host_optimizer == shard_bytes(state.opt_state, "pinned_host")
    assert plan.host_parameters + plan.host_optimizer > 0
    # A layer keeps its input, [rows, L / tensor, D] in bfloat16; with zero_stage=3 also what has a name.
    plain = layout_of(model, dict(replica=4, data=2), zero_stage=3)
    whole = memory(Job(model, plain, optimizer, global_batch=16, seq_len=32))
    assert plan.host_activations == (whole.activations if "activations" in offload else 0)


@pytest.mark.parametrize(
    ("shape", "elements"),
    (
        ((), 1),
        ((256,), 256),
        ((32,), 128),
        ((4, 256), 4 * 256),  # four rows make a smaller tile
        ((256, 32), 256 * 32),  # laid out the other way round
        ((4, 32, 8, 32), 4 * 32 * 8 * 128),  # nothing fills 128 lanes
        ((32, 512, 8, 128), 32 * 512 * 8 * 128),
    ),
    ids=str,
)
def test_tiles_fill_up_what_is_narrow(shape: tuple[int, ...], elements: int) -> None:
    """Shapes that XLA:TPU was seen to pad, and not to."""
    assert tiled(shape) == elements


@pytest.mark.slow
def test_argument_bytes_are_the_compilers() -> None:
    """XLA:CPU counts the same arguments, and our temporaries are of the size that it finds."""
    model = Transformer(**WIDER)
    lay = layout_of(model, dict(data=8), zero_stage=3, remat="full")
    optimizer = AdamW(peak_lr=1e-3)
    built = build(optimizer, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, optimizer, 16, 256, machine_of(jax.devices()))
    program = compile_step(job, built, devices=jax.devices())
    plan = memory(job)
    assert plan.argument_bytes == program.argument_bytes
    # XLA:CPU widens bfloat16 to float32 here and there, so its temporaries say little more than the order.
    assert 0.4 < plan.temp_bytes / program.temp_bytes < 1.5


def test_each_zero_stage_and_remat_saves_memory() -> None:
    """Every step towards less memory is one in the plan as well."""
    model = Transformer(**LLAMA8B)
    totals = [
        memory(
            Job(
                model,
                layout_of(model, dict(data=8), zero_stage=stage, remat=remat, microbatches=parts),
                AdamW(peak_lr=1e-3),
                global_batch=64,
                seq_len=4096,
            )
        ).total_bytes
        for stage, remat, parts in (
            (0, "none", 1),
            (1, "none", 1),
            (2, "none", 1),
            (3, "none", 1),
            (3, "full", 1),
        )
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 2 * totals[-1]


@pytest.mark.smoke
def test_llama_8b_state_is_twelve_bytes_a_parameter() -> None:
    """8,030,261,248 parameters: float32 parameters and two float32 moments."""
    model = Transformer(**LLAMA8B)
    plan = memory(Job(model, layout_of(model, {}), AdamW(peak_lr=1e-3), global_batch=1, seq_len=4096))
    assert plan.parameters + plan.optimizer == 12 * 8_030_261_248


def test_a_run_that_cannot_fit_is_refused_with_settings_that_would() -> None:
    """The settings in the message do fit."""
    model = Transformer(**LLAMA8B)
    lay = layout_of(model, dict(data=8), zero_stage=0)
    optimizer = AdamW(peak_lr=1e-3)
    available = 80 * 10**9
    with pytest.raises(
        ValueError, match=r"needs [\d.]+ GiB per device .* but 74\.5 GiB are available\. Any of these"
    ) as error:
        check_fits(Job(model, lay, optimizer, 32, 4096), available=available)
    way = next(line for line in str(error.value).splitlines() if "--set" in line)
    sets = dict(word.split("=") for word in shlex.split(way.split("  (")[0])[1::2])
    spec: dict[str, Any] = dict(zero_stage=0, remat="none", microbatches=1)
    for path, value in sets.items():
        assert path.startswith("layout."), "on these devices first"
        spec[path.removeprefix("layout.")] = int(value) if value.isdigit() else value
    fitting = Job(model, layout_of(model, dict(data=8), **spec), optimizer, 32, 4096)
    check_fits(fitting, available=available)


def test_host_memory_is_a_way_out() -> None:
    """One H200 holds the state of an 8B model only with its moments elsewhere; a CPU has no elsewhere."""
    model = Transformer(**LLAMA8B)
    lay = layout_of(model, {}, remat="full")
    machine = make_machine("h200", 1, host_memory_bytes=128 * 2**30)
    gpu = Job(model, lay, AdamW(peak_lr=1e-3), global_batch=1, seq_len=4096, machine=machine)
    cpu = dataclasses.replace(gpu, machine=Machine(DEVICES["cpu"], 1, 128 * 2**30))
    with pytest.raises(ValueError, match=r"\n  --set layout\.offload\.optimizer=as_needed +\(down to \d"):
        check_fits(gpu, available=80 * 10**9)
    with pytest.raises(ValueError, match="Any of these") as error:
        check_fits(cpu, available=80 * 10**9)
    assert "offload" not in str(error.value)


def test_nothing_fits_into_nothing() -> None:
    """Where no layout helps, the message says so."""
    model = Transformer(**LLAMA8B)
    job = Job(model, layout_of(model, {}), AdamW(peak_lr=1e-3), global_batch=1, seq_len=4096)
    with pytest.raises(ValueError, match="Nothing fits, nor on up to 4096 such devices: set a smaller model"):
        check_fits(job, available=10**6)


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "size"), (("h200:8", 141 * 10**9), ("v5p:2x2x1", 95 * 2**30)))
def test_a_device_to_compile_for_has_what_its_maker_says(topology: str, size: int) -> None:
    """There is no allocator to ask."""
    assert available_bytes(topology_devices(topology)) == size


def test_cpu_devices_share_the_free_memory() -> None:
    """Eight emulated devices have an eighth each of what one would."""
    one, eight = available_bytes(jax.devices()[:1]), available_bytes(jax.devices())
    if one is not None and eight is not None:  # what is free moves between the two readings
        assert 6 < one / eight < 10
