"""Every job is done in one module: the table of docs/architecture.md, held by reading the sources.

A row names the one module and those that still do the job beside it. Whoever removes one of those shortens
the row.
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jtrain"


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(ast.parse(source)))


def sources() -> Iterator[Path]:
    """Python files of the package."""
    return iter(sorted(PACKAGE.rglob("*.py")))


def calls(nodes: Iterable[ast.AST]) -> set[str]:
    """Last names of all that is called: `sleep` of `time.sleep`; with its value where that is a name."""
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    attributes = [function for function in functions if isinstance(function, ast.Attribute)]
    dotted = {f"{one.value.id}.{one.attr}" for one in attributes if isinstance(one.value, ast.Name)}
    return (
        dotted | {one.attr for one in attributes} | {one.id for one in functions if isinstance(one, ast.Name)}
    )


def calling(pattern: str) -> Callable[[str], bool]:
    """Finds sources with a call of a function of this name."""
    expression = re.compile(pattern)
    return lambda source: any(expression.fullmatch(name) for name in calls(nodes(source)))


def saying(pattern: str) -> Callable[[str], bool]:
    """Finds sources with this text."""
    return lambda source: re.search(pattern, source) is not None


def importing(module: str, name: str | None = None) -> Callable[[str], bool]:
    """Finds sources that import a module, or a name from it, also inside functions."""

    def imports(source: str) -> bool:
        for node in nodes(source):
            names = (
                {alias.name for alias in node.names}
                if isinstance(node, ast.Import | ast.ImportFrom)
                else set()
            )
            if isinstance(node, ast.Import) and name is None and module in names:
                return True
            if isinstance(node, ast.ImportFrom) and node.module == module and (name is None or name in names):
                return True
        return False

    return imports


def repeats_after_a_wait(source: str) -> bool:
    """True if a loop catches errors and sleeps: a retry of its own."""
    for node in nodes(source):
        if not isinstance(node, ast.For | ast.While):
            continue
        # A caught error that is raised again, or ends the loop, does not lead to another try.
        handlers = [
            handler for inner in ast.walk(node) if isinstance(inner, ast.Try) for handler in inner.handlers
        ]
        ends = (ast.Raise, ast.Return, ast.Break)
        goes_on = any(not any(isinstance(last, ends) for last in handler.body[-1:]) for handler in handlers)
        if goes_on and "sleep" in calls(ast.walk(node)):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Row:
    """A job, the module that does it, and how a source that does it looks.

    besides: modules that do it today as well.
    """

    job: str
    module: str
    looks: Callable[[str], bool]
    besides: tuple[str, ...] = ()


ROWS = (
    Row("boots of machines", "runtime/lease.py", saying("boot_id")),
    Row("starts of processes", "runtime/lease.py", saying(r"\[19\]")),
    Row(
        "signs of life in files",
        "runtime/lease_stores.py",
        calling("utime"),
        besides=("bench/fault_trials/hosts.py",),  # moves the times of files, as a jump of the clock does
    ),
    Row(
        "texts in jax's coordination service",
        "runtime/agreement.py",
        calling("(blocking_)?key_value_[a-z_]+"),
    ),
    Row(
        "waits of all processes in a collective",
        "runtime/multihost.py",
        calling("process_allgather|broadcast_one_to_all|sync_global_devices|wait_at_barrier"),
    ),
    # The constructors' links live in asyncio, where connecting again is a task for each peer.
    Row(
        "repetition after an error",
        "runtime/retry.py",
        repeats_after_a_wait,
        besides=("data/hosts/peer_links.py",),
    ),
    Row(
        "connections that are accepted",
        "runtime/link/meeting.py",
        calling("create_server|start_server"),
        besides=("data/hosts/peer_links.py",),  # hands the link's socket to asyncio
    ),
    Row("proofs of a shared secret", "runtime/link/protocol.py", calling("compare_digest")),
    Row(
        "pickle of received bytes", "data/plane/data_plane.py", calling(r"pickle\.loads?")
    ),  # of its own child
    Row(
        "documents that no loader survives",
        "data/loaders/process_pool.py",
        saying(r"\{activity\}, again and again"),
    ),
    Row(
        "restarts of a constructor",
        "data/plane/data_plane.py",
        saying("times in a row without making a batch"),
    ),
    Row("Python files of the user", "runtime/user_code.py", calling("spec_from_file_location")),
    Row(
        "command lines",
        "cli/run.py",
        importing("argparse"),
        besides=("bench/__main__.py", "hf/peers/reference.py"),
    ),
    Row("tables on a terminal", "report/terminal.py", importing("rich", "table")),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.job)
def test_a_job_is_done_in_one_module(row: Row) -> None:
    doing = {str(path.relative_to(PACKAGE)) for path in sources() if row.looks(path.read_text())}
    assert doing <= {row.module, *row.besides}, f"{row.job} belong to jtrain/{row.module}"
    assert doing, "the row finds nothing: it holds nothing either"


def test_the_architecture_page_names_the_module_of_each_job() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = {row.module for row in ROWS if (PACKAGE / row.module).exists()}
    assert {module for module in modules if f"jtrain/{module}" not in page} == set()


def test_a_second_mechanism_would_be_found() -> None:
    """The guard of the tests above."""
    retry = (
        "for wait_s in (1, 2):\n    try:\n        read()\n    except OSError:\n        time.sleep(wait_s)\n"
    )
    assert repeats_after_a_wait(retry)
    assert not repeats_after_a_wait(retry.replace("time.sleep(wait_s)", "raise"))
    assert not repeats_after_a_wait("while True:\n    time.sleep(1)\n")
    assert calling("create_server")("import socket\nsocket.create_server(('', 0))\n")
    assert not calling("touch")("torch.touchstone()\n")
    assert importing("rich.table", "Table")("def f():\n    from rich.table import Table\n")
    assert not importing("rich.table", "Table")("from rich.table import Column\n")
    assert importing("argparse")("import argparse\n")
