"""Exit codes of a run, which launchers and supervisors act upon."""

DONE = 0
BUG = 1
REFUSED = 2
"""The user can mend it: the message on stderr says how. The same command would end the same way."""
STOPPED = 75
"""Stopped on request, after a good save (EX_TEMPFAIL): the same command goes on."""
FAULTY_HARDWARE = 76
"""A device or host that the message names computes wrongly or hangs: the same command goes on, on another
host."""

AWAY = 77
"""A disk is full, or a store, file system or coordinator does not answer: the same command goes on once it is
back. Supervisors and clusters try again."""

MEANINGS = {
    DONE: "done",
    REFUSED: "an error that you can fix, as printed",
    STOPPED: "stopped, with a checkpoint",
    FAULTY_HARDWARE: "a device or host computes wrongly or hangs, as named",
    AWAY: "what the run needs is away now: a full disk, a store or process 0 that does not answer",
    BUG: "a bug",
}

_BY_CLUSTERS = {
    DONE: "end",
    REFUSED: "end",
    STOPPED: "start the same command again",
    FAULTY_HARDWARE: "start again, where possible on other hosts",
    AWAY: "start again, a few times in a row; `--supervise` has tried for an hour before",
    BUG: "end; a JobSet restarts all pods, up to `maxRestarts`",
}
"""What the kits in `launch/` do."""


def table() -> str:
    """Returns the table of docs/clusters.md."""
    rows = [f"| {code} | {meaning} | {_BY_CLUSTERS[code]} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| exit code | meaning | what the kits do |", "|---|---|---|", *rows])


def line(*codes: int) -> str:
    """Returns the line of `--help` that says what a command's exit codes mean."""
    return f"Exit codes: {'; '.join(f'{code} {MEANINGS[code]}' for code in codes)}."
