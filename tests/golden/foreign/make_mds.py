"""Writes the MDS folders beside this file with MosaicML's own MDSWriter, for test_adopt.py.

bench/peers/setup.sh /tmp/jtrain-peers
/tmp/jtrain-peers/bin/python tests/golden/foreign/make_mds.py
"""

from pathlib import Path

import numpy as np
from streaming import MDSWriter

ENCODINGS = {
    "bytes": ("bytes", np.int64),
    "array": ("ndarray", np.uint16),
    "uint32": ("ndarray:uint32", np.uint32),
}
"""Folder -> encoding of its column, and dtype of its ids."""


def main(out: Path) -> None:
    """Writes one folder per encoding; test_adopt.py has the same documents."""
    documents = [[5 + (i * j) % 270 for j in range(i + 1)] + [1] for i in range(12)] + [[3] * 300]
    for name, (encoding, dtype) in ENCODINGS.items():
        columns = {"id": "str", "tokens": encoding}
        with MDSWriter(out=str(out / f"mds_{name}"), columns=columns, size_limit=1000) as writer:
            for i, document in enumerate(documents):
                ids = np.asarray(document, dtype)
                writer.write({"id": f"document {i}", "tokens": ids.tobytes() if encoding == "bytes" else ids})


if __name__ == "__main__":
    main(Path(__file__).parent)
