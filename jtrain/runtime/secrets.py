"""Secrets in settings: which values of a config or a command line are never written down or printed. No jax.

A value is a secret by its field's name (`api_key`, `hub_token`, `alerts.webhook`), or by itself: a URL with
`user:password@`, with a signature or token in its query, or of a webhook. Only the secret part becomes `***`,
so that two texts can still be compared: a renewed signature is not another run.
"""

import re
from collections.abc import Sequence

HIDDEN = "***"

_WORDS = re.compile(
    r"(?i)(?<![a-z])(api_?key|access_?key|key|keys|token|secret|secrets|passwd|password|passphrase|pwd|"
    r"credential|credentials|auth|authorization|bearer|webhook|webhooks|cookie)(?![a-z])"
)
_PUBLIC = ("end_token",)
"""Fields whose name has such a word, but whose value is public: `data.end_token` is a token of a
vocabulary."""

_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(
    r"(?i)(?P<name>[?&#;](?:x-(?:amz|goog|oss|cos|ms)-signature|awsaccesskeyid|googleaccessid|sig|signature|"
    r"policy|key-pair-id|key|code|jwt|[a-z0-9_.-]*(?:token|secret|password|passwd|api_?key|credential|auth))=)"
    r"[^&#;\s'\"]+"
)
_WEBHOOK = re.compile(
    r"(?i)(?P<host>\bhttps?://(?:hooks\.[^/\s'\"]+|[^/\s'\"]+(?=/[^\s'\"]*webhook))/)[^\s'\"]+"
)


def is_secret(path: str) -> bool:
    """True if the name of a field, or of a variable, says that its value is a secret."""
    return bool(_WORDS.search(path.rpartition(".")[2])) and path.rpartition(".")[2] not in _PUBLIC


def without_secrets(text: str) -> str:
    """Returns text with the secret parts of the URLs in it replaced by `***`."""
    text = _USER.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _WEBHOOK.sub(rf"\g<host>{HIDDEN}", text)
    return _PARAMETER.sub(rf"\g<name>{HIDDEN}", text)


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
