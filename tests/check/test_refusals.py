"""What ends a check, or a launch that begins with one, before anything is proved."""

from pathlib import Path

import pytest

from jtrain.check.lines import Differs, DoesNotApply, chosen, take_line
from jtrain.check.memory import CompiledPlan
from jtrain.cli import launch
from jtrain.errors import UserError


def test_a_launch_ends_where_its_check_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code and message are those of the check; no workdir is made."""
    workdir = tmp_path / "run"
    words = ["--config=tiny", "--set", "data.path=/nowhere/*.txt", "--check", "--workdir", str(workdir)]
    assert launch.main(words) == 2
    assert "/nowhere/*.txt" in capfd.readouterr().err
    assert not workdir.exists()


def test_a_line_is_named_as_it_is_printed() -> None:
    proofs = [("packed = alone", lambda: "3 records"), ("mesh.data = one device", lambda: "2 updates")]
    assert [name for name, _ in chosen(proofs, [])] == ["packed = alone", "mesh.data = one device"]
    assert [name for name, _ in chosen(proofs, ["packed = alone"])] == ["packed = alone"]
    with pytest.raises(UserError, match=r"--only 'packed': no such line\. .*There are: packed = alone, mesh"):
        chosen(proofs, ["packed"])


def test_a_line_holds_fails_or_says_why_it_does_not_apply() -> None:
    """A crash of what is proved is a failure of its line, and the others still say something."""

    def raises(error: Exception) -> str:
        raise error

    for error, verdict, detail in (
        (Differs("q_DNH"), "FAILS", "q_DNH"),
        (DoesNotApply("no adapter"), "not checked", "no adapter"),
        (UserError("mesh.data=3"), "FAILS", "refused: mesh.data=3"),
        (KeyError("x"), "FAILS", "KeyError: 'x'"),
    ):
        line = take_line("a = b", lambda error=error: raises(error))
        assert (line.verdict, line.detail) == (verdict, detail)
    assert take_line("a = b", lambda: "2 updates").text.startswith("holds        a = b: 2 updates (")


def test_a_plan_that_is_not_wanted_names_the_command_that_compiles_it() -> None:
    memory = CompiledPlan(["--config=tiny"], "h100", 8, is_wanted=False)
    with pytest.raises(DoesNotApply, match="jtrain plan --config=tiny --device h100 --count 8 --compile"):
        memory.proof(1.0)
    memory.close()
