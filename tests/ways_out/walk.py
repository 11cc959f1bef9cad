"""Runs commands in this process, and follows the ways out of their refusals until one runs."""

import contextlib
import importlib
import io
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jtrain.hf.weight_folder import OWNER
from tests.data.pretokenized.foreign_writers import write_mds, write_parquet_ids, write_raw
from tests.ways_out.follow import Words, ways_out

MOST = 4
"""Refusals in a row after which following them counts as going in circles."""


def _write_machines(folder: Path) -> None:
    """Files for --machine: name -> devices and network."""
    machines = {
        "h200": (16, 'routing = "hashed"\nhosts_per_leaf = 1'),
        "adaptive": (4096, 'routing = "adaptive"\nhosts_per_leaf = 4'),
        "one_leaf": (64, 'routing = "hashed"\nhosts_per_leaf = 64'),
    }
    for name, (count, network) in machines.items():
        text = f'count = {count}\n[chip]\nname = "h200"\n[network]\n{network}\n'
        (folder / f"{name}.toml").write_text(text)
    (folder / "no_count.toml").write_text('[chip]\nname = "h200"\n')


def _write_tokens(folder: Path) -> None:
    """Token files of other projects, and folders that are in the way of an index."""
    documents = [[*range(65, 115), 0]] * 50
    write_raw(folder / "wide.bin", documents, dtype="uint32")
    write_parquet_ids(folder / "ids.parquet", documents)
    words = {"words": ["a"] * len(documents), "input_ids": documents}
    pq.write_table(pa.table(words), folder / "words.parquet")
    write_mds(folder / "mds", documents, column="numbers")
    for name in ("data", "ids"):
        (folder / "taken" / name).mkdir(parents=True)


def _message(errors: str) -> str:
    return errors.rpartition("error: ")[2].rstrip("\n")


def _runs_in_process(words: Words) -> bool:
    """False for devices that this process does not have: it emulates 8."""
    return "--emulate-devices" not in words or words[words.index("--emulate-devices") + 1] in ("0", "8")


class Walk:
    """Follows refusals in a folder with a small corpus and a machine's file.

    folder: where commands run, empty.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "corpus").mkdir()
        for number in range(40):
            (folder / "corpus" / f"{number}.txt").write_text(f"document {number} and no more. " * 80)
        _write_machines(folder)
        _write_tokens(folder)
        (folder / "policy").mkdir()
        (folder / "policy" / OWNER).write_text("../other\n")
        self.values = {
            "--count": "16",
            "--config": "tiny",
            "--device": "h200",
            "--stages": "4",
            "--microbatches": "8",
            "--machine": "h200.toml",
            "--workdir": "new",
            "--flows": "64",
            "--links": "8",
            "--mtbf": "50000",
            "--restart": "60",
            "--save": "1",
            "--days": "90",
            "--batch-tokens": "16M",
            "--latency-us": "5",
            "--out": "out",
            "--name": "other",
            "--step": "1",
        }
        """Values of a user, where a message names an option alone."""
        self._known: dict[tuple[str, ...], tuple[int, str]] = {}
        schedule = ["plan", "pipeline", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]
        assert self.run([*schedule, "--write-csv", "a.csv"])[0] == 0

    def run(self, words: Words) -> tuple[int, str]:
        """Exit code of a command, and its message if it is refused."""
        key = tuple(words)
        if key not in self._known:
            self._known[key] = self._in_process(words) if _runs_in_process(words) else self._alone(words)
        return self._known[key]

    def _in_process(self, words: Words) -> tuple[int, str]:
        module = importlib.import_module(f"jtrain.cli.{words[0]}")
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = module.main(words[1:])
        return code, _message(errors.getvalue())

    def _alone(self, words: Words) -> tuple[int, str]:
        command = [sys.executable, "-m", f"jtrain.{words[0]}", *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, _message(done.stderr)

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
