"""When a run hangs, who is named, and what excuses a process that waits."""

import dataclasses
import json

import pytest

from jtrain.errors import UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.lease import Lease
from jtrain.runtime.lease_stores import MessageStore
from jtrain.supervise.heart import Beat, HeartPhase
from jtrain.supervise.restarts import Restarts, shell_code
from jtrain.supervise.spec import SuperviseSpec
from jtrain.supervise.verdict import Watched, find_hang, limit_s

SPEC = SuperviseSpec()


def beat(phase: HeartPhase, quiet_s: float, *, step: int = 7, step_s: float | None = 0.1) -> Beat:
    return Beat(0, 2, 0, step, phase, quiet_s, step_s, "jit_train_step has 3 x all-reduce over data", SPEC)


def watched(name: str, phase: HeartPhase, quiet_s: float, *, step: int = 7, silent_s: float = 0.5) -> Watched:
    return Watched(name, None, beat(phase, quiet_s, step=step), silent_s)


def test_the_limit_of_a_step_grows_with_its_median() -> None:
    """supervise.step_s or supervise.step_factor median steps; the first two steps may compile."""
    assert limit_s(beat("device_wait", 0.0, step_s=0.1), SPEC) == SPEC.step_s
    assert limit_s(beat("device_wait", 0.0, step_s=30.0), SPEC) == 300.0
    assert limit_s(beat("device_wait", 0.0, step_s=None), SPEC) == SPEC.compile_s
    assert limit_s(None, SPEC) == SPEC.setup_s


@pytest.mark.parametrize(
    "phase", ["compile", "restore", "evaluation", "checkpoint", "profile", "joining", "setup"]
)
def test_a_long_phase_is_no_hang_also_for_those_who_wait(phase: HeartPhase) -> None:
    """Process 0 waits in a collective for ten minutes, because process 1 compiles, restores, evaluates or
    saves.
    """
    waiting, busy = watched("process 0", "device_wait", 600.0), watched("process 1", phase, 600.0)
    assert find_hang([waiting, busy], SPEC) is None
    both = [waiting, dataclasses.replace(busy, beat=beat(phase, SPEC.setup_s + 1))]
    assert find_hang(both, SPEC) is not None, "but it has a limit of its own"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Watched("process 1", 12.0, beat("step", 2.0), 12.0), "stopped by a signal (state T) for 12 s"),
        (watched("process 1", "device_wait", 10.0, silent_s=25.0), "no sign of life for 25 s"),
        (watched("process 1", "data_wait", 130.0), "in phase data_wait of step 7 for 130 s"),
        (watched("process 1", "device_wait", 40.0, step=6), "in phase device_wait of step 6 for 40 s"),
    ],
    ids=["stopped", "silent", "own work", "earlier step"],
)
def test_the_culprit_is_named_first_and_the_others_wait_for_it(other: Watched, why: str) -> None:
    hang = find_hang([watched("process 0", "device_wait", 40.0), other], SPEC)
    assert hang is not None
    assert [one.name for one in hang.culprits] == ["process 1"]
    lines = hang.lines()
    assert lines[1].startswith("process 1 causes it: ")
    assert why in lines[1]
    assert lines[2].startswith("process 0 waits: alive, in phase device_wait of step 7")
    assert lines[3] == "collectives: jit_train_step has 3 x all-reduce over data"


def test_where_all_wait_in_the_same_step_nobody_is_blamed() -> None:
    hang = find_hang([watched(f"process {index}", "device_wait", 40.0) for index in range(2)], SPEC)
    assert hang is not None
    assert hang.culprits == ()
    assert hang.lines()[:2] == [
        "hang: no step for 40 s, limit 20 s (supervise.step_s=20, or supervise.step_factor=10 median steps "
        "of 0.10 s)",
        "no process stands out: all wait for each other",
    ]


def test_progress_of_any_process_is_no_hang() -> None:
    assert find_hang([watched("0", "device_wait", 40.0), watched("1", "step", 1.0)], SPEC) is None
    assert find_hang([], SPEC) is None


def test_a_beat_arrives_as_it_was_sent() -> None:
    sent = dataclasses.replace(beat("device_wait", 1.25), collectives="c" * 1000)
    received: list[bytes] = []
    Lease(MessageStore(received.append), beat_s=0.0, payload=lambda: dataclasses.asdict(sent)).seize()
    assert Beat.of(json.loads(received[0])["payload"]) == sent
    assert len(received[0]) < 4096, "so that the pipe takes it whole"
    assert Beat.of(dataclasses.asdict(dataclasses.replace(sent, limits=None))).limits is None


def test_restarts_without_a_new_checkpoint_end() -> None:
    """The first at once, then 1, 4, 16 s and at most a minute; a later checkpoint resets the count."""
    restarts = Restarts()
    restarts.note_start(0)
    assert [restarts.pause_s(SPEC) for _ in range(6)] == [0.0, 1.0, 4.0, 16.0, 60.0, None]
    restarts.note_start(0)
    assert restarts.pause_s(SPEC) is None
    restarts.note_start(100)
    assert restarts.pause_s(SPEC) == 0.0
    assert restarts.pause_s(dataclasses.replace(SPEC, max_restarts=1)) is None


def test_codes_are_those_of_shells() -> None:
    assert (shell_code(-9), shell_code(exit_codes.STOPPED)) == (137, 75)


def test_limits_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"supervise\.step_s=0\.0 must be at least 1\."):
        SuperviseSpec(step_s=0.0)
    with pytest.raises(UserError, match=r"supervise\.max_restarts=-1 must be at least 0\."):
        SuperviseSpec(max_restarts=-1)
