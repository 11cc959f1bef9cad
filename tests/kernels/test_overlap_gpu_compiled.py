"""The fused kernels by NVIDIA's compiler, for GPUs that are not here: registers, shared memory, symmetric memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.bench import gpu_matmul
from jtrain.layout import LayoutSpec, make_layout
from jtrain.mesh import MeshSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.plan.aot import compile_step
from jtrain.plan.hlo import overlap
from jtrain_kernels import aot, device
from jtrain_kernels.overlap import api
from jtrain_kernels.overlap.gpu_program import gpu_program
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.tiles import CANDIDATES
from jtrain_kernels.targets import topology_devices
from tests.test_offload import ADAMW

pytestmark = pytest.mark.aot

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
MIB = 2**20


def compiled(op: OpName, topology: str, axes: dict[str, int], *, rows: int, model: int, hidden: int) -> aot.Report:
    """One layer's matmul and its gradients over the axis `tensor`, batch over the others: [1, rows, model] a device."""
    mesh, size = aot.virtual_mesh(topology, axes), axes["tensor"]
    others = tuple(axis for axis in axes if axis != "tensor")
    batch = mesh.size // size
    split_rows, split_model = PartitionSpec(others, "tensor"), PartitionSpec(others, None, "tensor")
    columns, depth = PartitionSpec(None, "tensor"), PartitionSpec("tensor")

    def layer(x: Any, *kernels: Any) -> Any:
        def forward(x: Any, kernels: Any) -> Any:
            if op == GATHER:
                return api.all_gather_matmul(x, *kernels, axis_name="tensor", axis_size=size)
            function = api.matmul_reduce_scatter if op == SCATTER else api.matmul_all_reduce
            return (function(x, *kernels, axis_name="tensor", axis_size=size),)

        y, pullback = jax.vjp(forward, x, kernels)
        return y, pullback(y)

    if op == GATHER:
        shapes: Any = [((batch, rows, model), split_rows), *[((model, hidden), columns)] * 2]
        specs: Any = (split_rows, columns, columns), ((split_model,) * 2, (split_rows, (columns, columns)))
    else:
        out = split_rows if op == SCATTER else PartitionSpec(others)
        shapes = [((batch, rows, hidden), split_model), ((hidden, model), depth)]
        specs = (split_model, depth), ((out,), (split_model, (depth,)))
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in shapes]
    function = jax.shard_map(layer, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return aot.compile_for(mesh, function, *args, forced=dict.fromkeys((GATHER, SCATTER, REDUCE), "mosaic_gpu"))


@pytest.mark.parametrize(
    ("op", "kernels", "temp_bytes"),
    (
        # x gathered (64 MiB) forwards, and once more for the kernels' gradients; partial sums of dx (56).
        (GATHER, (GATHER, SCATTER), 420 * MIB),
        # Partial sums (56 MiB), dy gathered (64).
        (SCATTER, (SCATTER, GATHER), 320 * MIB),
        # And the whole result (64 MiB).
        (REDUCE, (REDUCE, GATHER), 400 * MIB),
    ),
)
def test_llama8b_layers_compile_for_eight_h200_forwards_and_backwards(
    op: OpName, kernels: tuple[str, ...], temp_bytes: int
) -> None:
    """At tensor=8 and 8192 rows: no spills, shared memory within a block's, and it is these kernels that run."""
    report = compiled(op, "h200:8", {"tensor": 8}, rows=8192, model=4096, hidden=14336)
    assert aot.failures(report, expect=tuple(f"jtrain_{name}" for name in kernels), temp_bytes=temp_bytes) == ()
    assert report.calls["mosaic_gpu_v2"] == 2
    assert 150_000 < report.scratch_bytes < 232_448


def test_one_axis_of_a_larger_mesh_and_another_chip_compile_too() -> None:
    """Of two H100 along `tensor`, beside two along `data`."""
    report = compiled(GATHER, "h100:4", {"data": 2, "tensor": 2}, rows=1024, model=512, hidden=512)
    assert aot.failures(report, expect=(f"jtrain_{GATHER}", f"jtrain_{SCATTER}")) == ()


def test_an_axis_of_one_device_takes_the_tile_kernel_alone() -> None:
    """Symmetric memory of one device would abort the process."""
    report = compiled(SCATTER, "h200:1", {"tensor": 1}, rows=1024, model=512, hidden=512)
    assert aot.failures(report, expect=("jtrain_hopper_matmul",)) == ()
    assert not any(f"jtrain_{SCATTER}" in kernel.name for kernel in report.kernels)


def test_what_gpu_matmul_times_compiles_for_one_h200() -> None:
    """The tile kernel at 8192^3 and an op on four virtual ranks, cut as the benchmark cuts them."""
    spec, square = device.from_name("h200"), jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    report = aot.compile_for("h200", lambda a, b: gpu_matmul.matmul(a, b, spec, CANDIDATES[0]), square, square)
    assert aot.failures(report, expect=("jtrain_hopper_matmul",), temp_bytes=0) == ()

    op: OpName = "matmul_all_reduce"
    program = gpu_program(make_schedule(op, "full_mesh", 4, parts=2))
    config = gpu_matmul.overlap_configs(program, 4, spec, 8192)[-1]
    x, kernel = jax.eval_shape(lambda: gpu_matmul.operands(op, 4, 8192))
    report = aot.compile_for("h200", lambda x, k: gpu_matmul.virtual(program, 4, x, k, spec, config), x, kernel)
    assert aot.failures(report, expect=("jtrain_matmul_all_reduce",)) == ()


def test_gpu_matmul_refuses_without_a_hopper_gpu() -> None:
    """One line, before anything is computed; JAX's devices here are CPUs, and a B200's compiler is no Hopper's."""
    with pytest.raises(
        ValueError, match=r"gpu_matmul needs a Hopper GPU \(h100, h200\): cpu has no wgmma.*same command"
    ):
        gpu_matmul.hopper_gpu(jax.devices()[0])
    blackwell = aot.virtual_device("b200").devices.flat[0]
    with pytest.raises(ValueError, match=r"gpu_matmul needs a Hopper GPU .*: b200 has no wgmma"):
        gpu_matmul.hopper_gpu(blackwell)


@pytest.mark.slow
def test_a_train_step_compiles_with_the_fused_kernels_by_a_setting() -> None:
    """For two H200: with `layout.kernels` the projections' collectives leave the program and these kernels enter it."""
    forced = ((GATHER, "mosaic_gpu"), (SCATTER, "mosaic_gpu"))
    plain, fused = (step_traffic(LayoutSpec(tensor_overlap=bool(k), kernels=k)) for k in ((), forced))
    assert fused < 0.7 * plain


def step_traffic(spec: LayoutSpec) -> float:
    """Bytes that collectives of a small model's step put on the wire over `tensor`."""
    sizes: Any = dict(num_layers=2, d_model=512, num_heads=8, num_kv_heads=4, head_dim=128, d_ff=512, vocab_size=512)
    model = Transformer(**sizes)
    lay = make_layout(spec, MeshSpec(data=1, tensor=2), model.param_infos())
    opt = build(ADAMW, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    devices = topology_devices("h200:2")
    program = compile_step(model, lay, opt, global_batch=1, seq_len=1024, devices=devices)
    return overlap(program.traffic).wire_bytes
