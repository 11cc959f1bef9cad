"""Texts that processes tell each other: through files, and through jax's service with three real
processes.
"""

import json
import threading
from pathlib import Path

import pytest

from jtrain.runtime import multihost
from jtrain.runtime.agreement import Agreement, FolderCarrier, ProcessesSilent
from tests.processes import joined, program, run_together


def members(folder: Path, count: int) -> list[Agreement]:
    return [
        Agreement("task", FolderCarrier(folder / "a", poll_s=0.01), process=process, processes=count)
        for process in range(count)
    ]


def test_all_get_the_texts_of_all_and_who_is_silent_is_named(tmp_path: Path) -> None:
    first, second, third = members(tmp_path, 3)
    first.tell("files", "a")
    second.tell("files", "b")
    texts = first.collect("files", seconds=0.05)
    assert (texts, first.missing(texts)) == ({0: "a", 1: "b"}, [2])
    assert first.collect("files", of=[0, 1], seconds=0.0) == texts, "two were asked"
    with pytest.raises(
        ProcessesSilent, match=r"^no word from process 2 of 3 within 0\.05 s about task/files$"
    ):
        first.gather("files", "a", seconds=0.05)
    threading.Timer(0.1, third.tell, ("files", "c")).start()
    assert second.gather("files", "b", seconds=60.0) == ["a", "b", "c"]


def test_a_text_of_an_earlier_purpose_is_no_answer_and_a_failure_is_not_waited_for(tmp_path: Path) -> None:
    first, second = members(tmp_path, 2)
    first.tell("round", "1")
    second.tell("round", "0")
    assert first.collect("round", seconds=0.0, counts=lambda text: int(text) >= 1) == {0: "1"}
    second.tell("round", "1")
    assert first.collect("round", seconds=0.0, counts=lambda text: int(text) >= 1) == {0: "1", 1: "1"}
    first.tell("written", "the disk is full")
    assert second.collect("written", seconds=1e9, enough=bool) == {0: "the disk is full"}


def test_one_announces_for_all(tmp_path: Path) -> None:
    first, second = members(tmp_path, 2)
    assert second.announced("verdict", seconds=0.0) is None
    first.announce("verdict", "good")
    assert second.announced("verdict") == "good"
    assert first.told("verdict") == {}, "it is no process's own text"


def test_a_process_alone_agrees_with_itself() -> None:
    alone = multihost.agreement("task")
    assert alone.is_alone
    alone.announce("topic", "a")
    assert (alone.announced("topic"), alone.gather("other", "b", seconds=0.0)) == ("a", ["b"])


def test_real_processes_agree_through_the_service() -> None:
    """Before any device is used; long texts, arrays of process 0, equality; what was gathered does not pile
    up.
    """
    processes = [environ | {"XLA_FLAGS": ""} for environ in joined(3)]
    for ended in run_together([program(__file__, "agree")] * 3, processes):
        assert ended.code == 0, ended.errors
        answers = json.loads(ended.output.splitlines()[-1])
        assert answers["texts"] == ["text 0", "text 1", "text 2"]
        assert answers["no_backend"]
        turns = [[f"{'x' * (one + 1) * 1000}{turn}" for one in range(3)] for turn in range(3)]
        assert answers["gathered"] == turns
        assert answers["zero"] == [[1.5, 0.0]]
        assert answers["same"] == [True, False]
        assert answers["missing"] == [1]
        assert answers["left"] == [5], "of the six gathered"
