import itertools

import numpy as np
import pytest

from jtrain.data.constructor.context_order import ContextSplit, context_order
from jtrain.data.planner.device_tree import BatchBlock, ClientPlaceTree
from jtrain.mesh import AXES


def tree_of(processes: int, global_batch: int = 16, **axes: int) -> ClientPlaceTree:
    shape = {axis: axes.get(axis, 1) for axis in AXES}
    devices = int(np.prod(list(shape.values())))
    return ClientPlaceTree(shape, np.arange(devices) * processes // devices, global_batch=global_batch)


def test_every_row_and_every_slice_reaches_some_process() -> None:
    for processes in (1, 2, 4, 8):
        tree = tree_of(processes, replica=2, data=2, context=2)
        blocks = [tree.blocks(p) for p in range(processes)]
        found = {(row, b.context) for b in itertools.chain(*blocks) for row in range(b.first, b.end)}
        assert found == set(itertools.product(range(16), range(2)))


def test_blocks_follow_the_mesh() -> None:
    tree = tree_of(2, data=2, context=2, tensor=2)
    assert tree.blocks(0) == [BatchBlock(0, 8, 0), BatchBlock(0, 8, 1)]
    assert tree.blocks(1) == [BatchBlock(8, 16, 0), BatchBlock(8, 16, 1)]
    assert tree.rows(1).tolist() == list(range(8, 16))


def test_peers_along_tensor_context_and_stage_do_not_fetch_again() -> None:
    """Eight devices of a stage=2, tensor=2 mesh need two blocks, not eight."""
    tree = tree_of(8, stage=2, data=2, tensor=2)
    assert len(set(tree.fetch_from("tensor").tolist())) == 4
    fetch = tree.fetch_from("stage", "tensor")
    assert len(set(fetch.tolist())) == 2
    np.testing.assert_array_equal(tree.row_block[fetch], tree.row_block)
    np.testing.assert_array_equal(fetch[fetch], fetch)
    fetchers = {p: set(tree.fetching_process(p, "stage", "tensor").values()) for p in range(8)}
    assert fetchers == {0: {0}, 1: {0}, 2: {2}, 3: {2}, 4: {0}, 5: {0}, 6: {2}, 7: {2}}


def test_axes_that_rows_are_split_over_cannot_be_broadcast() -> None:
    with pytest.raises(ValueError, match=r"broadcast_at\('data'\).*Use tensor, stage or context"):
        tree_of(1, data=2).fetch_from("data")


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.global_batch=10 does not split .* = 4\. Set data\.global_batch"):
        tree_of(1, global_batch=10, data=4)
    with pytest.raises(ValueError, match=r"distribute\('rows'\): must be 'world'"):
        tree_of(1).count("rows")


def test_ranks_along_an_axis() -> None:
    tree = tree_of(1, replica=2, data=2, context=2, tensor=2)
    assert [tree.count(axis) for axis in ("data", "context", "world")] == [4, 2, 16]


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
    with pytest.raises(ValueError, match=r"data\.seq_len=20 does not split into 8 parts \(zigzag.*do: 16, 24"):
        context_order(20, 4, "zigzag")
