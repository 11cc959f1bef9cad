"""Ways out of a refusal, read off its message as a user would, and followed."""

import re
from collections.abc import Iterator
from typing import Any

from jtrain.bench.layout_trials.settings import DEVICES, FACTORS, Setting, refusal
from jtrain.errors import UserError

MOST = 6
"""Refusals in a row after which following their ways out counts as going in circles."""

_PATH = r"(?:(?:mesh|layout|pipeline|precision|optimizer|model|data)\.[a-z_.]*[a-z_])"
_BARE = {"microbatches": "layout.microbatches", "stages": "mesh.stage", "schedule": "pipeline.schedule"}
_BARE |= {"param_rounding": "optimizer.param_rounding", "chunks": "pipeline.chunks"}


def reason_of(error: UserError) -> str:
    """A refusal without its numbers and names, so that refusals for the same reason are the same text."""
    # Explanations in parentheses and everything after the first sentence are details of one case.
    text = re.sub(r"\([^)]*\)", "", str(error)).split(". ")[0]
    return re.sub(r"=\S+", "=_", re.sub(r"-?\d+(\.\d+)?%?", "_", text)).strip()[:110]


def ways_out(error: UserError, setting: Setting) -> list[Setting]:
    """Changes that a message names, one dict for each alternative; without those that name no value."""
    message = str(error)
    # Messages of sizes list those that would split evenly.
    nearest_sizes = (
        [int(n) for n in re.findall(r"\d+", match[1])]
        if (match := re.search(r"Nearest[^:]*: ([\d, ]+)", message))
        else []
    )
    changes: list[Setting] = []
    # A sentence ends with one of these marks; what follows may be a way out.
    for sentence in re.split(r"(?<=[.:;]) (?=[A-Za-z(])", message):
        # Only sentences that tell the user to do something are ways out.
        if (
            not re.match(r"(Set|Leave|Raise|Use|or take|add)\b", sentence)
            and "or take schedule" not in sentence
        ):
            continue
        if sentence.startswith("Use optimizer") or "or use AdamW" in sentence:
            changes.append({"optimizer": "AdamW"})
        # Alternatives within a sentence are separated by `or`.
        for clause in re.split(
            r",? or (?=set |take |add |change |leave |use |[a-z]+\.[a-z])|, or (?=\w)", sentence
        ):
            if change := _change(clause, setting, nearest_sizes):
                changes.append(change)
    # A change to the value that the setting has already is no way out.
    return [change for change in changes if any(setting[path] != value for path, value in change.items())]


def _change(clause: str, setting: Setting, nearest_sizes: list[int]) -> Setting:
    change: Setting = {}
    # Both parts of an `and` belong to one change.
    for part in re.split(r" and (?=[a-z_.]+=|[a-z]+\.[a-z])", clause):
        if take := re.search(r"take schedule ([\w-]+)", part):
            change["pipeline.schedule"] = take[1]
            continue
        named = re.search(
            rf"({_PATH}|\b(?:{'|'.join(_BARE)})\b)(?:=([\w.+-]*[\w+-])| (?:to|at) ([^.;(]+))?", part
        )
        if named is None:
            continue
        # Messages shorten some options to their last word.
        path = _BARE.get(named[1], named[1])
        if path not in setting:
            continue
        if named[2] is not None:
            change[path] = _typed(named[2])
        elif named[3] is not None and "least that" in named[3]:
            change[path] = 1.0  # a share of the bytes that moves all of them
        elif named[3] is not None and (value := _number(named[3], setting[path])) is not None:
            change[path] = value
        elif nearest_sizes and named[3] is None:
            # The larger of the nearest sizes, as a user would rather have more.
            change[path] = max(nearest_sizes)
        if path == "pipeline.schedule" and change.get(path) == "interleaved":
            # Interleaving needs at least two chunks per stage, which its message says elsewhere.
            change["pipeline.chunks"] = 2
    return change


def _typed(text: str) -> Any:
    literals: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in literals:
        return literals[text]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else text


def _number(text: str, current: Any) -> int | None:
    """A number that `2 or more`, `at most 2`, `one of 1, 2, 4` or `a divisor of 8` allows."""
    # Numbers that are parts of names or versions do not count.
    numbers = [int(n) for n in re.findall(r"(?<![\w.])\d+(?![\w.]*\.\d)", text)]
    if not numbers or not isinstance(current, int):
        return None
    if "divisor" in text:
        choices = [n for n in range(1, numbers[0] + 1) if numbers[0] % n == 0]
    elif "one of" in text:
        choices = [n for n in numbers if n <= DEVICES]
    else:
        return numbers[0]
    # The largest allowed value up to the current one changes the setting least.
    return max((n for n in choices if n <= current), default=min(choices))


def follow(setting: Setting, keep: tuple[str, ...] = ()) -> tuple[Setting | None, list[UserError]]:
    """Follows ways out until jtrain takes the setting.

    Args:
      keep: factors that must keep their values.

    Returns:
      The setting that is taken, None if no way out led to one; and the refusals on the way.
    """
    refusals: list[UserError] = []
    tried: list[Setting] = []
    # The first result is taken; the generator would yield others.
    for result in _followed(setting, keep, refusals, tried, MOST):
        return result, refusals
    return None, refusals


def _followed(
    setting: Setting, keep: tuple[str, ...], refusals: list[UserError], tried: list[Setting], depth: int
) -> Iterator[Setting]:
    error = refusal(setting)
    if error is None:
        yield setting
        return
    refusals.append(error)
    # Circles, and searches that grow, end here.
    if depth == 0 or setting in tried or len(tried) > 40:
        return
    tried.append(setting)
    for change in ways_out(error, setting):
        if all(setting[path] == value for path, value in change.items() if path in keep):
            yield from _followed(setting | change, keep, refusals, tried, depth - 1)


def try_ways_out(error: UserError, setting: Setting) -> list[tuple[Setting, bool]]:
    """For each way out that a message names, the changes and whether they end this refusal."""
    changes = [change for change in ways_out(error, setting) if set(change) <= set(FACTORS)]
    results: list[tuple[Setting, bool]] = []
    for change in changes:
        next_error = refusal(setting | change)
        # Another reason means that this refusal is over, although the setting is not accepted yet.
        results.append((change, next_error is None or reason_of(next_error) != reason_of(error)))
    return results
