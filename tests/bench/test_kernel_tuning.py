"""Tuning for a config: the step's own shapes are measured, and the same step then finds them."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jtrain.bench import kernels
from jtrain.bench.__main__ import bench
from jtrain_kernels import device, registry, tuned

REAL = ("llama1b", "llama8b", "llama70b", "qwen3_8b", "qwen3_30b_a3b")


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(arguments)


def cases(chip: str, *arguments: str) -> list[kernels.Case]:
    return kernels.config_cases(options(*arguments), device.from_name(chip))


def test_a_config_is_tuned_at_its_own_shapes(tmp_path: Path) -> None:
    """Of a mixture on a CPU only the experts' matmul has a choice; its key is the one that the step asks for."""
    arguments = ["--config=tiny_moe", "--set", "data.seq_len=64", "--set", "data.global_batch=2"]
    assert bench(["kernels", "--tune", "--op", "grouped_matmul", *arguments, "--out", str(tmp_path)]) == 0
    entries = tuned.read(tmp_path / "cpu.json")
    wanted = [case for case in cases("cpu", *arguments) if case.op.name == "grouped_matmul"]
    assert {tuned.key(case.op.name, case.avals) for case in wanted} == set(entries)
    assert len(entries) >= 1
    for case in wanted:
        choice = registry.choose(case.op, device.from_name("cpu"), case.avals, measured=entries)
        assert choice.because.startswith("it was the fastest measured on cpu for group_size=8")
        assert "nearest" not in choice.because


def test_a_wrong_configuration_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be the fastest: it computes nothing. The gradients are compared too."""

    def configs(spec: device.DeviceSpec, avals: registry.Avals) -> list[dict[str, int]]:
        return [{"times": times} for times in (1, 0)]

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    implementations = (
        registry.Implementation("other", lambda x, times: times * jnp.sin(x), configs=configs),
        registry.Implementation("xla", lambda x: jnp.sin(x)),
    )
    case = kernels.Case(registry.Op("sine", implementations, {"small": {"x": x}}), "small", {"x": x})
    assert len(list(kernels._tune(case, device.from_name("cpu"), tmp_path))) == 1
    assert "other {'times': 0}: WRONG by 1 of the largest element, left out" in capsys.readouterr().out
    (entry,) = tuned.read(tmp_path / "cpu.json").values()
    assert entry.config != {"times": 0}


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("chip", ("h200", "v5p"))
@pytest.mark.parametrize("config", REAL)
def test_every_key_of_a_real_config_is_one_that_tuning_writes(chip: str, config: str) -> None:
    """The traced step asks for attention at the config's rows; an entry for each case is found again, none is near."""
    spec, found = device.from_name(chip), cases(chip, f"--config={config}", "--set", "model.num_layers=1")
    assert {"attention", "rms_norm_branch", "rope", "linear"} <= {case.op.name for case in found}
    for case in found:
        entry = tuned.Entry(*tuned.key(case.op.name, case.avals), registry.REFERENCE, {}, 1.0, "by hand")
        again = tuned.nearest({tuned.key(case.op.name, case.avals): entry}, case.op.name, case.avals)
        assert again is entry
        assert registry.choose(case.op, spec, case.avals, measured={}).because


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """With what goes together, and what the step calls."""
    for arguments, message in (
        (["--explain", "rope", "--case", "llama8b", "--config=tiny"], r"--case llama8b and --config tiny both say"),
        (["--explain", "rope", "--set", "seed=1"], r"--with and --set change a config\. Add --config NAME"),
        (
            ["--explain", "grouped_matmul", "--config=tiny"],
            r"step of tiny does not call grouped_matmul\. It calls: att",
        ),
        (
            ["--explain", "rope", "--device", "mi300x", "--config=llama8b"],
            r"the mesh has 8 devices, .* no compiler for 8 x mi300x\. .*--set mesh\.data=8.* h100, h200, b200, v4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            bench(["kernels", *arguments])
