"""The tutorials: each is followed word for word, and what it quotes is what its commands print."""

import re
import shutil
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, check_quoted, follow

TUTORIALS = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "own_parts.md"]
MARKS = {"", "bash", "python", "text"}
"""Languages of blocks; those without one are only read."""


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    """In an empty folder, on one device; the folders are large, so they go as soon as it has passed."""
    typed = [block.text for block, _ in follow(page.read_text(), tmp_path / "work")]
    assert len(typed) >= 3
    shutil.rmtree(tmp_path / "work")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_is_run_or_compared(page: Path) -> None:
    """A block that is neither a file, nor typed, nor quoted could say anything."""
    found = blocks(page.read_text())
    assert len(found) == len(re.findall(r"^ *```\w", page.read_text(), re.MULTILINE)), "an indented block"
    assert {block.language for block in found} <= MARKS - {""}
    assert [block for block in found if block.language == "python" and not block.title] == []
    assert sum(block.language == "text" for block in found) >= 1


def test_what_is_quoted_must_be_printed(tmp_path: Path) -> None:
    """The guard of the tutorials: a command that fails, a line that is not there and one that comes too early."""
    page = (
        '```python title="a/b.py"\nprint("one"); print("two 2.5 s")\n```\n\n```bash\npython a/b.py\n```\n\n'
    )
    ((block, printed),) = follow(f"{page}```text\none\ntwo ... s\n```\n", tmp_path / "right")
    assert (block.text, printed) == ("python a/b.py\n", "one\ntwo 2.5 s\n")
    with pytest.raises(AssertionError, match="'one' is not in"):
        list(follow(f"{page}```text\ntwo ... s\n...\none\n```\n", tmp_path / "order"))
    with pytest.raises(AssertionError, match="no such file"):
        list(follow("```bash\ncat nothing 2>&1 | tr N n\necho later\n```\n", tmp_path / "fails"))
    check_quoted("a\n...\nb", "a\nb\n")
    check_quoted("a\n...\nb", "a x\ny\nb\n")
    with pytest.raises(AssertionError):
        check_quoted("a\nb", "a\nx\nb\n")
