"""Choice of implementations: forced > cost model > reference, each with its reason."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.bench import kernels
from jtrain.bench.__main__ import bench
from jtrain_kernels import device, registry
from jtrain_kernels.compile_only import aot
from jtrain_kernels.examples import new_backend
from jtrain_kernels.registry import Implementation, Op
from jtrain_kernels.rms_norm.api import rms_norm
from tests.kernels.gradients import agree_with, dtypes, normal
from tests.processes import program

ROOT = Path(__file__).parents[2]
H200, V5P = device.from_name("h200"), device.from_name("v5p")
AVALS: registry.Avals = {"x": jax.ShapeDtypeStruct((100, 64), jnp.bfloat16), "factor": 2}


def only_gpus(device: device.DeviceSpec, avals: registry.Avals) -> str | None:
    return None if device.platform == "gpu" else f"it is for GPUs, and a {device.name} is none"


def times(factor: int, x: jax.Array, **config: int) -> jax.Array:
    return x * factor + sum(config.values())


def costs(seconds: float | None) -> Any:
    return lambda device, avals: seconds


GPU = Implementation("cudnn", times, only_gpus, configs=lambda device, avals: ({"tile": 1}, {"tile": 2}))
XLA = Implementation("xla", times)
OP = Op("times", (GPU, XLA))


def test_without_more_knowledge_the_reference_runs() -> None:
    """The choice explains that nothing is known of the other implementation, or why it cannot run."""
    got = registry.choose(OP, H200, AVALS)
    assert got.implementation is XLA
    assert got.rejected == (("cudnn", "nothing is predicted for xla to compare it with"),)
    got = registry.choose(OP, V5P, AVALS)
    assert (got.implementation, got.because) == (XLA, "no other runs")
    assert got.rejected == (("cudnn", "it cannot run: it is for GPUs, and a v5p is none"),)


def test_the_cost_model_compares_predictions() -> None:
    """The lowest prediction wins; in a tie the reference wins, and one without a prediction loses."""
    slow, fast = dataclasses.replace(XLA, cost_s=costs(4e-6)), dataclasses.replace(GPU, cost_s=costs(1e-6))
    got = registry.choose(Op("times", (fast, slow)), H200, AVALS)
    assert (got.implementation, dict(got.config)) == (fast, {"tile": 1})
    assert got.because == "the cost model predicts 1 us, the least"
    assert got.rejected == (("xla", "predicted 4 us against 1 us"),)
    tie = dataclasses.replace(GPU, cost_s=costs(4e-6))
    assert registry.choose(Op("times", (tie, slow)), H200, AVALS).implementation is slow
    got = registry.choose(Op("times", (GPU, slow)), H200, AVALS)
    assert (got.implementation, got.rejected[0][1]) == (slow, "nothing is predicted for it")
    unproven = dataclasses.replace(fast, only_forced="no chip has run it")
    got = registry.choose(Op("times", (unproven, slow)), H200, AVALS)
    why = "it is chosen only if it is forced: no chip has run it"
    assert (got.implementation, got.rejected) == (slow, (("cudnn", why),))
    assert (
        registry.choose(Op("times", (unproven, slow)), H200, AVALS, forced="cudnn").implementation is unproven
    )


def test_optional_modules_are_those_of_the_machine_that_runs() -> None:
    """A program of this process takes what is installed here; one of another machine, what its extra brings.

    `jax.no_such_module` lacks a module of a package that is here, `no_such_package.core` the package too.
    """
    slow = dataclasses.replace(XLA, cost_s=costs(4e-6))
    for module in ("jax.no_such_module", "no_such_package.core"):
        optional = dataclasses.replace(GPU, cost_s=costs(1e-6), modules=("jax.numpy", module))
        op = Op("times", (optional, slow))
        here, there = registry.choose(op, H200, AVALS), registry.choose(op, H200, AVALS, installed=True)
        assert (here.implementation, there.implementation) == (slow, optional)
        reason = f"not installed: {module} (pip install 'jtrain[cuda]')"
        assert here.rejected == (("cudnn", f"it cannot run: {reason}"),)
        with pytest.raises(ValueError, match=re.escape(f"kernels.times=cudnn: {reason}. There are: ")):
            registry.choose(op, H200, AVALS, forced="cudnn")
        # A chip that the kernel is not for needs no installation.
        assert optional.obstacle(V5P, AVALS) == "it is for GPUs, and a v5p is none"
        present = dataclasses.replace(optional, modules=("jax.numpy",))
        assert registry.choose(Op("times", (present, slow)), H200, AVALS).implementation is present


def test_what_is_forced_runs_or_fails() -> None:
    """A forced implementation is never replaced by another one."""
    got = registry.choose(OP, H200, AVALS, forced="cudnn")
    assert (got.implementation, got.because, dict(got.config)) == (GPU, "it is forced", {"tile": 1})
    assert got.rejected == (("xla", "cudnn is forced"),)
    with pytest.raises(
        ValueError, match=r"kernels.times=cudnn: it is for GPUs, and a v5p is none. There are: cudnn, "
    ):
        registry.choose(OP, V5P, AVALS, forced="cudnn")
    with pytest.raises(
        ValueError, match=r"kernels.times=cuda: there is no such implementation. There are: cudnn, xla"
    ):
        registry.choose(OP, H200, AVALS, forced="cuda")
    nowhere = Op("times", (GPU, dataclasses.replace(XLA, supports=lambda device, avals: "it is too large")))
    with pytest.raises(ValueError, match=r"kernels.times: not even xla runs: it is too large\."):
        registry.choose(nowhere, H200, AVALS)


def test_an_op_ends_with_its_reference() -> None:
    """The implementations of an op have distinct names."""
    for implementations in ((), (XLA, GPU), (XLA, XLA)):
        with pytest.raises(ValueError, match=r"kernels.times: .* the last one xla"):
            Op("times", implementations)


def test_a_jitted_function_is_traced_anew_for_another_device() -> None:
    """The same function with the same argument uses XLA on a TPU and the other implementation on a GPU."""
    op = Op(
        "times", (dataclasses.replace(GPU, cost_s=costs(1e-6)), dataclasses.replace(XLA, cost_s=costs(2e-6)))
    )
    traces = []

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        traces.append(registry.device().name)
        return registry.call(op, factor=2, x=x)

    x = jnp.ones(3)
    got = []
    for spec in (H200, V5P, H200):
        with registry.on(spec):
            got.append(float(run(x)[0]))
    assert got == [3.0, 2.0, 3.0]
    assert traces == ["h200", "v5p"]
    assert float(run(x)[0]) == 2.0
    assert traces[-1] == "cpu", "the live device"


def test_names_that_mean_nothing_are_refused_before_anything_is_traced() -> None:
    """Unknown ops and implementations are refused with the nearest names; arguments must be arrays or plain
    values.
    """
    with (
        pytest.raises(
            ValueError,
            match=r"kernels: no op is called 'rms_nrm'\. Did you mean rms_norm, .*There are: .*swiglu",
        ),
        registry.on(H200, forced={"rms_nrm": "xla"}),
    ):
        pass
    with (
        pytest.raises(
            ValueError, match=r"kernels.rms_norm=x: there is no such implementation\. There are: .*xla"
        ),
        registry.on(H200, forced={"rms_norm": "x"}),
    ):
        pass
    with pytest.raises(
        ValueError, match=r"kernels: argument x is a list; ops take arrays and plain values\."
    ):
        registry.call(OP, x=[1.0], factor=2)


def test_every_op_of_the_package_is_found_with_cases_that_it_can_trace(
    emulated_devices: list[jax.Device],
) -> None:
    """Every case traces for an absent device, with gradients that have the shapes of their arguments."""
    assert {"rms_norm", "rope", "swiglu", "linear", "embedding_lookup", "linear_cross_entropy"} <= set(
        registry.ops()
    )
    for op in registry.ops().values():
        for case, avals in op.cases.items():
            function, axis = aot.op_function(op, avals, gradients=True), aot.axis_of(avals)
            if axis is not None:
                function = aot.over(jax.sharding.Mesh(np.array(emulated_devices), axis[:1]), function)
            arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
            with registry.on(H200, forced={op.name: "xla"}):
                _, (gradients,) = jax.eval_shape(function, arrays)
            got = {name: x.shape for name, x in gradients.items()}
            want = {name: x.shape for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
            assert got == want, (op.name, case)


def test_an_unknown_chip_is_described_by_itself() -> None:
    """An unknown chip has no peaks; the reference still runs on it."""

    @dataclasses.dataclass(frozen=True)
    class Chip:
        platform: str = "gpu"
        device_kind: str = "NVIDIA GeForce 256"
        core_count: int = 4
        compute_capability: str = "9.0"

    spec = device.live(Chip())
    assert (spec.name, spec.num_cores, spec.compute_capability) == ("NVIDIA GeForce 256", 4, (9, 0))
    assert spec.peak_bf16_flops is None
    assert registry.choose(Op("times", (XLA,)), spec, AVALS).because == "it is the only one"


@dtypes
def test_the_example_of_a_new_back_end_computes_the_op(dtype: str) -> None:
    """Value and gradients agree with float64 in the first configuration."""

    def formula(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale[None, None]

    op = new_backend.IMPLEMENTATIONS["rms_norm"]
    agree_with(
        lambda x, s: op.call(x=x, scale_C=s, eps=0.1, rows=8),
        formula,
        (normal(0, 2, 8, 16), normal(1, 16)),
        dtype,
    )


def test_the_example_of_a_new_back_end_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """A distribution that names the module provides chip and kernel; on another chip the kernel is
    refused.
    """
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[jtrain_kernels]\nacme = jtrain_kernels.examples.new_backend\n")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "120"}
    done = subprocess.run(
        program(__file__, "explain_acme"), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "acme is taken with rows=64: the cost model predicts" in done.stdout
    assert "acme is not: it cannot run: it is written for acme1, not for h200" in done.stdout
    assert "[1. 1. 1. 1.]" in done.stdout


def test_every_configuration_is_timed_and_the_fastest_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is printed with its time; the row is of the fastest."""
    assert bench(["kernels", "--tune", "--op", "rms_norm", "--case", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "rms_norm tiny, xla {}:" in said
    assert "rms_norm tiny: xla {}  " in said


@pytest.mark.parametrize("name", ("h200", "v5p"))
def test_every_ops_choice_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For every case one implementation is chosen and each other has a reason, without a device or
    compilation.
    """
    for op in registry.ops().values():
        assert bench(["kernels", "--explain", op.name, "--device", name]) == 0
        said = capsys.readouterr().out
        assert said.count(" is taken") == len(op.cases)
        for implementation in registry.implementations(op):
            lines = [line for line in said.splitlines() if line.startswith(f"  {implementation.name} is ")]
            assert len(lines) == len(op.cases)
            assert all(len(line.partition(": ")[2]) > 10 for line in lines), lines


def test_an_op_that_communicates_needs_its_devices_to_be_timed() -> None:
    """Timing runs if enough devices are present; otherwise the message has both numbers."""
    case = kernels.Case(
        registry.find("all_gather_matmul"), "llama8b", {"axis_name": "tensor", "axis_size": 8}
    )
    assert kernels.too_few_devices(case) is None
    sixteen = case._replace(avals={"axis_name": "tensor", "axis_size": 16})
    said = kernels.too_few_devices(sixteen)
    assert said == "all_gather_matmul llama8b needs 16 devices along tensor, and 8 are here"


def test_the_benchmark_refuses_what_it_cannot_mean(tmp_path: Path) -> None:
    """Refuses contradicting options, an unknown case, and timing an 8B model's sizes on a CPU."""
    for arguments, message in (
        (["--device", "h200"], r"--device and --compile are for --explain OP"),
        (["--explain", "rope", "--tune"], r"--explain runs nothing and --tune runs everything"),
        (["--explain", "rope", "--case", "huge"], r"rope has no case huge\. There are: llama8b"),
        (["--tune"], r"times of a CPU are no .* name --config, or --op and --case"),
        (["--explain", "rope", "--device", "h20"], r"No device is called 'h20'"),
        (
            ["--explain", "rop"],
            r"kernels: no op is called 'rop'\. Did you mean rope\? There are: attention, ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            bench(["kernels", *arguments])


def test_rms_norm_is_unchanged_by_its_registration() -> None:
    """A call through the registry equals a call of the only implementation, under jit and grad."""
    x, scale = jnp.asarray(normal(0, 4, 16)), jnp.asarray(normal(1, 16))
    got = jax.jit(jax.grad(lambda x: rms_norm(x, scale, 1e-6).sum()))(x)
    with registry.on(V5P, forced={"rms_norm": "xla"}):
        want = jax.jit(jax.grad(lambda x: rms_norm(x, scale, 1e-6).sum()))(x)
    np.testing.assert_array_equal(got, want)
