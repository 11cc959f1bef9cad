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

MEANINGS = {
    DONE: "done",
    REFUSED: "an error that you can fix, as printed",
    STOPPED: "stopped, with a checkpoint",
    FAULTY_HARDWARE: "a device or host computes wrongly or hangs, as named",
    BUG: "a bug",
}


def line(*codes: int) -> str:
    """Returns the line of `--help` that says what a command's exit codes mean."""
    return f"Exit codes: {'; '.join(f'{code} {MEANINGS[code]}' for code in codes)}."
