"""Source of documents as declared in the config, and how its records are identified."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float, Int, UInt64

from jtrain.data.chat.template import ChatRule, load_template
from jtrain.data.sources.formats.masked_text import MaskFields, check_format
from jtrain.errors import UserError

Format = Literal[
    "auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrayrecord", "webdataset", "arrow", "grain"
]

_OF_CHATS = (
    "chat_template",
    "template_options",
    "tools_field",
    "stop_tokens",
    "train_on",
    "on_rewritten_turn",
    "message_weights",
)
"""Settings that need a field of messages."""

ONE_SOURCE = "data"
"""Name of the single source that `data.path` declares."""


HELD_OUT_PREFIX = "eval.sets."
"""Start of the names of sources in `eval.sets`; no name in `data.sources` has a dot."""


def is_source_name(name: str) -> bool:
    """True for letters, digits, _ and -, no digit first."""
    return name.replace("-", "_").isidentifier()


def field_of(name: str) -> str:
    """Returns the config path of a source, for messages."""
    if name.startswith(HELD_OUT_PREFIX):
        return name
    # `data.path` declares one source without a name, so messages name its fields directly.
    return "data" if name == ONE_SOURCE else f"data.sources.{name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Source of documents, with a share in the mixture.

    path: a file, a folder, a glob (`**` for any depth), `stdlib` (source text of the Python standard
      library), `stdlib_chats` (conversations about the names in it), `stdlib_pairs` (a right and a wrong
      answer about each name), or the URL of a file, folder or glob: s3://, gs://, hf://, http(s)://, file://,
      or another scheme that fsspec knows. A folder takes only its data files (`data_files`); a file or a glob
      takes all that it names. For format grain, `module:function` or `path/to/file.py:function` of a function
      that returns a `grain.MapDataset` of str.
    weight: weight in the mixture, relative to the other sources; may be zero.
    format: `auto` goes by each file's suffix, in any case: .jsonl and .ndjson (JSON lines), .json (one
      object, an array of objects, or JSON lines, by its first bytes), .csv and .tsv (with a header),
      .parquet, .arrayrecord, .tar (WebDataset), .arrow and .feather, each also with .gz, .zst, .bz2 or .xz
      behind it; files of another suffix are JSON lines if their first lines are objects, otherwise text, one
      document per file. A folder written by Hugging Face's `save_to_disk` is recognised by its state.json.
    text_field: JSON key, column, or suffix of the tar's members (such as txt; `json.text` for a field of its
      members .json). `meta.text` is the key or
      column of that name, or else the field `text` of the JSON object or struct column `meta`. For
      ArrayRecord it applies to records that are JSON objects; if it is empty, each whole record is the text.
    prompt_field: field of a text that precedes the one in `text_field`: both are one document, the prompt
      before its completion. `instruction+input` joins two fields, each with a line end, empty ones left out.
      Prompt and completion may both be lists of messages. Not together with `mask_field`.
    rejected_field: field of the worse answer of a preference pair, for `objective=DPO(...)`. The better one
      is in `text_field`, behind the prompt of `prompt_field`, all three texts or lists of messages; or both
      are whole chats, the better one in `messages_field`, which differ in their last message alone. A pair is
      one sample: both texts are in one row, each by itself, and the answers alone are learned.
    mask_prompt: False to learn the prompt as well, or every message.
    mask_field: field of the spans of the text that are learned: a list of [start, end] in characters
      (Python's, not bytes), ascending and apart; in CSV as JSON. Whatever lies outside of them is read and
      not learned. The text is tokenised from border to border, as the prompt is by itself, so no token is
      half learned. The end of the document is learned if the last span reaches the end of the text.
    messages_field: field of a chat, a list of messages `{"role": "user", "content": "Hi"}`, or of ShareGPT's
      `{"from": "human", "value": "Hi"}`, instead of `text_field`. What is learned of it is what a model
      samples: each assistant's turn from the end of the generation prompt through the stop token; `weight` (0
      or 1) and `train` (true or false) of a message are honoured. In JSON, Parquet, Arrow and ArrayRecord.
    chat_template: template that writes chats: None for the tokenizer's own (`chat_template.jinja` or
      tokenizer_config.json in its folder), or `roles` if it has none; `roles` for the built-in one:
      `<|user|>`, a line end, the content and a line end; the path of a file of Jinja or of a tokenizer's
      folder; or Jinja itself.
    template_options: further variables of the template, such as `{"enable_thinking": False}`.
    tools_field: field of the tools of a chat, a list of their JSON schemas or its text; None if records have
      none, empty to leave them out.
    stop_tokens: tokens at which a model stops, beside the tokenizer's end token and those of a
      generation_config.json in its folder.
    train_on: `all` turns of the assistant, or the `last` one alone.
    on_rewritten_turn: rule for chats of which an earlier turn reads otherwise than when it was sampled, as
      with a template that drops earlier reasoning: they are bad records (`refuse`), or one record a turn
      (`split`), each with what the model has read before it.
    message_weights: True if the `weight` of a message is any number up to 1,000, by which the loss of its
      tokens is multiplied; the mean of a step is then that of weighted tokens (docs/data.md). Without it
      weights are 0 and 1.
    on_too_long: rule for samples (records of a source with `messages_field`, `prompt_field` or `mask_field`,
      or of an adopted index with labels of -100) that are longer than a row. The other samples are in one row
      each, unless `data.packing` is `concat`.
      `split_turns` cuts a sample between its turns, each a prompt with what is learned after it, into as few
      pieces as hold them; of a turn that is longer than a row the end is left out, or all of it if no learned
      token is within the row. `drop` leaves the sample out. Samples of which something is left out are
      counted (`data_skipped`) and logged. `refuse` ends the run. Preference pairs are never cut: without
      `drop` one that is longer than a row ends the run.
    tokenizer: tokenizer of this source; None for data.tokenizer.
    text_piece_bytes: text files longer than this are read as several documents, so that one big file can be
      shuffled too. Raise it for longer contexts.
    """

    path: str
    weight: float = 1.0
    format: Format = "auto"
    text_field: str = "text"
    prompt_field: str | None = None
    rejected_field: str | None = None
    mask_prompt: bool = True
    mask_field: str | None = None
    messages_field: str | None = None
    chat_template: str | None = None
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tools_field: str | None = None
    stop_tokens: tuple[str, ...] = ()
    train_on: Literal["all", "last"] = "all"
    on_rewritten_turn: Literal["refuse", "split"] = "refuse"
    message_weights: bool = False
    on_too_long: Literal["split_turns", "drop", "refuse"] = "split_turns"
    tokenizer: str | None = None
    text_piece_bytes: int = 1 << 16

    def check(self, name: str) -> None:
        """Raises UserError for an invalid value, naming it as `data.sources.NAME.FIELD` (see `field_of`)."""
        field = field_of(name)
        if not self.path:
            raise UserError(f"{field}.path is empty. Set it to a file, a folder, a glob, a URL or 'stdlib'.")
        if self.format not in get_args(Format):
            raise UserError(f"{field}.format={self.format!r} must be one of {', '.join(get_args(Format))}.")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise UserError(f"{field}.weight={self.weight} must be a number, zero or more.")
        if self.text_piece_bytes < 16:
            raise UserError(f"{field}.text_piece_bytes={self.text_piece_bytes} must be at least 16.")
        if self.on_too_long not in (rules := ("split_turns", "drop", "refuse")):
            raise UserError(f"{field}.on_too_long={self.on_too_long!r} must be one of {', '.join(rules)}.")
        self._check_mask(field)
        self._check_chat(field)

    def _check_mask(self, field: str) -> None:
        """Raises UserError if the fields that say what is learned do not go together."""
        prompt, mask, messages = self.prompt_field, self.mask_field, self.messages_field
        mask_settings = {"prompt_field": prompt, "mask_field": mask}
        if messages is not None:
            # "text" is the default, so it does not show that the user set it.
            text = None if self.text_field == "text" else self.text_field
            for setting, name in {**mask_settings, "text_field": text}.items():
                if name is not None:
                    raise UserError(
                        f"{field}: messages_field={messages!r} and {setting}={name!r} are both set. Remove "
                        "one: the text of a chat, and what is learned of it, are in its messages alone."
                    )
        if prompt is not None and not all(prompt.split("+")):
            raise UserError(
                f"{field}.prompt_field={prompt!r} names no field on one side of a +. Write the name of the "
                "prompt's field, or two of them as 'instruction+input'."
            )
        if prompt is not None and mask is not None:
            raise UserError(
                f"{field}: prompt_field={prompt!r} and mask_field={mask!r} are both set. Remove one: a "
                "prompt and its completion need no spans, and spans can leave out a prompt that is part of "
                "the text."
            )
        # Refused, since a setting without effect hides a typing error in another one.
        if prompt is None and messages is None and not self.mask_prompt:
            raise UserError(
                f"{field}.mask_prompt=False has no prompt to learn. Set {field}.prompt_field or "
                f"{field}.messages_field, or remove it."
            )
        for setting, name in mask_settings.items():
            # The same field twice would be its own prompt or mask.
            if name is not None and name == self.text_field:
                role = "completion" if setting == "prompt_field" else "text"
                raise UserError(
                    f"{field}.{setting}={name!r} is also its text_field. Set {field}.text_field to the field "
                    f"of the {role}."
                )
        if self.rejected_field is not None:
            self._check_pairs(field)
        if (mask_fields := self.mask) is not None:
            setting, name = f"{field}.{mask_fields.setting}", mask_fields.field
            check_format(self.format, label=f"{field}.format={self.format!r}", setting=setting, name=name)

    def _check_pairs(self, field: str) -> None:
        """Raises UserError for settings that preference pairs do not have."""
        rejected = self.rejected_field
        if self.messages_field is None and self.prompt_field is None:
            raise UserError(
                f"{field}.rejected_field={rejected!r} needs the prompt of both answers. Set "
                f"{field}.prompt_field, or {field}.messages_field to the field of the better chat."
            )
        if rejected in ("", self.messages_field, self.prompt_field) or (
            self.messages_field is None and rejected == self.text_field
        ):
            raise UserError(
                f"{field}.rejected_field={rejected!r} must name a field of its own, that of the worse "
                f"answer. Set {field}.rejected_field, and {field}.text_field to the field of the better one."
            )
        for setting, only in (("mask_prompt", True), ("on_rewritten_turn", "refuse")):
            if (value := getattr(self, setting)) != only:
                raise UserError(
                    f"{field}: rejected_field={rejected!r} learns the answers of a pair alone, but "
                    f"{setting}={value!r}. Remove {setting}."
                )

    def _check_chat(self, field: str) -> None:
        """Raises UserError for settings of chats that do not go together, or have no chat."""
        choices = {"train_on": ("all", "last"), "on_rewritten_turn": ("refuse", "split")}
        for setting, names in choices.items():
            if (value := getattr(self, setting)) not in names:
                raise UserError(f"{field}.{setting}={value!r} must be one of {', '.join(names)}.")
        # Refused, since a setting without effect hides a typing error in another one.
        # A factory makes the default of template_options, so its field has none.
        unset = {field.name: field.default for field in dataclasses.fields(self)} | {"template_options": {}}
        set_names = [name for name in _OF_CHATS if getattr(self, name) != unset[name]]
        if set_names and self.messages_field is None and self.prompt_field is None:
            raise UserError(
                f"{field}.{set_names[0]}={getattr(self, set_names[0])!r} is for chats. Set "
                f"{field}.messages_field, or remove it."
            )
        if self.tools_field and self.messages_field is None:
            raise UserError(
                f"{field}.tools_field={self.tools_field!r} is for chats of one field. Set "
                f"{field}.messages_field."
            )
        if self.message_weights and self.rejected_field is not None:
            raise UserError(
                f"{field}: rejected_field={self.rejected_field!r} has pairs, whose loss has no weights, but "
                "message_weights=True. Remove one of the two."
            )
        for setting in choices:
            if not self.mask_prompt and setting in set_names:
                raise UserError(
                    f"{field}: mask_prompt=False learns every message, but "
                    f"{setting}={getattr(self, setting)!r}. Remove one of the two."
                )

    def fields_at(self, field: str) -> str:
        """Returns the settings that name fields of a record, for messages; `field`: the source's path."""
        settings = [] if self.messages_field is not None else [f"{field}.text_field={self.text_field!r}"]
        return " or ".join(
            [*settings, *([f"{field}.{self.mask.setting}={self.mask.field!r}"] if self.mask else [])]
        )

    @property
    def mask(self) -> MaskFields | None:
        """Field that says what is learned of each text; None if all of it is."""
        # At most one of them is set: `check` refuses two.
        for setting in ("prompt_field", "mask_field", "messages_field"):
            if (name := getattr(self, setting)) is not None:
                return MaskFields(name, setting, self.mask_prompt, rejected=self.rejected_field)
        return None

    def mask_with(self, tokenizer: str, end_token: str | None, *, name: str) -> MaskFields | None:
        """Returns `mask` with the chat template of the source, which may be its tokenizer's.

        Args:
          tokenizer, end_token: arguments of `make_tokenizer`.
          name: name of the source.

        Raises:
          UserError: the template cannot be read.
        """
        # Spans are given by number, and need no template.
        if (mask := self.mask) is None or mask.setting == "mask_field":
            return mask
        template = load_template(
            self.chat_template,
            tokenizer=tokenizer,
            end_token=end_token,
            stop_tokens=tuple(self.stop_tokens),
            options=self.template_options,
            field=field_of(name),
        )
        rule = ChatRule(
            template, self.tools_field, self.train_on, self.on_rewritten_turn, self.message_weights
        )
        return dataclasses.replace(mask, rule=rule)


def identity_of(names: Sequence[str], file_ends: Int[np.ndarray, " files"], record: int) -> str:
    """Returns `file:number` of a record, the number counted from 0 within its file.

    Args:
      file_ends: number of records up to the end of each file.
    """
    file = int(np.searchsorted(file_ends, record, side="right"))
    return f"{names[file]}:{record - (int(file_ends[file - 1]) if file else 0)}"


class FileKeys:
    """Hashes of files' names, each computed at its first use: a source may have hundreds of thousands."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # Two arrays and no dict: 9 bytes per file of a large source.
        self._keys = np.zeros(len(names), np.uint64)
        self._is_computed = np.zeros(len(names), np.bool_)

    def __getitem__(self, files: Int[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
        """Returns the keys of the files with these numbers."""
        # In Python, file by file: blake2b, since the names need a hash that stays the same between runs.
        for file in set(files[~self._is_computed[files]].tolist()):
            digest = hashlib.blake2b(str(self._names[file]).encode(), digest_size=8).digest()
            self._keys[file], self._is_computed[file] = int.from_bytes(digest), True
        return self._keys[files]


def split_positions(
    file_ends: Int[np.ndarray, " files"], keys: FileKeys, records: Int[np.ndarray, " records"]
) -> Float[np.ndarray, " records"]:
    """Returns a hash of each record's file name and number in the file as a number in [0, 1).

    Args:
      file_ends: number of records up to the end of each file.
      keys: of the files' names.
      records: numbers of the records.
    """
    # side="right" steps over empty files, whose end equals that of the file before.
    files = np.searchsorted(file_ends, records, side="right")
    number = records - np.where(files > 0, file_ends[files - 1], 0)
    # Numbers are hashed by themselves first: those of neighbours differ in a few bits only.
    mixed = splitmix64(keys[files] ^ splitmix64(number.astype(np.uint64)))
    # The upper 53 bits, as many as a float64 holds exactly; 2**-53 maps them to [0, 1).
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Returns a hash of each number; each input bit affects all output bits (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
