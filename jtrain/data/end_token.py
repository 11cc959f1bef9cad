"""The token that ends a document, by a tokenizer's files and settings."""

import json
from pathlib import Path

from jtrain.errors import UserError

_KNOWN_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


def find_end_id(path: str, config: Path, vocabulary: dict[str, int], end_token: str | None) -> int:
    """Returns the id that ends a document; raises UserError if it is unknown or ambiguous."""
    setting = "data.end_token"
    if end_token is None and config.is_file():
        setting = f"eos_token of {config}"
        try:
            declared = json.loads(config.read_text()).get("eos_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{config} is not a JSON object ({error}). Mend or remove it.") from error
        end_token = declared.get("content") if isinstance(declared, dict) else declared
        if not isinstance(end_token, str | None):
            raise UserError(
                f"{setting} is {type(end_token).__name__}, not text. Mend it, or set data.end_token."
            )
    if end_token is not None:
        if end_token not in vocabulary:
            raise UserError(
                f"{setting}={end_token!r} is not one of the {len(vocabulary)} tokens of "
                f"data.tokenizer={path!r}. Set data.end_token to the token that ends a document."
            )
        return vocabulary[end_token]
    # The last resort, and only where it cannot be wrong: exactly one of them exists.
    known_tokens = [token for token in _KNOWN_END_TOKENS if token in vocabulary]
    if len(known_tokens) != 1:
        candidates = (
            f"several candidates: {', '.join(known_tokens)}"
            if known_tokens
            else f"none of {', '.join(_KNOWN_END_TOKENS)}"
        )
        raise UserError(
            f"data.tokenizer={path!r} does not say which token ends a document: there is no eos_token in a "
            f"tokenizer_config.json beside it, and its vocabulary has {candidates}. Set data.end_token."
        )
    return vocabulary[known_tokens[0]]
