"""Random layouts and precisions on emulated devices against one device and float64; nothing may be unequal.

    python -m jtrain.bench layouts --trials 500 --seed 0
    python -m jtrain.bench layouts --trials 500 --seed 0 --only 50:100
    python -m jtrain.bench layouts --trials 500 --seed 0 --only 73
    python -m jtrain.bench layouts --trials 500 --seed 0 --refusals

Trial i is the i-th of a sequence drawn from the seed so that every pair of settings meets soon: mesh axes
over 8 emulated devices, ZeRO, offload, remat, microbatches, schedules, overlap, precisions, optimizers,
models. One of four models is a description by chance: any mixer, norm and feed-forward layer in any pattern
(`layout_trials/descriptions.py`). Each trial makes three steps of the real train step on batches that differ
in every row, and compares first weights, losses, gradients and parameters with one device, and with a float64
reference that has no code of jtrain (`layout_trials/float64_model.py`); the bounds are in
`layout_trials/bounds.py`. A failed trial prints the command that repeats it alone, which also looks for fewer
settings that fail. With --refusals settings that jtrain refuses are drawn, and the ways out that the messages
name are followed: each must end the refusal, and one setting per reason is run.
Exit code 1 if anything is unequal.
"""

import collections
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jtrain.bench import Options, Row, option, row
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain.bench.layout_trials.pairs import Pair
    from jtrain.bench.layout_trials.settings import Setting

PRINTS = True
"""This benchmark prints a table of its own."""
MUST_MEET = True
"""Exit code 1 if a row misses its bar."""

REFUSED = 4
"""Settings by chance for each of `--trials`, most of which are refused."""


OPTIONS = (
    option("--trials", type=int, default=20, help="settings to run (default: %(default)s)"),
    option("--seed", type=int, default=0, help="of the sequence of settings (default: %(default)s)"),
    option("--only", metavar="K[:L]", help="only trial K, or those from K to L - 1"),
    option("--refusals", action="store_true", help="no trials: only settings that jtrain refuses"),
)


def run(args: Options) -> Iterator[Row]:
    """Runs the trials one after another; prints a line for each, then the tables; yields rows for `--json`.

    Raises:
      UserError: no trials are asked for.
    """
    if args.trials < 1:
        raise UserError(f"--trials {args.trials} must be at least 1.")
    chosen = choose_trials(args.only, args.trials)
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    import jax  # lazy: this file is read for `--help`

    from jtrain.bench.layout_trials.settings import DEVICES
    from jtrain.runtime.platform import start_jax

    # Devices are emulated by a flag that XLA reads once, so it is set before JAX starts.
    start_jax(os.environ, emulate_devices=DEVICES)
    # The steps compile for longer than they compute.
    jax.config.update("jax_disable_most_optimizations", True)
    yield from (
        follow_refusals(args.trials, args.seed) if args.refusals else fuzz(args.trials, args.seed, chosen)
    )


def choose_trials(only: str | None, trials: int) -> range:
    """Numbers of the trials to run.

    Raises:
      UserError: `--only` is no number or range of numbers within the trials.
    """
    if only is None:
        return range(trials)
    first, colon, end = only.partition(":")
    try:
        chosen = range(int(first), int(end) if colon else int(first) + 1)
    # `5:2:1` and words end here as well.
    except ValueError:
        chosen = range(0)
    if not chosen or chosen[0] < 0 or chosen[-1] >= trials:
        raise UserError(
            f"--only {only} must be K or K:L, trials from 0 to --trials {trials}. Set --only 0:{trials}."
        )
    return chosen


def fuzz(trials: int, seed: int, chosen: range) -> Iterator[Row]:
    """Runs the chosen trials of a seed; needs 8 devices."""
    from jtrain.bench.layout_trials import pairs  # lazy: they import jax
    from jtrain.bench.layout_trials.settings import as_text
    from jtrain.bench.layout_trials.trial import Lab, describe_result, shrink

    draw, lab = pairs.Draw(seed), Lab()
    met_pairs: set[pairs.Pair] = set()
    met_traits: set[pairs.Pair] = set()
    shares: dict[str, float] = {}
    unequal = 0
    # Settings are drawn from the first one on, because each draw depends on the pairs that were met before.
    for number, setting in enumerate(itertools.islice(draw, chosen[-1] + 1)):
        if number not in chosen:
            continue
        result = lab.trial(setting, number)
        print(describe_result(f"trial {number}", result), flush=True)
        for kind, share in result.shares.items():
            # Shares of a bound: the largest of each kind says how close to unequal the trials came.
            shares[kind] = max(shares.get(kind, 0.0), share)
        met_pairs |= pairs.pairs_of(setting)
        met_traits |= pairs.trait_pairs(setting)
        unequal += bool(result.unequal)
        if not result.unequal:
            continue
        print(
            f"    again: python -m jtrain.bench layouts --trials {trials} --seed {seed} --only {number}",
            flush=True,
        )
        # Shrinking runs many trials, so only the repetition of a single trial does it.
        if len(chosen) == 1:
            # B023 does not apply: `number` is read within this round of the loop.
            fewer = shrink(setting, lambda smaller: bool(lab.trial(smaller, number).unequal))  # noqa: B023
            print(f"    it takes: {as_text(fewer)}")
    # Pairs that every setting refuses cannot be met.
    possible = pairs.all_pairs() - draw.refused
    _print_tables(met_pairs, possible, shares)
    all_traits = pairs.all_trait_pairs()
    print(f"values of descriptions x values of layouts met: {len(met_traits)} of {len(all_traits)}")
    print(f"{len(chosen)} settings run, {unequal} unequal")
    yield row("settings that were run", float(len(chosen)), "settings")
    yield row("settings that were unequal", float(unequal), "settings", bar="<= 0")
    share = 100 * len(met_pairs & possible) / len(possible)
    yield row("pairs of settings met, of those not known to be refused", share, "%")


def follow_refusals(trials: int, seed: int) -> Iterator[Row]:
    """Draws settings of which most are refused, follows every way out, and runs one setting per reason.

    Prints how often each reason was met.
    """
    from jtrain.bench.layout_trials import pairs  # lazy: they import jax
    from jtrain.bench.layout_trials.refusals import follow, reason_of, try_ways_out
    from jtrain.bench.layout_trials.settings import as_text, refusal
    from jtrain.bench.layout_trials.trial import Lab, describe_result

    lab, met = Lab(), collections.Counter[str]()
    useless: list[str] = []
    accepted_settings: dict[str, Setting] = {}
    for setting in itertools.islice(pairs.random_settings(seed), REFUSED * trials):
        error = refusal(setting)
        if error is None:
            continue
        met[reason_of(error)] += 1
        ways_out = try_ways_out(error, setting)
        # A way out must end this refusal; a later one may be about something else.
        useless += [f"{change} does not end: {error}" for change, does_help in ways_out if not does_help]
        accepted, _ = follow(setting)
        if not ways_out or accepted is None:
            useless.append(f"no way out of {error} ({as_text(setting)})")
        else:
            # The first accepted setting of a reason stands for all.
            accepted_settings.setdefault(reason_of(error), accepted)
    print("refusals, by reason")
    for reason, count in met.most_common():
        print(f"{count:6}  {reason}")
    for line in sorted(set(useless)):
        print(f"    USELESS: {line}")
    unequal = 0
    for number, (reason, accepted) in enumerate(accepted_settings.items()):
        result = lab.trial(accepted, number)
        print(describe_result(f"way out of `{reason}`", result), flush=True)
        unequal += bool(result.unequal)
    yield row("settings that were refused", float(met.total()), "settings")
    yield row("ways out that do not end the refusal", float(len(set(useless))), "ways", bar="<= 0")
    yield row(
        "settings behind ways out that were run, one for each reason",
        float(len(accepted_settings)),
        "settings",
    )
    yield row("settings behind ways out that were unequal", float(unequal), "settings", bar="<= 0")


def _print_tables(met: "set[Pair]", possible: "set[Pair]", shares: Mapping[str, float]) -> None:
    """Prints for each factor the share of its pairs that met, and for each kind of difference the largest."""
    from jtrain.bench.layout_trials.settings import FACTORS  # lazy: it imports jax

    print("\npairs of settings met, by setting")
    for path in FACTORS:
        # A pair is two (path, value) items; it counts for both paths.
        of_path = [pair for pair in possible if path in (pair[0][0], pair[1][0])]
        count = sum(pair in met for pair in of_path)
        print(f"{path:28} {count:5} of {len(of_path):5}  {count / max(len(of_path), 1):6.1%}")
    print(
        f"{'all':28} {len(met & possible):5} of {len(possible):5}  {len(met & possible) / len(possible):6.1%}"
    )
    print("\nlargest difference of each kind, as a share of its bound")
    for kind, share in sorted(shares.items()):
        print(f"{kind:36} {share:.3f}")
    print()
