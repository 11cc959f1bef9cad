"""Bad numbers: NaN and large weights, gradients that are NaN, bits that flip in the memory of one device."""

import re
from typing import Any

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.planted import Plant
from jtrain.bench.fault_trials.recipe import NUM_STEPS
from jtrain.bench.fault_trials.trial import Trial
from jtrain.runtime.exit_codes import DONE

LONG = 96
"""Steps of a run whose guard knows how its losses spread: it needs 64 of them."""
LEAVES = r"^(bad_steps\.jsonl|checkpoints/N\.(damaged|doubtful))"
EACH: dict[str, Any] = dict(processes=(1, 2), may_keep_others=True, leaves=LEAVES)
NAMES_HARDWARE = r"error: .*(device|process) \d+"


def _planted(trial: Trial, plant: Plant) -> None:
    # The planted module wraps the training command.
    trial.module = plant.module
    attempt = trial.start()
    attempt.wait()
    trial.record_end(attempt)
    trial.result.notes.append(f"{plant.kind} before step {plant.step}")
    # A fault that did not happen would pass as survived.
    if plant.kind in ("nan", "large", "flip") and "planted:" not in attempt.text():
        trial.wrong("nothing was planted")


def _errors(text: str) -> str:
    return (
        "; ".join(line for line in text.splitlines() if line.startswith("error:")) or "no error was printed"
    )


def _marker(trial: Trial) -> str:
    return str(trial.folder / "planted")


@fault(
    "nan-weight",
    "a weight becomes NaN between two steps",
    says=NAMES_HARDWARE,
    lost_steps=NUM_STEPS,
    **EACH,
)
def nan_weight(trial: Trial) -> None:
    """The step is found bad, run again from the last good checkpoint, differs: hardware named, exit 76."""
    step = trial.rng.randint(2, NUM_STEPS - 1)
    _planted(trial, Plant("nan", step, seed=trial.rng.randrange(1000), marker=_marker(trial)))


@fault(
    "large-weight",
    "a weight becomes 1e4 between two steps",
    says=NAMES_HARDWARE,
    lost_steps=LONG,
    sets=(f"num_steps={LONG}",),
    **EACH,
)
def large_weight(trial: Trial) -> None:
    """A loss far above the recent ones is found in the same way."""
    # After the 64 steps that the guard needs, and early enough for steps after it.
    step = trial.rng.randint(70, LONG - 16)
    _planted(trial, Plant("large", step, seed=trial.rng.randrange(1000), marker=_marker(trial)))


def _bad_arithmetic(trial: Trial, plant: Plant) -> None:
    # The reference leaves the update out in the same program, so that the rounding is the same.
    trial.reference = trial.lab.reference(trial.recipe, Plant("left_out", plant.step).module)
    # The guard's state counts the rejected update, so only parameters and moments have to agree.
    trial.compared = ("params.", "opt_state.")
    _planted(trial, plant)
    if set(trial.attempts[0].codes.values()) != {DONE}:
        trial.wrong(f"NaN at one step ended the run with {trial.attempts[0].codes}: {_errors(trial.output)}")


@fault("nan-gradient", "the gradients of one step are NaN, each time it is computed", **EACH)
def nan_gradient(trial: Trial) -> None:
    """The update is not applied: the run equals one that leaves this batch out, and ends by itself."""
    _bad_arithmetic(trial, Plant("gradient", trial.rng.randint(2, NUM_STEPS - 1)))


@fault(
    "nan-update",
    "the update of a step that saves makes the weights NaN, each time it is computed",
    **EACH,
)
def nan_update(trial: Trial) -> None:
    """Loss and gradient norm are finite, so only the new state shows it; nothing of it is saved."""
    # Steps that save: the bad state must not get into a checkpoint.
    _bad_arithmetic(trial, Plant("update", trial.rng.choice((4, 8, 12))))


def _flip(trial: Trial) -> None:
    trial.recipe = trial.recipe.changed(
        "mesh.data=2",
        f"layout.zero_stage={trial.rng.choice((0, 3))}",
        # Two devices over all processes: a single one has no copy to differ from.
        emulated=2 // trial.recipe.num_processes,
    )
    trial.reference = trial.lab.reference(trial.recipe)
    step, process = trial.rng.randint(2, NUM_STEPS - 1), trial.rng.randrange(trial.recipe.num_processes)
    _planted(trial, Plant("flip", step, process, trial.rng.randrange(10**6), _marker(trial)))
    # The line says which devices were hit; the error must name the same.
    hit = re.findall(r"planted: flip .*devices=(\d+)", trial.output)
    if not hit or not re.search(rf"error: .*device {hit[0]}\b", trial.output):
        trial.wrong(f"a flipped bit on device {hit} was not located: {_errors(trial.output)}")


@fault(
    "flip",
    "one bit of a weight or moment flips on one of two devices",
    says=NAMES_HARDWARE,
    lost_steps=NUM_STEPS,
    **EACH,
)
def flip(trial: Trial) -> None:
    """The checks of the state find it, name the device and end the run with 76; nothing of it was saved."""
    _flip(trial)
