"""Sample corpus of `--config=mixture`: six sources in six formats, of text that comes with every Python."""

import ast
import gzip
import importlib
import importlib.metadata
import io
import json
import tarfile
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from jtrain.data.sources.storage import find_files

FILES = {
    "code": "code.jsonl.gz",
    "docstrings": "docstrings.parquet",
    "comments": "comments.arrayrecord",
    "topics": "topics",
    "packages": "packages.tar",
    "signatures": "signatures.jsonl",
}
"""Source -> its file or folder."""


def write_sample(out: Path) -> dict[str, int]:
    """Writes the sources into `out`; returns source -> number of documents.

    code: modules of the standard library, unchanged.
    docstrings, comments, signatures: those of the same modules, by definition, by block, and by module.
    topics: the language reference, in prose.
    packages: descriptions of the installed packages.
    """
    # Read once: four of the six sources are made of the same modules.
    modules = dict(_modules())
    documents = {
        "code": list(modules.values()),
        "docstrings": [text for module in modules.values() for text in _docstrings(module)],
        "comments": [text for module in modules.values() for text in _comments(module)],
        "topics": _topics(),
        "packages": _packages(),
        "signatures": [text for module in modules.values() if (text := _signatures(module))],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in documents.items():
        _WRITE[name](out / FILES[name], texts)
    return {name: len(texts) for name, texts in documents.items()}


def _modules() -> Iterator[tuple[str, str]]:
    for file in find_files("stdlib", field="data.sample"):
        try:
            yield file.name, Path(file.location).read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a module in another encoding


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the strings of these modules
        try:
            return ast.parse(text)
        except SyntaxError:  # a template, or syntax of another Python version
            return ast.Module([], [])


def _docstrings(module: str) -> Iterator[str]:
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield text


def _signatures(module: str) -> str:
    lines = []
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.FunctionDef):
            lines.append(f"def {node.name}({ast.unparse(node.args)})")
        elif isinstance(node, ast.ClassDef):
            lines.append(f"class {node.name}({', '.join(map(ast.unparse, node.bases))})")
    return "\n".join(lines)


def _comments(module: str) -> Iterator[str]:
    """Yields blocks of at least three consecutive comment lines, each block as one text."""
    block: list[str] = []
    last_line = -1
    try:
        for token in tokenize.generate_tokens(io.StringIO(module).readline):
            if token.type != tokenize.COMMENT:
                continue
            # A line without a comment ends the block.
            if token.start[0] != last_line + 1:
                if len(block) >= 3:
                    yield "\n".join(block)
                block = []
            block.append(token.string.removeprefix("#").strip())
            last_line = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        return
    # The last block of a module has no later comment that ends it.
    if len(block) >= 3:
        yield "\n".join(block)


def _topics() -> list[str]:
    return [text for _, text in sorted(importlib.import_module("pydoc_data.topics").topics.items())]


def _packages() -> list[str]:
    description_of = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        text = metadata.json.get("description") or metadata.json.get("summary") or ""
        if isinstance(text, str) and text.strip():
            description_of[metadata["Name"]] = text
    # By name: the order of installed packages differs between machines.
    return [text for _, text in sorted(description_of.items())]


def _write_json_lines(path: Path, texts: list[str]) -> None:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    # mtime=0: the same text gives the same bytes.
    path.write_bytes(gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


def _write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path, row_group_size=512)


def _write_array_record(path: Path, texts: list[str]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")  # so that each record can be read alone
    for text in texts:
        writer.write(text.encode())
    writer.close()


def _write_folder(path: Path, texts: list[str]) -> None:
    path.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number:04}.txt").write_text(text)


def _write_tar(path: Path, texts: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(content := text.encode())
            archive.addfile(member, io.BytesIO(content))


_WRITE = {
    "code": _write_json_lines,
    "docstrings": _write_parquet,
    "comments": _write_array_record,
    "topics": _write_folder,
    "packages": _write_tar,
    "signatures": _write_json_lines,
}
