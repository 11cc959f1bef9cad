"""Closed forms against the tables that their papers print."""

from typing import Any

import pytest

from jtrain.plan.report.plan_sheet import survey_bytes
from tests.plan.report import published as form

GIB = 2**30

KORTHIKANTI: dict[str, dict[str, Any]] = {
    "22B": dict(a=64, h=6144, l=48, t=8, p=1, b=4),
    "175B": dict(a=96, h=12288, l=96, t=8, p=8, b=1, interleaved=3),
    "530B": dict(a=128, h=20480, l=105, t=8, p=35, b=1, interleaved=3),
    "1T": dict(a=160, h=25600, l=128, t=8, p=64, b=1, interleaved=None),
}


@pytest.mark.parametrize(
    ("name", "none_gib", "selective_gib", "states_gib"),
    [
        ("22B", 59.25, 9.5625, 45.5625),
        ("175B", 66.84375, 12.3515625, 45.5625),
        ("530B", 114.0234375, 23.076171875, 31.640625),
        ("1T", 131.25, 26.5625, 32.958984375),
    ],
)
def test_korthikanti_figure_1(name: str, none_gib: float, selective_gib: float, states_gib: float) -> None:
    """Twelve values of arXiv:2205.05198, to the last digit."""
    sizes = KORTHIKANTI[name]
    none = form.korthikanti_activation_bytes(**sizes, sequence_parallel=False, recompute="none")
    selective = form.korthikanti_activation_bytes(**sizes, sequence_parallel=True, recompute="selective")
    states = form.korthikanti_state_bytes(**{key: sizes[key] for key in "hltp"})
    assert none / GIB == pytest.approx(none_gib, rel=1e-12)
    assert selective / GIB == pytest.approx(selective_gib, rel=1e-12)
    assert states / GIB == pytest.approx(states_gib, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("22B", (66.84, 49.42, 16.18, 7.64)),
        ("175B", (62.04, 56.53, 18.49, 8.71)),
        ("530B", (58.31, 62.04, 20.27, 9.42)),
        ("1T", (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_korthikanti_figure_7(name: str, percent: tuple[float, ...]) -> None:
    """Memory relative to tensor parallelism alone, within half a point: the rest is embedding and output."""
    sizes = KORTHIKANTI[name]
    base = form.korthikanti_activation_bytes(**sizes, sequence_parallel=False, recompute="none")
    ways: tuple[dict[str, Any], ...] = (
        dict(sequence_parallel=True, recompute="none"),
        dict(sequence_parallel=False, recompute="selective"),
        dict(sequence_parallel=True, recompute="selective"),
        dict(sequence_parallel=False, recompute="full"),
    )
    got = [100 * form.korthikanti_activation_bytes(**sizes, **way) / base for way in ways]
    assert got == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize(
    ("n", "stage", "gigabytes"),
    [
        (1, 3, (120, 2048, 16000)),
        (4, 1, (52.5, 896, 7000)),
        (4, 2, (41.25, 704, 5500)),
        (4, 3, (30, 512, 4000)),
        (16, 1, (35.6, 608, 4750)),
        (16, 2, (21.6, 368, 2875)),
        (16, 3, (7.5, 128, 1000)),
        (64, 1, (31.4, 536, 4187.5)),
        (64, 2, (16.6, 284, 2218.75)),
        (64, 3, (1.88, 32, 250)),
        (256, 1, (30.4, 518, 4047)),
        (256, 2, (15.4, 263, 2055)),
        (256, 3, (0.47, 8, 62.5)),
        (1024, 1, (30.1, 513.5, 4012)),
        (1024, 2, (15.1, 257.8, 2014)),
        (1024, 3, (0.12, 2, 15.6)),
    ],
)
def test_zero_table(n: int, stage: int, gigabytes: tuple[float, ...]) -> None:
    """7.5B, 128B and 1T of arXiv:1910.02054, to the digits that it prints."""
    got = [form.zero_bytes(params, n, stage) / 1e9 for params in (7.5e9, 128e9, 1e12)]
    assert got == pytest.approx(gigabytes, rel=3e-3, abs=5e-3)


@pytest.mark.parametrize(
    ("stage", "offload", "init", "device_gib", "host_gib"),
    [
        (2, "none", False, 15.93, 127.45),
        (2, "optimizer", False, 5.31, 127.45),
        (3, "none", True, 6.09, 1.43),
        (3, "none", False, 6.09, 127.45),
        (3, "optimizer", True, 0.78, 63.72),
        (3, "optimizer", False, 0.78, 127.45),
        (3, "all", True, 0.12, 71.69),
        (3, "all", False, 0.12, 127.45),
    ],
)
def test_deepspeed_table(stage: Any, offload: Any, init: bool, device_gib: float, host_gib: float) -> None:
    """T5-3B on 8 GPUs, 2851 million parameters, the largest layer 32 million: DeepSpeed's docs, to 0.01
    GiB.
    """
    device, host = form.deepspeed_bytes(2851e6, 32e6, 8, stage, offload=offload, init=init)
    assert device / GIB == pytest.approx(device_gib, abs=0.01)
    assert host / GIB == pytest.approx(host_gib, abs=0.01)


@pytest.mark.parametrize(
    ("h", "l", "billions"),
    [
        (2304, 24, 1.7),
        (6144, 40, 18.4),
        (10240, 60, 76.1),
        (12288, 80, 145.6),
        (20480, 105, 529.6),
        (25600, 128, 1008.0),
    ],
)
def test_megatron_parameters(h: int, l: int, billions: float) -> None:  # noqa: E741
    """The models of arXiv:2104.04473, table 1, to 0.1B."""
    assert form.megatron_parameters(h=h, l=l) / 1e9 == pytest.approx(billions, abs=0.05)


def test_megatron_training_times() -> None:
    """GPT-3 on 1024 A100 and 1T on 3072: the paper's 34 and 84 days are these, rounded; 8 T P is its own
    FLOPs.
    """
    gpt3 = form.megatron_training_days(tokens=300e9, params=175e9, n=1024, flops_per_s=140e12)
    trillion = form.megatron_training_days(tokens=450e9, params=1.008e12, n=3072, flops_per_s=163e12)
    assert (gpt3, trillion) == pytest.approx((33.9, 83.9), abs=0.05)
    assert form.megatron_training_days(
        tokens=450e9, params=1e12, n=3072, flops_per_s=163e12
    ) == pytest.approx(83.2, abs=0.05)
    flops = form.megatron_flops(h=12288, l=96, b=1536)
    eight_tp = 8 * 1536 * 2048 * form.megatron_parameters(h=12288, l=96)
    assert flops / eight_tp == pytest.approx(1.03, abs=0.01)  # attention


def test_scaling_book_on_v5p() -> None:
    """Part 5 and the worked Llama 3 70B of part 6: 4M tokens over 8,960 chips."""
    alpha = form.roofline_alpha(4.59e14, 1.8e11)
    assert alpha == 2550
    assert form.data_parallel_min_tokens(alpha, 3) == 850
    assert form.tensor_parallel_limit(28_672, alpha, 2) == pytest.approx(22.49, abs=0.01)
    assert form.mixed_min_tokens(alpha, 32_768, data_axes=2) == pytest.approx(397, abs=0.5)
    tokens = 4.0 * 2**20
    assert tokens / 8960 == pytest.approx(468, abs=0.2)
    assert form.mixed_min_tokens(alpha, 28_672, data_axes=2) == pytest.approx(453.6, abs=0.1)
    assert form.mixed_optimum(tokens, 28_672, 8960, data_axes=2) == pytest.approx(1618, abs=2)


def test_scaling_book_times_and_memory() -> None:
    """6.3e24 FLOPs: 44.3 days at 40 %, 16.9 on twice the chips at 50 %; 21.6 TB are 225 chips of 96 GB."""
    flops = 6 * 70e9 * 15e12
    assert flops == pytest.approx(6.3e24)
    assert form.training_days(flops, n=8960, peak_flops=4.59e14, mfu=0.4) == pytest.approx(44.3, abs=0.05)
    assert form.training_days(flops, n=18_823, peak_flops=4.59e14, mfu=0.5) == pytest.approx(16.9, abs=0.05)
    total = 2 * 70e9 + 8 * 70e9 + 20.9e12
    assert total / 1e12 == pytest.approx(21.6, abs=0.05)
    assert round(total / 96e9) == 225
    feed_forward, attention, tables = (
        80 * 3 * 8192 * 28_672,
        80 * 2 * 8192 * 128 * (64 + 8),
        2 * 8192 * 128_256,
    )
    sizes = [n / 1e9 for n in (feed_forward, attention, tables, feed_forward + attention + tables)]
    assert sizes == pytest.approx((56.3, 12, 2.1, 70.5), abs=0.1)


def test_the_survey_table() -> None:
    """Table I: 1B to 175B, and 80 GB devices."""
    for billions, gigabytes, devices in (
        (1, 40, 1),
        (7, 280, 4),
        (13, 520, 7),
        (70, 2800, 35),
        (175, 7000, 88),
    ):
        needed = survey_bytes(billions * 10**9)
        assert needed == gigabytes * 10**9
        assert -(-needed // (80 * 10**9)) == devices
