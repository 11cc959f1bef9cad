"""RMSNorm's backward pass in one pass over memory: Pallas for TPUs, Triton for GPUs, against the formula in
float64.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jtrain.hlo.memory_traffic import passes
from jtrain_kernels import compat, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.device import DEVICES, from_name
from jtrain_kernels.rms_norm import pallas_tpu, triton
from jtrain_kernels.rms_norm.api import (
    RMS_NORM,
    RMS_NORM_BRANCH,
    branch_by,
    norm_by,
    rms_norm,
    rms_norm_branch,
)
from tests.kernels.gradients import agree_with, dtypes, in_float32, normal

OPS = (RMS_NORM, RMS_NORM_BRANCH)
SHAPE = (2, 64, 256)


def formula(x: Array, scale: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale[None, None]


def stream_and_branch(pair: tuple[Array, Array]) -> Array:
    """Objective with different weights for stream and branch, so that their gradients cannot be confused."""
    return jnp.concatenate([3 * pair[0], pair[1]], axis=-1)


@dtypes
def test_a_branch_is_the_stream_and_its_norm(dtype: str) -> None:
    """Values and the sum of both gradients agree; in bfloat16 only the norm's own rounding is allowed."""
    agree_with(
        lambda x, s: stream_and_branch(rms_norm_branch(x, s, 0.1)),
        lambda x, s: stream_and_branch((x, formula(x, s))),
        (normal(0, *SHAPE), normal(1, 256)),
        dtype,
    )


@in_float32("mode", ("eager",), ("on_wait",))
def test_the_tpu_kernel_has_the_formulas_gradients(
    dtype: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated with race detection in both orders of copies; memory that was not written is NaN.

    Each part has two or four blocks, whose sums over rows add up.
    """
    monkeypatch.setattr(pallas_tpu, "VMEM_BYTES", 2**18)
    for residual in (False, True):
        assert pallas_tpu.block_rows(2 * 64, 256, jnp.dtype(dtype).itemsize, residual=residual) in (16, 32)
    backward = pallas_tpu.OnePassTPU(compat.tpu_interpret(mode, uninitialized_memory="nan"))
    inputs = normal(0, *SHAPE), normal(1, 256)
    agree_with(lambda x, s: norm_by(x, s, 0.1, backward), formula, inputs, dtype)
    agree_with(
        lambda x, s: stream_and_branch(branch_by(x, s, 0.1, backward)),
        lambda x, s: stream_and_branch((x, formula(x, s))),
        inputs,
        dtype,
    )
    assert not compat.tpu_races_found()


def test_blocks_fit_into_vmem_and_divide_the_rows() -> None:
    """A block has as many rows as fit, a power of two of tiles, the same in both parts."""
    assert pallas_tpu.block_rows(8192, 4096, 2, residual=True) == 64
    assert pallas_tpu.block_rows(8192, 4096, 2, residual=False) == 64
    assert pallas_tpu.block_rows(8192, 1024, 2, residual=True) == 256
    assert pallas_tpu.block_rows(96, 128, 2, residual=True) == 16
    assert pallas_tpu.block_rows(24, 128, 2, residual=True) is None
    assert pallas_tpu.block_rows(8192, 2**20, 2, residual=True) is None


def avals(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    return {
        "x": jax.ShapeDtypeStruct(shape, dtype),
        "scale_C": jax.ShapeDtypeStruct(shape[-1:], dtype),
        "eps": 1e-5,
    }


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("device", "name", "given", "reason"),
    (
        ("h200", "pallas_tpu", avals((8192, 4096)), "it is for TPUs, not for a h200"),
        ("v5p", "pallas_tpu", avals((8192, 100)), "rows of 100 are no multiple of 128 lanes"),
        ("v5p", "pallas_tpu", avals((24, 128)), "24 rows of 128 do not divide into 2 parts of blocks"),
        ("v5p", "pallas_tpu", avals((64, 128), jnp.float16), "x is float16, not bfloat16 or float32"),
        ("v5p", "triton", avals((8192, 4096)), "it is for GPUs, not for a v5p"),
    ),
)
def test_a_kernel_that_cannot_run_says_why(
    op: registry.Op, device: str, name: str, given: Any, reason: str
) -> None:
    """Forcing it is an error that lists the implementations."""
    with pytest.raises(
        ValueError, match=rf"kernels\.{op.name}={name}: {reason}.* There are: pallas_tpu, triton, xla"
    ):
        registry.choose(op, from_name(device), given, forced=name)


def test_triton_says_what_it_lacks() -> None:
    """Reasons: too few registers for a long row, a dtype."""
    h200 = DEVICES["h200"]
    assert triton.refusal(h200, avals((8, 128))["x"], residual=False) is None
    assert "rows of 32768 do not fit into registers" in str(
        triton.refusal(h200, avals((8, 32768))["x"], residual=True)
    )
    assert "x is int32" in str(triton.refusal(h200, avals((8, 128), jnp.int32)["x"], residual=True))


def test_triton_fills_the_device_and_its_registers() -> None:
    """512 threads per core of an H200 with 8 elements each; never more programs than rows."""
    first, *others = triton.configs(DEVICES["h200"], avals((8192, 4096)))
    assert first == dict(programs=132, warps=16, stages=4, capability=90)
    assert len(others) == 8
    llama1b = triton.configs(DEVICES["h200"], avals((8192, 2048)))[0]
    assert llama1b == dict(programs=264, warps=8, stages=4, capability=90)
    assert triton.configs(DEVICES["h200"], avals((3, 128)))[0] == dict(
        programs=3, warps=1, stages=4, capability=90
    )
    # Four stages of three rows of 16384 need 288 KiB of shared memory, three need 192.
    wide = triton.configs(DEVICES["h200"], avals((8192, 16384)))[0]
    assert wide == dict(programs=132, warps=16, stages=3, capability=90)


def test_a_kernel_that_nobody_measured_runs_only_where_it_is_forced() -> None:
    """No cost is predicted, because a prediction would have to count the fusions that a kernel prevents."""
    for device in ("v5p", "h200"):
        choice = registry.choose(RMS_NORM, from_name(device), RMS_NORM.cases["llama8b"])
        assert choice.implementation.name == "xla"
        assert {"pallas_tpu", "triton"} <= set(dict(choice.rejected))
    assert (
        registry.choose(RMS_NORM, from_name("v5p"), RMS_NORM.cases["llama8b"], forced="pallas_tpu").config
        == {}
    )


@pytest.mark.slow
def test_the_triton_source_has_the_formulas_gradients() -> None:
    """Runs Triton's interpreter, which needs torch's arrays: PEER_TORCH_PYTHON names a Python with both.

    13 rows, 4 programs, 96 of 128 lanes; tolerance 1e-6 in float32, and one rounding of the result in
    bfloat16.
    """
    python = os.environ.get("PEER_TORCH_PYTHON")
    if not python:
        pytest.skip("PEER_TORCH_PYTHON names no Python with torch and triton")
    source = Path(triton.__file__).with_name("triton_kernels.py")
    done = subprocess.run(
        [python, Path(__file__).parent / "peers" / "rms_norm_gradients.py", source],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 4
    assert all(error < (1e-6 if name.startswith("float32") else 1e-2) for name, error in errors.items()), (
        errors
    )


def backward_of(op: registry.Op, device: str, name: str) -> aot.Report:
    """The op's backward pass alone, 8192 x 4096 in bfloat16, compiled for a device."""
    wide, scale = (op.cases["llama8b"][key] for key in ("x", "scale_C"))
    public = {RMS_NORM: rms_norm, RMS_NORM_BRANCH: rms_norm_branch}[op]
    cotangents = wide if op is RMS_NORM else (wide, wide)
    return aot.compile_for(
        device,
        lambda x, s, given: jax.vjp(lambda x, s: public(x, s, 1e-5), x, s)[1](given),
        wide,
        scale,
        cotangents,
        forced={op.name: name},
    )


def arrays_moved(report: aot.Report) -> float:
    """Memory traffic of a program, in arrays of the size of x."""
    return sum(p.read_bytes + p.written_bytes for p in passes(report.hlo)) / (8192 * 4096 * 2)


def least(op: registry.Op) -> int:
    """Lower bound in arrays: dy, x and dx, and the gradient of the residual stream."""
    return 3 if op is RMS_NORM else 4


def old_and_new(*devices: str) -> list[Any]:
    """Each device with every op; the quick tests have one op on the oldest device, the other on the newest."""
    quick = {(OPS[0], devices[0]), (OPS[1], devices[-1])}
    return [
        pytest.param(
            op, device, id=f"{op.name}-{device}", marks=[pytest.mark.slow] * ((op, device) not in quick)
        )
        for op in OPS
        for device in devices
    ]


@pytest.mark.aot
@pytest.mark.parametrize(("op", "device"), old_and_new("v5e", "v5p", "v6e", "tpu7x"))
def test_tpus_make_one_pass_of_it(op: registry.Op, device: str) -> None:
    """The kernel moves each array once, plus a twentieth for sums; XLA reads x and dy again for every
    mean.
    """
    report = backward_of(op, device, "pallas_tpu")
    assert aot.failures(report) == ()
    assert any("rms_norm_backward" in name for name in report.calls), report.calls
    assert arrays_moved(report) <= least(op) + 0.05
    assert arrays_moved(backward_of(op, device, "xla")) >= least(op) + 2


@pytest.mark.aot
@pytest.mark.parametrize(("op", "device"), old_and_new("h100", "h200", "b200"))
def test_gpus_make_one_pass_of_it(op: registry.Op, device: str) -> None:
    """The kernel moves each array once, plus a tenth for 132 programs' sums; XLA reads x and dy for every
    mean.
    """
    report = backward_of(op, device, "triton")
    assert aot.failures(report) == ()
    assert any("triton_kernel_call" in name for name in report.calls), report.calls
    assert arrays_moved(report) <= least(op) + 0.1
    assert arrays_moved(backward_of(op, device, "xla")) >= least(op) + 2


def test_the_saved_inverse_is_what_the_input_gives() -> None:
    """The gradient is bit for bit the same as with a recomputed inverse."""
    x, scale = jnp.asarray(normal(0, *SHAPE)), jnp.asarray(normal(1, 256))
    dy = jnp.asarray(normal(2, *SHAPE))
    got = jax.jit(lambda x, s: jax.vjp(lambda x, s: rms_norm(x, s, 0.1), x, s)[1](dy))(x, scale)
    again = jax.jit(lambda x, s: jax.vjp(jax.checkpoint(lambda x, s: rms_norm(x, s, 0.1)), x, s)[1](dy))(
        x, scale
    )
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)
