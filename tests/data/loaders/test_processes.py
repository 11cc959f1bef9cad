import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain.data import PackedText, open_dataset, put_batch
from jtrain.mesh import MeshSpec, make_mesh

WORKER = """
import json, sys
process, global_batch, port, path, axes = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], json.loads(sys.argv[5])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jtrain.data import PackedText, open_dataset, place_tree, put_batch, share_batch
from jtrain.mesh import MeshSpec, make_mesh
spec = PackedText(path=path, seq_len=16, global_batch=global_batch, eval_fraction=0.1)
mesh = make_mesh(MeshSpec(**axes), jax.devices())
place = place_tree(mesh, global_batch)
rows = place.rows(process)
with open_dataset(spec, seed=1).train_batches(rows=rows) as iterator:
    for _ in range(3):
        host = next(iterator)
    assert host.token_BL.shape == (len(rows), 16), host.token_BL.shape
    batch = jax.block_until_ready(share_batch(put_batch(host, mesh, place), mesh))
blocks = [
    [[[part.start or 0, part.stop or size] for part, size in zip(s.index, (global_batch, 16))], s.data.tolist()]
    for s in batch.token_BL.addressable_shards
]
print(json.dumps({"rows": rows.tolist(), "blocks": blocks}))
"""


HALVES = ([0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("axes", "fetched", "block", "copies"),
    [
        ({"replica": 2, "data": 2, "context": 2}, HALVES, (2, 8), 1),
        ({"tensor": 8}, HALVES, (8, 16), 8),
        ({"context": 4, "tensor": 2}, HALVES, (8, 4), 2),
        ({"data": 2, "tensor": 4}, HALVES, (4, 16), 4),
        ({"stage": 2, "data": 2, "tensor": 2}, ([0, 1, 4, 5], [2, 3, 6, 7]), (4, 16), 4),
        ({"tensor": 8}, ([0, 1, 2, 3], [0, 1, 2, 3]), (4, 16), 8),  # four rows do not split over eight peers
    ],
    ids=str,
)
def test_two_processes_fetch_their_rows_and_hold_what_their_devices_need(
    axes: dict[str, int],
    fetched: tuple[list[int], list[int]],
    block: tuple[int, int],
    copies: int,
    texts: list[str],
    tmp_path: Path,
    emulated_devices: list[jax.Device],
) -> None:
    """Two real processes have four of the eight devices each; a row that both need is fetched by one if rows divide."""
    global_batch = block[0] * axes.get("replica", 1) * axes.get("data", 1)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WORKER]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(global_batch), str(port), str(tmp_path), json.dumps(axes)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]

    spec = PackedText(path=str(tmp_path), seq_len=16, global_batch=global_batch, eval_fraction=0.1)
    iterator = open_dataset(spec, seed=1).train_batches(inline=True)
    for _ in range(2):
        next(iterator)
    batch = next(iterator)
    seen = np.zeros((global_batch, 16), int)
    said = [json.loads(output.splitlines()[-1]) for output in outputs]  # gloo says something first
    for one in said:
        for ((top, bottom), (left, right)), tokens in one["blocks"]:
            assert (bottom - top, right - left) == block
            np.testing.assert_array_equal(tokens, batch.token_BL[top:bottom, left:right])
            seen[top:bottom, left:right] += 1
    assert (seen == copies).all()
    assert [one["rows"] for one in said] == [*fetched]
    placed = put_batch(batch, make_mesh(MeshSpec(**axes), emulated_devices))
    np.testing.assert_array_equal(np.asarray(placed.token_BL), batch.token_BL)
