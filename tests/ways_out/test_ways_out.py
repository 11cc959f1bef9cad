"""The advice of refusals, followed word for word, leads to a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ways_out.follow import ways_out
from tests.ways_out.messages import HOLE, messages
from tests.ways_out.scenarios import SCENARIOS
from tests.ways_out.walk import Walk

NOT_FOLLOWED = (Path(__file__).parent / "not_followed.txt").read_text()
"""Blocks of a line `# reason` and messages."""
QUICK = 12
"""Scenarios that the quick suite walks: one in so many."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("walk")
        patch.chdir(folder)
        # The command line sets it, for the processes that it starts.
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield Walk(folder)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.slow] * (number % QUICK != 1))
        for number, text in enumerate(SCENARIOS)
    ],
)
def test_every_way_out_of_a_refusal_leads_to_a_run(text: str, walk: Walk) -> None:
    """Each alternative that a message names, not just one of them."""
    words = SCENARIOS[text]
    code, message = walk.run(words)
    assert code == 2, message
    for part in text.split(HOLE):
        assert part in message
    ways = walk.ways_out(words)
    assert ways, f"nothing to follow in: {message}"
    for way in ways:
        assert walk.leads_to_a_run(way), (message, way, walk.run(way))


def test_every_message_that_names_a_way_out_is_followed_or_listed_with_a_reason() -> None:
    """No message is in neither place, and the list has none that is followed, or that no source has any more."""
    named = [message for message in messages() if message.names_a_way_out]
    assert len(named) > 150
    followed = {message.listing for message in named if any(text in message.text for text in SCENARIOS)}
    listed = list[str]()
    for block in NOT_FOLLOWED.split("\n\n"):
        reason, *lines = block.splitlines()
        assert reason.startswith("# ")
        assert lines == sorted(lines)
        assert lines
        listed += lines
    assert sorted(listed) == sorted({message.listing for message in named} - followed)


def test_words_are_followed_as_a_user_would() -> None:
    refused = ["launch", "--config=tiny", "--set", "layout.microbatches=3"]
    message = (
        "layout.microbatches=3 does not divide. Set data.global_batch to a multiple of 24, or "
        "layout.microbatches to a divisor of 2."
    )
    assert ways_out(message, refused, {}) == [
        [*refused, "--set", "data.global_batch=24"],
        [*refused, "--set", "layout.microbatches=2"],
    ]
    assert ways_out("--top 1 is of a search. Leave --top out.", ["plan", "--top", "1"], {}) == [["plan"]]
    assert ways_out("too small: add text, or lower data.seq_len.", refused, {}) == []
