"""Fields as a class's docstring describes them, and the unit at the end of a name."""

import dataclasses
import functools
import inspect
import re

_UNITS = {
    "steps": "train steps",
    "tokens": "tokens",
    "nats": "nats",
    "bytes": "bytes",
    "gib": "GiB",
    "mib": "MiB",
    "s": "seconds",
    "ms": "milliseconds",
    "minutes": "minutes",
    "flops": "floating-point operations",
    "mhz": "MHz",
    "w": "W",
}
"""End of a name -> its unit (DESIGN section 4)."""

_RATE = re.compile(r"(?:\w+_)?([a-z]+)_per_(s|token|byte)")
ENTRY = re.compile(r"([a-z_0-9]+(?:, [a-z_0-9]+)*): +(\S.*)")


@dataclasses.dataclass(frozen=True)
class FieldEntry:
    """Description of a field in a docstring.

    heading: the line without a text of its own that it stands under, as in `Mean since the last line:`.
    """

    text: str
    heading: str = ""


def unit_of(name: str) -> str:
    """Unit, from the end of a name such as `step_time_ms` or `tokens_per_s`; "" for none."""
    if match := _RATE.fullmatch(name):
        return f"{match[1]} per {'second' if match[2] == 's' else match[2]}"
    return _UNITS.get(name.rpartition("_")[2], "") if "_" in name else ""


@functools.cache
def entries(component: type) -> dict[str, FieldEntry]:
    """Entries `name, name: text` of a class's own docstring, continued on indented lines."""
    by_name: dict[str, FieldEntry] = {}
    names, indent, heading = list[str](), 0, ""
    for line in inspect.cleandoc(component.__dict__.get("__doc__") or "").splitlines():
        text = line.lstrip()
        # A continued line stands further in than its entry, under `Args:` as well.
        if names and text and len(line) - len(text) > indent:
            by_name |= {name: FieldEntry(f"{by_name[name].text} {text}", heading) for name in names}
        elif match := ENTRY.fullmatch(text):
            names, indent = match[1].split(", "), len(line) - len(text)
            by_name |= dict.fromkeys(names, FieldEntry(match[2], heading))
        else:
            names = []
            heading = text.removesuffix(":") if text.endswith(":") else heading
    return by_name
