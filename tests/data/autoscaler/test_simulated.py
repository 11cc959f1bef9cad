"""Simulated runs of the autoscaler: steps get fast again after a change, and placements stay stable."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from jtrain.data.autoscaler import policy
from jtrain.data.autoscaler.policy import Autoscaler

START_S = 2.0  # start time of a simulated loader; OPEN_S is added for each source that it opens
OPEN_S = 0.2
COMPUTE_S = 1.0
AHEAD = 2  # steps whose documents are requested before the trainer needs them

Weights = Callable[[int], Sequence[float]]


@dataclasses.dataclass
class Loader:
    """Simulated loader that serves its requests one after another."""

    ready_s: float
    free_s: float = 0.0
    opened: set[int] = dataclasses.field(default_factory=set)


class Schedule(NamedTuple):
    """Schedule of a mixture by a function."""

    of: Weights

    def weights(self, step: int, names: Sequence[str]) -> np.ndarray:
        return np.array(self.of(step), float)


class Simulation:
    """Simulated trainer of 1 s per step, with loaders that take a source's seconds per document; no real time
    passes.

    service_s: seconds per document of each source; may be changed between steps.
    noise: each run's cost is multiplied by 1 +- noise, uniform.
    follow: False keeps the first placement.
    """

    def __init__(
        self,
        service_s: Sequence[float],
        weights: Weights,
        *,
        documents: int = 100,
        max_loaders: int = 8,
        noise: float = 0.0,
        follow: bool = True,
        seed: int = 0,
    ) -> None:
        self.service_s = np.array(service_s)
        self.weights = weights
        self.documents = documents
        self.noise = noise
        self.follow = follow
        self.random = np.random.default_rng(seed)
        self.names = [f"s{i}" for i in range(len(service_s))]
        tokens = 600 * documents
        self.scaler = Autoscaler(self.names, Schedule(weights), step_tokens=tokens, max_loaders=max_loaders)
        self.now_s = 0.0
        self.step = 0
        self.ready_s: list[float] = []  # time at which all documents of a step have arrived
        self.step_s: list[float] = []
        self.lines: list[str] = []
        self.moves = 0
        self.opened = 0
        self.placement, _ = self.scaler.start(0)
        self.loaders = {loader: Loader(0.0) for loader in self.placement}
        self.serving = [self.on(s) for s in range(len(self.names))]

    def on(self, source: int) -> list[int]:
        return [loader for loader, held in self.placement.items() if source in held]

    def ready_on(self, source: int) -> list[int]:
        """Returns the loaders that serve a source: a new loader only after its start, its former loaders
        until then.
        """
        ready = [number for number in self.on(source) if self.loaders[number].ready_s <= self.now_s]
        self.serving[source] = (
            ready or [n for n in self.serving[source] if n in self.loaders] or self.on(source)
        )
        return self.serving[source]

    def request(self, step: int) -> None:
        """Hands out the runs of a step, split evenly over the loaders of each source."""
        done = self.now_s
        for s, weight in enumerate(self.weights(step)):
            on = self.ready_on(s)
            assert on or not weight, f"step {step} draws from {self.names[s]}, which is on no loader"
            for number in on:
                loader = self.loaders[number]
                if not (count := round(weight * self.documents / len(on))):
                    continue
                cost = count * self.service_s[s] * (1 + self.noise * self.random.uniform(-1, 1))
                start = max(loader.free_s, loader.ready_s, self.now_s)
                if s not in loader.opened:
                    start += OPEN_S
                    self.opened += 1
                    loader.opened.add(s)
                loader.free_s = start + cost
                done = max(done, loader.free_s)
                self.scaler.observe(s, read_s=cost, tokens=600 * count, documents=count)
        self.ready_s.append(done)

    def run(self, steps: int) -> list[float]:
        """Trains `steps` more steps; returns the seconds of each."""
        for _ in range(steps):
            while len(self.ready_s) <= self.step + AHEAD:
                self.request(len(self.ready_s))
            begin = self.now_s
            wait_s = max(0.0, self.ready_s[self.step] - begin)
            self.now_s = begin + wait_s + COMPUTE_S
            self.step += 1
            self.step_s.append(self.now_s - begin)
            if self.follow:
                self.scale(begin, wait_s)
        return self.step_s[-steps:]

    def scale(self, begin: float, wait_s: float) -> None:
        # Runs are requested AHEAD steps early, so the weights must be looked up from there.
        placement, lines = self.scaler.update(
            self.step + AHEAD, steps=1, seconds=self.now_s - begin, wait_s=wait_s
        )
        assert bool(lines) or placement == self.placement, "a placement changed without a word"
        self.moves += placement != self.placement
        self.lines += lines
        for number in placement.keys() - self.loaders.keys():
            self.loaders[number] = Loader(self.now_s + START_S)
        for number in self.loaders.keys() - placement.keys():
            del self.loaders[number]  # serves earlier requests only
        self.placement = placement
        for number, loader in self.loaders.items():
            loader.opened &= {s for s in loader.opened if number in self.serving[s] or number in self.on(s)}


def test_a_source_that_becomes_ten_times_slower_gets_its_loaders_and_the_steps_recover() -> None:
    """After scaling, steps are within 10 % of their former time. Without scaling they stay far slower."""
    want, stuck = (
        Simulation([3e-3] * 6, lambda _: [1 / 6] * 6, documents=300, follow=follow)
        for follow in (True, False)
    )
    for simulation in (want, stuck):
        simulation.run(30)
        simulation.service_s[2] *= 10
    before = np.mean(want.step_s[-10:])
    few = len(want.placement)

    after = want.run(60)

    assert np.mean(stuck.run(60)[-20:]) > 1.5 * before, (
        "the slow source must hurt, or recovery proves nothing"
    )
    assert np.mean(after[-40:]) <= 1.1 * before
    assert max(after[-40:]) <= 1.1 * before
    assert len(want.placement) > few
    assert len(want.on(2)) >= 2
    assert all(len(want.on(s)) == 1 for s in (0, 1, 3, 4, 5)), "only the slow source is split"


@pytest.mark.parametrize("ahead", [True, False])
def test_a_weight_that_the_schedule_raises_has_its_loaders_before_the_step(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expensive source rises from 1 % to 30 % at step 60: no step is slow; without look-ahead some are."""

    def weights(step: int) -> list[float]:
        return [0.01, 0.5, 0.49] if step < 60 else [0.3, 0.4, 0.3]

    if not ahead:
        monkeypatch.setattr(
            policy.Autoscaler, "weights_ahead_of", lambda self, step: np.array(weights(step), float)
        )
    simulation = Simulation([40e-3, 2e-3, 2e-3], weights, documents=200)
    simulation.run(55)
    early = len(simulation.on(0))
    steps = simulation.run(45)

    if not ahead:
        assert early == 1
        assert max(steps) > 1.1, "a step must be slow without look-ahead, or the other case proves nothing"
    else:
        assert early >= 3
        assert max(steps) <= 1.1
        line = next(line for line in simulation.lines if "s0 needs" in line)
        assert int(line.split(":")[0].removeprefix("step ")) < 60 - START_S
    assert max(simulation.step_s[-20:]) <= 1.1


def test_loaders_are_given_back_after_a_weight_has_fallen() -> None:
    def weights(step: int) -> list[float]:
        return [0.3, 0.4, 0.3] if step < 40 else [0.01, 0.5, 0.49]

    simulation = Simulation([40e-3, 2e-3, 2e-3], weights, documents=200)
    simulation.run(40)
    many = len(simulation.placement)
    steps = simulation.run(60)

    assert many >= 4
    assert len(simulation.placement) <= 2
    assert len(simulation.on(0)) == 1
    assert max(steps) <= 1.1
    assert any(f"loaders {many} -> " in line for line in simulation.lines), simulation.lines


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_move_sources_about(seed: int) -> None:
    """In 600 steps of runs that cost 30 % more or less, at loads near the limits, there are few changes, all
    early.
    """
    services = np.random.default_rng(seed).uniform(1e-3, 12e-3, 12)
    simulation = Simulation(services.tolist(), lambda _: [1 / 12] * 12, documents=400, noise=0.3, seed=seed)
    simulation.run(200)
    early = simulation.moves
    assert early >= 1, "the guesses by size must be wrong enough to be corrected"
    simulation.run(400)

    assert early <= 6
    assert simulation.moves - early <= 2
    assert np.mean(simulation.step_s[-100:]) <= 1.05


def test_the_windows_themselves_may_be_noisy() -> None:
    """Even if all sources are off by 30 % together in a window, which averaging does not hide, changes stay
    few.
    """
    random = np.random.default_rng(1)
    simulation = Simulation([4e-3] * 8, lambda _: [1 / 8] * 8, documents=400)
    for _ in range(200):
        simulation.service_s[:] = 4e-3 * random.uniform(0.7, 1.3)
        simulation.run(5)

    assert 1 <= simulation.moves <= 4
