"""Report of the trials: a line each, a table by kind, each failure with the command that repeats it, rows."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence

from jtrain.bench import Row, row
from jtrain.bench.fault_trials.kinds import FaultKind, FaultResult
from jtrain.bench.fault_trials.recipe import EVERY_STEPS
from jtrain.report.table import Table, numbers, words


def line(result: FaultResult, *, of_config: str | None) -> str:
    """One trial in one line; a failure in several."""
    notes = f" ({'; '.join(result.notes)})" if result.notes else ""
    # A skipped trial injected nothing and has no figures.
    if result.skipped is not None:
        return f"{result.kind} {result.seed}: skipped, {result.skipped}"
    times = "".join(f", {name} {seconds:.1f} s" for name, seconds in result.times_s.items())
    verdict = "FAILED" if result.wrong else "refused, then survived" if result.refused else "survived"
    head = (
        f"{result.kind} {result.seed}: {verdict}, {result.lost_steps} steps again{times}, "
        f"{result.seconds:.1f} s{notes}"
    )
    if not result.wrong:
        return head
    wrong = "".join(f"\n    {text}" for text in result.wrong)
    return (
        f"{head}{wrong}\n    files: {result.failed_folder}\n    again: {command(result, of_config=of_config)}"
    )


def command(result: FaultResult, *, of_config: str | None) -> str:
    """The command that repeats one trial."""
    config = f" --config {of_config}" if of_config else ""
    if ":" in result.kind:
        sequence = result.shortest or result.kind
        return (
            f"python -m jtrain.bench faults --sequence {sequence} --processes {result.num_processes}{config}"
        )
    return (
        f"python -m jtrain.bench faults --trials 1 --seed {result.seed} --only {result.kind} "
        f"--processes {result.num_processes}{config}"
    )


def by_kind(results: Sequence[FaultResult]) -> dict[str, list[FaultResult]]:
    """Kind, or number of faults of a sequence -> its results."""
    results_by_kind: dict[str, list[FaultResult]] = {}
    for result in results:
        results_by_kind.setdefault(result.group, []).append(result)
    return results_by_kind


def lines(
    results: Sequence[FaultResult], kinds: Mapping[str, FaultKind], *, of_config: str | None
) -> Iterator[str]:
    """The table, and below it the failures."""
    heads = (
        "trials",
        "survived",
        "refused",
        "failed",
        "skipped",
        "steps again",
        "recoveries",
        "again s",
        "trial s",
    )
    table = Table("trials", words("kind") + numbers(*heads))
    # In the order of the list of kinds, not in that of the trials.
    # Groups of sequences are no kinds, and come behind them.
    order = [*kinds, *sorted(by_kind(results))]
    for name, results_of_kind in sorted(by_kind(results).items(), key=lambda item: order.index(item[0])):
        injected = [result for result in results_of_kind if result.skipped is None]
        ok = [result for result in injected if not result.wrong]
        # Only trials with a next attempt have a time until its first step.
        again_s = [result.times_s["again"] for result in injected if "again" in result.times_s]
        counts = (
            len(results_of_kind),
            sum(not r.refused for r in ok),
            sum(r.refused for r in ok),
            len(injected) - len(ok),
        )
        counts += (
            len(results_of_kind) - len(injected),
            max((r.lost_steps for r in injected), default=0),
            sum(r.recoveries for r in injected),
        )
        # 0 where nothing was started again.
        times = (max(again_s, default=0.0), max((r.seconds for r in injected), default=0.0))
        table.add(name, *map(str, counts), *(f"{seconds:.1f}" for seconds in times))
    yield from table.lines()
    yield from sorted({f"{r.kind} skipped: {r.skipped}" for r in results if r.skipped is not None})
    for result in results:
        if result.wrong:
            yield line(result, of_config=of_config)
    faults = collections.Counter(re.findall(r"([a-z-]+):\d", ",".join(result.kind for result in results)))
    if faults:
        yield "faults of the sequences: " + ", ".join(
            f"{name} {count}" for name, count in faults.most_common()
        )
    # A run of skipped trials alone must not read as a success.
    if not any(result.skipped is None for result in results):
        yield "no fault was injected"
    yield (
        f"checkpoints every {EVERY_STEPS} steps; `again s`: slowest start of a next attempt, to its first "
        "new step"
    )


def rows(results: Sequence[FaultResult]) -> Iterator[Row]:
    """Rows of `--json`: per kind the trials that failed, and the most steps that were done again."""
    for name, results_of_kind in by_kind(results).items():
        injected = [result for result in results_of_kind if result.skipped is None]
        failed = sum(bool(result.wrong) for result in injected)
        yield row(f"{name}: trials", len(injected), "trials")
        # No injected trial: no number, which is no met bar either.
        yield row(f"{name}: lost or diverged", failed if injected else None, "trials", bar="<= 0")
        yield row(
            f"{name}: most steps done again", max((r.lost_steps for r in injected), default=None), "steps"
        )
        yield row(f"{name}: recoveries", sum(r.recoveries for r in injected), "starts")
        # Names of times differ by kind: supervised kinds have `named`, `ended` and `trained`, others `again`.
        for name_of_time in sorted({name_of_time for r in injected for name_of_time in r.times_s}):
            slowest = max(r.times_s[name_of_time] for r in injected if name_of_time in r.times_s)
            yield row(f"{name}: {name_of_time}, slowest", slowest, "s")
