"""Actions after each step: the pure decision that the loop follows."""

import pytest

from jtrain.train.actions import Actions, Cadence

CADENCE = Cadence(num_steps=10, evaluate_every_steps=5, copy_every_steps=2, send_every_steps=6)


def names(actions: Actions) -> list[str]:
    return [name for name in ("evaluate", "copy", "save", "send") if getattr(actions, name)]


def decide(step: int, *, save_every: int = 4, stop: bool = False, ended: bool = False) -> Actions:
    return CADENCE.decide(step, is_save_due=step % save_every == 0, stop_requested=stop, data_ended=ended)


def test_the_table_of_the_docstring() -> None:
    """Ten steps, a save every 4, an evaluation every 5, weights every 6, a copy every 2."""
    table = {step: names(actions) for step in range(1, 11) if names(actions := decide(step))}
    assert table == {
        2: ["copy"],
        4: ["save"],
        5: ["evaluate"],
        6: ["copy", "send"],
        8: ["save"],
        10: ["evaluate", "save", "send"],
    }
    assert [step for step in range(1, 11) if decide(step).is_last] == [10]


@pytest.mark.parametrize(("stop", "ended"), [(True, False), (False, True), (True, True)])
def test_the_last_step_is_saved_and_evaluated_only_if_the_data_ends(stop: bool, ended: bool) -> None:
    """A scheduler kills a job soon after its warning: a stop saves at once, and evaluates nothing for it."""
    actions = decide(3, stop=stop, ended=ended)
    assert actions == Actions(is_last=True, evaluate=ended, copy=False, save=True, send=ended)


def test_weights_that_could_not_be_sent_are_owed_at_the_next_step() -> None:
    """As a save is; a stop sends none, and neither does a run without readers."""
    owed: dict[str, bool] = dict(is_save_due=False, data_ended=False, is_send_due=True)
    assert names(CADENCE.decide(7, stop_requested=False, **owed)) == ["send"]
    assert names(CADENCE.decide(7, stop_requested=True, **owed)) == ["save"]
    assert names(decide(6, stop=True)) == ["save"]
    assert names(decide(10, stop=True)) == ["evaluate", "save", "send"]


def test_results_are_read_before_anything_that_needs_good_ones() -> None:
    """Every step with an action, and no other: the loop otherwise stays one step behind the devices."""
    assert [step for step in range(1, 11) if decide(step).read_results] == [2, 4, 5, 6, 8, 10]


def test_without_intervals_only_the_last_step_is_saved() -> None:
    """None for an interval is never; a save that waits for good numbers is due at the next step."""
    never = Cadence(num_steps=3, evaluate_every_steps=None, copy_every_steps=None)
    decided = [
        never.decide(step, is_save_due=False, stop_requested=False, data_ended=False) for step in (1, 2, 3)
    ]
    assert [names(actions) for actions in decided] == [[], [], ["save"]]
    assert names(never.decide(1, is_save_due=True, stop_requested=False, data_ended=False)) == ["save"]
