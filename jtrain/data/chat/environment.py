"""Sandboxed Jinja for chat templates, with the helpers that transformers gives them."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

NOW = "2025-01-01"
"""Day that `strftime_now` tells: the text of a record must be the same on every day of a run. Another one is
`now` of `template_options`."""

_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Characters of private use that mark the blocks `{% generation %}` in a text."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which some templates put around what assistants say."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - of the class, as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Returns a template; raises `jinja2.TemplateSyntaxError`."""
    return _environment().from_string(source)


def render(source: str, **variables: Any) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Returns the text of a template, and the spans of its blocks `{% generation %}`, in characters.

    Raises:
      ValueError: the template fails, or refuses these variables by `raise_exception`.
    """
    date = datetime.datetime.fromisoformat(variables.pop("now", NOW))
    try:
        marked = compile_template(source).render(strftime_now=date.strftime, **variables)
    except RecursionError as error:
        raise ValueError("makes the chat template fail: it calls itself without end") from error
    except Exception as error:  # a template may raise whatever Python raises
        kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
        raise ValueError(f"makes the chat template fail: {kind}{error}") from error
    if _OPEN not in marked:
        return marked, ()
    spans, parts, end = [], [], 0
    first, *blocks = marked.split(_OPEN)
    parts.append(first)
    end += len(first)
    for block in blocks:
        generated, _, tail = block.partition(_CLOSE)
        spans.append((end, end + len(generated)))
        parts += [generated, tail]
        end += len(generated) + len(tail)
    return "".join(parts), tuple(spans)


def check_syntax(source: str) -> str:
    """Returns why a source is no template; empty if it is one."""
    try:
        compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""
