"""Errors that end a run with a code of their own: `UserError` (2, the user can fix it), `AwayError` (77, what
it needs is away now) and `HardwareFault` (76).
"""

from collections.abc import Sequence

from jtrain_kernels.errors import AwayError, FileError, UserError, did_you_mean

__all__ = [
    "AwayError",
    "FileError",
    "HardwareFault",
    "TakenWorkdir",
    "UserError",
    "did_you_mean",
    "first_few",
]


class HardwareFault(Exception):
    """A device or host computes wrongly or hangs; the message names it. Nothing that it computed is saved."""


class TakenWorkdir(UserError):
    """A workdir holds another run than the one that is asked for, or one that is done.

    ending: of the name of a new workdir; "" numbers it.
    """

    ending = ""


def first_few(items: Sequence[str], most: int, between: str = ", ") -> str:
    """Joins up to `most` items and says how many more there are: `a, b and 3 more`, or `a; b; and 3 more`."""
    num_more = len(items) - most
    separator = " " if between == ", " else between
    return between.join(items[:most]) + (f"{separator}and {num_more} more" if num_more > 0 else "")
