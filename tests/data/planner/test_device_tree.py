import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.constructor.context_order import ContextSplit, context_order
from jtrain.data.planner.device_tree import ClientPlaceTree
from jtrain.layout.mesh import AXES, BATCH_AXES

PEER_AXES = ("tensor", "stage", "context")


def tree_of(processes: int, global_batch: int = 16, **axes: int) -> ClientPlaceTree:
    """Returns the tree of a mesh whose devices, in order, are divided evenly among processes."""
    shape = {axis: axes.get(axis, 1) for axis in AXES}
    devices = math.prod(shape.values())
    process = (np.arange(devices) * processes // devices).reshape(tuple(shape.values()))
    return ClientPlaceTree(shape=shape, process_of_device=process, global_batch=global_batch)


def placed(tree: ClientPlaceTree) -> ClientPlaceTree:
    return tree.distribute(*BATCH_AXES).broadcast_at(*PEER_AXES)


FETCHED = (
    # Rows are split over data ranks; peers in one process add no level.
    ({"data": 2, "context": 2, "tensor": 2}, 2, (), [range(8), range(8, 16)]),
    ({"data": 4, "tensor": 2}, 1, (), [range(16)]),
    # All devices need all rows; each process fetches another part.
    ({"tensor": 8}, 2, ("tensor",), [range(8), range(8, 16)]),
    ({"context": 4, "tensor": 2}, 4, ("context",), [range(4), range(4, 8), range(8, 12), range(12, 16)]),
    ({"stage": 2, "tensor": 2}, 4, ("tensor", "stage"), [range(4), range(8, 12), range(4, 8), range(12, 16)]),
    # Pairs of processes share a data rank.
    ({"data": 2, "tensor": 4}, 4, ("tensor",), [range(4), range(4, 8), range(8, 12), range(12, 16)]),
    # A stage holds all data ranks: its process fetches half the rows of each.
    (
        {"stage": 2, "data": 2, "tensor": 2},
        2,
        ("stage",),
        [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]],
    ),
)


@pytest.mark.parametrize(("axes", "processes", "levels", "rows"), FETCHED, ids=str)
def test_each_process_fetches_its_part_of_the_rows(
    axes: dict[str, int], processes: int, levels: tuple[str, ...], rows: list[range | list[int]]
) -> None:
    tree = placed(tree_of(processes, **axes))
    assert tree.levels == (*BATCH_AXES, *levels)
    assert [tree.rows(process).tolist() for process in range(processes)] == [list(part) for part in rows]


def test_rows_that_do_not_split_over_peers_are_fetched_by_each_of_them() -> None:
    """Four rows over eight peers; six rows over two stages, then three rows over two pairs of tensor
    ranks.
    """
    whole = placed(tree_of(2, 4, tensor=8))
    assert whole.levels == BATCH_AXES
    assert [whole.rows(process).tolist() for process in range(2)] == [[0, 1, 2, 3]] * 2
    half = placed(tree_of(4, 6, stage=2, context=2))
    assert half.levels == (*BATCH_AXES, "stage")
    assert [half.rows(process).tolist() for process in range(4)] == [
        [0, 1, 2],
        [0, 1, 2],
        [3, 4, 5],
        [3, 4, 5],
    ]


@given(
    sizes=st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in AXES}),
    processes=st.integers(1, 8),
    rows_per_rank=st.sampled_from([1, 2, 4, 6, 12]),
    order=st.randoms(use_true_random=False),
)
def test_every_row_is_fetched_once_or_by_all_that_need_it(
    sizes: dict[str, int], processes: int, rows_per_rank: int, order: random.Random
) -> None:
    """For any mesh and any order of its devices, on as many rows as devices along the axes split, or on
    fewer.
    """
    global_batch = rows_per_rank * math.prod(sizes[axis] for axis in BATCH_AXES)
    tree = tree_of(processes, global_batch, **sizes)
    devices = tree.process_of_device.reshape(-1).tolist()
    order.shuffle(devices)
    processes_of = np.asarray(devices).reshape(tree.process_of_device.shape)
    tree = ClientPlaceTree(shape=tree.shape, process_of_device=processes_of, global_batch=global_batch)
    needed, fetched = tree.distribute(*BATCH_AXES), placed(tree)
    times = np.zeros(global_batch, int)
    for process in range(processes):
        assert set(fetched.rows(process).tolist()) <= set(needed.rows(process).tolist())
        times[fetched.rows(process)] += 1
    assert (times >= 1).all()
    apart = [axis for axis in PEER_AXES if np.ptp(processes_of, axis=AXES.index(axis)).any()]
    if rows_per_rank % math.prod(sizes[axis] for axis in apart) == 0:
        assert (times == 1).all()


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"data\.global_batch=10 does not split evenly .* = 4 shards.*do: 8, 12\. Set"
    ):
        tree_of(1, 10, data=4).distribute(*BATCH_AXES)


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_context_slices_hold_every_token_once(split: ContextSplit, context: int) -> None:
    assert sorted(context_order(32, context, split).tolist()) == list(range(32))


def test_zigzag_gives_each_device_the_same_causal_attention() -> None:
    """Contiguous slices do not: the last of four slices has seven times the attention of the first."""
    work = {}
    for split in ("contiguous", "zigzag"):
        seen = (context_order(64, 4, split) + 1).reshape(4, -1).sum(axis=1)
        work[split] = seen.max() / seen.min()
    assert work["zigzag"] == 1
    assert work["contiguous"] > 6


def test_a_row_that_does_not_split_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"data\.seq_len=20 does not split into 8 parts \(zigzag.*do: 16, 24"
    ):
        context_order(20, 4, "zigzag")
