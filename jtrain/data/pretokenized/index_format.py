"""Format of a prepared index (`python -m jtrain.data prepare`): its files, their hashes and index.json.

    OUT/command.txt          the command that wrote the indexes
    OUT/NAME/index.json      what the index was made of, counts, and the size of each file below; written last
    OUT/NAME/lengths.bin     uint32 tokens per record, zero-padded to a multiple of 16 records; then int64 starts:
                             the first token of each block of 16 records, and the number of tokens at the end
    OUT/NAME/ids.bin         token ids of all records, one after another, uint8, uint16 or uint32
    OUT/NAME/units.jsonl     a line per shard (a few MB): its counts and the hashes of its ids and lengths
    OUT/NAME/skipped.jsonl   bad records that were left out, and why
    OUT/NAME/masks.bin       of a source with a loss mask: int64 start and end of each run of tokens not learned,
                             counted from the first token of the source
    OUT/NAME/places.bin      of an adopted index without ids.bin: see `AdoptedIds`
    OUT/NAME/files.json      names of the source's files and record counts of their parts (`FileParts`), so that the
                             index is complete without them

The bytes do not depend on the number of worker processes, nor on how often the build was killed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

FORMAT = 1
INDEX, LENGTHS, IDS, SHARDS, SKIPPED = "index.json", "lengths.bin", "ids.bin", "units.jsonl", "skipped.jsonl"
FILES, PLACES, MASKS = "files.json", "places.bin", "masks.bin"
COMMAND = "command.txt"
BLOCK = 16
"""Records per stored start: their lengths fill one cache line. 4.5 bytes per record; a start for each would
take 12."""

_HASHED_WHOLE = (SHARDS, SKIPPED, FILES, MASKS)


def digest(content: bytes | UInt[np.ndarray, " n"]) -> str:
    """Returns the 128-bit blake2b hash of `content` in hex; about 1 GB/s."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(folder: Path, body: dict[str, Any]) -> str:
    """Returns the text of `index.json` for a folder that holds all other files of the index."""
    hashed = [name for name in _HASHED_WHOLE if (folder / name).exists()]
    names = [name for name in (LENGTHS, IDS, PLACES) if (folder / name).exists()] + hashed
    body = {
        "format": FORMAT,
        **body,
        "bytes": {name: (folder / name).stat().st_size for name in names},
        "hashes": {name: digest((folder / name).read_bytes()) for name in hashed},
    }
    return sign(body)


def sign(body: dict[str, Any]) -> str:
    """Returns the text of `index.json`: its body and the digest of it."""
    return json.dumps(body | {"digest": digest(json.dumps(body, sort_keys=True).encode())}, indent=1) + "\n"
