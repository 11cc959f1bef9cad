"""User callbacks: what they see, in which order, and that the loop calls the step itself."""

import ast
import contextlib
import json
from pathlib import Path

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.telemetry import metrics
from jtrain.train import attempt

ROOT = Path(__file__).parents[2]


def train(folder: Path, callback: str) -> list[list[object]]:
    sets = ("num_steps=3", "mesh.data=8", "eval.every_steps=3", "checkpoint.every_steps=3")
    run_config = load_config("tiny", ["debug"], [*sets, f"callbacks=('tests.train.recorder:{callback}',)"])
    ends = (
        pytest.raises(RuntimeError, match="seen enough")
        if callback == "StopsAt2"
        else contextlib.nullcontext()
    )
    with ends:
        attempt.train(build_run(run_config), workdir=folder / "run", config_text=tree.flat(run_config))
    return json.loads((folder / "events.json").read_text())


def test_a_callback_sees_the_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come one step late, so that the devices never wait for the host; what it sees is what is
    logged.
    """
    monkeypatch.chdir(tmp_path)
    events = train(tmp_path, "Recorder")
    losses = {step: loss for name, step, *rest in events if name == "results" for loss in rest}
    lines = metrics.read(tmp_path / "run" / metrics.FILE)
    assert losses == {line["step"]: line["loss_nats"] for line in lines if "loss_nats" in line}
    assert [event[:2] for event in events] == [
        *(["enter", 0], ["restore", 0], ["start", 0], ["data_wait", 0]),
        *(["step", 1], ["dispatch", 1], ["data_wait", 1], ["dispatched", 1]),
        *(["step", 2], ["dispatch", 2], ["results", 1], ["data_wait", 2], ["dispatched", 2]),
        *(["step", 3], ["dispatch", 3], ["results", 2], ["dispatched", 3]),
        *(["results", 3], ["evaluation", 3], ["checkpoint", 3], ["checkpoint", 3]),
        *(["profile", 3], ["end", 0], ["exit", 0]),
    ]


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every callback is left, told of the error; no on_end."""
    monkeypatch.chdir(tmp_path)
    events = train(tmp_path, "StopsAt2")
    assert events[-1] == ["exit", 1]
    assert ["end", 0] not in events
    assert not (tmp_path / "run" / "checkpoints" / "3").exists()


def test_the_loop_calls_the_train_step_itself() -> None:
    """`state, metrics = train_step(state, batch)` stands in the loop, which calls callbacks at five places at
    most.
    """
    source = (ROOT / "jtrain" / "train" / "loop.py").read_text()
    statements = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign)]
    assert statements.count("state, metrics = train_step(state, batch)") == 1
    places = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value).endswith("callbacks")
    ]
    assert 1 <= len(places) <= 5, [ast.unparse(place) for place in places]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Thing", "there is no module 'nowhere'"),
        ("mine.py:Missing", r"has no function 'Missing'. It has: Watch"),
        ("mine.py:Watch", "makes a str, but must make a jtrain.train.callbacks.Callback"),
        ("gone.py:Watch", "there is no file"),
        ("word", "must be 'module:name' or 'path/to/file.py:name'"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, with what there is."""
    from jtrain.errors import UserError
    from jtrain.train.callbacks import load_callbacks

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def Watch(): return 'text'\n")
    with pytest.raises(UserError, match=message):
        load_callbacks([name])
