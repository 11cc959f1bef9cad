import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.data import PackedText, open_dataset, put_batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from tests.ports import free_port
from tests.processes import program

HALVES = ([0, 1, 2, 3], [4, 5, 6, 7])
CASES: list[tuple[dict[str, int], tuple[list[int], list[int]], tuple[int, int], int]] = [
    ({"replica": 2, "data": 2, "context": 2}, HALVES, (2, 8), 1),
    ({"tensor": 8}, HALVES, (8, 16), 8),
    ({"context": 4, "tensor": 2}, HALVES, (8, 4), 2),
    ({"data": 2, "tensor": 4}, HALVES, (4, 16), 4),
    ({"stage": 2, "data": 2, "tensor": 2}, ([0, 1, 4, 5], [2, 3, 6, 7]), (4, 16), 4),
    ({"tensor": 8}, ([0, 1, 2, 3], [0, 1, 2, 3]), (4, 16), 8),  # four rows do not split over eight peers
]


def global_batch_of(axes: dict[str, int], block: tuple[int, int]) -> int:
    return block[0] * axes.get("replica", 1) * axes.get("data", 1)


@pytest.fixture(scope="module")
def said(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Folder of the corpus, and the words of both processes on each case: one pair of processes goes through
    all.
    """
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    port = free_port()
    cases = json.dumps([(axes, global_batch_of(axes, block)) for axes, _, block, _ in CASES])
    processes = [
        subprocess.Popen(
            program(__file__, "fetch_rows", number, port, folder, cases),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    # gloo says something in between
    return folder, [
        [json.loads(line) for line in output.splitlines() if line[:1] == "{"] for output in outputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_two_processes_fetch_their_rows_and_hold_what_their_devices_need(
    case: int, said: tuple[Path, list[list[dict[str, Any]]]], emulated_devices: list[jax.Device]
) -> None:
    """Two real processes have four of the eight devices each; a row that both need is fetched by one if rows
    divide.
    """
    axes, fetched, block, copies = CASES[case]
    global_batch = global_batch_of(axes, block)
    folder, words = said
    spec = PackedText(path=str(folder), seq_len=16, global_batch=global_batch, eval_fraction=0.1)
    iterator = open_dataset(spec, seed=1).train_batches(inline=True)
    for _ in range(2):
        next(iterator)
    batch = next(iterator)
    seen = np.zeros((global_batch, 16), int)
    for one in (of_process[case] for of_process in words):
        for ((top, bottom), (left, right)), tokens in one["blocks"]:
            assert (bottom - top, right - left) == block
            np.testing.assert_array_equal(tokens, batch.token_BL[top:bottom, left:right])
            seen[top:bottom, left:right] += 1
    assert (seen == copies).all()
    assert [of_process[case]["rows"] for of_process in words] == [*fetched]
    placed = put_batch(batch, make_mesh(MeshSpec(**axes), emulated_devices))
    np.testing.assert_array_equal(np.asarray(placed.token_BL), batch.token_BL)
