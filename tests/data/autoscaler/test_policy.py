import pytest

from jtrain.data.autoscaler.policy import TARGET_BUSY, WINDOW_S
from jtrain.data.mixture.schedule import Constant, Staged
from tests.data.autoscaler.autoscaling import STEP_TOKENS, STEPS, even, on, policy_of, scaler, windows


def test_one_strange_window_changes_nothing() -> None:
    """Every second window costs ten times as much, as if a disk stalled: no two windows in a row agree."""
    policy = scaler(even(2))
    windows(policy, 3, [0.1, 0.1])
    before, needs = policy.placement, policy.needs.sum()
    for i in range(27):
        busy = 0.1 if i % 2 else 1.0
        assert windows(policy, 1, [busy, busy]) == []
    assert policy.placement == before
    assert policy.needs.sum() == pytest.approx(needs)


def test_costs_that_swing_by_30_percent_change_a_placement_once() -> None:
    """Even if each swing lasts three windows, 2.8 and 5.2 loaders in turn: the larger number is kept."""
    policy = scaler({"a": 1.0})
    windows(policy, 3, [4 * TARGET_BUSY])
    assert len(policy.placement) == 4
    lines = []
    for i in range(1, 20):
        lines += windows(policy, 3, [4 * TARGET_BUSY * (1.3 if i % 2 else 0.7)])
    assert len(lines) == 1
    assert len(policy.placement) == 6


def test_a_decision_reads_as_a_sentence_with_its_numbers() -> None:
    """3.3 loaders at full load are 4.3 at three quarters."""
    policy = scaler({"wiki": 0.7, "web": 0.3})
    lines = windows(policy, 3, [0.01, 3.25])
    assert lines == ["step 5: loaders 1 -> 5: web needs 4.3 at weight 0.3, now on 0, 1, 2, 3, 4"]


def test_the_need_does_not_shrink_because_the_trainer_waits() -> None:
    """If the need were divided by all seconds, a starved source would seem to need a quarter."""
    needs = []
    for wait in (0.0, 0.75):
        policy = scaler({"web": 1.0})
        windows(policy, 4, [3.0], wait=wait)
        needs.append(policy.needs[0])
    assert needs[0] == pytest.approx(3.0 / TARGET_BUSY)
    assert needs[1] == pytest.approx(needs[0])


def test_cheap_sources_share_one_loader_and_a_heavy_one_has_several() -> None:
    policy = scaler(even(40))
    windows(policy, 4, [2.0] + [1e-3] * 39)
    assert len(on(policy, 0)) == 3
    assert len(set.union(*(on(policy, s) for s in range(1, 40)))) == 1


def test_the_others_stay_where_they_are_when_one_source_grows() -> None:
    """Moving a source means opening its files once more."""
    policy = scaler(even(20))
    windows(policy, 4, [0.04] * 20)
    before = {(n, s) for n, held in policy.placement.items() for s in held if s != 7}
    windows(policy, 4, [0.04] * 7 + [1.6] + [0.04] * 12)
    after = {(n, s) for n, held in policy.placement.items() for s in held if s != 7}
    assert len(on(policy, 7)) >= 2
    assert after == before


def test_the_cap_holds_and_the_bottleneck_is_named_once() -> None:
    """With two loaders, needs are scaled down together, and the log says how many loaders they would take."""
    policy = scaler({"web": 0.9, "wiki": 0.1}, max_loaders=2)
    lines = windows(policy, 10, [9.0, 0.1])
    assert len(policy.placement) == 2
    assert on(policy, 0) == set(policy.placement), "web works on both"
    said = [line for line in lines if "bottleneck" in line]
    assert len(said) == 1
    assert (
        "its sources need 13 loaders and data.max_loaders=2; the largest need: web needs 12 at weight 0.9"
        in said[0]
    )
    windows(policy, 4, [0.1, 0.01])
    assert sum("bottleneck" in line for line in windows(policy, 4, [9.0, 0.1])) == 1, (
        "again after it had passed"
    )


def test_at_the_cap_loaders_are_loaded_alike() -> None:
    """Three equal sources on two loaders: without splitting a source, one loader would have twice the
    load.
    """
    policy = scaler(even(3), max_loaders=2)
    windows(policy, 4, [0.7] * 3)
    copies = [len(on(policy, s)) for s in range(3)]
    share = [sum(1 / copies[s] for s in held) for held in policy.placement.values()]
    assert max(share) <= 1.2 * min(share)


def test_loaders_merge_again_when_their_sources_have_become_cheap() -> None:
    policy = scaler(even(10))
    windows(policy, 4, [0.2] * 10)
    many = len(policy.placement)
    assert many >= 3
    lines = windows(policy, 4, [0.02] * 10)
    assert len(policy.placement) == 1
    assert lines[0].startswith(f"step 5: loaders {many} -> 1: ")
    assert lines[0].endswith("more moved")


def test_a_source_without_weight_is_closed_after_some_windows_and_opened_when_it_is_announced() -> None:
    schedule = Staged(((0, {"a": 1, "b": 1}), (10, {"a": 1}), (1000, {"a": 4, "b": 1})))
    policy = policy_of(("a", "b"), schedule)
    said = [policy.update(step, steps=5, seconds=WINDOW_S, wait_s=0.0)[1] for step in (15, 20, 25)]
    assert said == [[], [], ["step 25: loaders 1 -> 1: b needs 0 at weight 0, now on none"]]
    assert policy.placement == {0: (0,)}
    placement, lines = policy.update(995, steps=1, seconds=0.3, wait_s=0.0)
    assert placement == {0: (0, 1)}
    assert lines[0].startswith("step 995: loaders 1 -> 1: b needs ")


def test_a_weight_that_rises_between_windows_is_acted_on_at_once() -> None:
    schedule = Staged(((0, {"a": 99, "b": 1}), (1000, {"a": 1, "b": 99})))
    policy = policy_of(("a", "b"), schedule)
    windows(policy, 3, [0.1, 0.05])
    assert len(policy.placement) == 1
    _, lines = policy.update(995, steps=1, seconds=0.3, wait_s=0.0)
    assert len(lines) == 1
    assert len(on(policy, 1)) == 7, "5 loaders at a weight of 1 are 6.6 at three quarters"


def test_a_source_never_read_is_guessed_like_the_others() -> None:
    schedule = Staged(((0, {"a": 1, "b": 1}), (1000, {"a": 1, "b": 1, "c": 2})))
    policy = policy_of(("a", "b", "c"), schedule)
    windows(policy, 3, [1.0, 1.0])
    policy.update(995, steps=1, seconds=0.3, wait_s=0.0)
    assert policy.needs[2] == pytest.approx(0.5 * 2.0 / TARGET_BUSY)


def test_a_rare_source_is_known_by_its_first_run() -> None:
    """A run of a source at 1 % lasts many windows: 50 s for 1,000 tokens, of which 100 are read in a step."""
    policy = scaler({"web": 0.99, "rare": 0.01})
    policy.observe(1, read_s=50.0, tokens=1000, documents=10)
    windows(policy, 2, [0.1, 0.0])
    assert policy.needs[1] == pytest.approx(
        50.0 * 0.01 * STEP_TOKENS / 1000 / (WINDOW_S / STEPS) / TARGET_BUSY
    )


def test_weights_that_count_documents_are_turned_into_tokens() -> None:
    """Half of the documents each, nine tenths of the tokens from one: so is its need."""
    policy = policy_of(("short", "long"), Constant({"short": 0.5, "long": 0.5}), unit="samples")
    for _ in range(2):
        for source, share in enumerate((0.1, 0.9)):
            tokens = int(STEPS * STEP_TOKENS * share)
            policy.observe(source, read_s=2.0 * share * WINDOW_S, tokens=tokens, documents=STEPS)
        policy.update(5, steps=STEPS, seconds=WINDOW_S, wait_s=0.0)
    assert policy.needs.tolist() == pytest.approx([0.2 / TARGET_BUSY, 1.8 / TARGET_BUSY], rel=0.5)
    assert policy.needs[1] == pytest.approx(1.8 / TARGET_BUSY)


def test_the_opening_of_a_source_does_not_count_as_its_cost() -> None:
    """The first run opens the source; the second window shows what reading costs."""
    policy = scaler({"a": 1.0})
    policy.observe(0, read_s=60.0, tokens=100, documents=1)
    windows(policy, 4, [0.3])
    assert len(policy.placement) == 1
    assert policy.needs[0] <= 0.5 / TARGET_BUSY
