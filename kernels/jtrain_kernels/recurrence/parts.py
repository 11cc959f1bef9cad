"""Rows split over the devices of a mesh axis: each device computes its parts of the row, given the state
before them.

A device has one part of each row, or with zig-zag two, which are stacked along B; activations do not move.
What a part does to a state is small, a matrix or a decay per head: devices gather it from all parts and
combine those before their own.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.attention.context import RowSplit
from jtrain_kernels.errors import UserError
from jtrain_kernels.recurrence.documents import RecurrentState, fill_padding, number_documents


def parts_per_device(split: RowSplit) -> int:
    """Number of parts of a row that a device has."""
    return 2 if split.order == "zigzag" and split.size > 1 else 1


def cut(op: str, x_BL: Array, split: RowSplit) -> Array:
    """Stacks a device's parts along B: [parts * B, L / parts, ...].

    Raises:
      UserError: the positions do not divide.
    """
    parts, (B, L) = parts_per_device(split), x_BL.shape[:2]
    if L % parts:
        raise UserError(
            f"{op}: a device has L={L} positions, which zig-zag cannot halve. Set data.seq_len to a multiple "
            f"of 2 * mesh.context = {2 * split.size}, or data.context_order=contiguous."
        )
    x_BPL = x_BL.reshape(B, parts, L // parts, *x_BL.shape[2:])
    return jnp.swapaxes(x_BPL, 0, 1).reshape(parts * B, L // parts, *x_BL.shape[2:])


def join(x: Array, split: RowSplit) -> Array:
    """Inverse of `cut`."""
    parts = parts_per_device(split)
    x_PBL = x.reshape(parts, -1, *x.shape[1:])
    return jnp.swapaxes(x_PBL, 0, 1).reshape(x_PBL.shape[1], -1, *x.shape[2:])


def gather(x: Array, split: RowSplit) -> Array:
    """Arrays of all parts, in the order of the row: [parts * B, ...] -> [all parts, B, ...]."""
    parts = parts_per_device(split)
    x_CPB = jax.lax.all_gather(x.reshape(parts, -1, *x.shape[1:]), split.axis)
    # Late parts descend over the devices.
    return jnp.concatenate([x_CPB[:, 0], *([x_CPB[::-1, 1]] if parts == 2 else [])])


def take_own(x_RB: Array, split: RowSplit) -> Array:
    """This device's parts of an array of all parts: [all parts, B, ...] -> [parts * B, ...]."""
    device = jax.lax.axis_index(split.axis)
    # Zig-zag: device i has part i and the i-th part from the end.
    indices = [device, 2 * split.size - 1 - device][: parts_per_device(split)]
    return x_RB[jnp.stack(indices)].reshape(-1, *x_RB.shape[2:])


def segments_before(
    segment: Int[Array, "PB L"], first_B: Int[Array, " B"], split: RowSplit
) -> tuple[Int[Array, " PB"], Int[Array, " B"]]:
    """Segment of the last token that is no padding before each of this device's parts, and after the row.

    Args:
      segment: of the stacked parts.
      first_B: segment before the row.
    """
    # 0 for a part of padding alone, which takes the segment of the part before it below.
    last = fill_padding(segment, jnp.zeros(segment.shape[0], segment.dtype))[:, -1]
    # Transposed, since parts follow each other here as tokens do in a row.
    after_RB = fill_padding(gather(last, split).T, first_B).T
    before_RB = jnp.concatenate([first_B[None], after_RB[:-1]])
    return take_own(before_RB, split), after_RB[-1]


type StateArrays = Mapping[str, Array]
"""Arguments of an op by name, [B, L, ...] each."""


def run_row(
    op: str,
    run: Callable[[StateArrays, Array, Array], tuple[Array, Array]],
    transition: Callable[[StateArrays, Array], tuple[Array, Array]],
    apply: Callable[[Array, Array], Array],
    arrays: StateArrays,
    segment_BL: Int[Array, "B L"],
    start: RecurrentState,
    split: RowSplit,
) -> tuple[Float[Array, "B L N P"], RecurrentState]:
    """Results of a recurrence at a device's tokens, and the state after the whole row.

    Args:
      run: arrays, number of each token's document, state before them -> results, state after them.
      transition: arrays, documents -> the two arrays that say what these tokens do to the state before them:
        `apply(transition, state) + added`.
      start: state before the row.
    """
    if split.size == 1:
        document_BL, segment_B = number_documents(segment_BL, start.segment_B)
        y_BLNP, state_BNHP = run(arrays, document_BL, start.state_BNHP)
        return y_BLNP, RecurrentState(state_BNHP, segment_B)
    arrays = {name: cut(op, x, split) for name, x in arrays.items()}
    segment = cut(op, segment_BL, split)
    first, segment_B = segments_before(segment, start.segment_B, split)
    document, _ = number_documents(segment, first)

    def step(state: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        matrix, added = part
        return apply(matrix, state) + added, state

    # Before any state is known: what a part does to a state does not depend on the state.
    of_parts = [gather(x, split) for x in transition(arrays, document)]
    # Every device combines all parts: products of states of a few heads, too small to be worth more messages.
    last_BNHP, before_RBNHP = jax.lax.scan(step, start.state_BNHP, (of_parts[0], of_parts[1]))
    y, _ = run(arrays, document, take_own(before_RBNHP, split))
    return join(y, split), RecurrentState(last_BNHP, segment_B)
