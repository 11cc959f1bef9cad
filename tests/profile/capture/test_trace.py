"""Files of a trace window, and refusal of folders that lack some of them."""

import json
import shutil
from pathlib import Path

import pytest

from jtrain.profile.capture.trace import Window, compiled_text
from jtrain.profile.trace_dir import FACTS, read_facts
from tests.profile.traced import MODULE, ROWS, traced


def test_a_window_leaves_trace_program_and_facts_beside_each_other() -> None:
    """The folder can be analysed later without the run; the program is the one that ran, with its scopes."""
    folder = traced(data=8)
    assert len(list(folder.rglob("*.xplane.pb"))) == 1
    text = (folder / f"{MODULE}.hlo.txt").read_text()
    assert text.startswith(f"HloModule {MODULE}")
    assert "transpose(jvp(layers))" in text
    facts = read_facts(folder)
    assert facts["mesh"] == {"replica": 1, "stage": 1, "data": 8, "expert": 1, "context": 1, "tensor": 1}
    assert facts["tokens_per_step"] % ROWS == 0
    assert facts["planned"]


def test_the_text_of_a_program_that_never_ran_is_refused() -> None:
    """A trace never compiles anything."""
    with pytest.raises(ValueError, match="no compiled program is named jit_nothing"):
        compiled_text("jit_nothing")


def test_a_window_that_knows_too_little_is_a_mistake_of_ours(tmp_path: Path) -> None:
    """A window with a missing fact does not open."""
    with pytest.raises(AssertionError, match="step_flops"):
        Window(tmp_path, facts={name: None for name in read_facts(traced(data=8)) if name != "step_flops"})


def test_facts_that_are_missing_or_cut_off_are_refused_in_one_line(tmp_path: Path) -> None:
    """A run killed inside its window leaves no facts; a full disk leaves half of them."""
    with pytest.raises(ValueError, match="is not a folder"):
        read_facts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="the run ended inside its window"):
        read_facts(tmp_path)
    whole = (traced(data=8) / FACTS).read_text()
    shutil.copytree(traced(data=8), tmp_path / "copy")
    for text, match in (
        (whole[: len(whole) // 2], "is truncated"),
        (json.dumps({"mesh": {}}), "lacks platform, device_kind"),
        ("[]", "lacks platform"),
    ):
        (tmp_path / "copy" / FACTS).write_text(text)
        with pytest.raises(ValueError, match=match) as refused:
            read_facts(tmp_path / "copy")
        assert "\n" not in str(refused.value)
