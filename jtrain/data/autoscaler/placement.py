"""Placement of sources on loaders, repaired with few moves so that every loader stays within its time."""

import math

FULL = 1.1
"""Planned time of a loader above which sources are moved away; new placements fill it only to 1."""

_SPARE = 0.8  # merging fills a loader up to here, so that merged sources do not have to be split again soon
_EVEN = 0.1  # loads that differ by less are even
_EPS = 1e-9

Placement = dict[int, tuple[int, ...]]
"""Loader number -> its sources, ascending. No number is used for two processes, so that logs stay clear."""


def repair(
    placement: Placement, need: list[float], *, max_loaders: int, next_loader: int, merge: bool
) -> tuple[Placement, int]:
    """Returns a placement for other needs with few moves, since each move opens a source again.

    Example: loaders 0 and 1 hold sources {0} and {1, 2}, and source 1 has grown: needs 0.5, 0.9, 0.3. Loader
    1 is at 1.2, above FULL; its smallest source that takes the excess of 0.2 is source 2, which fits on
    loader 0 (0.5 + 0.3): the result is {0: (0, 2), 1: (1,)}.

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
    loaders = _Loaders(placement, need, max_loaders, next_loader)
    # Largest needs first: small sources then fill the gaps that are left.
    for source in sorted(range(len(need)), key=lambda source: (-need[source], source)):
        loaders.fit_source(source)
    # After all sources have loaders: only then is it known which loaders are overloaded.
    loaders.relieve()
    for loader in [loader for loader, sources in loaders.sources.items() if not sources]:
        del loaders.sources[loader]
    # any() stops at the first loader that was emptied: that changed the loads, so look again from the idlest.
    while merge and any(
        loaders.try_empty(loader) for loader in sorted(loaders.sources, key=lambda n: (loaders.load(n), -n))
    ):
        pass
    return {n: tuple(sorted(loaders.sources[n])) for n in sorted(loaders.sources)}, loaders.next_loader


class _Loaders:
    """Sources of each loader, while they are placed. Loaders of one source share it evenly."""

    def __init__(self, placement: Placement, need: list[float], max_loaders: int, next_loader: int) -> None:
        self.need, self.max_loaders, self.next_loader = need, max_loaders, next_loader
        self.sources = {loader: {s for s in held if need[s] > 0} for loader, held in placement.items()}
        self.loaders_of: list[set[int]] = [set() for _ in need]
        for loader, held in self.sources.items():
            for s in held:
                self.loaders_of[s].add(loader)

    def time_share(self, s: int) -> float:
        """Returns the share of time that source s takes of each of its loaders."""
        return self.need[s] / max(len(self.loaders_of[s]), 1)

    def load(self, loader: int) -> float:
        """Returns the share of a loader's planned time that its sources take."""
        return sum(map(self.time_share, self.sources[loader]), 0.0)

    def place(self, s: int, loaders: set[int]) -> None:
        """Places source s on exactly these loaders."""
        for loader in self.loaders_of[s]:
            self.sources[loader].discard(s)
        self.loaders_of[s] = set(loaders)
        for loader in loaders:
            self.sources[loader].add(s)

    def add_loader(self) -> int:
        """Adds a loader."""
        loader = self.next_loader
        self.next_loader += 1
        self.sources[loader] = set()
        return loader

    def fit_source(self, source: int) -> None:
        """Places a new source, spreads one that has outgrown its loaders, or takes back spare loaders."""
        if not self.need[source]:
            return
        current_loaders = self.loaders_of[source]
        copies = min(self.max_loaders, max(1, math.ceil(self.need[source] - _EPS)))
        # Fewer loaders only down to a load of _SPARE, or the next rise would take one more again.
        min_loaders = max(1, math.ceil(self.need[source] / _SPARE - _EPS))
        if len(current_loaders) > min_loaders:
            remaining_loaders = sorted(current_loaders, key=lambda loader: (self.load(loader), loader))[
                :min_loaders
            ]
            if all(
                self.load(loader) - self.time_share(source) + self.need[source] / min_loaders <= 1 + _EPS
                for loader in remaining_loaders
            ):
                self.place(source, set(remaining_loaders))
            return
        if current_loaders and (self.time_share(source) <= FULL or len(current_loaders) >= copies):
            return
        # Taken off first, so that `load` counts the loaders without it.
        self.place(source, set())
        time_share = self.need[source] / copies
        # Its present loaders first: they have it open.
        candidates = sorted(current_loaders) + sorted(self.sources.keys() - current_loaders)
        chosen_loaders = [loader for loader in candidates if self.load(loader) + time_share <= 1 + _EPS][
            :copies
        ]
        while len(chosen_loaders) < copies and len(self.sources) < self.max_loaders:
            chosen_loaders.append(self.add_loader())
        # No loader has room and none can be added: the least loaded ones, to be relieved later.
        chosen_loaders += sorted(
            set(candidates) - set(chosen_loaders),
            key=lambda loader: (self.load(loader), loader not in current_loaders, loader),
        )[: copies - len(chosen_loaders)]
        self.place(source, set(chosen_loaders))

    def relieve(self) -> None:
        """Moves sources off overloaded loaders, the smallest that are enough, or splits them if need be."""
        # A bound: moving sources to and fro between two loaders must end.
        for _ in range(8 * self.max_loaders):
            busiest = max(self.sources, key=lambda loader: (self.load(loader), -loader), default=-1)
            if busiest < 0 or self.load(busiest) <= FULL:
                return
            excess = self.load(busiest) - 1
            by_time_share = sorted(
                self.sources[busiest], key=lambda source: (self.time_share(source), source)
            )
            # Smallest source that is enough by itself, else the largest.
            source = next(
                (source for source in by_time_share if self.time_share(source) >= excess), by_time_share[-1]
            )
            free_loaders = [
                loader
                for loader in sorted(self.sources)
                if loader != busiest and self.load(loader) + self.time_share(source) <= 1 + _EPS
            ]
            if free_loaders := [loader for loader in free_loaders if loader not in self.loaders_of[source]]:
                self.place(source, self.loaders_of[source] - {busiest} | {free_loaders[0]})
            # A loader's only source is not moved to a new one: it would be as full.
            elif len(self.sources) < self.max_loaders and len(by_time_share) > 1:
                self.place(source, self.loaders_of[source] - {busiest} | {self.add_loader()})
            elif not self._even_out(busiest):
                return

    def _even_out(self, busiest: int) -> bool:
        """Moves or splits a source of the busiest loader where none can be added; False if nothing helps."""
        idlest = min(self.sources, key=lambda loader: (self.load(loader), loader))
        gap = self.load(busiest) - self.load(idlest)
        movable = [
            source for source in sorted(self.sources[busiest]) if idlest not in self.loaders_of[source]
        ]
        # Each move must help: it leaves both loaders at least half of _EVEN below the busiest one's load.
        if fitting := [
            source for source in movable if _EVEN / 2 <= self.time_share(source) <= gap - _EVEN / 2
        ]:
            # Nearest to half the gap: both loaders are then equally busy.
            source = min(fitting, key=lambda source: (abs(self.time_share(source) - gap / 2), source))
            self.place(source, self.loaders_of[source] - {busiest} | {idlest})
            return True
        # No source is small enough to move: share the largest one that helps.
        for source in sorted(movable, key=lambda source: (-self.time_share(source), source)):
            # The share that the idlest loader takes over; it too stays below the busiest one's load.
            if self.need[source] / (len(self.loaders_of[source]) + 1) <= gap - _EVEN / 2:
                self.place(source, self.loaders_of[source] | {idlest})
                return True
        return False

    def try_empty(self, loader: int) -> bool:
        """Moves all sources of a loader to others and closes it, or does nothing; returns True if it did."""
        other_loaders = sorted(self.sources.keys() - {loader})
        # To take the moves back if one of the sources fits nowhere.
        loaders_before = {source: set(self.loaders_of[source]) for source in self.sources[loader]}
        for source in sorted(loaders_before, key=lambda source: (-self.time_share(source), source)):
            time_share, remaining_loaders = self.time_share(source), loaders_before[source] - {loader}
            # What each remaining loader of the source would take over.
            growth = self.need[source] / max(len(remaining_loaders), 1) - time_share
            free_loaders = [
                candidate
                for candidate in other_loaders
                if candidate not in remaining_loaders and self.load(candidate) + time_share <= _SPARE + _EPS
            ]
            if remaining_loaders and all(
                self.load(candidate) + growth <= _SPARE + _EPS for candidate in remaining_loaders
            ):
                self.place(source, remaining_loaders)
            elif free_loaders:
                self.place(source, remaining_loaders | {free_loaders[0]})
            else:
                for moved_source, old_loaders in loaders_before.items():
                    self.place(moved_source, old_loaders)
                return False
        del self.sources[loader]
        return True
