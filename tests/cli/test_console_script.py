"""`jtrain VERB`: a list of verbs, and each of them as `python -m jtrain.VERB` runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.cli.verbs import VERBS, main
from tests.cli.loaded import list_loaded

ROOT = Path(__file__).parents[2]


def jtrain(*words: str, module: str = "jtrain") -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_every_verb_is_listed_and_no_other() -> None:
    """A verb is a package with a `__main__`, or one of the four modules that are programs."""
    packages = {path.parent.name for path in (ROOT / "jtrain").glob("*/__main__.py")}
    assert set(VERBS) == packages | {"launch", "generate", "explain", "survey"}


def test_help_lists_the_verbs_without_importing_jax(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, so fast that nobody waits: jax alone takes half a second."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(VERBS)
    assert list_loaded(("jax", "numpy"), ["jtrain", "--help"]).packages == []


def test_an_unknown_verb_exits_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch", "--config=tiny"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: no verb lanch. Did you mean launch, plan, bench? There are: launch, plan, "
    )
    assert main(["x"]) == 2
    assert capsys.readouterr().err.startswith("error: no verb x. There are: launch, ")
    assert main([]) == 2
    assert "usage: jtrain VERB" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_its_module(verb: str) -> None:
    """The same help, with the same name of the program in it."""
    ours, theirs = jtrain(verb, "--help"), jtrain("--help", module=f"jtrain.{verb}")
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == 0
    assert f"python -m jtrain.{verb}" in ours.stdout


def test_exit_codes_and_messages_pass_through() -> None:
    done = jtrain("bench", "cpu_stp")
    assert done.returncode == 2
    assert "Did you mean cpu_step?" in done.stderr
