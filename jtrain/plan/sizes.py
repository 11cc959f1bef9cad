"""Sizes in bytes on a command line."""

import re

from jtrain.errors import UserError

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}
_UNITS |= {p + end: 1024**k for k, p in enumerate("KMGT", 1) for end in ("iB", "")}


def parse_bytes(option: str, text: str) -> int:
    """Bytes of a size such as `128GiB`, `2TB`, `1000000`, or `1G`, which is 1 GiB as for nccl-tests.

    Raises:
      UserError: the text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT](?:i?B)?|B)?", text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"{option} {text}: expected a size such as 128GiB or 2TB.")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def show_bytes(count: int | float) -> str:
    """A size for a reader, such as `1 GiB` or `4 KiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count:.4g} bytes"
