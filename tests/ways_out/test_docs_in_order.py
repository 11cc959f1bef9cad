"""The commands of the README and of the docs, in their order in one folder, and the next commands that they name."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ways_out.follow import Words, ways_out

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(
        f"docs/verbs/{verb}.md"
        for verb in ("launch", "profile", "checkpoint", "generate", "hf", "data", "plan")
    ),
    *(f"docs/{page}.md" for page in ("install", "tutorial", "configs", "callbacks", "data", "pipelines")),
    *(f"docs/{page}.md" for page in ("cost", "network", "kernels", "memory", "bad_numbers")),
)
NOT_RUN = {
    "--compile": "compiles for a machine that is not here, for minutes; tests/plan compiles",
    "--topology": "compiles for a machine that is not here, for minutes; tests/plan compiles",
    "hooks.example.com": "a server of the user",
    "gs://": "a store of the user",
    "data/web_text_document": "files of the user",
    "data/train.bin": "files of the user",
    "models/Qwen3-8B": "files of the user",
    "models/Llama-3.1-8B": "files of the user",
    "runs/llama1b": "a run on a GPU",
    "my.toml": "a file of the user",
    "racks.toml": "a file of the user",
    "profile compare": "two runs of the user",
}
"""Part of a command -> why this test does not run it."""
FIRST = ["launch", "--config=tiny"]


def commands(page: str) -> list[Words]:
    """The words after `jtrain` of each of its commands in a page's bash blocks."""
    blocks = re.findall(r"^ *```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    last_commands = [line.rpartition("&& ")[2].strip() for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in last_commands if line.startswith("jtrain ")]


def runs_here(words: Words) -> bool:
    return not any(part in shlex.join(words) for part in NOT_RUN)


class Newcomer:
    """Runs commands one after another in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[str, ...], tuple[int, str]] = {}

    def run(self, words: Words) -> tuple[int, str]:
        """Exit code and both streams of a command."""
        if tuple(words) not in self._done:
            verb, *options = [word.replace("/my/", f"{self.folder}/my/") for word in words]
            command = [sys.executable, "-m", "jtrain" if verb == "--help" else f"jtrain.{verb}", *options]
            if verb == "--help":
                command = [sys.executable, "-m", "jtrain.cli.verbs", verb]
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self._done[tuple(words)] = done.returncode, done.stdout
        return self._done[tuple(words)]

    def trains(self, words: Words) -> str:
        """Output of a command that must end well."""
        code, output = self.run(words)
        assert code == 0, f"jtrain {shlex.join(words)}\n{output[-3000:]}"
        return output


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """A folder with the user's text, the files that pages show, and the run of the README's first line."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my").mkdir()
    lines = (
        f'{{"text": "{f"document {number} says {number * number}. " * 16}"}}\n' for number in range(2000)
    )
    (folder / "my" / "a.jsonl").write_text("".join(lines))
    (callback,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/callbacks.md").read_text(), re.DOTALL)
    (folder / "my_callbacks.py").write_text(callback)
    newcomer = Newcomer(folder)
    newcomer.trains(FIRST)
    return newcomer


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(page: str, newcomer: Newcomer) -> None:
    """All in one folder: what one page trains, another shows."""
    mine = [words for words in commands(page) if runs_here(words)]
    assert mine
    for words in mine:
        newcomer.trains(words)


def test_every_command_that_is_not_run_is_on_a_page() -> None:
    everything = [shlex.join(words) for page in PAGES for words in commands(page)]
    assert len(everything) > 60
    assert [part for part in NOT_RUN if not any(part in text for text in everything)] == []


@pytest.mark.slow
def test_a_finished_run_is_profiled_in_a_workdir_of_its_own(newcomer: Newcomer) -> None:
    """The README's first command once more, with a profile: the refusal's command trains, traces, and names the
    command that shows the trace; `jtrain profile` of the finished run names the same.
    """
    words = [*FIRST, "--with", "profile"]
    code, output = newcomer.run(words)
    assert code == 2, output
    (traced,) = ways_out(output.rpartition("error: ")[2].strip(), words, {})
    assert traced == [*words, "--workdir", "runs/tiny-profile"]
    output = newcomer.trains(traced)
    shown = output.splitlines()[-1].removeprefix("next: jtrain ")
    assert shown == "profile --workdir runs/tiny-profile"
    assert "report.html" in newcomer.trains(shown.split())
    code, output = newcomer.run(["profile", "--workdir", "runs/tiny"])
    assert code == 2, output
    assert "--with profile --workdir runs/tiny-profile" in output


@pytest.mark.slow
def test_the_last_line_of_every_verb_is_a_command_that_runs(newcomer: Newcomer) -> None:
    """From the README's first run along the commands that each one names, and those that the docs show."""
    for words in (
        FIRST,
        ["launch", "--config=tiny", "--with", "debug", "--dry-run", "--workdir", "runs/dry"],
        ["generate", "--workdir", "runs/tiny", "--max-tokens", "4"],
        ["checkpoint", "verify", "runs/tiny"],
        ["hf", "export", "--workdir", "runs/tiny", "--out", "exported"],
        ["data", "sample", "--out", "samples"],
        ["data", "plan", "--config=tiny"],
        ["plan", "llama8b", "--device", "h200", "--count", "8"],
        ["plan", "table"],
        ["plan", "network", "--device", "h100", "--count", "64"],
        ["plan", "pipeline", "--stages", "2", "--microbatches", "2"],
        ["bench"],
    ):
        last = newcomer.trains(words).splitlines()[-1]
        assert last.startswith("next: jtrain "), last
        following = shlex.split(last.removeprefix("next: jtrain ").replace("NAME", "tiny"))
        if following[0] != "bench":
            newcomer.trains(following)
