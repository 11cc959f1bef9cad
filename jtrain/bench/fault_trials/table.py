"""Report of the trials: a line for each, a table by kind, each failure with the command that repeats it, and
rows.
"""

from collections.abc import Iterator, Mapping, Sequence

from jtrain.bench import Row, row
from jtrain.bench.fault_trials.recipe import EVERY_STEPS
from jtrain.bench.fault_trials.trial import Kind, Result
from jtrain.report.table import Table, numbers, words


def line(result: Result, *, of_config: str | None) -> str:
    """One trial in one line; a failure in several."""
    notes = f" ({'; '.join(result.notes)})" if result.notes else ""
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
    return f"{head}{wrong}\n    files: {result.kept}\n    again: {command(result, of_config=of_config)}"


def command(result: Result, *, of_config: str | None) -> str:
    """The command that repeats one trial."""
    config = f" --config {of_config}" if of_config else ""
    return (
        f"python -m jtrain.bench faults --trials 1 --seed {result.seed} --only {result.kind} "
        f"--processes {result.num_processes}{config}"
    )


def by_kind(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Kind -> its results."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.kind, []).append(result)
    return found


def lines(results: Sequence[Result], kinds: Mapping[str, Kind], *, of_config: str | None) -> Iterator[str]:
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
    for name in (name for name in kinds if name in by_kind(results)):
        mine = by_kind(results)[name]
        done = [result for result in mine if result.skipped is None]
        ok = [result for result in done if not result.wrong]
        again_s = [result.times_s["again"] for result in done if "again" in result.times_s]
        counts = (len(mine), sum(not r.refused for r in ok), sum(r.refused for r in ok), len(done) - len(ok))
        counts += (
            len(mine) - len(done),
            max((r.lost_steps for r in done), default=0),
            sum(r.recoveries for r in done),
        )
        times = (max(again_s, default=0.0), max((r.seconds for r in done), default=0.0))
        table.add(name, *map(str, counts), *(f"{seconds:.1f}" for seconds in times))
    yield from table.lines()
    yield from sorted({f"{r.kind} skipped: {r.skipped}" for r in results if r.skipped is not None})
    for result in results:
        if result.wrong:
            yield line(result, of_config=of_config)
    if not any(result.skipped is None for result in results):
        yield "no fault was injected"
    yield f"checkpoints every {EVERY_STEPS} steps; `again s`: slowest start of a next attempt, to its first new step"


def rows(results: Sequence[Result]) -> Iterator[Row]:
    """Rows of `--json`: per kind the trials that failed, and the most steps that were done again."""
    for name, mine in by_kind(results).items():
        done = [result for result in mine if result.skipped is None]
        failed = sum(bool(result.wrong) for result in done)
        yield row(f"{name}: trials", len(done), "trials")
        yield row(f"{name}: lost or diverged", failed if done else None, "trials", bar="<= 0")
        yield row(f"{name}: most steps done again", max((r.lost_steps for r in done), default=None), "steps")
        yield row(f"{name}: recoveries", sum(r.recoveries for r in done), "starts")
        for time in sorted({time for r in done for time in r.times_s}):
            slowest = max(r.times_s[time] for r in done if time in r.times_s)
            yield row(f"{name}: {time}, slowest", slowest, "s")
