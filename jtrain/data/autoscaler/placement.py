"""Placement of sources on loaders, repaired with few moves so that every loader stays within its time."""

import math

FULL = 1.1
"""Limit of a loader's planned time: above it, sources are moved away; new placements fill a loader only to
1."""

_SPARE = 0.8  # merging fills a loader up to here, so that merged sources do not have to be split again soon
_EVEN = 0.1  # loads that differ by less are even
_EPS = 1e-9

Placement = dict[int, tuple[int, ...]]
"""Loader number -> its sources, ascending. A number is never reused for another process, so that logs stay
clear."""


def repair(
    placement: Placement, need: list[float], *, max_loaders: int, next_loader: int, merge: bool
) -> tuple[Placement, int]:
    """Returns a placement for other needs with few moves, since the new loader of a source has to open it
    again.

    Args:
      placement: placement to start from.
      need: loaders that each source needs, fractional, where 1 is all of a loader's planned time; 0 for a
        source that is not read. The sum must not exceed max_loaders.
      max_loaders: largest number of loaders.
      next_loader: number of the next loader to start.
      merge: give loaders back whose sources fit on the others.

    Returns:
      The placement and the number of the next loader to start.
    """
    work = _Loaders(placement, need, max_loaders, next_loader)
    for s in sorted(range(len(need)), key=lambda s: (-need[s], s)):
        work.fit(s)
    work.relieve()
    for loader in [loader for loader, sources in work.sources.items() if not sources]:
        del work.sources[loader]
    while merge and any(
        work.empty(loader) for loader in sorted(work.sources, key=lambda n: (work.share(n), -n))
    ):
        pass
    return {n: tuple(sorted(work.sources[n])) for n in sorted(work.sources)}, work.next_loader


class _Loaders:
    """Sources of each loader, while they are placed. Loaders of one source share it evenly."""

    def __init__(self, placement: Placement, need: list[float], max_loaders: int, next_loader: int) -> None:
        self.need, self.max_loaders, self.next_loader = need, max_loaders, next_loader
        self.sources = {loader: {s for s in held if need[s] > 0} for loader, held in placement.items()}
        self.on: list[set[int]] = [set() for _ in need]
        for loader, held in self.sources.items():
            for s in held:
                self.on[s].add(loader)

    def part(self, s: int) -> float:
        """Returns the share of time that source s takes of each of its loaders."""
        return self.need[s] / max(len(self.on[s]), 1)

    def share(self, loader: int) -> float:
        """Returns the share of a loader's planned time that its sources take."""
        return sum(map(self.part, self.sources[loader]), 0.0)

    def put(self, s: int, loaders: set[int]) -> None:
        """Places source s on exactly these loaders."""
        for loader in self.on[s]:
            self.sources[loader].discard(s)
        self.on[s] = set(loaders)
        for loader in loaders:
            self.sources[loader].add(s)

    def open(self) -> int:
        """Adds a loader."""
        loader = self.next_loader
        self.next_loader += 1
        self.sources[loader] = set()
        return loader

    def fit(self, s: int) -> None:
        """Places a new source, spreads one that has outgrown its loaders, and takes back loaders it needs no
        more.
        """
        if not self.need[s]:
            return
        copies, have = min(self.max_loaders, max(1, math.ceil(self.need[s] - _EPS))), self.on[s]
        fewer = max(1, math.ceil(self.need[s] / _SPARE - _EPS))
        if len(have) > fewer:
            keep = sorted(have, key=lambda n: (self.share(n), n))[:fewer]
            if all(self.share(n) - self.part(s) + self.need[s] / fewer <= 1 + _EPS for n in keep):
                self.put(s, set(keep))
            return
        if have and (self.part(s) <= FULL or len(have) >= copies):
            return
        self.put(s, set())
        part = self.need[s] / copies
        order = sorted(have) + sorted(self.sources.keys() - have)
        found = [loader for loader in order if self.share(loader) + part <= 1 + _EPS][:copies]
        while len(found) < copies and len(self.sources) < self.max_loaders:
            found.append(self.open())
        found += sorted(set(order) - set(found), key=lambda n: (self.share(n), n not in have, n))[
            : copies - len(found)
        ]
        self.put(s, set(found))

    def relieve(self) -> None:
        """Moves sources off overloaded loaders, the smallest that are enough, or splits them if nothing else
        helps.
        """
        for _ in range(8 * self.max_loaders):
            hot = max(self.sources, key=lambda n: (self.share(n), -n), default=-1)
            if hot < 0 or self.share(hot) <= FULL:
                return
            excess = self.share(hot) - 1
            parts = sorted(self.sources[hot], key=lambda s: (self.part(s), s))
            s = next((s for s in parts if self.part(s) >= excess), parts[-1])
            room = [n for n in sorted(self.sources) if n != hot and self.share(n) + self.part(s) <= 1 + _EPS]
            if room := [n for n in room if n not in self.on[s]]:
                self.put(s, self.on[s] - {hot} | {room[0]})
            elif len(self.sources) < self.max_loaders and len(parts) > 1:
                self.put(s, self.on[s] - {hot} | {self.open()})
            elif not self._even_out(hot):
                return

    def _even_out(self, hot: int) -> bool:
        """Moves or splits a source of the busiest loader where none can be added; returns False if nothing is
        won.
        """
        cool = min(self.sources, key=lambda n: (self.share(n), n))
        gap = self.share(hot) - self.share(cool)
        able = [s for s in sorted(self.sources[hot]) if cool not in self.on[s]]
        if whole := [s for s in able if _EVEN / 2 <= self.part(s) <= gap - _EVEN / 2]:
            s = min(whole, key=lambda s: (abs(self.part(s) - gap / 2), s))
            self.put(s, self.on[s] - {hot} | {cool})
            return True
        for s in sorted(able, key=lambda s: (-self.part(s), s)):
            if self.need[s] / (len(self.on[s]) + 1) <= gap - _EVEN / 2:
                self.put(s, self.on[s] | {cool})
                return True
        return False

    def empty(self, loader: int) -> bool:
        """Moves all sources of a loader to others and closes it, or does nothing; returns True if it did."""
        others = sorted(self.sources.keys() - {loader})
        saved = {s: set(self.on[s]) for s in self.sources[loader]}
        for s in sorted(saved, key=lambda s: (-self.part(s), s)):
            part, rest = self.part(s), saved[s] - {loader}
            grown = self.need[s] / max(len(rest), 1) - part
            to = [n for n in others if n not in rest and self.share(n) + part <= _SPARE + _EPS]
            if rest and all(self.share(n) + grown <= _SPARE + _EPS for n in rest):
                self.put(s, rest)
            elif to:
                self.put(s, rest | {to[0]})
            else:
                for moved, on in saved.items():
                    self.put(moved, on)
                return False
        del self.sources[loader]
        return True
