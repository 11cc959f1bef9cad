"""Partitions of the object store that has the workdir, and a kill while it does not answer."""

import importlib.util
import time

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.stores.loopback_store import Link
from jtrain.bench.fault_trials.trial import Trial
from jtrain.runtime.exit_codes import AWAY, DONE

IN_STORE = dict(in_store=True, processes=(1,), chains=True, leaves=r"^lock/")
LONGEST_S = 4.0


def no_client() -> str | None:
    """Returns why this machine has no workdir in a store, None if it can."""
    if importlib.util.find_spec("gcsfs") is None:
        return "gcsfs is not installed: `pip install 'jtrain[gcs]'`"
    return None


@fault("store-silent", "the store of the workdir does not answer for seconds", needs=no_client, **IN_STORE)
def store_silent(trial: Trial) -> None:
    """The training goes on, and what it had to write follows."""
    _cut_off(trial, "silent")


@fault(
    "store-reset", "the store of the workdir ends all connections for seconds", needs=no_client, **IN_STORE
)
def store_reset(trial: Trial) -> None:
    """The same, or the run ends with 77, and the same command goes on."""
    _cut_off(trial, "reset")


def _cut_off(trial: Trial, link: Link) -> None:
    assert trial.loopback is not None
    attempt = trial.start()
    cut_step = trial.draw_step(4)
    attempt.until(lambda: trial.workdir.last_step() >= cut_step)
    seconds = trial.rng.uniform(0, LONGEST_S)
    kills = trial.rng.random() < 0.5
    trial.result.notes.append(f"{link} for {seconds:.1f} s{', killed meanwhile' if kills else ''}")
    trial.loopback.partition(link)
    try:
        end_s = time.monotonic() + seconds
        attempt.until(lambda: time.monotonic() > end_s, poll_s=0.01)
        if kills:
            attempt.kill()
    finally:
        trial.loopback.heal()
    if trial.let_train(attempt) and attempt.codes[0] not in (DONE, AWAY):
        trial.wrong(f"a store that was {link} for {seconds:.1f} s ended the run with {attempt.codes}")
