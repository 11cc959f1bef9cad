"""Messages among the Data Constructors of a run, as `SharedPool` handles them and as a link carries them.

("ask", request, part, first)                                   asks for the lengths of a run of documents
("run", request, number, numbers, lengths, skipped, anchor, seconds)   one of the answers
("fetch", request, number, source, numbers, anchor)             asks for the ids of some documents of a run
("ids", request, lengths, ids, ignored)                         the answer; `ignored`: the runs not learned
("done", number)                                                a run is needed no more
"""

from typing import Any

import numpy as np

from jtrain.data.loaders.messages import RequestPart
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.runtime import link

SCHEMA: link.Schema = {
    "ask": {
        "request": int,
        "first": bool,
        "source": int,
        "numbers": np.ndarray,
        "anchor": list,
        "skip": list,
        "share": list,
    },
    "run": {
        "request": int,
        "number": int,
        "numbers": np.ndarray,
        "lengths": np.ndarray,
        "skipped": list,
        "anchor": list,
        "read_s": float,
    },
    "fetch": {"request": int, "number": int, "source": int, "numbers": np.ndarray, "anchor": list},
    "ids": {"request": int, "lengths": np.ndarray, "ids": np.ndarray, "ignored": np.ndarray},
    "done": {"number": int},
}
"""Fields of each message on a link; an anchor is three numbers, or none."""


def encoded(message: tuple[Any, ...]) -> list[bytes]:
    """Returns the contents that a message consists of on a link."""
    fields: dict[str, Any]
    match message:
        case "ask", request, RequestPart() as part, first:
            fields = {"request": request, "first": first, "source": int(part.source), "numbers": part.numbers}
            fields |= {"anchor": _numbers(part.anchor), "skip": _numbers(part.skip), "share": _numbers(part.share)}
        case "run", request, number, numbers, lengths, skipped, anchor, read_s:
            fields = {"request": request, "number": number, "numbers": numbers, "lengths": lengths}
            lines = [[int(document), reason] for document, reason in skipped.items()]
            fields |= {"skipped": lines, "anchor": _numbers(anchor), "read_s": float(read_s)}
        case "fetch", request, number, source, numbers, anchor:
            fields = {"request": request, "number": number, "source": int(source), "numbers": numbers}
            fields |= {"anchor": _numbers(anchor)}
        case "ids", request, lengths, ids, ignored:
            fields = {"request": request, "lengths": lengths, "ids": ids, "ignored": ignored}
        case "done", number:
            fields = {"number": number}
        case _:
            raise AssertionError(message)
    return link.encoded(message[0], fields)


def decoded(kind: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the message that a link has carried; raises TypeError or ValueError for a list of other contents."""
    fields = dict(fields)
    if "anchor" in fields:
        fields["anchor"] = WindowAnchor(*map(_number, fields["anchor"])) if fields["anchor"] else None
    match kind:
        case "ask":
            skip, (rest, modulus) = frozenset(map(_number, fields["skip"])), map(_number, fields["share"])
            part = RequestPart(fields["source"], fields["numbers"], fields["anchor"], skip, share=(rest, modulus))
            return kind, fields["request"], part, fields["first"]
        case "run":
            fields["skipped"] = {_number(document): str(reason) for document, reason in fields["skipped"]}
    return kind, *(fields[name] for name in SCHEMA[kind])


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values or ()]


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value
