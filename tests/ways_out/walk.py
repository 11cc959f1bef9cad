"""Runs commands in this process, and follows the ways out of their refusals until one runs."""

import contextlib
import importlib
import io
from pathlib import Path

from tests.ways_out.follow import Words, ways_out

MOST = 4
"""Refusals in a row after which following them counts as going in circles."""


class Walk:
    """Follows refusals in a folder with a small corpus and a machine's file.

    folder: where commands run, empty.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "corpus").mkdir()
        for number in range(40):
            (folder / "corpus" / f"{number}.txt").write_text(f"document {number} and no more. " * 80)
        (folder / "h200.toml").write_text('count = 16\n[chip]\nname = "h200"\n')
        self.values = {
            "--count": "16",
            "--config": "tiny",
            "--device": "h200",
            "--stages": "4",
            "--microbatches": "8",
            "--machine": "h200.toml",
            "--workdir": "new",
            "--links": "8",
            "--step": "1",
        }
        """Values of a user, where a message names an option alone."""
        self._known: dict[tuple[str, ...], tuple[int, str]] = {}

    def run(self, words: Words) -> tuple[int, str]:
        """Exit code of a command, and its message if it is refused."""
        key = tuple(words)
        if key not in self._known:
            module = importlib.import_module(f"jtrain.cli.{words[0]}")
            out, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                code = module.main(words[1:])
            self._known[key] = code, errors.getvalue().rpartition("error: ")[2].rstrip("\n")
        return self._known[key]

    def ways_out(self, words: Words) -> list[Words]:
        """Commands that the refusal of a command names."""
        code, message = self.run(words)
        assert code == 2, (words, code, message)
        return ways_out(message, words, self.values)

    def leads_to_a_run(self, words: Words, seen: tuple[Words, ...] = ()) -> bool:
        """True if a command runs, or some way out of its refusal does in the end."""
        code, _ = self.run(words)
        if code != 2:
            return code == 0
        if len(seen) == MOST or words in seen:
            return False
        return any(self.leads_to_a_run(way, (*seen, words)) for way in self.ways_out(words))
