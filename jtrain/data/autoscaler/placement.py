"""Placement of sources on loaders, repaired with few moves so that every loader stays within its time and memory."""

import bisect
import itertools
import math
from collections.abc import Collection, Iterable

PROCESS_BYTES = 17 << 20
"""Memory of a loader without open sources: forkserver, no jax (measured PSS of a comparable one: 7 to 17 MB)."""

FULL = 1.1
"""Limit of a loader's planned time: above it, sources are moved away; new placements fill a loader only to 1."""

_SPARE = 0.8  # merging fills a loader up to here, so that merged sources do not have to be split again soon
_EPS = 1e-9

Placement = dict[int, tuple[int, ...]]
"""Loader number -> its sources, ascending. A number is never reused for another process, so that logs stay clear."""


class LoaderAssignment:
    """Placement that is repaired with few moves, because the new loader of a source has to open it again.

    Args:
      placement: placement to start from.
      need: number of loaders that each source needs, fractional; 1 is all of a loader's planned time. The sum must not
        exceed max_loaders.
      open_bytes: memory that one loader needs per open source.
      max_loaders: largest number of loaders.
      memory_bytes: memory limit of one loader, including the process itself.
      next_loader: number of the next loader to start.

    Attributes:
      on: loaders of each source.
      sources, share, bytes: for each loader, its sources, the share of its planned time that they take, and its memory.
      relieved: overloaded loaders that gave sources away: the share of time they had, and their heaviest source.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        need: list[float],
        open_bytes: list[float],
        max_loaders: int,
        memory_bytes: int,
        next_loader: int,
    ) -> None:
        self.need = need
        self.open_bytes = open_bytes
        self.max_loaders = max_loaders
        self.memory_bytes = memory_bytes
        self.next_loader = next_loader
        self.relieved: dict[int, tuple[float, int]] = {}
        self.on = loaders_of(placement, len(need))
        self._recount(placement)

    def _recount(self, loaders: Iterable[int]) -> None:
        """Recomputes the sums of every loader from `on`."""
        self.sources: dict[int, set[int]] = {loader: set() for loader in loaders}
        self.share = dict.fromkeys(self.sources, 0.0)
        self.bytes = dict.fromkeys(self.sources, float(PROCESS_BYTES))
        for s, on in enumerate(self.on):
            self.on[s] = frozenset()
            self.put(s, on)

    def placement(self) -> Placement:
        return {loader: tuple(sorted(self.sources[loader])) for loader in sorted(self.sources)}

    def put(self, s: int, loaders: frozenset[int]) -> None:
        """Places source s on exactly these loaders; they take turns with its runs, so each has an equal part."""
        for loader in self.on[s]:
            self.share[loader] -= self.need[s] / len(self.on[s])
            self.bytes[loader] -= self.open_bytes[s]
            self.sources[loader].discard(s)
        self.on[s] = loaders
        for loader in loaders:
            self.share[loader] += self.need[s] / len(loaders)
            self.bytes[loader] += self.open_bytes[s]
            self.sources[loader].add(s)

    def open(self) -> int:
        loader = self.next_loader
        self.next_loader += 1
        self.sources[loader], self.share[loader], self.bytes[loader] = set(), 0.0, float(PROCESS_BYTES)
        return loader

    def close(self, loader: int) -> None:
        for s in sorted(self.sources[loader]):
            self.put(s, self.on[s] - {loader})
        del self.sources[loader], self.share[loader], self.bytes[loader]

    def part(self, s: int) -> float:
        """Returns the share of time that source s takes of each of its loaders."""
        return self.need[s] / len(self.on[s])

    def wanted(self, s: int) -> int:
        return min(self.max_loaders, max(1, math.ceil(self.need[s] - _EPS)))

    def too_big(self, s: int) -> bool:
        """True if source s alone exceeds a loader's memory: it then gets one loader of its own and no second one."""
        return PROCESS_BYTES + self.open_bytes[s] > self.memory_bytes

    def has_memory(self, loader: int, s: int) -> bool:
        """True if the loader has memory for source s. An empty loader takes any source, since each must be placed."""
        return self.bytes[loader] + self.open_bytes[s] <= self.memory_bytes + _EPS or not self.sources[loader]

    def fits(self, loader: int, s: int, part: float, limit: float = 1.0) -> bool:
        return self.share[loader] + part <= limit + _EPS and self.has_memory(loader, s)

    def repair(self, active: list[bool]) -> None:
        """Places new sources, spreads sources that have outgrown their loaders, and moves those that no longer fit."""
        order = sorted((s for s in range(len(self.need)) if active[s]), key=lambda s: (-self.need[s], s))
        for s, on in enumerate(self.on):
            if on and not active[s]:
                self.put(s, frozenset())
        self._shrink(order)
        for s in order:
            if not self.on[s] or (self.part(s) > FULL and len(self.on[s]) < self.max_loaders):
                self._spread(s)
        self._mend_memory()
        if self._over_memory() and any(len(self.sources[loader]) > 1 for loader in self._over_memory()):
            self._repack(order)
        self._relieve()
        for loader in [loader for loader, sources in self.sources.items() if not sources]:
            self.close(loader)

    def _shrink(self, order: list[int]) -> None:
        """Takes sources off loaders that they no longer need, the busiest loaders first."""
        for s in order:
            wanted = max(1, math.ceil(self.need[s] / _SPARE - _EPS))
            if len(self.on[s]) <= wanted:
                continue
            part = self.part(s)
            keep = frozenset(sorted(self.on[s], key=lambda loader: (self.share[loader] - part, loader))[:wanted])
            if all(self.share[loader] - part + self.need[s] / wanted <= 1 + _EPS for loader in keep):
                self.put(s, keep)

    def _spread(self, s: int) -> None:
        """Places a source on its present loaders if it fits, else on the first loaders with room, else on new ones."""
        home = self.on[s]
        self.put(s, frozenset())
        order = sorted(home) + [loader for loader in sorted(self.sources) if loader not in home]
        if self.too_big(s):
            empty = [loader for loader in order if not self.sources[loader]]
            if not empty and len(self.sources) < self.max_loaders:
                empty = [self.open()]
            least_full = min(order, key=lambda loader: (self.bytes[loader], loader), default=-1)
            self.put(s, frozenset(empty[:1] or [least_full]))
            return
        least = self.wanted(s)
        for copies in range(least, max(least, len(order)) + 1):
            part = self.need[s] / copies
            found = list(itertools.islice((loader for loader in order if self.fits(loader, s, part)), copies))
            while len(found) < copies and len(self.sources) < self.max_loaders:
                found.append(self.open())
            if len(found) == copies:
                self.put(s, frozenset(found))
                return
        # No loader has time left: takes the least busy ones with enough memory.
        roomy = [loader for loader in order if self.has_memory(loader, s)]
        if roomy:
            roomy.sort(key=lambda loader: (self.share[loader], loader not in home, loader))
            self.put(s, frozenset(roomy[:least]))
        else:
            self.put(s, frozenset([min(order, key=lambda loader: (self.bytes[loader], loader))]))

    def _over_memory(self) -> list[int]:
        return [loader for loader in sorted(self.sources) if self.bytes[loader] > self.memory_bytes + _EPS]

    def _mend_memory(self) -> None:
        """Removes second copies, then moves the largest sources, until every loader fits its memory, if possible."""
        for loader in self._over_memory():
            for s in sorted(self.sources[loader], key=lambda s: (len(self.on[s]) == 1, -self.open_bytes[s], s)):
                if self.bytes[loader] <= self.memory_bytes + _EPS or len(self.sources[loader]) == 1:
                    break
                others = self.on[s] - {loader}
                if not others:
                    room = [other for other in sorted(self.sources) if other != loader and self.has_memory(other, s)]
                    room.sort(
                        key=lambda other: self.share[other] + self.part(s) > 1
                    )  # stable sort: loaders with time left first
                    if room:
                        others = frozenset(room[:1])
                    elif len(self.sources) < self.max_loaders:
                        others = frozenset([self.open()])
                if others:
                    self.put(s, others)

    def _repack(self, order: list[int]) -> None:
        """Places all sources anew by memory, after small moves have failed; keeps the result only if it is better."""
        saved = self.on.copy(), list(self.sources), self.next_loader
        worst = sum(self.bytes[loader] - self.memory_bytes for loader in self._over_memory())
        for s in order:
            self.put(s, frozenset())
        for s in sorted(order, key=lambda s: (-self.open_bytes[s], s)):
            room = [loader for loader in sorted(self.sources) if self.has_memory(loader, s)]
            if not room and len(self.sources) < self.max_loaders:
                room = [self.open()]
            timely = [loader for loader in room if self.share[loader] + self.need[s] <= 1]
            where = (timely or room or [min(self.sources, key=lambda loader: (self.bytes[loader], loader))])[0]
            self.put(s, frozenset([where]))
        if sum(self.bytes[loader] - self.memory_bytes for loader in self._over_memory()) >= worst:
            self.on, loaders, self.next_loader = saved
            self._recount(loaders)
            return
        for s in order:
            if self.part(s) > FULL:
                self._add_copies(s)

    def _add_copies(self, s: int) -> None:
        """Adds loaders to a source without taking any away."""
        while len(self.on[s]) < self.wanted(s):
            part = self.need[s] / (len(self.on[s]) + 1)
            others = sorted(self.sources.keys() - self.on[s])
            if room := [loader for loader in others if self.fits(loader, s, part)]:
                self.put(s, self.on[s] | {room[0]})
            elif len(self.sources) < self.max_loaders and not self.too_big(s):
                self.put(s, self.on[s] | {self.open()})
            else:
                return

    def _relieve(self) -> None:
        """Moves as few sources as possible off overloaded loaders."""
        for _ in range(4 * self.max_loaders):
            over = [loader for loader in sorted(self.sources) if self.share[loader] > FULL]
            moved = [self._relieve_one(loader) for loader in over]
            if not any(moved):
                return

    def _relieve_one(self, loader: int) -> bool:
        """Moves sources off this loader until it is within its time, or no other loader has room."""
        share, heaviest = self.share[loader], max(self.sources[loader], key=lambda s: (self.part(s), -s))
        moved = False
        order = sorted(self.sources[loader], key=lambda s: (self.part(s), s))
        while self.share[loader] > FULL and order:
            # The smallest source that is enough, else the largest; but none larger than the room elsewhere.
            enough = min(bisect.bisect_left(order, self.share[loader] - 1, key=self.part), len(order) - 1)
            room = 1 - min((share for other, share in self.share.items() if other != loader), default=1.0)
            fitting = bisect.bisect_right(order, room + _EPS, key=self.part)
            s = order.pop(min(enough, fitting - 1) if fitting else enough)
            if fitting:
                to = self._first_fit(s, self.on[s])
            else:  # a new loader would not help the only source left
                to = self.open() if len(self.sources) < self.max_loaders and len(self.sources[loader]) > 1 else None
                order = order if to is not None else []
            if to is not None:
                self.put(s, self.on[s] - {loader} | {to})
                moved = True
        if self.share[loader] > FULL and not moved:
            if len(self.sources) == self.max_loaders:
                moved = self._even_out(loader)
            elif len(self.sources[loader]) > 1:  # other loaders have time, but no memory
                s = max(self.sources[loader], key=lambda s: (self.part(s), -s))
                self.put(s, self.on[s] - {loader} | {self.open()})
                moved = True
        if moved:
            self.relieved.setdefault(loader, (share, heaviest))
        return moved

    def _first_fit(self, s: int, without: Collection[int], limit: float = 1.0) -> int | None:
        """Returns the first loader with time and memory for the part of s that each of its loaders now has."""
        part = self.part(s)
        return next((to for to in sorted(self.sources) if to not in without and self.fits(to, s, part, limit)), None)

    def _even_out(self, loader: int) -> bool:
        """Evens out two loaders when no loader can be added: moves or splits a source of the busier one."""
        order = sorted(self.sources[loader])
        for other in sorted(self.sources, key=lambda other: (self.share[other], other)):
            gap = self.share[loader] - self.share[other]
            if gap < 0.1:
                break
            able = [s for s in order if other not in self.on[s] and self.has_memory(other, s)]
            whole = [s for s in able if 0.05 <= self.part(s) <= gap - 0.05]
            if whole:
                s = min(whole, key=lambda s: (abs(self.part(s) - gap / 2), s))
                self.put(s, self.on[s] - {loader} | {other})
                return True
            for s in sorted(able, key=lambda s: (-self.part(s), s)):
                enough = self.part(s) > 0.1 and self.need[s] / (len(self.on[s]) + 1) <= gap - 0.05
                if enough and not self.too_big(s):
                    self.put(s, self.on[s] | {other})
                    return True
        for s in sorted(
            order, key=lambda s: (-self.part(s), s)
        ):  # no pair of loaders gains; spreading a source over all may
            on = self.on[s]
            everywhere = on.union(other for other in self.sources if self.has_memory(other, s))
            highest = max(self.share.values())
            if len(everywhere) > len(on) and not self.too_big(s):
                self.put(s, everywhere)
                if max(self.share.values()) < highest - 0.05:
                    return True
                self.put(s, on)
        return False

    def reclaim(self) -> dict[int, list[int]]:
        """Closes loaders whose sources fit on the others with room to spare; returns them and their sources."""
        closed: dict[int, list[int]] = {}
        while True:
            for loader in sorted(self.sources, key=lambda loader: (self.share[loader], -loader)):
                if self._empty(loader, held := sorted(self.sources[loader])):
                    self.close(loader)
                    closed[loader] = held
                    break
            else:
                return closed

    def _empty(self, loader: int, held: list[int]) -> bool:
        """Moves all sources of a loader elsewhere, or none; returns True if it did."""
        others = [other for other in sorted(self.sources) if other != loader]
        if sum(max(0.0, _SPARE - self.share[other]) for other in others) < self.share[loader]:
            return False
        saved = {s: self.on[s] for s in held}
        for s in sorted(held, key=lambda s: (-self.part(s), s)):
            part, rest = self.part(s), self.on[s] - {loader}
            grown = self.need[s] / max(len(rest), 1) - part
            if rest and all(self.share[other] + grown <= _SPARE + _EPS for other in rest):
                self.put(s, rest)
                continue
            if (to := self._first_fit(s, self.on[s], _SPARE)) is None:
                for moved, on in saved.items():
                    self.put(moved, on)
                return False
            self.put(s, rest | {to})
        return True


def loaders_of(placement: Placement, sources: int) -> list[frozenset[int]]:
    """Returns the loaders of each source; an empty set if it is not placed."""
    on: list[set[int]] = [set() for _ in range(sources)]
    for loader, held in placement.items():
        for s in held:
            on[s].add(loader)
    return [frozenset(loaders) for loaders in on]
