"""Pages of the docs, followed as a reader follows them: files are written and commands run as the page has them.

A block with a file's name as its title is that file. A `bash` block is typed. A `text` block after it is what it
prints, somewhere in its output, where `...` stands for what differs from machine to machine; with a file's name as
its title it is in that file. All other blocks are only read.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """A fenced block: its language or "", the file that it names or "", and its text."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """Blocks of a page that begin at the left margin."""
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
    return [Block(*groups) for groups in found]


def environment(programs: Path) -> dict[str, str]:
    """A reader's environment: one device, and `jtrain` and `python` of this tree.

    Args:
      programs: folder for the two programs.
    """
    programs.mkdir(parents=True, exist_ok=True)
    for name, words in {"jtrain": "-m jtrain", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    dropped = ("XLA_FLAGS", "JAX_PLATFORMS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    return env


def follow(page: str, folder: Path) -> Iterator[tuple[Block, str]]:
    """Does what a page says, in its order, in `folder`; yields each typed block and what it printed.

    Raises:
      AssertionError: a command failed, or what is quoted is not there.
    """
    env = environment(folder.parent / f"{folder.name}-programs")
    folder.mkdir(exist_ok=True)
    typed: Block | None = None
    printed = ""
    for block in blocks(page):
        path = folder / block.title
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            typed, printed = block, done.stdout
            assert done.returncode == 0, f"{block.text}{printed[-4000:]}"
            yield block, printed
        elif block.language == "text":
            assert typed is not None, f"nothing was typed before this:\n{block.text}"
            check_quoted(block.text, path.read_text() if block.title else printed)
        elif block.title:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def check_quoted(quoted: str, printed: str) -> None:
    """Asks that a text with `...` for what differs is somewhere in what was printed."""
    lines = quoted.strip().splitlines()
    for count in range(1, len(lines) + 1):
        # A line of nothing but `...` stands for any number of lines, and for none.
        text = re.sub(r"\n\.\.\.(?=\n|$)", "...", "\n".join(lines[:count]))
        pattern = ".*?".join(re.escape(part) for part in text.split("..."))
        assert re.search(pattern, printed, re.DOTALL), f"{lines[count - 1]!r} is not in\n{printed[-6000:]}"


if __name__ == "__main__":
    for typed_block, output in follow(Path(sys.argv[1]).read_text(), Path(sys.argv[2])):
        print(f"$ {typed_block.text}{output}", flush=True)
