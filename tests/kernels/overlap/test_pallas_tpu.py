"""The Pallas TPU kernels of overlapped collectives, emulated on CPUs with race detection, and compiled for TPUs."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain_kernels import compat
from jtrain_kernels.overlap.pallas_tpu.kernel import overlapped
from jtrain_kernels.overlap.schedule import Schedule, Wait, make_schedule

GATHER = make_schedule("all_gather_matmul", "bidirectional", 4)
SCATTER = make_schedule("matmul_reduce_scatter", "bidirectional", 4, slot_rounds=1)
FULL_MESH = make_schedule("matmul_reduce_scatter", "full_mesh", 4, parts=2)
SPECS = {
    "all_gather_matmul": (P("x"), P(None, "x"), P(None, "x")),
    "matmul_reduce_scatter": (P(None, "x"), P("x"), P("x")),
}


@pytest.fixture(autouse=True)
def forgotten_races() -> Iterator[None]:
    """Clears the emulator before and after each test."""
    compat.reset_interpreters()
    yield
    compat.reset_interpreters()


def on_mesh(schedule: Schedule, mesh: Mesh, **options: Any) -> Any:
    *given, out = SPECS[schedule.op]
    body = lambda x, kernel: overlapped(schedule, x, kernel, axis_name="x", **options)  # noqa: E731
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=tuple(given), out_specs=out, check_vma=False))


def emulated(
    schedule: Schedule, mode: Literal["eager", "on_wait"], *, columns: int = 32, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Result of the kernel on four CPU devices, and numpy's, for small integers that are exact in float32."""
    draw = np.random.default_rng(0)
    x = draw.integers(-4, 5, (64, 256)).astype(np.float32)
    kernel = draw.integers(-4, 5, (256, columns)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[: schedule.num_ranks]), ("x",))
    got = on_mesh(schedule, mesh, interpret=compat.tpu_interpret(mode), **options)(x, kernel)
    return np.asarray(got), x @ kernel


@pytest.mark.parametrize(
    ("schedule", "mode", "columns"),
    [
        (GATHER, "eager", 32),
        (SCATTER, "on_wait", 384),
        (FULL_MESH, "on_wait", 32),
        pytest.param(GATHER, "on_wait", 384, marks=pytest.mark.slow),
        *(pytest.param(s, "eager", 384, marks=pytest.mark.slow) for s in (SCATTER, FULL_MESH)),
    ],
    ids=lambda value: f"{value.op}-{value.swizzle}" if isinstance(value, Schedule) else str(value),
)
def test_the_emulated_kernel_computes_the_product_and_does_not_race(
    schedule: Schedule, mode: Literal["eager", "on_wait"], columns: int
) -> None:
    """The product is exact bit for bit in both modes of the emulated DMA engine, with two tiles of contraction.

    With 384 columns a piece has three tiles, one more than there are buffers. A missing wait for what was sent, and a
    buffer that is reused too early, show only `on_wait`, where a copy reads its source as late as it may. A full mesh
    shows the former, because no other message orders a send before the next sum in the same accumulator there.
    """
    got, want = emulated(schedule, mode, columns=columns, tiles=(512, 128, 128))
    np.testing.assert_array_equal(got, want)
    assert not compat.tpu_races_found()


def without_waits(schedule: Schedule) -> Schedule:
    """The schedule without its waits for arriving pieces."""
    programs = [
        tuple(i for i in program if not (isinstance(i, Wait) and i.until == "arrived")) for program in schedule.programs
    ]
    return dataclasses.replace(schedule, programs=tuple(programs))


def test_a_missing_wait_is_a_race_in_one_mode_and_nan_in_the_other() -> None:
    """Each mode finds a fault that the other misses, so every kernel runs in both."""
    two = without_waits(make_schedule("all_gather_matmul", "ring", 2))
    emulated(two, "eager")
    assert compat.tpu_races_found()
    compat.reset_interpreters()
    got, _ = emulated(two, "on_wait")
    assert np.isnan(got).any()


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one rank has nothing to send.*Use a plain matmul"):
        overlapped(make_schedule("all_gather_matmul", "ring", 1), jnp.ones((8, 8)), jnp.ones((8, 8)), axis_name="x")


def test_sizes_without_a_tile_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a dimension of 256 has no tile of at most 20 that is a multiple of 128\. Pad"
    ):
        emulated(make_schedule("all_gather_matmul", "ring", 4), "eager", tiles=(16, 16, 20))


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("chip", ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"))
def test_the_kernels_compile_for_tpus(chip: str) -> None:
    """At llama8b's sizes in bfloat16 Mosaic accepts tiles, copies and semaphores, and only the kernel runs."""
    platform = topologies.get_topology_desc(platform="tpu", topology_name=chip)
    mesh = Mesh(np.array(platform.devices), ("x",))
    n = mesh.size
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        schedule = make_schedule(op, "bidirectional", n)
        *given, _ = SPECS[op]
        shapes = ((8192, 4096), (4096, 1792 * n)) if op == "all_gather_matmul" else ((8192, 1792 * n), (1792 * n, 4096))
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, given, strict=True)
        ]
        with compat.no_compile_cache():
            program = on_mesh(schedule, mesh).lower(*arguments).compile()
        text = program.as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 1
        assert "all-gather" not in text
        assert "reduce-scatter" not in text
