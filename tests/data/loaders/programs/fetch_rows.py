"""One of two processes that fetch their rows of a batch and put them on their devices, layout after layout.

    python fetch_rows.py PROCESS PORT FOLDER CASES

CASES: JSON list of mesh axes and global batch.
"""

import json
import sys

import jax

from jtrain.data import PackedText, open_dataset, place_tree, put_batch, share_batch
from jtrain.layout.mesh import MeshSpec, make_mesh

process, port, folder = int(sys.argv[1]), *sys.argv[2:4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, process)
for axes, global_batch in json.loads(sys.argv[4]):
    spec = PackedText(path=folder, seq_len=16, global_batch=global_batch, eval_fraction=0.1)
    mesh = make_mesh(MeshSpec(**axes), jax.devices())
    place = place_tree(mesh, global_batch)
    rows = place.rows(process)
    with open_dataset(spec, seed=1).train_batches(rows=rows) as batches:
        host = [next(batches) for _ in range(3)][-1]
        assert host.token_BL.shape == (len(rows), 16), host.token_BL.shape
        batch = jax.block_until_ready(share_batch(put_batch(host, mesh, place), mesh))
    blocks: list[object] = []
    for shard in batch.token_BL.addressable_shards:
        parts = zip(shard.index, (global_batch, 16), strict=True)
        blocks.append([[[part.start or 0, part.stop or size] for part, size in parts], shard.data.tolist()])
    print(json.dumps({"rows": rows.tolist(), "blocks": blocks}))
