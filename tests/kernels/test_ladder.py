"""Checks that a kernel passes before it runs on a chip (a ladder), with a planted bug that each rung must
find.

| rung | checks | planted bug |
|---|---|---|
| float64 | value and gradients | a gradient that lacks a term |
| emulated TPUs | remote copies, semaphores, races; both orders of copying | a missing wait |
| emulated GPU | copies to shared memory, barriers, races | a missing wait |
| TPU compilers | it lowers, its memory fits | too much VMEM |
| GPU compilers | it lowers, no spill, shared memory fits, it is the kernel | a spill; too much memory; a fallback |

Emulation enforces no limits, and compilers run nothing, so a kernel needs every rung. Only speed needs the
chip.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu
from jax.sharding import Mesh, PartitionSpec

from jtrain_kernels import compat, device, registry
from jtrain_kernels.compile_only import aot, cubin, riegeli
from tests.kernels.gradients import agree_with, normal

GPUS, TPUS = ("h100", "h200", "b200"), ("v5e", "v5p", "v6e", "tpu7x")
BLOCK = (8, 128)


def to_the_right(x: jax.Array, *, interpret: Any = False, wait: bool = True) -> jax.Array:
    """Doubles the left neighbour's block, copied from it; runs on one device, under shard_map over `x`."""

    def kernel(x_ref: Any, y_ref: Any, landed: Any, sent: Any, received: Any) -> None:
        me, size = jax.lax.axis_index("x"), jax.lax.axis_size("x")
        ready = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(ready, device_id=((me - 1) % size,))
        pl.semaphore_wait(ready, 1)
        copy = pltpu.make_async_remote_copy(x_ref, landed, sent, received, device_id=((me + 1) % size,))
        copy.start()
        copy.wait_send()
        if wait:
            copy.wait_recv()
        y_ref[...] = landed[...] * 2.0

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=interpret,
        name="to_the_right",
    )(x)


def over(mesh: Mesh, **options: Any) -> Any:
    """`to_the_right` on every device of a mesh."""
    spec = PartitionSpec("x")
    function = functools.partial(to_the_right, **options)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def doubled(x: jax.Array, *, interpret: Any = None, wait: bool = True) -> jax.Array:
    """`2 x`, computed through shared memory."""

    def kernel(x_ref: Any, y_ref: Any, shared: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref, shared, barrier)
        if wait:
            plgpu.barrier_wait(barrier)
        shared[...] = shared[...] * 2.0
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        interpret=interpret,
    )(x)


def matmul(a: jax.Array, b: jax.Array, *, tile_n: int) -> jax.Array:
    """JAX's own Hopper matmul, whose accumulators for tiles of 128 x 256 do not fit the registers."""
    config = hopper_matmul_mgpu.TuningConfig(tile_m=128, tile_n=tile_n, tile_k=64, max_concurrent_steps=2)
    return hopper_matmul_mgpu.matmul(a, b, None, config)


def test_float64_finds_a_gradient_without_a_term() -> None:
    """The gradient of swiglu's gate lacks a term; only the value is right."""

    @jax.custom_vjp
    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    gated.defvjp(
        lambda gate, up: (gated(gate, up), (gate, up)),
        lambda saved, dy: (dy * saved[1] * jax.nn.sigmoid(saved[0]), dy * jax.nn.silu(saved[0])),
    )

    def formula(gate: jax.Array, up: jax.Array) -> jax.Array:
        return gate / (1 + jnp.exp(-gate)) * up

    inputs = (normal(0, 4, 64), normal(1, 4, 64))
    with pytest.raises(AssertionError, match="gradient 0"):
        agree_with(gated, formula, inputs, "float32")


@pytest.mark.parametrize("dma_mode", ("eager", "on_wait"))
def test_emulated_tpus_find_a_missing_wait(dma_mode: Any, emulated_devices: list[jax.Device]) -> None:
    """Eager copies race with the reader; copies made on the wait never arrive. Each mode finds only one
    fault.
    """
    mesh = Mesh(np.array(emulated_devices), ("x",))
    x = np.arange(8 * 8 * 128, dtype=np.float32).reshape(64, 128)
    want = 2 * np.roll(x, 8, axis=0)
    got = jax.jit(over(mesh, interpret=compat.tpu_interpret(dma_mode)))(x)
    np.testing.assert_array_equal(got, want)
    assert not compat.tpu_races_found()
    try:
        got = np.asarray(jax.jit(over(mesh, interpret=compat.tpu_interpret(dma_mode), wait=False))(x))
        raced = compat.tpu_races_found()
    finally:
        compat.reset_interpreters()
    assert raced if dma_mode == "eager" else not np.array_equal(got, want)


def test_an_emulated_gpu_finds_a_missing_wait() -> None:
    """The copy into shared memory races with its reader."""
    x = normal(0, 128, 128)
    got = doubled(jnp.asarray(x), interpret=compat.gpu_interpret())
    np.testing.assert_array_equal(got, 2 * x)
    assert not compat.gpu_races_found()
    try:
        jax.block_until_ready(doubled(jnp.asarray(x), interpret=compat.gpu_interpret(), wait=False))
        assert compat.gpu_races_found()
    finally:
        compat.reset_interpreters()


@pytest.mark.aot
@pytest.mark.parametrize("name", TPUS)
def test_tpu_compilers_take_a_remote_copy(name: str) -> None:
    """The program for two devices contains the kernel by name, and it fits VMEM."""
    topology = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}.get(name, f"{name}:2x2x1")
    mesh = aot.virtual_mesh(topology, {"x": 4})
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((4 * BLOCK[0], BLOCK[1]), jnp.float32, sharding=sharding)
    report = aot.compile_for(mesh, over(mesh), x)
    assert aot.failures(report, expect=("tpu_custom_call", "to_the_right"), temp_bytes=1 << 20) == ()
    assert aot.failures(report, expect=("to_the_left",)) == (
        "to_the_left is not in the program, which calls tpu_custom_call, to_the_right",
    )


@pytest.mark.aot
def test_tpu_compilers_refuse_more_vmem_than_there_is() -> None:
    """A kernel with 256 MiB of scratch is refused on a v5e, which has 128 MiB."""

    def kernel(x_ref: Any, y_ref: Any, scratch: Any) -> None:
        scratch[: BLOCK[0], : BLOCK[1]] = x_ref[...]
        y_ref[...] = scratch[: BLOCK[0], : BLOCK[1]]

    x = jax.ShapeDtypeStruct(BLOCK, jnp.float32)
    call = pl.pallas_call(kernel, out_shape=x, scratch_shapes=[pltpu.VMEM((8192, 8192), jnp.float32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        aot.compile_for("v5e", call, x)


@pytest.mark.aot
@pytest.mark.parametrize("name", GPUS)
def test_gpu_compilers_take_a_kernel_and_report_it(name: str) -> None:
    """The report has the requested shared memory and no spills, and a fallback is noticed."""
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    report = aot.compile_for(name, doubled, x)
    assert aot.failures(report, expect=("mosaic_gpu_v2", "mosaic_gpu_kernel"), temp_bytes=0) == ()
    assert report.scratch_bytes == 128 * 128 * 4
    fallback = aot.compile_for(name, lambda x: x * 2.0, x)
    (said,) = aot.failures(fallback, expect=("mosaic_gpu_v2",))
    assert said.startswith("mosaic_gpu_v2 is not in the program, which calls ")
    assert fallback.kernels, "XLA's own kernels are reported as well"


@pytest.mark.aot
def test_the_gates_find_spills_shared_memory_and_temporaries() -> None:
    """A kernel with each of these faults is reported."""
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    fits = aot.compile_for("h200", functools.partial(matmul, tile_n=128), a, a)
    assert aot.failures(fits) == ()
    wide = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    spills = aot.compile_for("h200", functools.partial(matmul, tile_n=256), a, wide)
    (said,) = aot.failures(spills)
    assert "spills: " in said
    assert "bytes of stack per thread, 168 registers" in said
    with pytest.raises(ValueError, match="smem"):
        aot.compile_for("h200", doubled, jax.ShapeDtypeStruct((512, 128), jnp.float32))
    small = device.DeviceSpec("small", "gpu", "H200", None, None, None, None, None, scratch_bytes=1024)
    (said,) = aot.failures(dataclasses.replace(fits, device=small))
    assert "bytes of scratch memory, but a small has 1024" in said
    sorts = aot.compile_for("h200", lambda x: jnp.sort(x @ x, axis=0), a)
    (said,) = aot.failures(sorts, temp_bytes=0)
    assert "temporary bytes, over the budget of 0" in said


COMPILED = [(name, gpu_or_tpu) for name in ("rms_norm", "swiglu") for gpu_or_tpu in ("h200", "v5e")]


@pytest.mark.aot
@pytest.mark.parametrize(("name", "machine"), COMPILED)
def test_ops_pass_the_gates_of_their_compilers(name: str, machine: str) -> None:
    """Every implementation that supports the device compiles with gradients, at the size of the op's first
    case.
    """
    assert_compiles(registry.find(name), machine)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("machine", (*GPUS, *TPUS))
@pytest.mark.parametrize("name", registry.ops())
def test_every_op_passes_the_gates_of_every_compiler(name: str, machine: str) -> None:
    """Every op compiles for every machine."""
    assert_compiles(registry.find(name), machine)


EXPECTED = {
    "pallas_tpu": ("tpu_custom_call",),
    "splash": ("tpu_custom_call",),
    "mosaic_gpu": ("mosaic_gpu_v2",),
    "tokamax": ("mosaic_gpu_v2",),
    "triton": ("triton_kernel_call",),
}
"""Custom calls in the program of an implementation; a missing one means that another implementation ran."""

BUDGET_MIB: dict[str, int | dict[str, int]] = {
    "delta_rule": 900,
    "mamba2": 900,
    "short_conv": 900,
    "attention": {"tokamax": 64, "splash": 360, "xla": 1900},
    "embedding_lookup": 2200,  # the table's gradient is summed in float32
    "grouped_matmul": {"tokamax": 190, "xla": 830},
    "linear": 460,  # 0 on GPUs and a v5p, 224 on a v6e, 448 on a tpu7x
    "linear_cross_entropy": 6400,  # 2263 on an H200, 3135 on a v5p, 4137 on a v6e, 6269 on a tpu7x
    "all_gather_matmul": {"mosaic_gpu": 200, "permute": 450, "xla": 260},
    "matmul_reduce_scatter": {"mosaic_gpu": 72, "permute": 150, "xla": 84},
    "all_gather_matmul_fp8": {"permute": 300, "xla": 350},
    "matmul_reduce_scatter_fp8": {"permute": 120, "xla": 165},
    "rms_norm": 72,
    "rms_norm_branch": 72,
    "rope": 290,
    "swiglu": 16,
    "grouped_swiglu": 16,
}
"""Budget in MiB of temporary memory for an op's first case with gradients on any chip, or per
implementation."""

KNOWN_SPILLS = {("attention", "tokamax"): 200}
"""Bytes of stack per thread, for kernels that are not written here: Tokamax's own, in the blocks and stages
that were the fastest on an H100 despite the spill."""


def assert_compiles(op: registry.Op, machine: str) -> None:
    """Compiles every supported implementation of an op's first case; skips cuDNN if its library is not
    installed.
    """
    case, avals = next(iter(op.cases.items()))
    spec = device.from_name(machine)
    able = [
        i.name
        for i in op.implementations
        if not aot.missing_library(i.name) and i.obstacle(spec, avals) is None
    ]
    assert "xla" in able
    for implementation in able:
        report = aot.compile_op(op, case, machine, implementation)
        budget = BUDGET_MIB[op.name]
        mib = budget[implementation] if isinstance(budget, dict) else budget
        said = aot.failures(report, expect=EXPECTED.get(implementation, ()), temp_bytes=mib * 2**20)
        spills = max((kernel.stack_bytes for kernel in report.spilled), default=0)
        assert spills <= KNOWN_SPILLS.get((op.name, implementation), 0), (op.name, implementation, said)
        assert [line for line in said if " spills: " not in line] == [], (op.name, implementation)
        assert report.output_bytes > 0


@pytest.mark.aot
def test_a_mesh_larger_than_its_topology_is_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(
        ValueError, match=r"h200:8 has 8 devices, but x=4, y=4 needs 16\. Take a larger topology\."
    ):
        aot.virtual_mesh("h200:8", {"x": 4, "y": 4})


def test_a_damaged_executable_is_refused() -> None:
    """A damaged file raises, instead of being read as one without kernels; other bytes have no kernels."""
    literal = bytes([5, 4 << 2]) + b"hello"
    assert riegeli.snappy(literal) == b"hello"
    assert riegeli.snappy(bytes([9, 0]) + b"a" + bytes([8 - 4 << 2 | 1, 1])) == b"a" * 9, (
        "a copy of what it writes"
    )
    with pytest.raises(ValueError, match=r"5 bytes, not 6: the stream is damaged"):
        riegeli.snappy(bytes([6]) + literal[1:])

    def file(kind: bytes, compression: bytes) -> bytes:
        data = compression + b"\0"
        header = bytes(8) + len(data).to_bytes(8, "little") + bytes(8) + kind + bytes(15)
        return bytes.fromhex("83af70d10d884a3f") + bytes(16) + header + data

    assert cubin.kernels(b"no executable") == ()
    assert list(riegeli.records(file(b"r", b"\0"))) == [b""]
    with pytest.raises(ValueError, match=r"kind b't' cannot be read"):
        list(riegeli.records(file(b"t", b"\0")))
    with pytest.raises(ValueError, match=r"compression b'z' cannot be read"):
        list(riegeli.records(file(b"r", b"z")))
