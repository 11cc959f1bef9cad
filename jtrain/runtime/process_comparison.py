"""Comparison of all processes of a run at its start, before their devices are used: versions and configs.

It goes through jax's coordination service: collectives between different versions could fail or wait for each
other.
"""

import dataclasses
import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import UserError, first_few
from jtrain.runtime import exit_codes, multihost
from jtrain.runtime.agreement import Agreement
from jtrain.runtime.run_files import versions

WAIT_S = 10.0
"""Time for each process to tell its description, which it has when it joins, so before jax misses a dead
process."""

_COMPARED = (
    "jtrain",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """One process of a run, as it describes itself.

    versions: package -> version, None where it is not installed; of jtrain also a digest of its source.
    config: path -> value as text.
    """

    host: str
    versions: Mapping[str, str | None]
    config: Mapping[str, str]


def this_process(config: Mapping[str, str]) -> Peer:
    """Returns the description of this process, which has this config."""
    package_versions = versions(_COMPARED) | {"python": platform.python_version()}
    return Peer(
        socket.gethostname(),
        package_versions | {"jtrain": f"{package_versions['jtrain']} ({_source_digest()})"},
        config,
    )


def compare_processes(peer: Peer) -> list[str]:
    """Returns the host of each process of this run; all processes must call it, before they use devices.

    If a process has joined but tells nothing, because it has ended or hangs, all others end here with a
    message that names it: jax's shutdown would wait for it.

    Args:
      peer: `this_process` with the config that this process was started with, made before it joins the
        others.

    Raises:
      UserError: processes have different versions or configs; the same message in all of them.
    """
    start = multihost.agreement("start")
    if start.is_alone:
        return [peer.host]
    # Told before the verdict is awaited, by process 0 as well: it collects from itself.
    start.tell("peer", json.dumps(dataclasses.asdict(peer)))
    if start.process == 0:
        start.announce("verdict", json.dumps(_verdict(start)))
    # Twice the wait of process 0, which has to hear from all before it answers.
    text = start.announced("verdict", seconds=2 * WAIT_S)
    # No verdict in time: process 0 itself is silent.
    verdict: dict[str, Any] = {"silent": [0]} if text is None else json.loads(text)
    if verdict["silent"]:
        _leave(start, verdict["silent"])
    if verdict["refusal"]:
        raise UserError(verdict["refusal"])
    return verdict["hosts"]


def _verdict(start: Agreement) -> dict[str, Any]:
    """Collects all descriptions in process 0: processes that told nothing, the hosts, the first
    difference.
    """
    texts = start.collect("peer", seconds=WAIT_S)
    if silent := start.missing(texts):
        return {"silent": silent}
    # In the order of the processes: the first difference is the same in every run.
    peers = [Peer(**json.loads(texts[number])) for number in sorted(texts)]
    return {"silent": [], "hosts": [peer.host for peer in peers], "refusal": difference(peers)}


def _leave(start: Agreement, silent: Sequence[int]) -> None:
    """Ends this process with a message about processes that told nothing; a supervisor starts all of them
    again.
    """
    silent_names = ", ".join(f"process {number}" for number in silent)
    print(
        f"error: {silent_names} of {start.processes} joined the others, but did not tell versions and config "
        f"within {WAIT_S:g} s: the process has ended or hangs, and its log says why. All others end now. "
        "Start all processes again.",
        file=sys.stderr,
        flush=True,
    )
    try:
        if start.process == 0:
            # Process 0 runs the service, and jax aborts processes that lose it: so it leaves last.
            answering = [number for number in range(1, start.processes) if number not in silent]
            start.collect("leaves", of=answering, seconds=WAIT_S)
            time.sleep(1.0)  # the others end after they have told it, and nobody is left to say so
        elif 0 not in silent:
            start.tell("leaves", "")
    finally:
        # Not sys.exit: at a normal end jax would wait for the processes that are gone.
        os._exit(exit_codes.BUG)


def difference(peers: Sequence[Peer]) -> str:
    """Returns a message about the first process that differs from process 0; "" if none does."""
    first = peers[0]
    for number, peer in enumerate(peers):
        name = f"process {number} on host {peer.host}"
        # Versions first: with two versions the configs may differ just because of them.
        for expected, actual, subject, way_out in (
            (first.versions, peer.versions, "versions", "Install the same versions on all hosts."),
            (
                first.config,
                peer.config,
                "a config",
                "Start all processes with the same command and the same files.",
            ),
        ):
            # Paths of both sides: a field may exist in one version alone.
            paths = [path for path in {**expected, **actual} if expected.get(path) != actual.get(path)]
            if paths:
                lines = [f"{path}: {expected.get(path)} there, {actual.get(path)} here" for path in paths]
                return (
                    f"{name} has {subject} other than process 0 on host {first.host} (there: process 0, "
                    f"here: process {number}):\n  {first_few(lines, 8, '\n  ')}\n{way_out}"
                )
    return ""


def _source_digest() -> str:
    """Returns a digest of jtrain's own source: checkouts of different commits may have the same version."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    # Sorted: file systems list folders in different orders.
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
