"""What `profile.*` takes and refuses."""

import pytest

from jtrain import config
from jtrain.profile.spec import CLOCKS, ProfileSpec


def test_a_window_is_set_by_its_two_steps() -> None:
    """As in --set profile.steps=(20,25); none unless asked for."""
    assert config.build(config.load("tiny")).profile == ProfileSpec(steps=None, clocks="auto")
    asked = config.build(config.load("tiny", (), ["profile.steps=(20,25)", "profile.clocks=scripted:/my/clocks.json"]))
    assert asked.profile == ProfileSpec(steps=(20, 25), clocks="scripted:/my/clocks.json")
    assert config.build(config.load("tiny", ["profile"])).profile.steps == (20, 25)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": (0, 5)}, r"profile\.steps=\(0, 5\) begins before step 1.*Set profile\.steps=\(1, 5\) or later"),
        ({"steps": (-3, 1)}, r"begins before step 1 is done.*Set profile\.steps=\(1, 2\)"),
        ({"steps": (7, 7)}, r"profile\.steps=\(7, 7\) holds no step.*Set profile\.steps=\(7, 12\)"),
        ({"steps": (9, 4)}, r"profile\.steps=\(9, 4\) holds no step"),
        ({"clocks": "nvlm"}, r"profile\.clocks='nvlm' must be one of auto, none, nvml, amd, tpu, cpu, scripted:FILE"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused(fields: dict[str, object], said: str) -> None:
    """Each with the numbers and the way out."""
    with pytest.raises(ValueError, match=said):
        ProfileSpec(**fields)  # pyright: ignore[reportArgumentType]


def test_a_window_that_the_run_never_reaches_is_refused() -> None:
    """It would be silently absent at the end."""
    sets = ["num_steps=24", "profile.steps=(20,25)"]
    with pytest.raises(ValueError, match=r"profile\.steps=\(20, 25\) ends after the run, num_steps=24.*num_steps=25"):
        config.build(config.load("tiny", (), sets))


def test_every_clock_source_is_taken() -> None:
    """The list that the refusal names is the list that works."""
    for clocks in CLOCKS:
        assert ProfileSpec(clocks=clocks).clocks == clocks


def test_a_resumed_run_may_trace_another_window() -> None:
    """A trace is what a run leaves behind, not what it computes."""
    assert config.differences("profile.steps: x = None\n", "profile.steps: x = (20, 25)\n") == []
    assert config.differences("seed: int = 0\n", "seed: int = 1\n") != []
