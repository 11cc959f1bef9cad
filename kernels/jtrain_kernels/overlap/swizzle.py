"""Routing trees of overlapped collectives: the ranks along which a piece travels, and its time of arrival.

A swizzle defines one tree per owner; the trees of all owners have the same form, rotated to start there.

Example: 4 ranks, bidirectional: piece 2 * r goes upwards from rank r, piece 2 * r + 1 downwards. Rank 0 has
its own pieces 0 and 1 at time 0, then 6 (from rank 3, upwards) and 3 (from rank 1, downwards), then 4 and 5,
then 2 and 7, which went the long way around: `by_time(0)` is [[0, 1], [6, 3], [4, 5], [2, 7]].
"""

import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple

type Swizzle = Literal["ring", "bidirectional", "full_mesh"]
"""Order in which ranks exchange their parts."""

SWIZZLES: tuple[Swizzle, ...] = ("ring", "bidirectional", "full_mesh")


class Route(NamedTuple):
    """One tree per owner, all of the same form.

    parent: (rank, owner) -> the rank's parent in the owner's tree; None at the root.
    time: (rank, owner) -> hops, or turns, after which a piece of `owner` can be at `rank`; 0 at the root.
    """

    parent: Callable[[int, int], int | None]
    time: Callable[[int, int], int]


def _direct(num_ranks: int) -> Route:
    """Tree of depth 1: at time t every rank sends to the t-th after it, and receives from one."""
    return Route(
        parent=lambda rank, owner: None if rank == owner else owner,
        time=lambda rank, owner: (rank - owner) % num_ranks,
    )


def _around(num_ranks: int, sign: int) -> Route:
    """A chain once around the ring, upwards (sign 1) or downwards (sign -1)."""
    # Distances are taken modulo num_ranks, so the chain of rank 3 of 4 goes 3, 0, 1, 2.
    return Route(
        parent=lambda rank, owner: None if rank == owner else (rank - sign) % num_ranks,
        time=lambda rank, owner: sign * (rank - owner) % num_ranks,
    )


def _routes(swizzle: Swizzle, num_ranks: int) -> list[Route]:
    """One tree for each piece of a shard."""
    if swizzle == "full_mesh":
        return [_direct(num_ranks)]
    return [_around(num_ranks, sign) for sign in ((1,) if swizzle == "ring" else (1, -1))]


class Trees:
    """The trees of all pieces, and the order in which a rank takes the pieces."""

    def __init__(self, num_ranks: int, routes: list[Route], parts: int) -> None:
        self.num_ranks = num_ranks
        # With parts, index % len(routes) picks the direction: of four pieces 0 and 2 go up, 1 and 3 down.
        self.pieces_per_rank = len(routes) * parts
        self._routes = routes

    def relative(self, rank: int, origin: int) -> int:
        """Steps upwards around the ranks from `origin` to `rank`."""
        return (rank - origin) % self.num_ranks

    def time(self, rank: int, piece: int) -> int:
        owner, index = divmod(piece, self.pieces_per_rank)
        return self._routes[index % len(self._routes)].time(rank, owner)

    def parent(self, rank: int, piece: int) -> int | None:
        owner, index = divmod(piece, self.pieces_per_rank)
        return self._routes[index % len(self._routes)].parent(rank, owner)

    def children(self, rank: int, piece: int) -> list[int]:
        """Ranks that receive the piece from this one, the earliest first."""
        children = [child for child in range(self.num_ranks) if self.parent(child, piece) == rank]
        return sorted(children, key=lambda child: (self.time(child, piece), self.relative(child, rank)))

    def by_time(self, rank: int) -> list[list[int]]:
        """All pieces, grouped by time of arrival at `rank`, in one relative order for all ranks."""

        def key(piece: int) -> tuple[int, int, int]:
            owner, index = divmod(piece, self.pieces_per_rank)
            # Ties by index, then by distance from this rank: relative, so that all ranks run one program.
            return self.time(rank, piece), index, self.relative(owner, rank)

        pieces = sorted(range(self.num_ranks * self.pieces_per_rank), key=key)
        # groupby needs the pieces sorted by the time that it groups by, which is the first field of the key.
        return [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: key(piece)[0])]


def make_trees(swizzle: Swizzle, num_ranks: int, parts: int) -> Trees:
    """The trees of a swizzle, for each of `parts` parts of every shard."""
    return Trees(num_ranks, _routes(swizzle, num_ranks), parts)
