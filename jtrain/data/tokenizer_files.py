"""Folder of a tokenizer's files, by its name in a config."""

from pathlib import Path

BYTES = "bytes"
"""Name of the tokenizer without files."""

BYTES_CHAT = "bytes_chat"
"""Name of the tokenizer of 256 bytes and three marks of chats that comes with jtrain, with its chat template.
"""


def folder_of(tokenizer: str) -> Path | None:
    """Returns the folder of a tokenizer.json and the files beside it; None for `bytes`.

    Args:
      tokenizer: `bytes`, `bytes_chat`, or the path of a tokenizer.json or of its folder.
    """
    if tokenizer == BYTES:
        return None
    if tokenizer == BYTES_CHAT:
        return Path(__file__).with_name("chat") / "byte_tokenizer"
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent
