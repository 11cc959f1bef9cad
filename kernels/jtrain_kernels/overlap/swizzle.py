"""The trees along which the pieces of an overlapped collective travel, and when they can be where.

Ranks are numbered through the dimensions of a grid; every tree of a swizzle has the same form, moved to its owner.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

type Swizzle = Literal["ring", "bidirectional", "full_mesh", "torus"]

SWIZZLES: tuple[Swizzle, ...] = ("ring", "bidirectional", "full_mesh", "torus")


@dataclasses.dataclass(frozen=True)
class Grid:
    """How ranks are numbered: through all dimensions, the last the fastest."""

    dims: tuple[int, ...]

    def relative(self, rank: int, origin: int) -> tuple[int, ...]:
        """Steps from `origin` to `rank` along each dimension, upwards around it."""
        steps: list[int] = []
        for size in reversed(self.dims):
            steps.append((rank - origin) % size)
            rank, origin = rank // size, origin // size
        return tuple(reversed(steps))

    def neighbour(self, rank: int, axis: int, step: int) -> int:
        stride, size = math.prod(self.dims[axis + 1 :]), self.dims[axis]
        at = rank // stride % size
        return rank + ((at + step) % size - at) * stride


class Route(NamedTuple):
    """One tree per owner, all of the same form.

    parent: of (rank, owner); None at the root.
    time: hops, or turns, after which a piece of `owner` can be at `rank`; 0 at the root.
    """

    parent: Callable[[int, int], int | None]
    time: Callable[[int, int], int]


def _direct(grid: Grid) -> Route:
    """At time t every rank sends to the t-th after it: n different pairs."""
    return Route(
        parent=lambda rank, owner: None if rank == owner else owner,
        time=lambda rank, owner: grid.relative(rank, owner)[0],
    )


def _along(grid: Grid, order: Sequence[int], sign: int) -> Route:
    """Around the dimension `order[0]`, then from each rank there around `order[1]`, and so on."""

    def hops(rank: int, owner: int) -> list[int]:
        steps = grid.relative(rank, owner)
        return [sign * steps[axis] % grid.dims[axis] for axis in order]

    def parent(rank: int, owner: int) -> int | None:
        moved = [axis for axis, count in zip(order, hops(rank, owner), strict=True) if count]
        return grid.neighbour(rank, moved[-1], -sign) if moved else None

    return Route(parent, lambda rank, owner: sum(hops(rank, owner)))


def _routes(swizzle: Swizzle, num_ranks: int, torus: tuple[int, ...]) -> tuple[Grid, list[Route]]:
    """One tree for each piece of a shard.

    Raises:
      ValueError: the torus does not hold the ranks.
    """
    if (swizzle == "torus") != bool(torus):
        raise ValueError(
            f"swizzle={swizzle} with torus={torus}: the swizzle torus needs the sizes of its dimensions, and no other "
            "has any. Give both or neither."
        )
    if swizzle == "torus":
        if math.prod(torus) != num_ranks or len(torus) < 2 or min(torus) < 2:
            raise ValueError(
                f"torus={torus} does not hold {num_ranks} ranks in two or more dimensions of at least 2. Give sizes "
                f"whose product is {num_ranks}, or take the swizzle ring or bidirectional."
            )
        grid, axes = Grid(torus), list(range(len(torus)))
        return grid, [_along(grid, axes[first:] + axes[:first], sign) for first in axes for sign in (1, -1)]
    grid = Grid((num_ranks,))
    if swizzle == "full_mesh":
        return grid, [_direct(grid)]
    return grid, [_along(grid, (0,), sign) for sign in ((1,) if swizzle == "ring" else (1, -1))]


class Trees:
    """The trees of all pieces, and the order in which a rank takes them."""

    def __init__(self, grid: Grid, routes: list[Route], parts: int) -> None:
        self.grid = grid
        self.num_ranks = math.prod(grid.dims)
        self.num_parts = parts
        self.pieces_per_rank = len(routes) * parts
        self._routes = routes

    def pieces(self, part: int) -> list[int]:
        """Those of one part of every shard."""
        each = len(self._routes)
        indexes = range(part * each, (part + 1) * each)
        return [owner * self.pieces_per_rank + index for owner in range(self.num_ranks) for index in indexes]

    def time(self, rank: int, piece: int) -> int:
        owner, index = divmod(piece, self.pieces_per_rank)
        return self._routes[index % len(self._routes)].time(rank, owner)

    def parent(self, rank: int, piece: int) -> int | None:
        owner, index = divmod(piece, self.pieces_per_rank)
        return self._routes[index % len(self._routes)].parent(rank, owner)

    def children(self, rank: int, piece: int) -> list[int]:
        """Those whom the piece reaches first, first."""
        found = [child for child in range(self.num_ranks) if self.parent(child, piece) == rank]
        return sorted(found, key=lambda child: (self.time(child, piece), self.grid.relative(child, rank)))

    def by_time(self, rank: int, pieces: Sequence[int]) -> list[list[int]]:
        """Pieces grouped by when they can be at `rank`; within a group in the same relative order for every rank."""

        def key(piece: int) -> tuple[int, int, tuple[int, ...]]:
            owner, index = divmod(piece, self.pieces_per_rank)
            return self.time(rank, piece), index, self.grid.relative(owner, rank)

        return [list(group) for _, group in itertools.groupby(sorted(pieces, key=key), key=lambda p: key(p)[0])]


def make_trees(swizzle: Swizzle, num_ranks: int, torus: tuple[int, ...], parts: int) -> Trees:
    """The trees of a swizzle, for each of `parts` parts of every shard.

    Raises:
      ValueError: the torus does not hold the ranks.
    """
    grid, routes = _routes(swizzle, num_ranks, torus)
    return Trees(grid, routes, parts)
