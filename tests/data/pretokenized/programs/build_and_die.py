"""Builds the indexes of `tests.data.two_sources` in FOLDER/out, and is killed at an instant.

    python build_and_die.py FOLDER TOKENIZER INSTANT SHARD_BYTES

INSTANT: a word below; `limited` dies at no instant, but may write no file of more than 40 kB.
"""

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jtrain.cli.run import run
from jtrain.data.pretokenized import writer
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.build_process import BuildProcess
from tests.data.two_sources import recipes_of

folder, tokenizer, instant = Path(sys.argv[1]), *sys.argv[2:4]
write_whole, rename, unlink, rmtree = BuildProcess.write_whole, Path.rename, Path.unlink, shutil.rmtree


def die() -> NoReturn:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the kernel ends it first")


def write_half(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Appends a half of a shard."""
    target.write(source.read(size // 2))
    target.flush()
    die()


def die_before(part_of_name: str) -> Any:
    """The writer of whole files, which dies before it writes one of this name."""

    def write(self: BuildProcess, path: Path, text: str) -> None:
        if part_of_name in path.name:
            die()
        write_whole(self, path, text)

    return write


def write_and_die(self: BuildProcess, path: Path, content: str) -> None:
    """Writes a whole file; dies after a plan."""
    write_whole(self, path, content)
    if path.name == "plan.json":
        die()


def remove_plan(path: Path, **named: Any) -> None:
    """Removes a folder; of one that is not in place only the plan, and dies."""
    if not path.name.endswith(".partial"):
        return rmtree(path, **named)
    (path / "plan.json").unlink(missing_ok=True)
    die()


def remove_unless_unit(self: Path, missing_ok: bool = False) -> None:
    """Removes a file; dies before one of a worker."""
    if self.name.endswith(".unit"):
        die()
    unlink(self, missing_ok=missing_ok)


def rename_unless_partial(path: Path, target: Path) -> Path:
    """Renames a file; dies before a finished index gets its name."""
    return die() if path.name.endswith(".partial") else rename(path, target)


if instant == "while-appending":
    writer.copy_hashed = write_half
elif instant == "appended-but-not-noted":
    BuildProcess.write_whole = die_before("state.json")
elif instant == "noted-but-not-removed":
    Path.unlink = remove_unless_unit
elif instant == "while-removing":
    shutil.rmtree = remove_plan
elif instant == "planned":
    BuildProcess.write_whole = write_and_die
elif instant == "not-yet-planned":
    BuildProcess.write_whole = die_before("plan.json")
elif instant == "not-yet-sealed":
    BuildProcess.write_whole = die_before("index.json")
elif instant == "sealed-but-not-in-place":
    Path.rename = rename_unless_partial  # pyright: ignore[reportAttributeAccessIssue]
elif instant == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def main() -> int:
    """Builds with two workers."""
    recipes = recipes_of(folder, tokenizer=tokenizer)
    prepare(recipes, folder / "out", workers=2, stream=sys.stdout, shard_bytes=int(sys.argv[4]))
    return 0


sys.exit(run(main))
