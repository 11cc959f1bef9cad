"""The site builds without a warning, and names only commands, files and functions that are there."""

import ast
import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jtrain.cli.verbs import VERBS
from jtrain.config.load import load_config
from jtrain.train.callbacks import load_callbacks
from tests.pages import environment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}


def commands(text: str) -> list[list[str]]:
    """The `jtrain VERB` lines of a page's bash blocks, as words."""
    blocks = re.findall(r"^ *```bash\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.strip().startswith("jtrain ")]


COMMANDS = {shlex.join(words): words for text in TEXTS.values() for words in commands(text)}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, docstrings and notebooks; every package has a page of its reference."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "SEPARATE_SIGNATURES": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.parent.name for path in (tmp_path / "site" / "reference").glob("*/index.html")}
    packages = {f"jtrain.{path.parent.name}" for path in (ROOT / "jtrain").glob("*/__init__.py")}
    assert len(packages) > 10
    assert packages <= pages
    assert "make_train_step" in (tmp_path / "site" / "reference" / "jtrain.step" / "index.html").read_text()


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    """Paths in backticks below the folders of the repository; a workdir's or a user's are none of ours."""
    named = re.findall(r"`((?:jtrain|kernels|tests|configs|launch|docs)/[\w./]+)`", TEXTS[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_glossary_has_the_legend_of_the_code() -> None:
    """Its table of dimension letters is the one of jtrain/layout/dims.py, which has the whole alphabet."""
    glossary, dims = (
        [line for line in (ROOT / path).read_text().splitlines() if re.match(r"\| [A-Z] \| ", line)]
        for path in ("docs/glossary.md", "jtrain/layout/dims.py")
    )
    assert glossary == dims
    assert sorted(re.findall(r"\| ([A-Z]) \|", "\n".join(dims))) == list(string.ascii_uppercase)


def test_every_module_of_the_changelog_is_where_it_says() -> None:
    """The last column of the table of modules that moved."""
    rows = re.findall(r"^\| `jtrain[\w.]*` \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    modules = {name for row in rows for name in re.findall(r"`(jtrain[\w.]*)`", row)}
    folders = {"jtrain": ROOT, "jtrain_kernels": ROOT / "kernels"}
    paths = {name: folders[name.partition(".")[0]].joinpath(*name.split(".")) for name in modules}
    assert [
        name for name, path in paths.items() if not (path.with_suffix(".py").exists() or path.is_dir())
    ] == []


def test_the_callback_of_the_page_is_one(tmp_path: Path) -> None:
    """Loads it as a run does; it speaks once, when the loss is low."""
    (source,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/callbacks.md"], re.DOTALL)
    file = tmp_path / "my_callbacks.py"
    file.write_text(source)
    (callback,) = load_callbacks([f"{file}:SayWhenGood"])
    said: list[str] = []
    callback.on_start(cast(Any, SimpleNamespace(metrics=SimpleNamespace(say=said.append))))
    for step, loss in enumerate((5.0, 4.5, 4.4), start=1):
        callback.on_results(cast(Any, SimpleNamespace(step=step, values={"loss_nats": loss})))
    assert said == ["step 2: the loss is below 4.6 nats"]


def defined(path: Path) -> set[str]:
    """Names that a module defines or passes on: functions, classes, methods, variables and imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_every_function_that_the_tutorial_names_is_in_its_file() -> None:
    """Written as `name` in `path`."""
    tutorial = " ".join(TEXTS["docs/tutorial.md"].split())
    named = re.findall(r"`(\w+)` (?:of the same file )?in `([\w/]+\.py)`", tutorial)
    assert len(named) > 20
    assert [(name, path) for name, path in named if name not in defined(ROOT / path)] == []


@pytest.mark.parametrize("verb", sorted({words[0] for words in COMMANDS.values()}))
def test_every_option_of_a_command_is_in_its_help(verb: str) -> None:
    """Checks every command of the README and the site against its own help; nothing runs."""
    assert verb in {*VERBS, "--help"}
    if verb == "--help":
        return
    helps: dict[tuple[str, ...], str] = {}
    for words in (words for words in COMMANDS.values() if words[0] == verb):
        options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        key = () if len(words) < 2 or words[1].startswith("-") else (words[1],)
        if key not in helps:
            asked = [sys.executable, "-m", f"jtrain.{verb}", *key, "--help"]
            helps[key] = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [option for option in options if option not in helps[key]] == [], words


WALKED = ("launch", "plan", "profile", "checkpoint", "data", "hf", "generate")
"""Verbs whose pages a newcomer follows, in the order of the site."""


def newcomer_commands(corpus: Path) -> list[list[str]]:
    """The front page, the README, then the first four of each page whose files are there or made before.

    Args:
      corpus: stands for the reader's own files, /my/.
    """
    elsewhere = ("gs://", "models/", "hooks.", "train.bin", "runs/after", "runs/llama1b", "qwen3_4b")
    # Compilers of other machines, minutes each; tests/plan and tests/cli run them.
    dear = ("--compile", "--topology", "--config=llama8b")
    chosen = [*commands(TEXTS["docs/index.md"]), ["launch", "--config=tiny"], *commands(TEXTS["README.md"])]
    for verb in WALKED:
        near = [
            words
            for words in commands(TEXTS[f"docs/verbs/{verb}.md"])
            if not any(part in shlex.join(words) for part in (*elsewhere, *dear))
        ]
        chosen += near[:4]
    chosen = [[word.replace("/my/", f"{corpus}/") for word in words] for words in chosen]
    return [words for number, words in enumerate(chosen) if words not in chosen[:number]]


@pytest.mark.slow
def test_a_newcomer_follows_the_pages_and_each_next_command(tmp_path: Path) -> None:
    """In one folder, in their order, with short configs; each ends with a command that runs as well."""
    shorter = [("num_steps=300", "num_steps=30"), ("d_model=256", "d_model=64"), ("=100)", "=15)")]
    earlier = [("(50, _PROSE)", "(5, _PROSE)"), ("(200, _CODE)", "(20, _CODE)")]
    (tmp_path / "configs").mkdir()
    for name, changes in {"tiny": shorter, "mixture": [*shorter, *earlier]}.items():
        text = (ROOT / "configs" / f"{name}.py").read_text()
        for old, new in changes:
            assert old in text, (name, old)
            text = text.replace(old, new)
        (tmp_path / "configs" / f"{name}.py").write_text(text)
    corpus = tmp_path / "my"
    corpus.mkdir()
    documents = ({"text": f"document {number} says {number * number}. " * 8} for number in range(2000))
    (corpus / "a.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    env = environment(tmp_path / "programs")

    def run(words: list[str]) -> str:
        done = subprocess.run(
            [str(tmp_path / "programs" / "jtrain"), *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-3000:])
        return done.stdout + done.stderr

    chosen, seen = newcomer_commands(corpus), list[list[str]]()
    assert len(chosen) >= 20
    for words in chosen:
        advice = re.findall(r"^next: (.*)$", run(words), re.MULTILINE)
        assert advice, words
        seen.append(words)
        first, *follow = shlex.split(advice[-1])
        # A search ends with a command for devices that are not here.
        if "--search" not in words and follow not in [*seen, *chosen]:
            assert first == "jtrain"
            run(follow)
            seen.append(follow)


def configured(words: list[str]) -> tuple[str | None, list[str], list[str]]:
    """The config, fiddlers and sets of a command; no config where it has none."""
    taken: dict[str, list[str]] = {"--config": [], "--with": [], "--set": []}
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option in taken:
            taken[option].append(value or words[at + 1])
    return next(iter(taken["--config"]), None), taken["--with"], taken["--set"]


def is_in_a_readers_file(name: str, sets: list[str]) -> bool:
    """True if a config, or a class that a field is set to, is in a file that the page has the reader write."""
    return re.search(r"\.py($|:)", name) is not None or any(re.search(r"=\w+\.py:", text) for text in sets)


CONFIGURED = {
    text: configured(words)
    for text, words in COMMANDS.items()
    # tests/docs/test_tutorials.py trains what is in a reader's file.
    if (name := configured(words)[0]) is not None and not is_in_a_readers_file(name, configured(words)[2])
}


@pytest.mark.parametrize("command", CONFIGURED)
def test_every_config_fiddler_and_field_of_a_command_is_there(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads the config exactly as the command would."""
    monkeypatch.chdir(ROOT)
    name, fiddlers, sets = CONFIGURED[command]
    assert name is not None
    load_config(name, fiddlers, sets)
