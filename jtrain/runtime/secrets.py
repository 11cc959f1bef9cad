"""Secrets in settings: which values of a config or a command line are never written down or printed. No jax.

A value is a secret by its field's name (`api_key`, `hub_token`, `alerts.webhook`), or by itself: a URL with
`user:password@`, with a signature or token in its query, of a webhook, or with a part of its path that looks
drawn at random; an argument of a call, as in `make(api_key="...")`. Only the secret part becomes `***`, so
that two texts can still be compared: a renewed signature is not another run.
"""

import re
from collections.abc import Sequence

HIDDEN = "***"

_WORDS = re.compile(
    r"(?i)(?<![a-z])(api_?key|access_?key|key|keys|token|secret|secrets|pass|passwd|password|passphrase|pwd|"
    r"credential|credentials|auth|authorization|bearer|webhook|webhooks|cookie)(?![a-z])"
)
_PUBLIC = ("end_token",)
"""Fields whose name has such a word, but whose value is public: `data.end_token` is a token of a
vocabulary."""

_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(
    r"(?i)(?P<name>[?&#;](?:x-(?:amz|goog|oss|cos|ms)-signature|awsaccesskeyid|googleaccessid|sig|signature|"
    r"policy|key-pair-id|(?:[a-z0-9_.-]*[_.-])?(?:key|pass|session|sessionid|sid)|code|jwt|"
    r"[a-z0-9_.-]*(?:token|secret|password|passwd|api_?key|credential|auth))=)"
    r"[^&#;\s'\"]+"
)
_WEBHOOK = re.compile(
    r"(?i)(?P<host>\bhttps?://(?:hooks\.[^/\s'\"]+|[^/\s'\"]+(?=/[^\s'\"]*webhook))/)[^\s'\"]+"
)

_ARGUMENT = re.compile(
    r"(?i)(?P<name>\b[a-z0-9_]*(?:(?<!end_)token|secret|password|passwd|\bpass|_pass|api_?key|access_?key|"
    r"credential|auth)\s*=\s*)(?P<quote>[\"'])(?:(?!(?P=quote)).)+(?P=quote)"
)
"""Argument of a call in a value, such as a callback's `make(api_key="...")`."""
_PATH = re.compile(r"(?i)(?P<host>\bhttps?://[^/\s'\"?#]+)(?P<path>/[^\s'\"?#]+)")
_RANDOM = re.compile(r"[A-Za-z0-9]{20,}")


def is_secret(path: str) -> bool:
    """True if the name of a field, or of a variable, says that its value is a secret."""
    return bool(_WORDS.search(path.rpartition(".")[2])) and path.rpartition(".")[2] not in _PUBLIC


def without_secrets(text: str) -> str:
    """Returns text with the secret parts of the URLs in it replaced by `***`."""
    text = _USER.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _WEBHOOK.sub(rf"\g<host>{HIDDEN}", text)
    text = _ARGUMENT.sub(rf"\g<name>\g<quote>{HIDDEN}\g<quote>", text)
    text = _PATH.sub(lambda match: match["host"] + _hide_tokens(match["path"]), text)
    return _PARAMETER.sub(rf"\g<name>{HIDDEN}", text)


def _hide_tokens(path: str) -> str:
    """Hides parts of a URL's path that look drawn at random: 20 characters in a row, of all three kinds.

    Hashes in hex stay: they name a version, and two versions must not look the same.
    """
    return "/".join(
        HIDDEN if any(map(_is_token, _RANDOM.findall(part))) else part for part in path.split("/")
    )


def _is_token(run: str) -> bool:
    # A word, a number or a hash in hex has two of the three at most.
    return all(re.search(kind, run) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


def redact_value(path: str, text: str) -> str:
    """Returns the text of a field's value as it may be shown; numbers, None, True and False are no
    secrets.
    """
    if (
        is_secret(path)
        and text.strip("'\"")
        # A secret field that is unset is no secret: whether it is set may be shown.
        and not re.fullmatch(r"None|True|False|[-+.\deE]+|\(\)|\{\}|\[\]", text)
    ):
        return repr(HIDDEN)
    return without_secrets(text)


def redact_assignment(text: str) -> str:
    """Returns `PATH=VALUE` as it may be shown."""
    # The first `=`: a value may hold more of them, as a signature does.
    path, equals, value = text.partition("=")
    hidden = redact_value(path.strip(), value.strip())
    # `redact_value` returns a Python literal; in PATH=VALUE the quotes would be part of the value.
    return f"{path}{equals}{value if hidden == value.strip() else hidden.strip(chr(39))}"


def redact_lines(config_text: str) -> str:
    """Returns a flat config (`path: type = value` lines) as it may be shown."""
    return "".join(map(_redact_line, config_text.splitlines(keepends=True)))


def redact_command(command: Sequence[str]) -> list[str]:
    """Returns a command line as it may be kept: arguments of the form NAME=VALUE are judged by their name
    too.
    """
    return [
        redact_assignment(argument) if "=" in argument else without_secrets(argument) for argument in command
    ]


def _redact_line(line: str) -> str:
    head, equals, value = line.partition(" = ")
    # A remark has no value, but may quote a URL.
    if not equals or line.startswith("#"):
        return without_secrets(line)
    body, newline = (value[:-1], "\n") if value.endswith("\n") else (value, "")
    return f"{head}{equals}{redact_value(head.partition(': ')[0], body)}{newline}"
