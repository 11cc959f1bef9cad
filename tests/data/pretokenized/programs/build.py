"""Builds the indexes of `tests.data.two_sources` in 16 KiB shards, and prints each as it is made.

    python build.py FOLDER OUT TOKENIZER MACHINE

MACHINE: name of the machine that the process believes to run on; `this` for its own. On another one a process
that is silent for 2 s counts as dead.
"""

import sys
from pathlib import Path
from typing import Any

from jtrain.data.pretokenized import writer
from jtrain.data.pretokenized.build import prepare
from jtrain.runtime import lease
from tests.data.two_sources import recipes_of

folder, out, tokenizer, machine = sys.argv[1:]
if machine != "this":
    lease.this_machine = lambda: machine
    lease.BEAT_S, lease.STALE_S, lease.WATCH_S = 0.1, 2.0, 2.0
add = writer.IndexWriter.add


def add_and_print(self: writer.IndexWriter, shard: Any) -> None:
    """Adds a shard to an index, and prints its number."""
    print("made", self.recipe.name, shard, flush=True)
    add(self, shard)


writer.IndexWriter.add = add_and_print
prepare(
    recipes_of(Path(folder), tokenizer=tokenizer),
    Path(out),
    workers=1,
    stream=sys.stderr,
    shard_bytes=1 << 14,
)
