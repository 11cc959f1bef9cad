"""Times of every configuration at a config's own shapes."""

import jax
import jax.numpy as jnp
import pytest

from jtrain.bench import Options, kernels
from jtrain.bench.__main__ import bench, parse
from jtrain_kernels import device, registry

REAL = ("llama1b", "llama8b", "llama70b", "qwen3_8b", "qwen3_30b_a3b")


def options(*arguments: str) -> Options:
    return parse(kernels.OPTIONS, ["kernels", *arguments])


def cases(chip: str, *arguments: str) -> list[kernels.Case]:
    return kernels.config_cases(options(*arguments), device.from_name(chip))


@pytest.mark.slow
def test_a_config_is_timed_at_its_own_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a mixture on a CPU only the experts' matmul has a choice; every shape that the step asks for has a
    row.
    """
    arguments = ["--config=tiny_moe", "--set", "data.seq_len=64", "--set", "data.global_batch=2"]
    assert bench(["kernels", "--tune", "--op", "grouped_matmul", *arguments]) == 0
    said = capsys.readouterr().out
    wanted = [case for case in cases("cpu", *arguments) if case.op.name == "grouped_matmul"]
    assert len(wanted) >= 1
    for case in wanted:
        assert f"grouped_matmul {case.name}: xla " in said


def test_a_wrong_configuration_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be the fastest: it computes nothing. The gradients are compared too."""

    def configs(spec: device.DeviceSpec, avals: registry.Avals) -> list[dict[str, int]]:
        return [{"times": times} for times in (1, 0)]

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    implementations = (
        registry.Implementation("other", lambda x, times: times * jnp.sin(x), configs=configs),
        registry.Implementation("xla", lambda x: jnp.sin(x)),
    )
    case = kernels.Case(registry.Op("sine", implementations, {"small": {"x": x}}), "small", {"x": x})
    (fastest,) = kernels.tune_case(case, device.from_name("cpu"))
    assert "other {'times': 0}: WRONG by 1 of the largest element, left out" in capsys.readouterr().out
    assert "{'times': 0}" not in fastest["what"]


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("chip", ("h200", "v5p"))
@pytest.mark.parametrize("config", REAL)
def test_a_real_config_asks_for_each_shape_once(chip: str, config: str) -> None:
    """Every op of the traced step has its shapes, and a choice with a reason."""
    spec, found = device.from_name(chip), cases(chip, f"--config={config}", "--set", "model.num_layers=1")
    assert {"attention", "rms_norm_branch", "rope", "linear"} <= {case.op.name for case in found}
    assert len({(case.op.name, registry.shapes(case.avals)) for case in found}) == len(found)
    for case in found:
        assert registry.choose(case.op, spec, case.avals).because


def test_wrong_options_are_refused() -> None:
    """With what goes together, and what the step calls."""
    for arguments, message in (
        (
            ["--explain", "rope", "--case", "llama8b", "--config=tiny"],
            r"--case llama8b and --config tiny both say",
        ),
        (["--explain", "rope", "--set", "seed=1"], r"--with and --set change a config\. Add --config NAME"),
        (
            ["--explain", "grouped_matmul", "--config=tiny"],
            r"step of tiny does not call grouped_matmul\. It calls: att",
        ),
        (
            ["--explain", "rope", "--device", "mi300x", "--config=llama8b"],
            r"the mesh has 1 devices, .* no compiler for 1 x mi300x\. .*--set mesh\.data=8.* h100, h200, "
            r"b200, v4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            bench(["kernels", *arguments])
