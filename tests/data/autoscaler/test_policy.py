import math

import numpy as np
import pytest

from jtrain.data.autoscaler.policy import TARGET_BUSY, Autoscaler
from jtrain.data.autoscaler.source_profile import LoaderLoad, SourceProfile
from tests.data.autoscaler.autoscaling import MIB, loads_of, profile, scaler, started, windows


def test_one_strange_window_changes_nothing() -> None:
    """Every second window costs ten times as much, as if a disk stalled: no two windows in a row agree."""
    policy = scaler("a b")
    started(policy, [0.5, 0.5])
    windows(policy, 3, weights=[0.5, 0.5], costs=[2e-3] * 2)
    before, needs = policy.placement, policy.needs.sum()
    for i in range(3, 30):
        cost = 20e-3 if i % 2 else 2e-3
        assert windows(policy, 1, weights=[0.5, 0.5], costs=[cost] * 2, first=i) == []
    assert policy.placement == before
    assert policy.needs.sum() == pytest.approx(needs)


def test_costs_that_swing_by_30_percent_change_a_placement_once() -> None:
    """Even if each swing lasts three windows, 2.8 and 5.2 loaders in turn: the larger number is kept."""
    policy = scaler("a")
    started(policy, [1.0])
    windows(policy, 3, weights=[1.0], costs=[40e-3 * TARGET_BUSY])
    assert len(policy.placement) == 4
    lines = []
    for i in range(1, 20):
        swing = 1.3 if i % 2 else 0.7
        lines += windows(policy, 3, weights=[1.0], costs=[swing * 40e-3 * TARGET_BUSY], first=3 * i)
    assert len(lines) == 1
    assert len(policy.placement) == 6


def test_a_decision_reads_as_a_sentence_with_its_numbers() -> None:
    """The numbers in it add up: 31 ms x 210 / 2 s = 3.3 loaders at full load, 4.3 at three quarters."""
    policy = scaler("wiki web")
    started(policy, [0.7, 0.3], documents=700)
    lines = windows(policy, 4, weights=[0.7, 0.3], costs=[1e-4, 31e-3], documents=700, step_s=2.0)

    want = (
        "step 20: source web needs 4.3 loaders (31 ms/document x 210 documents per 2 s step at weight 0.3, loaders at "
        "most 75 % busy): loaders 1 -> 5; web on 0, 1, 2, 3, 4"
    )
    assert [line.replace("75%", "75 %") for line in lines] == [want]


def test_the_need_does_not_shrink_because_the_trainer_waits() -> None:
    """If the need were divided by the whole step of 4 s, a starved source would seem to need a quarter."""
    needs = []
    for step_s, wait_s in ((1.0, 0.0), (4.0, 3.0)):
        policy = scaler("web")
        started(policy, [1.0])
        windows(policy, 4, weights=[1.0], costs=[30e-3], step_s=step_s, wait_s=wait_s)
        needs.append(policy.needs[0])
    assert needs[0] == pytest.approx(3.0 / TARGET_BUSY)
    assert needs[1] == pytest.approx(needs[0])


def test_cheap_sources_share_one_loader_and_a_heavy_one_has_several() -> None:
    policy = scaler(" ".join(f"s{i}" for i in range(40)))
    started(policy, [1 / 40] * 40, documents=400)
    windows(policy, 4, weights=[1 / 40] * 40, costs=[0.2] + [1e-4] * 39, documents=400)

    on = [{n for n, held in policy.placement.items() if s in held} for s in range(40)]
    assert len(on[0]) == math.ceil(10 * 0.2 / TARGET_BUSY)
    assert len(set.union(*on[1:])) == 1


def test_the_others_stay_where_they_are_when_one_source_grows() -> None:
    """Moving a source means opening its files once more."""
    policy = scaler(" ".join(f"s{i}" for i in range(20)))
    started(policy, [0.05] * 20, documents=400)
    windows(policy, 4, weights=[0.05] * 20, costs=[2e-3] * 20, documents=400)
    before = {(n, s) for n, held in policy.placement.items() for s in held if s != 7}
    windows(policy, 4, weights=[0.05] * 20, costs=[2e-3] * 7 + [80e-3] + [2e-3] * 12, documents=400, first=4)
    after = {(n, s) for n, held in policy.placement.items() for s in held if s != 7}

    assert sum(7 in held for held in policy.placement.values()) >= 2
    assert after == before


def test_the_sources_of_a_dead_loader_move_at_once_and_the_others_stay() -> None:
    policy = scaler(" ".join(f"s{i}" for i in range(30)))
    started(policy, [1 / 30] * 30, documents=300)
    windows(policy, 4, weights=[1 / 30] * 30, costs=[10e-3] * 30, documents=300)
    before = dict(policy.placement)
    victim = min(before)
    assert len(before) >= 3
    lines = windows(policy, 1, weights=[1 / 30] * 30, costs=[10e-3] * 30, documents=300, first=4, dead=[victim])

    assert victim not in policy.placement
    assert {s for held in policy.placement.values() for s in held} == set(range(30))
    for loader, held in before.items():
        assert loader == victim or set(held) <= set(policy.placement[loader])
    assert len(lines) == 1
    named = ", ".join(f"s{s}" for s in before[victim][:4])
    assert f"step 40: loader {victim} is dead: its sources {named} and" in lines[0]
    assert max(policy.placement) > max(before), "a number is never given twice"


def test_all_loaders_may_die() -> None:
    policy = scaler("a b", max_loaders=1)
    started(policy, [0.5, 0.5])
    windows(policy, 1, weights=[0.5, 0.5], costs=[1e-3] * 2, dead=[0])
    assert policy.placement == {1: (0, 1)}


def test_the_cap_holds_and_the_bottleneck_is_named_once() -> None:
    """With two loaders, needs are scaled down together, and the log says how many loaders they would take."""
    policy = scaler("web wiki", max_loaders=2)
    started(policy, [0.9, 0.1])
    lines = windows(policy, 10, weights=[0.9, 0.1], costs=[100e-3, 10e-3])

    assert len(policy.placement) == 2
    assert all(0 in held for held in policy.placement.values()), "web works on both"
    said = [line for line in lines if "bottleneck" in line]
    assert len(said) == 1
    assert "its sources need 13 loaders and data.max_loaders=2, so a step takes about 4.5 times as long" in said[0]
    assert "source web needs 12 loaders (100 ms/document x 90 documents per 1 s step" in said[0]

    windows(policy, 4, weights=[0.9, 0.1], costs=[1e-3, 1e-3], first=10)
    again = windows(policy, 4, weights=[0.9, 0.1], costs=[100e-3, 10e-3], first=14)
    assert sum("bottleneck" in line for line in again) == 1, "and again only after it had passed"


def test_at_the_cap_loaders_are_loaded_alike() -> None:
    """Three equal sources on two loaders: without splitting a source, one loader would have twice the load."""
    policy = scaler("a b c", max_loaders=2)
    started(policy, [1 / 3] * 3)
    windows(policy, 4, weights=[1 / 3] * 3, costs=[20e-3] * 3)
    copies = np.array([sum(s in held for held in policy.placement.values()) for s in range(3)])
    share = [sum(float(policy.needs[s] / copies[s]) for s in held) for held in policy.placement.values()]
    assert max(share) <= 1.2 * min(share)


def test_loaders_merge_again_when_their_sources_have_become_cheap() -> None:
    policy = scaler(" ".join(f"s{i}" for i in range(10)))
    started(policy, [0.1] * 10)
    windows(policy, 4, weights=[0.1] * 10, costs=[20e-3] * 10)
    many = len(policy.placement)
    assert many >= 3
    lines = windows(policy, 4, weights=[0.1] * 10, costs=[2e-3] * 10, first=4)
    assert len(policy.placement) == 1
    assert "is not needed any more: its sources " in lines[0]
    assert lines[0].endswith(f"loaders {many} -> 1")


def test_a_source_gives_up_a_copy_though_its_loader_stays() -> None:
    """Each copy needs memory. Here memory keeps the other two sources apart, so both loaders remain."""
    policy = scaler("web b c", memory_bytes=400 * MIB)
    sizes = [MIB, 200 * MIB, 200 * MIB]
    costs = [1.5 * TARGET_BUSY / 80, *[0.1 * TARGET_BUSY / 10] * 2]
    started(policy, [0.8, 0.1, 0.1], open_bytes=sizes)
    windows(policy, 4, weights=[0.8, 0.1, 0.1], costs=costs, open_bytes=sizes)
    assert sorted(policy.placement.values()) == [(0, 1), (0, 2)]
    windows(policy, 4, weights=[0.25, 0.1, 0.1], costs=costs, open_bytes=sizes, first=4)
    assert sorted(policy.placement.values()) == [(0, 1), (2,)]


def test_a_source_without_weight_is_closed_after_two_windows_and_opened_when_it_is_announced() -> None:
    policy = scaler("a b")
    started(policy, [0.5, 0.5])
    windows(policy, 3, weights=[0.5, 0.5], costs=[1e-3] * 2)
    assert windows(policy, 1, weights=[1.0, 0.0], costs=[1e-3] * 2, first=3) == []
    lines = windows(policy, 3, weights=[1.0, 0.0], costs=[1e-3] * 2, first=4)
    assert policy.placement == {0: (0,)}
    assert lines == ["step 50: no weight within the look-ahead: closed b; loaders stay 1"]
    lines = windows(policy, 1, weights=[1.0, 0.2], costs=[1e-3] * 2, first=7)
    assert policy.placement == {0: (0, 1)}
    assert "source b needs" in lines[0]


def test_a_weight_that_rises_between_windows_is_acted_on_at_once() -> None:
    policy = scaler("a b", window_s=1000.0)
    started(policy, [0.99, 0.01])
    windows(policy, 1, weights=[0.99, 0.01], costs=[1e-3] * 2)
    assert [held for held in policy.placement.values() if 1 in held] == [(0, 1)]
    lines = windows(policy, 1, weights=[0.99, 0.01], costs=[1e-3, 1.0], first=1)
    assert lines == [], "what is measured waits for its window"
    lines = windows(policy, 1, weights=[0.99, 60.0], costs=[1e-3, 1e-3], first=2)
    assert len(lines) == 1
    assert sum(1 in held for held in policy.placement.values()) >= 4


def test_a_source_never_read_is_guessed_as_far_off_as_the_others_were() -> None:
    """By size, a document costs 0.53 ms here; if measured sources take 20 times their guess, so does a new one."""
    policy = scaler("a b c")
    started(policy, [0.5, 0.5, 0.0])
    unread = [profile(10.6e-3), profile(10.6e-3), SourceProfile()]
    for i in range(4):
        weight = np.array([0.5, 0.5, 0.0])
        policy.update(
            now_s=10.0 * i, step=i, step_s=1.0, wait_s=0.0, weights=weight, documents_per_step=100 * weight,
            profiles=unread, loads=loads_of(policy.placement),
        )  # fmt: skip
    weight = np.array([0.5, 0.5, 0.3])
    policy.update(
        now_s=40.0, step=4, step_s=1.0, wait_s=0.0, weights=weight, documents_per_step=100 * weight, profiles=unread,
        loads=loads_of(policy.placement),
    )  # fmt: skip
    assert policy.needs[2] == pytest.approx(30 * 10.6e-3 / TARGET_BUSY)


def test_waiting_on_a_busy_loader_teaches_what_the_profile_does_not_know() -> None:
    """Profiles explain 13 % of the load of a fully busy loader: its sources are spread until the waiting ends."""
    policy = scaler("a b")
    started(policy, [0.5, 0.5])
    windows(policy, 3, weights=[0.5, 0.5], costs=[1.3e-3] * 2)
    assert len(policy.placement) == 1
    idle = windows(policy, 6, weights=[0.5, 0.5], costs=[1.3e-3] * 2, first=3, step_s=1.4, wait_s=0.4, busy=0.3)
    assert idle == [], "loaders that idle are not what the trainer waits for"
    lines = windows(policy, 6, weights=[0.5, 0.5], costs=[1.3e-3] * 2, first=9, step_s=1.4, wait_s=0.4, busy=1.0)
    assert (
        "steps wait 0.4 of 1.4 s for data and loader 0 is 100% busy with 2 sources whose profiles explain 13%"
        in (lines[0])
    )
    assert len(policy.placement) == 2
    assert policy.needs.sum() < 2 * 8 * 0.13 / TARGET_BUSY, "it stops at eightfold"


def test_the_first_placement_goes_by_size() -> None:
    """Documents of 50 KB take about 25 times as long as documents of 2 KB, apart from the cost per document."""
    policy = Autoscaler([f"s{i}" for i in range(306)], max_loaders=16, memory_bytes=1 << 30)
    weight = np.full(306, 1 / 306)
    documents = np.full(306, 1e5)
    size = documents * 2000
    size[5] = documents[5] * 4e6
    placement, lines = policy.initial(
        step_s=1.0, weights=weight, documents_per_step=1000 * weight, source_bytes=size, source_documents=documents
    )
    assert len(placement) >= 5
    assert sum(5 in held for held in placement.values()) >= 4
    assert {s for held in placement.values() for s in held} == set(range(306))
    assert len(lines) == 1
    assert lines[0].startswith("start: 306 of 306 sources have a weight; by their size they need ")


def test_memory_spreads_sources_that_time_would_merge() -> None:
    """Ten sources of 100 MiB with hardly any work need several loaders of 400 MiB."""
    policy = scaler(" ".join(f"s{i}" for i in range(10)), memory_bytes=400 * MIB)
    _, lines = started(policy, [0.1] * 10, documents=1, open_bytes=[100 * MIB] * 10)
    assert sorted(len(held) for held in policy.placement.values()) == [1, 3, 3, 3]
    assert len(lines) == 1


def test_memory_that_grows_moves_sources_to_where_there_is_some() -> None:
    """The memory of a source is known only after it is opened; second copies are given up first."""
    policy = scaler("a b c d", memory_bytes=400 * MIB)
    started(policy, [0.25] * 4, open_bytes=[MIB] * 4)
    assert policy.placement == {0: (0, 1, 2, 3)}
    windows(policy, 4, weights=[0.25] * 4, costs=[1e-3] * 4, open_bytes=[150 * MIB] * 4)
    assert sorted(len(held) for held in policy.placement.values()) == [2, 2]


def test_no_more_moves_for_memory_than_must() -> None:
    """Each loader has six sources of 60 MiB; only the one that grows to 90 MiB moves."""
    policy = scaler(" ".join(f"s{i}" for i in range(12)), memory_bytes=400 * MIB)
    sizes = [60 * MIB] * 12
    started(policy, [1 / 12] * 12, documents=1, open_bytes=sizes)
    assert policy.placement == {0: tuple(range(6)), 1: tuple(range(6, 12))}
    sizes[0] = 90 * MIB
    windows(policy, 4, weights=[1 / 12] * 12, costs=[1e-3] * 12, documents=1, open_bytes=sizes)
    assert policy.placement == {0: tuple(range(1, 6)), 1: tuple(range(6, 12)), 2: (0,)}


def test_all_is_packed_anew_where_moving_little_leaves_no_room() -> None:
    """190 + 120 MiB on each of two loaders of 383 MiB leave no room for 130; 190 + 190 and 120 + 120 + 130 fit."""
    policy = scaler("a b c d e", memory_bytes=400 * MIB, max_loaders=2)
    sizes = [size * MIB for size in (190, 120, 190, 120, 130)]
    started(policy, [0.25] * 4 + [0.0], open_bytes=sizes)
    assert policy.placement == {0: (0, 1), 1: (2, 3)}
    lines = windows(policy, 3, weights=[0.25] * 4 + [0.1], costs=[1e-3] * 5, open_bytes=sizes)
    assert sorted(policy.placement.values()) == [(0, 2), (1, 3, 4)]
    assert not any("no better placement" in line for line in lines)


def test_what_memory_forbids_is_said_once() -> None:
    policy = scaler("big other", memory_bytes=400 * MIB, max_loaders=4)
    _, lines = started(policy, [0.5, 0.5], open_bytes=[500 * MIB, MIB])
    assert sorted(policy.placement.values()) == [(0,), (1,)]
    assert "loader 0 would take 517 MiB with big, more than its limit of 400 MiB" in lines[1]

    lines = windows(policy, 8, weights=[0.5, 0.5], costs=[40e-3, 1e-3], open_bytes=[500 * MIB, MIB])
    assert sorted(policy.placement.values()) == [(0,), (1,)]
    said = [line for line in lines if "but gets 1: no other loader has memory for its 500 MiB" in line]
    assert len(said) == 1


def test_a_loader_larger_than_its_sources_explain_is_reported() -> None:
    policy = scaler("a", memory_bytes=100 * MIB)
    started(policy, [1.0])
    lines = []
    for i in range(4):
        load = LoaderLoad(busy_share=0.1, queued=0, alive=True, rss_bytes=300 * MIB)
        _, said = policy.update(
            now_s=10.0 * i, step=i, step_s=1.0, wait_s=0.0, weights=np.ones(1), documents_per_step=np.ones(1),
            profiles=[profile(1e-3)], loads={0: load},
        )  # fmt: skip
        lines += said
    assert lines == [
        "step 1: loader 0 takes 300 MiB, more than its limit of 100 MiB; by the profiles of its sources it should take "
        "19 MiB"
    ]


@pytest.mark.parametrize(
    ("max_loaders", "memory_bytes", "message"),
    (
        (0, 1 << 30, r"data\.max_loaders=0 must be at least 1"),
        (2, 10 * MIB, r"a loader may take 10 MiB, but takes about 17 MiB without any source"),
    ),
)
def test_no_loader_and_no_memory_are_refused(max_loaders: int, memory_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Autoscaler(["a"], max_loaders=max_loaders, memory_bytes=memory_bytes)


def test_a_profile_forgets_old_runs() -> None:
    found = profile(1e-3)
    assert found.s_per_document == pytest.approx(1e-3)
    assert found.s_per_token == pytest.approx(1e-3 / 600)
    assert found.tokens_per_document == pytest.approx(600)
    assert found.bytes_per_document == pytest.approx(2400)
    for _ in range(50):
        found.observe(documents=100, tokens=60_000, bytes=240_000, read_s=0.9, send_s=0.1, open_bytes=5)
    assert found.s_per_document == pytest.approx(10e-3, rel=0.01)
    assert 0.5 * MIB < found.open_bytes < MIB
    assert math.isnan(SourceProfile().s_per_document)
