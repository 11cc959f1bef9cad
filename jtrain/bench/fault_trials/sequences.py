"""Sequences of faults in one workdir: drawn, injected one after another, and shortened once they fail.

`kill-step:17,sigterm:3` is a kill in a step, and SIGTERM to what was started after it. Each number draws the
details of its fault (step, instant, process), so a fault is the same in a longer and in a shorter sequence.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from jtrain.bench.fault_trials.kinds import FaultKind, FaultResult
from jtrain.bench.fault_trials.lab import FaultLab
from jtrain.bench.fault_trials.recipe import NUM_STEPS
from jtrain.bench.fault_trials.trial import Trial, inject_and_compare
from jtrain.errors import UserError

MOST_FAULTS = 4
"""Faults of a drawn sequence: a run of 16 steps has room for few more."""

SPAN = 4
"""Steps from the last logged one within which a fault of a sequence comes, so that others fit behind it."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Kind of fault, by its name, and the number that draws its details."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}:{self.number}"


FaultSequence = tuple[Fault, ...]


def shown(sequence: FaultSequence) -> str:
    """Text of a sequence, as after `--sequence`."""
    return ",".join(map(str, sequence))


def parse(text: str, kinds: Mapping[str, FaultKind]) -> FaultSequence:
    """Reads the text of a sequence.

    Raises:
      UserError: it names a kind that is unknown or cannot follow others, has no number, or needs two
        workdirs.
    """
    sequence = []
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if name not in kinds:
            raise UserError(
                f"--sequence {part}: no kind of this name can follow others. There are: {', '.join(kinds)}."
            )
        if not number.isdecimal():
            raise UserError(f"--sequence {part}: a fault is KIND:NUMBER, such as {name}:0.")
        sequence.append(Fault(name, int(number)))
    if _contradict(tuple(sequence), kinds):
        on_disk = ", ".join(fault.name for fault in sequence if kinds[fault.name].on_disk)
        raise UserError(
            f"--sequence {text}: {on_disk} needs a workdir on a disk, the others one in a store. Leave one "
            "out."
        )
    return tuple(sequence)


def draw(kinds: Mapping[str, FaultKind], seed: int) -> Iterator[FaultSequence]:
    """Yields sequences without end; sequence i is the same for a seed, however many are taken."""
    rng, names = random.Random(seed), list(kinds)
    while True:
        # One fault alone is what the trials without --hours inject.
        length = rng.randint(2, MOST_FAULTS)
        sequence = tuple(Fault(rng.choice(names), rng.randrange(1000)) for _ in range(length))
        # Drawn again, so that all sequences that can run are equally likely.
        if not _contradict(sequence, kinds):
            yield sequence


def _contradict(sequence: FaultSequence, kinds: Mapping[str, FaultKind]) -> bool:
    """True if one fault needs a workdir in a store and another one on a disk."""
    parts = [kinds[fault.name] for fault in sequence]
    return any(part.in_store for part in parts) and any(part.on_disk for part in parts)


def combine(sequence: FaultSequence, kinds: Mapping[str, FaultKind]) -> FaultKind:
    """Returns a kind that injects the faults of a sequence one after another, until the run is done."""
    parts = tuple(kinds[fault.name] for fault in sequence)

    def inject(trial: Trial) -> None:
        trial.span = SPAN
        for index, (fault, part) in enumerate(zip(sequence, parts, strict=True)):
            # After the last step is committed there is nothing left to break.
            if trial.result.wrong or NUM_STEPS in trial.workdir.committed():
                trial.result.notes.append(f"ended before {shown(sequence[index:])}")
                return
            # Seeded by the fault alone: its details are the same in every part of the sequence.
            trial.part, trial.rng = index, random.Random(str(fault))
            part.inject(trial)

    leaves = [f"(?:{part.leaves})" for part in parts if part.leaves is not None]
    return FaultKind(
        shown(sequence),
        "; ".join(part.description for part in parts),
        inject,
        # Numbers of processes that every part takes.
        processes=tuple(set.intersection(*(set(part.processes) for part in parts))),
        lines_lost=any(part.lines_lost for part in parts),
        may_keep_others=any(part.may_keep_others for part in parts),
        leaves="|".join(leaves) or None,
        needs=lambda: next((reason for part in parts if (reason := part.needs()) is not None), None),
        # One of each: two kinds may need the same setting.
        sets=tuple(dict.fromkeys(text for part in parts for text in part.sets)),
        in_store=any(part.in_store for part in parts),
        on_disk=any(part.on_disk for part in parts),
        parts=parts,
    )


def shorten(sequence: FaultSequence, fails: Callable[[FaultSequence], bool]) -> FaultSequence:
    """Returns the shortest part of a sequence, in its order, that fails by itself; `sequence` if none does.

    All parts are tried, the short ones first: a sequence of four has 14, and nothing shorter than the result
    fails.
    """
    for length in range(1, len(sequence)):
        # Each once, also where a fault comes twice.
        for part in dict.fromkeys(itertools.combinations(sequence, length)):
            if fails(part):
                return part
    return sequence


def try_and_shorten(
    sequence: FaultSequence, number: int, lab: FaultLab, kinds: Mapping[str, FaultKind]
) -> FaultResult:
    """Runs a sequence in a workdir of its own; one that fails, again in parts, to find the shortest."""
    tries = itertools.count(1)
    # The whole sequence first; parts are tried only where it fails.
    result = inject_and_compare(combine(sequence, kinds), lab, f"sequence-{number}", number)

    def fails(part: FaultSequence) -> bool:
        name = f"sequence-{number}.{next(tries)}"
        part_result = inject_and_compare(combine(part, kinds), lab, name, number)
        print(f"  {shown(part)}: {'fails' if part_result.wrong else 'survived'}", flush=True)
        return bool(part_result.wrong)

    if result.wrong:
        result.shortest = shown(shorten(sequence, fails))
    return result
