"""Opens batches of two sources, prints the ids of the data plane's processes, and waits for the end of stdin.

python train_until_killed.py FOLDER
"""

import json
import sys

from jtrain.data import PackedText, Source, open_dataset
from tests.data.test_data_plane import plane_of

sources = {name: Source(path=f"{sys.argv[1]}/{name}.jsonl") for name in ("web", "code")}
spec = PackedText(sources=sources, seq_len=64, global_batch=16, max_loaders=2, shadows=2)
batches = open_dataset(spec, seed=0).train_batches()
next(batches)
print(json.dumps(plane_of(batches).pids()), flush=True)
sys.stdin.read()
