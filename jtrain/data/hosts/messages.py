"""Messages among the Data Constructors of a run, as `SharedPool` handles them and as a link carries them.

("ask", request, part, first)                                   asks for the lengths of a run of documents
("run", request, number, numbers, lengths, skipped, anchor, seconds)   one of the answers
("fetch", request, number, source, numbers, anchor)             asks for the ids of some documents of a run
("ids", request, lengths, ids, ignored)                         the answer; `ignored`: the runs not learned
("done", number)                                                a run is needed no more
("beat", sent_ms)                                               asks for a sign of life; `echo` answers
("echo", sent_ms)
"""

from typing import Any

import numpy as np

from jtrain.data.loaders.messages import RequestPart
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.runtime.link import protocol

SCHEMA: protocol.Schema = {
    "ask": dict(request=int, first=bool, source=int, numbers=np.ndarray, anchor=list, skip=list, share=list),
    "run": dict(
        request=int,
        number=int,
        numbers=np.ndarray,
        lengths=np.ndarray,
        skipped=list,
        anchor=list,
        read_s=float,
    ),
    "fetch": dict(request=int, number=int, source=int, numbers=np.ndarray, anchor=list),
    "ids": dict(request=int, lengths=np.ndarray, ids=np.ndarray, ignored=np.ndarray),
    "done": dict(number=int),
    "beat": dict(sent_ms=int),
    "echo": dict(sent_ms=int),
}
"""Fields of each message, in the order of its tuple but for `ask`; an anchor is three numbers, or none."""


def encode_message(message: tuple[Any, ...]) -> list[bytes]:
    """Returns the contents that a message consists of on a link."""
    kind, *values = message
    # A RequestPart is taken apart: a link carries numbers, strings, lists and arrays, and no pickles.
    if kind == "ask":
        request, part, first = values
        values = [
            request,
            first,
            part.source,
            part.numbers,
            part.anchor,
            _numbers(part.skip),
            _numbers(part.share),
        ]
    # Numbers may be NumPy's, which a link does not carry: int and float fields are converted below.
    field_types = SCHEMA[kind].items()
    fields: dict[str, Any] = {
        name: field_type(value) if field_type in (int, float) else value
        for (name, field_type), value in zip(field_types, values, strict=True)
    }
    if "anchor" in fields:
        fields["anchor"] = _numbers(fields["anchor"])
    if kind == "run":
        # Pairs, as the keys of a JSON object are strings.
        fields["skipped"] = [[int(document), reason] for document, reason in fields["skipped"].items()]
    return protocol.encoded(kind, fields)


def decode_message(kind: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the message that a link has carried; raises TypeError or ValueError for other contents."""
    fields = dict(fields)
    if "anchor" in fields:
        fields["anchor"] = WindowAnchor(*map(_number, fields["anchor"])) if fields["anchor"] else None
    if kind == "run":
        fields["skipped"] = {_number(document): str(reason) for document, reason in fields["skipped"]}
    if kind == "ask":
        skip, (index, modulus) = frozenset(map(_number, fields["skip"])), map(_number, fields["share"])
        part = RequestPart(
            fields["source"], fields["numbers"], fields["anchor"], skip, share=(index, modulus)
        )
        return kind, fields["request"], part, fields["first"]
    return kind, *(fields[name] for name in SCHEMA[kind])


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values or ()]


def _number(value: Any) -> int:
    # Not isinstance: True is an int too, and a peer that sends it is not one of ours.
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value
