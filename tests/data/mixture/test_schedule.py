import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.mixture.schedule import (
    ONE,
    Constant,
    Custom,
    Linear,
    Schedule,
    Staged,
    integer_shares,
    own_weights,
)
from jtrain.errors import FileError

NAMES = ("web", "code", "math")


def shares(schedule: Schedule, step: int) -> list[float]:
    return schedule.weights(step, NAMES).tolist()


def test_constant_shares_add_up_to_one_and_zero_is_legal() -> None:
    assert shares(Constant({"web": 3, "code": 0, "math": 1.0}), 7) == [0.75, 0.0, 0.25]


def test_a_constant_without_weights_takes_those_of_the_sources() -> None:
    schedule = own_weights(Constant(), {"web": 1.0, "code": 1.0, "math": 2.0})
    assert shares(schedule, 0) == [0.25, 0.25, 0.5]
    staged = Staged(((0, {"web": 1}),))
    assert own_weights(staged, {"web": 1.0}) is staged


def test_a_stage_holds_until_the_next() -> None:
    schedule = Staged(((0, {"web": 1}), (10, {"code": 1, "web": 1})))
    assert shares(schedule, 9) == [1, 0, 0]
    assert shares(schedule, 10) == [0.5, 0.5, 0]
    assert shares(schedule, 10**9) == [0.5, 0.5, 0]


def test_linear_shares_move_in_a_straight_line_and_stand_still_outside() -> None:
    schedule = Linear(((10, {"web": 8, "code": 2}), (20, {"code": 1})))
    assert shares(schedule, 0) == shares(schedule, 10) == [0.8, 0.2, 0]
    np.testing.assert_allclose(schedule.weights(15, NAMES), [0.4, 0.6, 0], rtol=1e-15)
    assert shares(schedule, 20) == shares(schedule, 99) == [0, 1, 0]


def test_a_function_says_the_shares_and_is_checked_at_each_call(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mixture(step):\n    return {'web': 1, 'code': step} if step < 5 else {'web': -1}\n")
    schedule = Custom(f"{file}:mixture")
    assert shares(schedule, 1) == [0.5, 0.5, 0]
    with pytest.raises(ValueError, match=r"mine\.py:mixture' at step 5: the weight of 'web' is -1"):
        schedule.weights(5, NAMES)
    assert "web 0.25" in schedule.describe(3)


def test_a_function_whose_module_imports_jax_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that plan the data have no jax."""
    body = "def mixture(step):\n    return {'web': 1}\n"
    (tmp_path / "mine.py").write_text(f"import jax.numpy as jnp\n{body}")
    (tmp_path / "theirs.py").write_text(f"import no_such_module_here\n{body}")
    (tmp_path / "named.py").write_text(f"from json import no_such_name\n{body}")
    (tmp_path / "schedule_with_jax.py").write_text(f"from jtrain.layout.dims import Batch\n{body}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [
        name for name in sys.modules if name == "jtrain.layout.dims" or name.partition(".")[0] == "jax"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    for function in (f"{tmp_path}/mine.py:mixture", "schedule_with_jax:mixture"):
        with pytest.raises(
            ValueError, match=r"its module imports jax, .* Put the function into a file of its own"
        ):
            Custom(function).weights(0, NAMES)
    with pytest.raises(
        ValueError, match=r"theirs\.py:mixture': there is no module 'no_such_module_here'\. Install it"
    ):
        Custom(f"{tmp_path}/theirs.py:mixture").weights(0, NAMES)
    with pytest.raises(
        ValueError, match=r"named\.py:mixture': its module cannot be imported \(cannot import name"
    ):
        Custom(f"{tmp_path}/named.py:mixture").weights(0, NAMES)
    (tmp_path / "mine.py").write_text(body)
    assert shares(Custom(f"{tmp_path}/mine.py:mixture"), 0) == [1, 0, 0]


def test_functions_that_are_not_there_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mixture(step):\n    return [1]\n")
    for function, error, message in (
        ("mixture", ValueError, "must be 'module:name'"),
        (f"{tmp_path}/other.py:mixture", FileError, "there is no file"),
        ("no_such_module_here:mixture", ValueError, "there is no module 'no_such_module_here'"),
        (f"{file}:mixtrue", ValueError, "no function 'mixtrue'. Did you mean mixture?"),
        (f"{file}:mixture", ValueError, "returned a list"),
    ):
        with pytest.raises(error, match=message):
            Custom(function).weights(0, NAMES)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, True])
def test_weights_that_are_no_numbers_from_zero_up_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"data\.mixture.*'code' is .*Set a number of at least 0"):
        Staged(((0, {"web": 1, "code": bad}),))


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="at step 4: no source has a weight above 0"):
        Linear(((0, {"web": 1}), (4, {"web": 0})))


def test_messages_name_the_field_that_holds_the_weights() -> None:
    with pytest.raises(ValueError, match=r"^data\.mixture\.weights_by_source: the weight of 'web' is -1"):
        Constant({"web": -1})
    with pytest.raises(ValueError, match=r"^data\.mixture\.weights_by_source: there is no source 'cod'"):
        Constant({"cod": 1}).weights(0, NAMES)
    message = r"^data\.sources\.\*\.weight: no source has a weight above 0 \(web 0, code 0\)"
    with pytest.raises(ValueError, match=message):
        own_weights(Constant(), {"web": 0.0, "code": 0.0})


@pytest.mark.parametrize(
    "schedule",
    [
        Staged(((0, {"web": 1}), (10, {"code": 1, "web": 0}), (20, {"math": 1}))),
        Linear(((0, {"web": 1}), (10, {"code": 1}), (20, {"math": 1}))),
        Linear(((7, {"web": 1}), (10, {"code": 1, "math": 0}), (11, {"math": 1}))),
    ],
)
def test_what_is_to_come_is_known_from_the_schedule(schedule: Staged | Linear) -> None:
    """`later` names, for each source that gets weight, the first step with that weight."""
    for step in range(25):
        weight = {at: dict(zip(NAMES, shares(schedule, at), strict=True)) for at in range(step, 30)}
        for name in NAMES:
            first = next((at for at in range(step + 1, 30) if weight[at][name]), None)
            found = next((at for at, weights in schedule.later(step) if weights.get(name)), None)
            if not weight[step][name]:
                assert found == first
            assert found is None or weight[found][name] > 0
    assert schedule.later(20) == ()


def test_an_unknown_source_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"no source 'cod'\. Did you mean code\? data\.sources has"):
        Constant({"cod": 1}).weights(0, NAMES)


def test_steps_must_rise_and_stages_begin_at_zero() -> None:
    with pytest.raises(ValueError, match=r"stages begin at step 3: .* Let the first stage begin at step 0"):
        Staged(((3, {"web": 1}),))
    with pytest.raises(ValueError, match=r"the steps are \[0, 5, 5\]"):
        Linear(((0, {"web": 1}), (5, {"web": 1}), (5, {"web": 1})))
    with pytest.raises(ValueError, match=r"the steps are \[\]"):
        Staged(())


def test_the_identity_changes_if_and_only_if_weights_do(tmp_path: Path) -> None:
    assert Constant({"web": 1, "code": 1}).identity == Constant({"code": 2, "web": 2, "math": 0}).identity
    assert Constant({"web": 1, "code": 1}).identity != Constant({"web": 1}).identity
    assert (
        Staged(((0, {"web": 1}), (4, {"code": 1}))).identity
        != Staged(((0, {"web": 1}), (5, {"code": 1}))).identity
    )
    assert Staged(((0, {"web": 1}),)).identity != Linear(((0, {"web": 1}),)).identity
    texts = ["def f(step):\n    return {'web': 1}\n", "def f(step):\n    return {'web': 2}\n"]
    for i, text in enumerate(texts):
        (tmp_path / f"f{i}.py").write_text(text)
    first, second = (Custom(f"{tmp_path}/f{i}.py:f").identity.split()[-1] for i in range(2))
    assert first != second


def test_integer_shares_add_up_exactly_and_keep_the_smallest() -> None:
    weights = np.asarray([1e-12, 0, 1 / 3, 1 / 7, 0.5])
    found = integer_shares(weights)
    assert found.sum() == ONE
    assert found[0] == 1
    assert found[1] == 0
    np.testing.assert_allclose(found / ONE, weights / weights.sum(), atol=1e-8)
