"""Draws settings so that every pair of values of two factors meets in some trial, in few trials."""

import itertools
import random
from collections.abc import Iterator

from jtrain.bench.layout_trials.descriptions import all_traits, draw_description, traits
from jtrain.bench.layout_trials.refusals import follow
from jtrain.bench.layout_trials.settings import (
    DESCRIBED,
    DESCRIPTION,
    DEVICES,
    FACTORS,
    OF_A_PRECISION,
    Setting,
    count_devices,
    defaults,
    refusal,
)

type Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a value each, as text."""

PATHS = tuple(FACTORS)
IN_FLOAT32 = tuple(path for path in PATHS if not path.startswith(OF_A_PRECISION))
"""Factors that a trial in float32 may change."""
OF_THE_LAYOUT = tuple(path for path in PATHS if path.startswith(("mesh.", "layout.", "pipeline.", "data.")))
"""Factors that place a model on devices."""


def pairs_of(setting: Setting) -> set[Pair]:
    """All pairs of factors of a setting; every description counts as `described`."""
    # In the order of PATHS, so that a pair has one form only.
    return set(itertools.combinations([(path, str(setting[path])) for path in PATHS], 2))


def all_pairs(paths: tuple[str, ...] = PATHS) -> set[Pair]:
    """All pairs of values of two different factors."""
    return {
        ((a, str(x)), (b, str(y)))
        for a, b in itertools.combinations(paths, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }


def trait_pairs(setting: Setting) -> set[Pair]:
    """Pairs of a field of a description and a factor of the layout; none without a description."""
    if setting["model"] != DESCRIBED:
        return set()
    values = [(path, str(setting[path])) for path in OF_THE_LAYOUT]
    return set(itertools.product(traits(setting[DESCRIPTION]), values))


def all_trait_pairs() -> set[Pair]:
    """All pairs of a value of a field of a description and a value of a factor of the layout."""
    values = [(path, str(value)) for path in OF_THE_LAYOUT for value in FACTORS[path]]
    return set(itertools.product(all_traits(), values))


CANDIDATES = 2
"""Settings that are drawn for each that is taken: the one that meets more new pairs."""


class Draw:
    """Endless settings that jtrain takes, the same for the same seed: first those that meet new pairs.

    Every second one computes in float32 throughout, where the bounds are tightest, and seeks pairs that have
    not met in float32 yet. Once these have met, one of four has a description of its own. `refused` has the
    pairs that no setting could be found for.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"layouts {seed}")
        # Two sets: pairs in any precision, and pairs within float32.
        self.unmet = {False: all_pairs(), True: all_pairs(IN_FLOAT32)}
        self.refused: set[Pair] = set()
        self.description: Setting = {}

    def __iter__(self) -> Iterator[Setting]:
        for number in itertools.count():
            # While pairs are left, those with a description bring descriptions too.
            described = number % 4 == 2 and not self.unmet[True]
            candidates = [self._candidate(number % 2 == 0, described) for _ in range(CANDIDATES)]
            setting = max(candidates, key=lambda candidate: len(pairs_of(candidate) & self.unmet[False]))
            met = pairs_of(setting)
            self.unmet[False] -= met
            if number % 2 == 0:
                self.unmet[True] -= met
            yield setting

    def _candidate(self, in_float32: bool, described: bool) -> Setting:
        """A setting, with a description that nobody else has if it wants one."""
        self.description = {DESCRIPTION: draw_description(self.rng)}
        setting = self._setting(in_float32=in_float32, described=described)
        return setting if setting["model"] == DESCRIBED else setting | {DESCRIPTION: None}

    def _setting(self, *, in_float32: bool, described: bool) -> Setting:
        setting, fixed = self._start(in_float32, {"model": DESCRIBED} if described else {})
        unmet = self.unmet[in_float32]
        for path in self._shuffled(IN_FLOAT32 if in_float32 else PATHS):
            if path in fixed:
                continue
            # How many unmet pairs each value would add to the setting so far.
            new = {value: self._new_pairs(setting, path, value, unmet) for value in FACTORS[path]}
            # Ties by chance, half of them for the default: a setting where all is on meets more refusals than
            # pairs.
            order = sorted(
                self._shuffled(FACTORS[path]),
                key=lambda value: (-new[value], value != FACTORS[path][0] and self.rng.random() < 0.5),
            )
            # The best value that is not refused: descriptions have more refusals than flat models.
            for value in order[:4]:
                if value == setting[path] or refusal(setting | {path: value}) is None:
                    setting = setting | {path: value}
                    break
        return setting

    def _start(self, in_float32: bool, demanded: Setting) -> tuple[Setting, tuple[str, ...]]:
        """A setting with an unmet pair, and the factors it was made for; any setting if all pairs have met.

        Args:
          demanded: values that the setting must have.
        """
        unmet = self.unmet[in_float32]
        values = {path: {str(value): value for value in FACTORS[path]} for path in PATHS}
        # Sorted, because the order of a set differs between processes.
        for pair in self._shuffled(tuple(sorted(unmet))):
            chosen = {path: values[path][text] for path, text in pair}
            if any(chosen.get(path, value) != value for path, value in demanded.items()):
                continue
            if (setting := self._with(demanded | chosen, in_float32)) is not None:
                return setting, (*demanded, *chosen)
            # Another description may allow the pair.
            if demanded:
                continue
            # No setting was found for it, so it is not tried again.
            unmet.discard(pair)
            if not in_float32:
                self.refused.add(pair)
        # All pairs have met: six factors by chance.
        paths = IN_FLOAT32 if in_float32 else PATHS
        chosen = {path: self.rng.choice(FACTORS[path]) for path in self.rng.sample(paths, 6)} | demanded
        setting = self._with(chosen, in_float32)
        if setting is None:
            return defaults() | self.description | demanded, tuple(demanded)
        return setting, (*demanded, *chosen)

    def _with(self, chosen: Setting, in_float32: bool) -> Setting | None:
        """A setting with these values that jtrain takes: by the ways out of its refusals, else by chance."""
        base = defaults() | self.description
        setting, _ = follow(base | chosen, keep=tuple(chosen))
        paths = [path for path in (IN_FLOAT32 if in_float32 else PATHS) if path not in chosen]
        # Few changes first, then more, four times over: 48 tries at most.
        for count in (1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5) * 4:
            if setting is not None and (not in_float32 or _only(setting, IN_FLOAT32)):
                return setting
            random_changes = {path: self.rng.choice(FACTORS[path]) for path in self.rng.sample(paths, count)}
            # The chosen values last, so that chance does not overwrite them.
            setting, _ = follow(base | random_changes | chosen, keep=tuple(chosen))
        return None

    def _new_pairs(self, setting: Setting, path: str, value: object, unmet: set[Pair]) -> int:
        own_value = (path, str(value))
        other_values = ((other_path, str(setting[other_path])) for other_path in PATHS if other_path != path)
        # A pair's two factors come in the order of PATHS, which is unknown here.
        return sum(
            (own_value, other_value) in unmet or (other_value, own_value) in unmet
            for other_value in other_values
        )

    def _shuffled[T](self, values: tuple[T, ...]) -> list[T]:
        return self.rng.sample(values, len(values))


def _only(setting: Setting, paths: tuple[str, ...]) -> bool:
    return all(path in paths or setting[path] == FACTORS[path][0] for path in PATHS)


def random_settings(seed: int) -> Iterator[Setting]:
    """Endless settings by chance, of which jtrain refuses most."""
    rng = random.Random(f"layouts refused {seed}")
    while True:
        setting = defaults()
        # Drawn for every second one: drawing takes longer than a refusal.
        if rng.random() < 0.5:
            setting |= {"model": DESCRIBED, DESCRIPTION: draw_description(rng)}
        for path in rng.sample(PATHS, rng.randint(3, 12)):
            setting[path] = rng.choice([v for v in FACTORS[path] if v != DESCRIBED or setting[DESCRIPTION]])
        # Otherwise most refusals would be for the number of devices.
        if count_devices(setting) <= DEVICES:
            yield setting
