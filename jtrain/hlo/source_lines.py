"""Lines of source code that the instructions of a compiled program were traced from.

HLO text has four tables before its first computation, each a line per entry: file names, function names, file
locations and stack frames. An instruction names its innermost frame:

    FileNames
    1 "/home/me/jtrain/model/mlp.py"
    FileLocations
    1 {file_name_id=1 function_name_id=1 line=88 end_line=88 column=4 end_column=20}
    StackFrames
    7 {file_location_id=1 parent_frame_id=3}

    %dot.1 = bf16[8,8] dot(%x, %w), metadata={op_name="..." stack_frame_id=7}
"""

import re
from pathlib import PurePath

_LIBRARIES = ("site-packages", "dist-packages")
_PACKAGES = ("jtrain_kernels", "jtrain")
_DISPATCH = "jtrain_kernels/registry.py"
"""It calls the kernel that was chosen: who asked for one says more, where the program knows it."""


def source_lines(hlo: str) -> dict[int, str]:
    """Stack frame -> `jtrain/model/mlp.py:88`: its innermost place that is in no installed library.

    A frame whose callers are all in libraries has no entry. Empty if the text has no tables.
    """
    tables: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in hlo.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables[line] = []
        # The tables end where the first computation begins.
        elif tables and line.endswith("{"):
            break
        elif line:
            rows.append(line)
    files = {int(number): name for number, name in _matches(r'(\d+) "(.*)"', tables.get("FileNames", []))}
    places = {
        int(number): f"{_short_name(files[int(file)])}:{line}" if _is_ours(files[int(file)]) else ""
        for number, file, line in _matches(
            r"(\d+) \{file_name_id=(\d+).*? line=(\d+)", tables.get("FileLocations", [])
        )
    }
    lines: dict[int, str] = {}
    # A frame's parent, the caller, stands before it.
    for number, place, parent in _matches(
        r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", tables.get("StackFrames", [])
    ):
        own, outer = places[int(place)], lines.get(int(parent or 0), "")
        if line := outer or own if own.startswith(_DISPATCH) else own or outer:
            lines[int(number)] = line
    return lines


def _matches(pattern: str, rows: list[str]) -> list[tuple[str, ...]]:
    return [match.groups() for row in rows if (match := re.match(pattern, row))]


def _is_ours(file: str) -> bool:
    parts = PurePath(file).parts
    # An installed jtrain lies beside the libraries, and its lines are wanted.
    return any(package in parts for package in _PACKAGES) or not (
        file.startswith("<") or any(library in parts for library in _LIBRARIES)
    )


def _short_name(file: str) -> str:
    """A file's name from its package on; in full if it is the user's own."""
    parts = PurePath(file).parts
    for package in _PACKAGES:
        if package in parts:
            # The last one: a checkout may lie in a folder of the same name.
            start = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[start:])
    return file
