"""Valid and refused values of `profile.*`."""

import pytest

from jtrain.config.load import load_config
from jtrain.config.resume import differences
from jtrain.config.run import build_run
from jtrain.profile.spec import CLOCKS, ProfileSpec


def test_a_window_is_set_by_its_two_steps() -> None:
    """Set by --set profile.steps=(20,25) or the `profile` fiddler; there is no window by default."""
    assert build_run(load_config("tiny")).profile == ProfileSpec(steps=None, clocks="auto")
    asked = build_run(
        load_config("tiny", (), ["profile.steps=(20,25)", "profile.clocks=scripted:/my/clocks.json"])
    )
    assert asked.profile == ProfileSpec(steps=(20, 25), clocks="scripted:/my/clocks.json")
    assert build_run(load_config("tiny", ["profile"])).profile.steps == (20, 25)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": (0, 5)}, r"profile\.steps=\(0, 5\) includes step 1.*Set profile\.steps=\(1, 5\) or later"),
        ({"steps": (-3, 1)}, r"includes step 1.*Set profile\.steps=\(1, 2\)"),
        ({"steps": (7, 7)}, r"profile\.steps=\(7, 7\) holds no step.*Set profile\.steps=\(7, 12\)"),
        ({"steps": (9, 4)}, r"profile\.steps=\(9, 4\) holds no step"),
        (
            {"clocks": "nvlm"},
            r"profile\.clocks='nvlm' must be one of auto, none, nvml, amd, tpu, cpu, scripted:FILE",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused(fields: dict[str, object], said: str) -> None:
    """Each message has the numbers and the way out."""
    with pytest.raises(ValueError, match=said):
        ProfileSpec(**fields)  # pyright: ignore[reportArgumentType]


def test_a_window_that_the_run_never_reaches_is_refused() -> None:
    """Otherwise the trace would be silently missing."""
    sets = ["num_steps=24", "profile.steps=(20,25)"]
    with pytest.raises(
        ValueError, match=r"profile\.steps=\(20, 25\) ends after the run, num_steps=24.*num_steps=25"
    ):
        build_run(load_config("tiny", (), sets))


def test_every_clock_source_is_taken() -> None:
    """Every source in the error message's list is accepted."""
    for clocks in CLOCKS:
        assert ProfileSpec(clocks=clocks).clocks == clocks


def test_a_resumed_run_may_trace_another_window() -> None:
    """The trace window does not change what a run computes."""
    assert differences("profile.steps: x = None\n", "profile.steps: x = (20, 25)\n") == []
    assert differences("seed: int = 0\n", "seed: int = 1\n") != []
