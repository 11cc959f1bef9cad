"""Adds the API reference to the site: a page per package, with the docstrings of all its modules."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "jtrain", ROOT / "kernels" / "jtrain_kernels")
SKIPPED = {"checkpoint_programs", "_configs"}


def packages() -> dict[str, list[str]]:
    """Package -> its own modules, without programs; packages in alphabetical order, jtrain before its
    kernels.
    """
    found: dict[str, list[str]] = {}
    for top in FOLDERS:
        for init in sorted(top.rglob("__init__.py")):
            parts = init.parent.relative_to(top.parent).parts
            if not SKIPPED & set(parts):
                files = [path for path in sorted(init.parent.glob("*.py")) if not path.stem.startswith("_")]
                found[".".join(parts)] = [f"{'.'.join(parts)}.{path.stem}" for path in files]
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages into the navigation."""
    assert config.nav is not None
    pages: list[dict[str, Any]] = [{name: f"reference/{name}.md"} for name in packages()]
    config.nav.append({"API reference": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Writes the pages, as text that mkdocstrings fills in."""
    for name, modules in packages().items():
        blocks = [f"::: {name}\n    options:\n      heading_level: 1\n      members: false"]
        blocks += [f"::: {module}" for module in modules]
        files.append(File.generated(config, f"reference/{name}.md", content="\n\n".join(blocks) + "\n"))
    return files
