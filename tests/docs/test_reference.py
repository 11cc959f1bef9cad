"""The reference has a page for every module, and every public name on it says what it is."""

import ast
from pathlib import Path

import pytest

from jtrain.runtime.user_code import load_python_file
from tests.pages import ROOT

FOLDERS = {"jtrain": ROOT / "jtrain", "jtrain_kernels": ROOT / "kernels" / "jtrain_kernels"}
PROGRAMS = {"checkpoint_programs", "peers", "__main__", "_live"}
"""Folders and modules that are run by their path, in environments of their own or as `python -m`."""


def modules() -> dict[str, Path]:
    """Module -> its file; packages' own files are the head of their page."""
    files = {file: top.parent for top in FOLDERS.values() for file in top.rglob("*.py")}
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts): file
        for file, folder in files.items()
        if file.stem != "__init__" and PROGRAMS.isdisjoint(file.relative_to(folder).with_suffix("").parts)
    }


def unexplained(source: str) -> list[str]:
    """Public functions, classes and type aliases of a module without a docstring; "" is the module itself."""
    tree = ast.parse(source)
    following = dict(zip(tree.body, [*tree.body[1:], None], strict=True))
    names = [] if ast.get_docstring(tree) else [""]
    for node, text in following.items():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, is_explained = node.name, ast.get_docstring(node) is not None
        elif isinstance(node, ast.TypeAlias):
            # An alias has no docstring of its own: mkdocstrings shows the string behind it, and hides one without.
            is_explained = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            name = node.name.id
        else:
            continue
        if not (is_explained or name.startswith("_")):
            names.append(name)
    return names


def test_every_module_is_on_a_page() -> None:
    pytest.importorskip("mkdocs")
    pages = load_python_file(ROOT / "docs" / "reference_pages.py").packages()
    on_pages = {module for names in pages.values() for module in names}
    assert len(on_pages) > 500
    assert modules().keys() - on_pages == set()


def test_every_public_name_has_a_docstring() -> None:
    texts = {module: file.read_text() for module, file in modules().items()}
    assert {module: names for module, text in texts.items() if (names := unexplained(text))} == {}


def test_a_name_without_a_docstring_is_found() -> None:
    source = "type A = int\n\ndef f(): ...\n\nclass C:\n    'text'\n\ntype B = int\n'text'\n\ndef _g(): ...\n"
    assert unexplained(source) == ["", "A", "f"]
