"""Settings of optimizers: learning rates by step, and values that are refused."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jtrain.optim import AdamW, Cosine, Muon, WarmupStableDecay, build
from tests.optim.test_optimizer import INFOS


def checked(kind: Any, **values: Any) -> None:
    """Runs the checks of a spec on values that the tests' type checker would refuse earlier."""
    spec = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(spec, field.name, values.get(field.name, field.default))
    spec.__post_init__()


def rates(spec: AdamW, num_steps: int) -> np.ndarray:
    opt = build(spec, num_steps=num_steps, params=INFOS)
    return np.array([opt.learning_rate(k) for k in range(num_steps)])


def test_the_rate_rises_from_the_first_update_and_the_cosine_ends_where_the_run_does() -> None:
    """Update 0 has a rate above 0, warm-up reaches the peak, and the final fraction is reached at
    `num_steps`.
    """
    got = rates(AdamW(2.0, Cosine(0.25), warmup_steps=4), 12)
    np.testing.assert_allclose(got[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(got[8], 2.0 * (0.25 + 0.75 / 2), rtol=1e-6)
    assert 2.0 * 0.25 < got[-1] < got[-2]
    end = build(AdamW(2.0, Cosine(0.25), warmup_steps=4), num_steps=12, params=INFOS).learning_rate(12)
    np.testing.assert_allclose(end, 0.5, rtol=1e-6)
    assert rates(AdamW(1.0, Cosine(0.0), warmup_steps=0), 1).tolist() == [1.0]


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_warmup_stable_decay_holds_the_peak_and_then_falls(shape: Any, half: float) -> None:
    """The schedule has exact values on the plateau and at the start, middle and end of the decay."""
    spec = AdamW(1.0, WarmupStableDecay(decay_steps=4, final_fraction=0.2, shape=shape), warmup_steps=2)
    got = rates(spec, 10)
    np.testing.assert_allclose(got[:7], [0.5, 1, 1, 1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(got[8], 0.2 + 0.8 * half, rtol=1e-6)
    assert 0.2 < got[9] < got[8] < got[7] < 1.0
    end = build(spec, num_steps=10, params=INFOS).learning_rate(10)
    np.testing.assert_allclose(end, 0.2, rtol=1e-6)


def test_steps_and_fractions_mean_the_same_run() -> None:
    """An int counts steps and a float is a share of the run, rounded down; 0.29 of 100 is 29."""
    for fraction, steps in ((0.29, 29), (0.07, 7), (0.999, 99), (0.0, 0), (0.001, 0)):
        assert build(AdamW(1.0, warmup_steps=fraction), num_steps=100, params=INFOS).warmup == steps
    of_steps = rates(AdamW(1.0, WarmupStableDecay(decay_steps=20), warmup_steps=10), 100)
    assert (
        rates(AdamW(1.0, WarmupStableDecay(decay_steps=0.2), warmup_steps=0.1), 100).tolist()
        == of_steps.tolist()
    )
    assert len(set(of_steps.tolist())) > 20, "the rate must change, or equality proves nothing"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak_lr": -1e-3}, r"optimizer.peak_lr=-0.001 must be a number above 0"),
        ({"peak_lr": math.nan}, r"optimizer.peak_lr=nan must be"),
        ({"peak_lr": "fast"}, r"optimizer.peak_lr='fast' must be a number"),
        ({"b2": 1.0}, r"optimizer.b2=1.0 must be a number of at least 0 and below 1"),
        ({"eps": 0.0}, r"optimizer.eps=0.0 must be"),
        ({"weight_decay": -0.1}, r"optimizer.weight_decay=-0.1 must be"),
        ({"clip_norm": 0.0}, r"optimizer.clip_norm=0.0 must be a number above 0, or None"),
        ({"moment_dtype": "float16"}, r"optimizer.moment_dtype='float16' must be one of float32, bfloat16"),
        (
            {"moment_dtype": "bfloat16", "b2": 0.999},
            r"b2=0.999 with .*bfloat16.* 391% off .*b2 to 0.96 at most",
        ),
        ({"momentum": 1.5}, r"optimizer.momentum=1.5 must be"),
        ({"update_rms": 0.0}, r"optimizer.update_rms=0.0 must be"),
        ({"newton_schulz_steps": 2.5}, r"optimizer.newton_schulz_steps=2.5 must be a number \(int\) above 0"),
        (
            {"warmup_steps": 1.0},
            r"optimizer.warmup_steps=1.0 must be an int .* or a float .* Write 2000 for steps",
        ),
        ({"warmup_steps": 2000.0}, r"optimizer.warmup_steps=2000.0 must be"),
        ({"warmup_steps": -1}, r"optimizer.warmup_steps=-1 must be"),
        ({"warmup_steps": True}, r"optimizer.warmup_steps=True must be"),
        ({"schedule": "cosine"}, r"optimizer.schedule='cosine' must be Cosine or WarmupStableDecay"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    """Each refusal names the field and the allowed values."""
    with pytest.raises(ValueError, match=message):
        checked(Muon, **{"peak_lr": 1e-3, **wrong})
    checked(Muon, peak_lr=1e-3)


def test_a_schedules_own_values_are_checked() -> None:
    """Each refusal of a schedule names the field and the allowed values."""
    with pytest.raises(
        ValueError, match=r"optimizer.schedule.final_fraction=1.5 must be a number from 0 to 1"
    ):
        Cosine(final_fraction=1.5)
    with pytest.raises(ValueError, match=r"optimizer.schedule.decay_steps=1.2 must be an int"):
        WarmupStableDecay(decay_steps=1.2)
    with pytest.raises(ValueError, match=r"optimizer.schedule.shape='cubic' must be one of linear, sqrt"):
        checked(WarmupStableDecay, shape="cubic")


def test_a_schedule_longer_than_the_run_is_refused() -> None:
    """The message has the sum and the shortest run that fits; a run of exactly that length is accepted."""
    with pytest.raises(
        ValueError, match=r"warmup_steps=20 do not fit in num_steps=5. Set num_steps to at least 20"
    ):
        build(AdamW(1e-3, warmup_steps=20), num_steps=5, params=INFOS)
    spec = AdamW(1e-3, WarmupStableDecay(decay_steps=6), warmup_steps=5)
    with pytest.raises(
        ValueError, match=r"warmup_steps=5 and optimizer.schedule.decay_steps=6 .* at least 11"
    ):
        build(spec, num_steps=10, params=INFOS)
    assert build(spec, num_steps=11, params=INFOS).num_steps == 11
    with pytest.raises(ValueError, match=r"num_steps=0 must be at least 1"):
        build(AdamW(1e-3), num_steps=0, params=INFOS)
