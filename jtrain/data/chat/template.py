"""Chat template of a tokenizer, of a file or of the config, and the tokens at which a model stops.

Which characters are learned: turns.py. Which tokens: jtrain/data/loss_mask.py.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from jtrain.data.chat.messages import ASSISTANT, ChatMessage
from jtrain.data.tokenizer_files import folder_of
from jtrain.errors import FileError, UserError

BUILT_IN = "roles"
"""Name of the built-in template, which needs no special tokens and any tokenizer can write."""

_ROLES = (
    "{%- for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|' + generation_role + '|>\n' }}{% endif %}"
)
"""Built-in template. `generation_role` lets a message of any role be learned; other templates ignore it. The
line end behind a content is where the model has to stop."""

_PROBES = ("jtrainprobeone", "jtrainprobetwo")
"""Texts that show what a template keeps of a message."""

type Values = tuple[tuple[str, Any], ...]
"""Variables of a template beside its messages, by name; hashable."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Template that writes a chat as text.

    source: Jinja of chats.
    tool_source: Jinja of chats with tools, where the tokenizer has one of its own; otherwise empty.
    tokens: special tokens by name, such as `bos_token`, which templates write.
    stops: tokens at which sampling stops; none of the built-in template, whose turns end where their text
      ends.
    specials: special tokens of the tokenizer, which no message may spell.
    options: further variables as JSON, such as `enable_thinking`.
    origin: file or setting that has the template, for messages.
    """

    source: str = _ROLES
    tool_source: str = ""
    tokens: Values = ()
    stops: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()
    options: str = "{}"
    origin: str = "the built-in chat template"

    @property
    def is_built_in(self) -> bool:
        """True for the template whose markers are plain text, in a document with begin and end ids."""
        return self.source == _ROLES

    @property
    def exported(self) -> str:
        """Source for others, who render it without the variable of the built-in template."""
        return self.source.replace("generation_role", "'assistant'") if self.is_built_in else self.source

    @property
    def identity(self) -> str:
        """Text that changes whenever a chat could read otherwise; empty for the built-in template."""
        if self.is_built_in:
            return ""
        content = repr((self.source, self.tool_source, self.tokens, self.stops, self.specials, self.options))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def render(
        self,
        messages: list[ChatMessage],
        tools: list[Any] | None = None,
        *,
        prompts: str = "",
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns the text of a chat, and the spans of its blocks `{% generation %}`.

        Args:
          prompts: role whose message is sampled next, so that the text ends with the generation prompt.

        Raises:
          ValueError: the template fails or refuses the chat.
        """
        has_calls = any(message.tool_calls for message in messages)
        as_json = has_calls and self._arguments_form == "json"
        return self._render(messages, tools, prompts, form=self._content_form, as_json=as_json)

    def _render(
        self, messages: list[ChatMessage], tools: list[Any] | None, prompts: str, *, form: str, as_json: bool
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        from jtrain.data.chat.environment import render  # lazy: only chats need jinja2

        source = self.tool_source if tools and self.tool_source else self.source
        variables = {**dict(self.tokens), "tools": tools, "documents": None, **json.loads(self.options)}
        return render(
            source,
            messages=[_as_mapping(message, form=form, as_json=as_json) for message in messages],
            add_generation_prompt=bool(prompts),
            generation_role=prompts,
            **variables,
        )

    @functools.cached_property
    def _content_form(self) -> Literal["text", "parts"]:
        """`parts` for a template that loses contents that are text, as those of models for images do."""
        chat = [ChatMessage("user", _PROBES[0]), ChatMessage(ASSISTANT, _PROBES[1])]
        return "parts" if self._keeps_only(chat, ("text", "parts"), as_json=False) == "parts" else "text"

    @functools.cached_property
    def _arguments_form(self) -> Literal["mapping", "json"]:
        """`json` for a template that joins the arguments of a call as text."""
        call = {"type": "function", "function": {"name": _PROBES[0], "arguments": {"key": _PROBES[1]}}}
        chat = [ChatMessage("user", "?"), ChatMessage(ASSISTANT, "", tool_calls=({"id": "call", **call},))]
        form = (self._content_form,)
        if self._keeps_only(chat, form, as_json=False) or not self._keeps_only(chat, form, as_json=True):
            return "mapping"
        return "json"

    def _keeps_only(self, chat: list[ChatMessage], forms: tuple[str, ...], *, as_json: bool) -> str:
        """Returns the first form in which the template keeps both probes; empty if there is none."""
        for form in forms:
            try:
                text, _ = self._render(chat, None, "", form=form, as_json=as_json)
            except ValueError:
                continue
            if all(probe in text for probe in _PROBES):
                return form
        return ""


def _as_mapping(message: ChatMessage, *, form: str, as_json: bool) -> dict[str, Any]:
    """Returns a message as templates read it."""
    mapping: dict[str, Any] = {"role": message.role, "content": message.content}
    if form == "parts":
        mapping["content"] = [{"type": "text", "text": message.content}]
    if message.reasoning:
        mapping |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        mapping["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _dumped(call)}} if as_json else call
            for call in message.tool_calls
        ]
    return mapping | dict(message.others)


def _dumped(call: dict[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class ChatRule:
    """Rule by which the messages of a source become text, and which of its turns are learned.

    tools_field: field of a record with the tools that the model may call; empty if they are left out, None if
      there is no such field.
    train_on: `all` assistant's turns, or the `last` one.
    on_rewritten_turn: `refuse` a chat of which an earlier turn reads otherwise than it did when it was
      sampled, or `split` it into one record a turn.
    message_weights: True if the weights of messages are other numbers than 0 and 1.
    """

    template: ChatTemplate = ChatTemplate()
    tools_field: str | None = None
    train_on: Literal["all", "last"] = "all"
    on_rewritten_turn: Literal["refuse", "split"] = "refuse"
    message_weights: bool = False

    def __str__(self) -> str:
        """Text that changes whenever a chat could read otherwise; empty for the default."""
        settings: dict[str, Any] = {"template": self.template.identity, "tools": self.tools_field}
        settings["train_on"] = "" if self.train_on == "all" else self.train_on
        settings["on_rewritten_turn"] = "" if self.on_rewritten_turn == "refuse" else self.on_rewritten_turn
        settings["message_weights"] = self.message_weights
        return "".join(f", {name}={value}" for name, value in settings.items() if value)


def load_template(
    template: str | None,
    *,
    tokenizer: str,
    end_token: str | None,
    stop_tokens: tuple[str, ...],
    options: dict[str, Any],
    field: str,
) -> ChatTemplate:
    """Returns the chat template of a source.

    Args:
      template: `roles`, the path of a file of Jinja or of a folder with a tokenizer, or Jinja itself; None
        for the tokenizer's own, or `roles` if it has none.
      tokenizer: `bytes`, or the path of a tokenizer.json or its folder.
      field: config path of the source, for messages.

    Raises:
      FileError: there is no such file.
      UserError: the file has no template, or it is no Jinja.
    """
    setting = f"{field}.chat_template={template!r}"
    folder = folder_of(tokenizer)
    if template == BUILT_IN:
        return ChatTemplate()
    if template is None:
        if folder is None or not (sources_and_origin := _template_in(folder)):
            return ChatTemplate()
        sources, origin = sources_and_origin
    elif "{{" in template or "{%" in template:
        sources, origin = {"default": template}, f"{field}.chat_template"
    else:
        path = Path(template).expanduser()
        if not path.exists():
            raise FileError(
                f"{setting}: no such file; looked for {path.absolute()}. Set it to a file of Jinja, to a "
                f"tokenizer's folder, to {BUILT_IN!r}, or to the template itself."
            )
        if path.is_dir() or path.suffix == ".json":
            if not (sources_and_origin := _template_in(path if path.is_dir() else path.parent)):
                raise UserError(
                    f"{setting}: there is no chat_template.jinja, and no chat_template in a "
                    f"tokenizer_config.json. Set it to a file of Jinja, or to {BUILT_IN!r}."
                )
            sources, origin = sources_and_origin
        else:
            sources, origin = {"default": path.read_text("utf-8")}, str(path)
    from jtrain.data.chat.environment import check_syntax  # lazy: only chats need jinja2

    for source in sources.values():
        if defect := check_syntax(source):
            raise UserError(
                f"{origin}: not a chat template: {defect}. Mend it, or set {field}.chat_template."
            )
    tokens = _special_tokens(folder) if folder else {}
    added = _added_tokens(folder) if folder else {}
    named = [*([end_token] if end_token else []), *stop_tokens]
    stops = [*named, *([tokens["eos_token"]] if "eos_token" in tokens else [])]
    stops += [added[i][0] for i in _generation_stops(folder) if i in added] if folder else []
    return ChatTemplate(
        source=sources["default"],
        tool_source=sources.get("tool_use", ""),
        tokens=tuple(sorted(tokens.items())),
        stops=tuple(dict.fromkeys(stops)),
        specials=tuple(sorted({content for content, special in added.values() if special and content})),
        options=json.dumps(options, sort_keys=True),
        origin=origin,
    )


def _template_in(folder: Path) -> tuple[dict[str, str], str] | None:
    """Returns the templates of a tokenizer's folder by name, and the file that has them."""
    if (file := folder / "chat_template.jinja").is_file():
        return {"default": file.read_text("utf-8")}, str(file)
    declared = _json_of(folder / "tokenizer_config.json").get("chat_template")
    origin = f"chat_template of {folder / 'tokenizer_config.json'}"
    if isinstance(declared, str):
        return {"default": declared}, origin
    if isinstance(declared, list):
        named = {entry["name"]: entry["template"] for entry in declared if isinstance(entry, dict)}
        if "default" in named:
            return named, origin
        raise UserError(
            f"{origin} has templates {', '.join(named)} and none called default. Set data.sources.NAME."
            "chat_template to a file with one of them."
        )
    return None


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens that a tokenizer_config.json names, such as bos_token."""
    config = {**_json_of(folder / "special_tokens_map.json"), **_json_of(folder / "tokenizer_config.json")}
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _added_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """Returns the added tokens of a tokenizer.json by id, and if they are special."""
    added = _json_of(folder / "tokenizer.json").get("added_tokens") or []
    return {token["id"]: (token["content"], bool(token.get("special"))) for token in added}


def _generation_stops(folder: Path) -> list[int]:
    declared = _json_of(folder / "generation_config.json").get("eos_token_id")
    return declared if isinstance(declared, list) else [] if declared is None else [declared]


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON object ({error}). Mend or remove it.") from error
    return content if isinstance(content, dict) else {}
