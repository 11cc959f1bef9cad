"""The fused kernels compiled for absent NVIDIA GPUs: registers, shared memory, symmetric memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.bench import gpu_matmul
from jtrain.hlo.traffic import overlap
from jtrain.layout.mesh import MeshSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.plan.compile.compiled_step import compile_step
from jtrain.plan.job import Job
from jtrain_kernels import device, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.compile_only.targets import topology_devices
from jtrain_kernels.overlap import api
from jtrain_kernels.overlap.mosaic_gpu.tables import gpu_program
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from tests.kernels.overlap.test_fused_order import beside_fused
from tests.layouts import layout_from
from tests.step.test_host_offload import ADAMW

pytestmark = pytest.mark.aot

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
MIB = 2**20


def compiled(
    op: OpName, topology: str, axes: dict[str, int], *, rows: int, model: int, hidden: int
) -> aot.Report:
    """Report of one layer's matmul and its gradients over the axis `tensor`: [1, rows, model] per device."""
    mesh, size = aot.virtual_mesh(topology, axes), axes["tensor"]
    others = tuple(axis for axis in axes if axis != "tensor")
    batch = mesh.size // size
    split_rows, split_model = PartitionSpec(others, "tensor"), PartitionSpec(others, None, "tensor")
    columns, depth = PartitionSpec(None, "tensor"), PartitionSpec("tensor")

    def layer(x: Any, *kernels: Any) -> Any:
        def forward(x: Any, kernels: Any) -> Any:
            if op == GATHER:
                return api.all_gather_matmul(x, *kernels, axis_name="tensor", axis_size=size)
            return (api.matmul_reduce_scatter(x, *kernels, axis_name="tensor", axis_size=size),)

        y, pullback = jax.vjp(forward, x, kernels)
        return y, pullback(y)

    if op == GATHER:
        shapes: Any = [((batch, rows, model), split_rows), *[((model, hidden), columns)] * 2]
        specs: Any = (split_rows, columns, columns), ((split_model,) * 2, (split_rows, (columns, columns)))
    else:
        shapes = [((batch, rows, hidden), split_model), ((hidden, model), depth)]
        specs = (split_model, depth), ((split_rows,), (split_model, (depth,)))
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in shapes]
    function = jax.shard_map(layer, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return aot.compile_for(mesh, function, *args, forced=dict.fromkeys((GATHER, SCATTER), "mosaic_gpu"))


@pytest.mark.parametrize(
    ("op", "kernels", "temp_bytes"),
    (
        # Gathered x (64 MiB) in the forward pass and again for the kernels' gradients; partial sums of dx
        # (56).
        (GATHER, (GATHER, SCATTER), 420 * MIB),
        # Partial sums (56 MiB), gathered dy (64).
        pytest.param(SCATTER, (SCATTER, GATHER), 320 * MIB, marks=pytest.mark.slow),
    ),
)
def test_llama8b_layers_compile_for_eight_h200_forwards_and_backwards(
    op: OpName, kernels: tuple[str, ...], temp_bytes: int
) -> None:
    """At tensor=8 and 8192 rows these kernels run, without spills, in a block's shared memory, in turn with
    gathers.
    """
    report = compiled(op, "h200:8", {"tensor": 8}, rows=8192, model=4096, hidden=14336)
    assert (
        aot.failures(report, expect=tuple(f"jtrain_{name}" for name in kernels), temp_bytes=temp_bytes) == ()
    )
    assert report.calls["mosaic_gpu_v2"] == 2
    assert 150_000 < report.scratch_bytes < 232_448
    assert beside_fused(report.hlo) == []


def test_one_axis_of_a_larger_mesh_and_another_chip_compile_too() -> None:
    """Two H100 along `tensor` times two along `data`."""
    report = two_by_two_h100()
    assert aot.failures(report, expect=(f"jtrain_{GATHER}", f"jtrain_{SCATTER}")) == ()
    assert beside_fused(report.hlo) == []


def two_by_two_h100() -> aot.Report:
    return compiled(GATHER, "h100:4", {"data": 2, "tensor": 2}, rows=1024, model=512, hidden=512)


def test_without_its_options_xla_gathers_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather for the kernels' gradients would be under way while both kernels run, which could
    deadlock.
    """
    monkeypatch.setattr(registry, "compiler_options", lambda *args: {})
    assert len(beside_fused(two_by_two_h100().hlo)) == 2


def test_an_axis_of_one_device_takes_the_tile_kernel_alone() -> None:
    """Symmetric memory on a single device would abort the process."""
    report = compiled(SCATTER, "h200:1", {"tensor": 1}, rows=1024, model=512, hidden=512)
    assert aot.failures(report, expect=("jtrain_hopper_matmul",)) == ()
    assert not any(f"jtrain_{SCATTER}" in kernel.name for kernel in report.kernels)


def test_what_gpu_matmul_times_compiles_for_one_h200() -> None:
    """The tile kernel at 8192^3 and an op on four virtual ranks compile with the benchmark's tiles."""
    spec, square = device.from_name("h200"), jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    report = aot.compile_for(
        "h200", lambda a, b: gpu_matmul.matmul(a, b, spec, CANDIDATES[0]), square, square
    )
    assert aot.failures(report, expect=("jtrain_hopper_matmul",), temp_bytes=0) == ()

    op: OpName = "all_gather_matmul"
    program = gpu_program(make_schedule(op, "full_mesh", 4))
    config = gpu_matmul.overlap_configs(program, 4, spec, 8192)[-1]
    x, kernel = jax.eval_shape(lambda: gpu_matmul.operands(op, 4, 8192))
    report = aot.compile_for(
        "h200", lambda x, k: gpu_matmul.run_virtual_ranks(program, 4, x, k, spec, config), x, kernel
    )
    assert aot.failures(report, expect=("jtrain_all_gather_matmul",)) == ()


def test_gpu_matmul_refuses_without_a_hopper_gpu() -> None:
    """A one-line error comes before any computation, on CPUs and on a B200, which is no Hopper."""
    with pytest.raises(
        ValueError, match=r"gpu_matmul needs a Hopper GPU \(h100, h200\): cpu has no wgmma.*same command"
    ):
        gpu_matmul.hopper_gpu(jax.devices()[0])
    blackwell = aot.virtual_device("b200").devices.flat[0]
    with pytest.raises(ValueError, match=r"gpu_matmul needs a Hopper GPU .*: b200 has no wgmma"):
        gpu_matmul.hopper_gpu(blackwell)


@pytest.mark.slow
def test_a_train_step_compiles_with_the_fused_kernels_by_a_setting() -> None:
    """For two H200, `kernels` replaces the projections' collectives by these kernels."""
    forced = ((GATHER, "mosaic_gpu"), (SCATTER, "mosaic_gpu"))
    plain, fused = (step_traffic(tensor_overlap=bool(k), kernels=k) for k in ((), forced))
    assert fused < 0.7 * plain


def step_traffic(**layout: Any) -> float:
    """Bytes that collectives of a small model's step put on the wire over `tensor`."""
    sizes: Any = dict(
        num_layers=2, d_model=512, num_heads=8, num_kv_heads=4, head_dim=128, d_ff=512, vocab_size=512
    )
    model = Transformer(**sizes)
    lay = layout_from(layout, MeshSpec(data=1, tensor=2), model.param_infos())
    opt = build(ADAMW, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    devices = topology_devices("h200:2")
    program = compile_step(Job(model, lay, ADAMW, global_batch=1, seq_len=1024), opt, devices=devices)
    return overlap(program.traffic).wire_bytes
