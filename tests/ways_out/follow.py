"""Follows the advice of a refusal as a user would who copies it: changes of a command, word for word.

    layout.microbatches=3 does not divide ... Set data.global_batch to a multiple of 24, or layout.microbatches to
    a divisor of 1.

gives two commands, with `--set data.global_batch=24` and with `--set layout.microbatches=1`.
"""

import re
from collections.abc import Iterator, Mapping

type Words = list[str]

_COMPONENTS = (
    "mesh|layout|pipeline|precision|model|adapter|optimizer|objective|data|eval|checkpoint|profile|guard|metrics|"
    "weight_stream"
)
_PATH = rf"(?<![\w./-])(?:(?:{_COMPONENTS})(?:\.[a-z_0-9]+)+|num_steps|seed)(?![\w/])"
_VALUE = r"\([^)]*\)|\{[^}]*\}|'[^']*'|[\w+.:-]*[\w+]"
_OPTION = r"--[a-z][a-z-]*"
_VERBS = "set|add|leave|give|use|choose|raise|lower|remove|take"
_SHORT = {"microbatches": "layout.microbatches", "param_rounding": "optimizer.param_rounding"}
"""Fields that messages shorten to their last word, where the words before name their component."""


def ways_out(message: str, words: Words, values: Mapping[str, str]) -> list[Words]:
    """Commands that a message tells to use in place of the one it refuses.

    Advice without a value, such as "lower data.seq_len", leaves it to the user and gives no command.

    Args:
      words: the refused command.
      values: option -> a value of the user, where a message names the option alone ("Give --count").
    """
    commands = [*_respelt(message, words), *_at_least(message, words), *_whole_command(message, values)]
    for alternative in _alternatives(message):
        commands += _commands(alternative, message, words, values)
    # The same command again is no way out.
    return [words for number, words in enumerate(commands) if words not in commands[:number]]


def _alternatives(message: str) -> Iterator[str]:
    """Parts of a message that tell the user to do something, each an alternative of the others."""
    for sentence in re.split(r"(?<=[.?;:])\s+|\n", message):
        if match := re.match(r"\s*(--set .*?)  \(", sentence):
            yield f"add {match[1]}"  # a line of settings with the bytes that it takes
        if not (match := re.search(rf"(?:^|, | or |; )((?:{_VERBS})\b.*)", sentence, re.IGNORECASE)):
            continue
        verb = ""
        for part in re.split(
            r",? or (?!more|less|later|fewer)|, (?=(?:lower|raise|set) )", match[1].rstrip(".")
        ):
            if found := re.match(rf"(?:{_VERBS})\b", part, re.IGNORECASE):
                verb = found[0].lower()
                yield part
            else:
                yield f"{verb} {part}"


def _commands(clause: str, message: str, words: Words, values: Mapping[str, str]) -> Iterator[Words]:
    verb, _, advice = clause.partition(" ")
    options = re.findall(rf"({_OPTION})(?:[ =](?!--)([^\s,;`]+))?", advice)
    if verb.lower() in ("leave", "remove"):
        yield from _left_out(advice, message, words)
    elif options:
        changed = words
        for name, value in options:
            value = value.rstrip(".)")
            if name in ("--set", "--with", "--allow-change"):
                changed = [*changed, name, value]
            elif re.fullmatch(r"[\w./:=()-]*[\w)]", value) and not re.fullmatch(
                r"-.*|or|of|and|one|to|in|if|for|with|FILE|K|instead", value
            ):
                changed = [*without(changed, name), name, value]
            elif match := re.search(rf"{name}(?:,| to) one of '?(\w+)", message):
                changed = [*without(changed, name), name, match[1]]
            else:
                changed = [*without(changed, name), name, *([values[name]] if name in values else [])]
        yield changed
    elif re.match(r"both\b", advice):
        missing = [name for name in dict.fromkeys(re.findall(_OPTION, message)) if name not in words]
        yield [*words, *(word for name in missing for word in (name, values[name]))]
    elif (subject := re.match(rf"({_OPTION})[ =]", message)) and (
        match := re.match(r"one of:? ([\w-]+)|(\d+)(?:,|$)", advice)
    ):
        yield [*without(words, subject[1]), subject[1], match[1] or match[2]]
    else:
        changed = [*words]
        for part in re.split(r" and (?=[a-z_.]+=|[a-z_]+\.[a-z]|[a-z_]+=)", advice):
            changed += _setting(part, message, words)
        if changed != words:
            yield changed


def _left_out(advice: str, message: str, words: Words) -> Iterator[Words]:
    if re.match(r"one\b|one of them", advice):
        yield from (without(words, name) for name in dict.fromkeys(re.findall(_OPTION, message)))
        return
    left = words
    if match := re.search(rf"({_PATH}) at (\S+)", advice):
        left = [*words, "--set", f"{match[1]}={match[2]}"]
    for name in re.findall(_OPTION, advice):
        left = without(left, name)
    if match := re.match(rf"({_PATH})$", advice):
        left = _unset(left, match[1])
    yield left


def _unset(words: Words, path: str) -> Words:
    """The command without `--set PATH=...`."""
    places = [number for number, word in enumerate(words) if word.startswith(f"{path}=")]
    return [word for number, word in enumerate(words) if not {number, number + 1} & {*places}]


def _setting(part: str, message: str, words: Words) -> Words:
    """`--set PATH=VALUE` as a part of a sentence says it; nothing where it leaves the value to the user."""
    path_pattern = rf"{_PATH}|{'|'.join(_SHORT)}"
    if match := re.search(rf"({path_pattern})=({_VALUE})", part):
        return ["--set", f"{_SHORT.get(match[1], match[1])}={match[2]}"]
    if match := re.search(rf"({_PATH}) (?:to|at|above) (.*)", part):
        path, text = match[1], match[0].removeprefix(f"{match[1]} ")
    elif match := re.match(r"(?:it )?(to .*|'.*)", part):
        # The last field that was named before.
        path, text = re.findall(_PATH, message.partition(part)[0])[-1], match[1]
    elif re.fullmatch(_PATH, part) and (nearest := re.search(r"[Nn]earest[^:]*: ([\d, ]*\d)", message)):
        path, text = part, nearest[1].split(", ")[-1]
    elif re.fullmatch(_PATH, part) and (match := re.search(r"must be (.*?)[.(]", message)):
        path, text = part, match[1]
    else:
        return []
    value = _value(text, setting(words, path, message))
    return [] if value is None else ["--set", f"{path}={value}"]


def _value(text: str, current: str | None) -> str | None:
    """A value that `2 or more`, `a multiple of 4`, `one of a, b`, `at least 3` or `'bytes'` allows."""
    text = re.sub(r"^(?:to|at) (?!least|most)", "", text)
    if match := re.search(r"multiple of (\d+)", text):
        unit = int(match[1])
        return str(max(1, -(-int(current or 1) // unit)) * unit)
    if match := re.search(r"divisor of (\d+)", text):
        size, most = int(match[1]), max(1, int(current or 1))
        return str(max(n for n in range(1, size + 1) if size % n == 0 and n <= most))
    if "least that" in text:
        return "1.0"  # a share of the bytes that moves all of them
    if match := re.search(r"above (-?[\d.]*\d)", text):
        return str(float(match[1]) + 0.5)
    if match := re.search(r"one of ([\w.-]*\w)|(?:at least|at most) (-?[\d.]*\d)|[`']([^`']+)[`']", text):
        return match[1] or match[2] or match[3]
    match = re.match(r"(?!an? )([\w.+-]*[\w+])", text)
    return None if match is None else match[1]


def setting(words: Words, path: str, message: str) -> str | None:
    """Value that a command sets, else the one that the message says."""
    said = re.findall(rf"{re.escape(path)}=(\d+)", message)
    values = [word.partition("=")[2] for word in words if word.startswith(f"{path}=")]
    return [*said, *values][-1] if said or values else None


def without(words: Words, name: str) -> Words:
    """The command without an option and its value."""
    left, is_value = list[str](), False
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word == name:
            is_value = re.match("-+[a-z]|--$", following) is None
        elif is_value:
            is_value = False
        elif not word.startswith(f"{name}="):
            left.append(word)
    return left


def _at_least(message: str, words: Words) -> Iterator[Words]:
    """The command with an option at the least that it takes, where a message says no more than that."""
    pattern = rf"({_OPTION}) -?[\d.]+ must be (?:at least|from) (\d+)|({_OPTION}) -?\d+ must be (\d+) or more"
    if match := re.match(pattern, message):
        option, least = match[1] or match[3], match[2] or match[4]
        yield [*without(words, option), option, least]


def _whole_command(message: str, values: Mapping[str, str]) -> Iterator[Words]:
    """The command that a message gives whole, with the user's config for `--config=...`."""
    for verb, text in re.findall(r"run python -m jtrain\.(\w+) ([^.`]*(?:\.\.\.[^.`]*)?)", message):
        yield [verb, *text.replace("--config=...", f"--config={values['--config']}").split()]


def _respelt(message: str, words: Words) -> Iterator[Words]:
    """The command with its misspelt word replaced by each that the message offers; the first is the nearest."""
    offered = re.search(r"[Dd]id you mean ([^?]*)\?", message)
    wrong = re.search(
        r"(?:no (?:option|command|fiddler|verb) |has no field |--config=|--[\w-]+ )([\w.-]*\w)", message
    )
    if offered is not None and (
        names := re.findall(r"has no (?:field|fiddler) ([\w.]*\w)", message) or wrong
    ):
        name = names[0] if isinstance(names, list) else names[1]
        nearest = (
            offered[1].split(", ")[0].rpartition(".")[2]
            if "has no field" in message
            else offered[1].split(", ")[0]
        )
        yield [re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", nearest, word) for word in words]
