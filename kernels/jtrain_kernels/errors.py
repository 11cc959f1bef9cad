"""Errors that a user can fix, and hints at the name that was meant. Standard library only."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Error in a setting, file or machine that the user can fix; names the field, the numbers and the way
    out.

    A command prints the message and exits with code 2. Any other exception is a bug: it keeps its traceback
    and exits with code 1.
    """


class FileError(UserError, OSError):
    """A file or store that is missing, damaged or unreadable."""


class AwayError(FileError):
    """A disk, store or peer that cannot serve now; the same command may go on later, unchanged.

    A command exits with code 77, which supervisors and clusters try again.
    """


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`"Did you mean tiny? "` if some of `names` are close to `name`, in any case, else an empty string."""
    # Compared in lower case, shown as they are spelled.
    by_lower = {candidate.lower(): candidate for candidate in names}
    close_names = [by_lower[candidate] for candidate in difflib.get_close_matches(name.lower(), by_lower)]
    return f"Did you mean {', '.join(close_names)}? " if close_names else ""
