"""Folders of a window's files, and the files that it removes before it starts."""

from pathlib import Path

import pytest

from jtrain.profile.capture.windows import Windows
from jtrain.profile.spec import ProfileSpec
from jtrain.profile.trace_dir import FACT_NAMES, other_parts, part_of


@pytest.mark.parametrize(
    ("process", "left"), [(0, ["process-1"]), (1, ["breakdown.json", "process-1", "process-4"])]
)
def test_a_window_begins_empty_but_for_what_other_processes_own(
    tmp_path: Path, process: int, left: list[str]
) -> None:
    """Process 0 also removes folders of a larger earlier run; each other process clears only its own."""
    window = tmp_path / "profile" / "20"
    old = part_of(window, process) / "old"
    for file in (window / "breakdown.json", old, *(part_of(window, i) / "plugins" / "trace" for i in (1, 4))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    copied = window / "process-1.bak"  # a copy made by hand, which belongs to no process
    copied.mkdir()
    assert other_parts(window) == {1: window / "process-1", 4: window / "process-4"}
    copied.rmdir()
    facts = dict.fromkeys(FACT_NAMES) | {"platform": "cpu"}
    with Windows(tmp_path, ProfileSpec(), process=process, num_processes=2) as windows:
        assert windows.open(20, facts) is None
        assert sorted(path.name for path in window.iterdir() if path.name != "plugins") == left
        assert not old.exists()
        assert list((window / "process-1").iterdir()) == (
            [] if process == 1 else [window / "process-1" / "plugins"]
        )
