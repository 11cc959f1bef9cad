"""What each chip's compiler is told."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.job import Job
from jtrain.step.xla_options import compiler_options, kernels_for
from jtrain_kernels import registry
from tests.layouts import layout_from


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "count", "sparse_cores", "sums"),
    [
        ("v5p:2x2x1", 4, True, True),
        ("v5e:2x2", 4, False, True),
        ("v5p:2x2x1", 1, False, False),
        ("h200:8", 8, False, False),
    ],
)
def test_options_are_those_of_the_chip(topology: str, count: int, sparse_cores: bool, sums: bool) -> None:
    """Sparse cores where a chip has them; sums of gradients stay split on any TPU; one device and GPUs need
    nothing.
    """
    options = compiler_options(make_mesh(MeshSpec(data=count), topology_devices(topology)[:count]))
    assert any("sparse_core" in name for name in options) == sparse_cores
    assert ("while-loop-all-reduce" in str(options.get("xla_disable_hlo_passes"))) == sums
    assert bool(options) == (sparse_cores or sums)


@pytest.mark.aot
def test_the_kernels_of_a_traced_step_are_launched_one_by_one() -> None:
    """On a GPU, whose command buffers have no layers in a trace. The compiler takes the option; a TPU needs
    none.
    """
    gpu = make_mesh(MeshSpec(), topology_devices("h200:1"))
    options = compiler_options(gpu, traced=True)
    assert options == {"xla_gpu_enable_command_buffer": ""}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(gpu, PartitionSpec()))
    assert jax.jit(jnp.sin, compiler_options=options).lower(x).compile() is not None
    assert compiler_options(make_mesh(MeshSpec(), topology_devices("v5p:2x2x1")[:1]), traced=True) == {}


@pytest.mark.aot
def test_gpus_keep_the_collectives_of_groups_apart() -> None:
    """And have several under way; TPUs have options of their own."""
    gpus, tpus = (make_mesh(MeshSpec(tensor=4), topology_devices(t)[:4]) for t in ("h200:4", "v5p:2x2x1"))
    assert compiler_options(gpus, sequence_groups=2)["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 0
    assert compiler_options(tpus, sequence_groups=2) == compiler_options(tpus)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "count"), [("v5p:2x2x1", 1), ("v5p:2x2x1", 4), ("v5e:2x2", 4), ("v6e:2x2", 4)]
)
def test_tpus_leave_the_fetch_of_activations_where_it_is(topology: str, count: int) -> None:
    """One option more, which the compiler of each chip takes; it changes nothing of a step without
    fetches.
    """
    mesh = make_mesh(MeshSpec(data=count), topology_devices(topology)[:count])
    options, plain = compiler_options(mesh, offloaded=["activations"]), compiler_options(mesh)
    assert options == plain | {"xla_tpu_pipeline_memory_host_transfers": False}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    assert jax.jit(jnp.sin, compiler_options=options).lower(x).compile() is not None


@pytest.mark.aot
def test_gpus_schedule_around_the_exchange_of_experts() -> None:
    """Only with devices along `expert`, and beside the options for 8-bit matmuls."""
    mesh, plain = (
        make_mesh(spec, topology_devices("h200:8")) for spec in (MeshSpec(data=4, expert=2), MeshSpec(data=8))
    )
    options = compiler_options(mesh)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert set(compiler_options(mesh, "fp8_current")) == set(options) | set(
        compiler_options(plain, "fp8_current")
    )


@pytest.mark.aot
def test_gpus_copy_slices_in_order_beside_8_bit_matmuls_and_over_tensor() -> None:
    """Where there is a network to wait for, and no copy from host memory that should run beside the
    layers.
    """
    one, several = (make_mesh(MeshSpec(data=n), topology_devices("h200:8")[:n]) for n in (1, 8))
    passes = "xla_disable_hlo_passes"
    assert "dynamic-slice-copy" in compiler_options(several, "fp8_delayed")[passes]
    assert "dynamic-slice-copy" in compiler_options(several, plain_tensor=True)[passes]
    assert passes not in compiler_options(several)
    assert passes not in compiler_options(one, "fp8_delayed")
    assert passes not in compiler_options(several, "fp8_delayed", offloaded=["optimizer"])


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "name"), [("v5e:2x2", "v5e"), ("h200:1", "h200")])
def test_kernels_are_chosen_for_the_devices_of_the_mesh(topology: str, name: str) -> None:
    """Not for the machine that compiles; and a layout's word is law for them."""
    mesh_spec = MeshSpec()
    mesh = make_mesh(mesh_spec, topology_devices(topology)[:1])
    layout = layout_from(dict(kernels=(("rope", "xla"),)), mesh_spec, ())
    rope = registry.find("rope")
    with kernels_for(layout, mesh):
        assert registry.device().name == name
        assert registry.select(rope, rope.cases["llama8b"]).because == "it is forced"
    assert registry.device().name == "cpu"


@pytest.mark.aot
def test_a_step_is_traced_within_its_layouts_kernels() -> None:
    """Forward, backward and update: an implementation that there is not stops it."""
    model = Transformer(
        num_layers=1, d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=64, vocab_size=64
    )
    infos = model.param_infos()
    adam = AdamW(peak_lr=1e-3, warmup_steps=1)
    optimizer = build(adam, num_steps=2, params=map_params(lambda info: info, infos))
    layout = layout_from(dict(kernels=(("swiglu", "nowhere"),)), MeshSpec(), infos)
    job = Job(model, layout, adam, global_batch=1, seq_len=16)
    with pytest.raises(ValueError, match=r"kernels\.swiglu=nowhere: there is no such implementation"):
        compile_step(job, optimizer, devices=topology_devices("h200:1"))
