"""`jtrain VERB ...`, the console script: the same as `python -m jtrain.VERB ...`.

Imports neither jax nor the verb, so that the list of verbs and a misspelt verb are answered at once.
"""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from jtrain.cli.run import run
from jtrain.errors import UserError, did_you_mean

VERBS = {
    "launch": "train the model of a config; the same command again resumes",
    "plan": "bytes, FLOPs, network, seconds and money of a run, before it runs",
    "profile": "where a run's time went, and what got slower between two runs",
    "dashboard": "a live page of runs as they train, and their numbers for Prometheus",
    "checkpoint": "list, show and verify the checkpoints of a run",
    "check": "prove a config on its own data, small and on emulated devices, before it is paid for",
    "data": "inspect, plan, prepare, adopt, verify and time what a run reads",
    "hf": "export to and import from Hugging Face directories",
    "generate": "sample text from a checkpoint",
    "explain": "what a field of a config means, and how it is set",
    "survey": "the survey's claims beside predictions, compilers and measurements, with verdicts",
    "bench": "measure one of the published numbers",
}
"""Verb -> one line of help. A verb is a module or package of `jtrain` that runs with `python -m`."""


FIRST = "begin with: jtrain launch --config=tiny"


def usage() -> str:
    """The verbs with a line each."""
    lines = [f"  {verb:11} {line}" for verb, line in VERBS.items()]
    return "\n".join(
        ["usage: jtrain VERB [options]    (`jtrain VERB --help` lists the options)", "", *lines, "", FIRST]
    )


def versions() -> str:
    """Versions of jtrain, jax and Python, in a line."""

    def version_of(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name}, not installed"

    return f"{version_of('jtrain')}, {version_of('jax')}, Python {platform.python_version()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the verb's; returns only for `--help` and `--version` (0), and a mistake (2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    verb, *arguments = words or [""]
    if verb in ("-h", "--help"):
        print(usage())
        return 0
    if verb in ("-V", "--version"):
        print(versions())
        return 0
    if not verb:
        raise UserError(f"no verb is given.\n{usage()}")
    if verb not in VERBS:
        raise UserError(f"no verb {verb}. {did_you_mean(verb, VERBS)}There are: {', '.join(VERBS)}.")
    # Before the process is replaced: Python's buffer would be lost with it.
    sys.stdout.flush()
    # `python -m`, word for word: the same sys.path, the same
    # command in run.json, the same process id for signals.
    return os.execv(sys.executable, [sys.executable, "-m", f"jtrain.{verb}", *arguments])
