"""Comparison of all processes of a run at its start, before their devices are used: versions and configs.

It goes through jax's coordination service: collectives between different versions could fail or wait for each other.
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

from jtrain.errors import UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.run_files import versions

WAIT_S = 10.0
"""Time for each process to tell its description, which it has when it joins, so before jax misses a dead process."""

_COMPARED = ("jtrain", "jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")


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
    found = versions(_COMPARED) | {"python": platform.python_version()}
    return Peer(socket.gethostname(), found | {"jtrain": f"{found['jtrain']} ({_source_digest()})"}, config)


def compare_processes(own: Peer) -> list[str]:
    """Returns the host of each process of this run; all processes must call it, before they use devices.

    If a process has joined but tells nothing, because it has ended or hangs, all others end here with a message that
    names it: jax's shutdown would wait for it.

    Args:
      own: `this_process` with the config that this process was started with, made before it joins the others.

    Raises:
      UserError: processes have different versions or configs; the same message in all of them.
    """
    from jax._src import distributed  # public jax has no way to the coordination service

    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return [own.host]
    client, number, count = state.client, state.process_id, state.num_processes
    client.key_value_set(f"jtrain/peer/{number}", json.dumps(dataclasses.asdict(own)))
    if number == 0:
        client.key_value_set("jtrain/verdict", json.dumps(_verdict(client, count)))
    told = _told(client, "verdict", until_s=time.monotonic() + 2 * WAIT_S)
    verdict: dict[str, Any] = {"silent": [0]} if told is None else json.loads(told)
    if verdict["silent"]:
        _leave(client, number, count, verdict["silent"])
    if verdict["refusal"]:
        raise UserError(verdict["refusal"])
    return verdict["hosts"]


def _verdict(client: Any, count: int) -> dict[str, Any]:
    """Collects all descriptions in process 0: processes that told nothing, the hosts, the first difference."""
    until_s = time.monotonic() + WAIT_S
    for number in range(count):
        if _told(client, f"peer/{number}", until_s=until_s) is None:
            break  # the time is over
    told = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get("jtrain/peer/")}
    if silent := [number for number in range(count) if number not in told]:
        return {"silent": silent}
    peers = [Peer(**json.loads(told[number])) for number in range(count)]
    return {"silent": [], "hosts": [peer.host for peer in peers], "refusal": difference(peers)}


def _leave(client: Any, own: int, count: int, silent: Sequence[int]) -> None:
    """Ends this process with a message about processes that told nothing; a supervisor starts all of them again."""
    listed = ", ".join(f"process {number}" for number in silent)
    print(
        f"error: {listed} of {count} joined the others, but did not tell versions and config within {WAIT_S:g} s: the "
        "process has ended or hangs, and its log says why. All others end now. Start all processes again.",
        file=sys.stderr,
        flush=True,
    )
    try:
        if 0 not in silent:
            # Process 0 runs the service, and jax aborts processes that lose it: so it leaves last.
            client.wait_at_barrier("jtrain/leave", int(1000 * WAIT_S), [n for n in range(count) if n not in silent])
            time.sleep(0.0 if own else 1.0)  # the others end after the barrier, and nobody is left to say so
    finally:
        os._exit(exit_codes.BUG)


def difference(peers: Sequence[Peer]) -> str:
    """Returns a message about the first process that differs from process 0; "" if none does."""
    first = peers[0]
    for number, peer in enumerate(peers):
        who = f"process {number} on host {peer.host}"
        for of_first, of_peer, what, way in (
            (first.versions, peer.versions, "versions", "Install the same versions on all hosts."),
            (first.config, peer.config, "a config", "Start all processes with the same command and the same files."),
        ):
            paths = [path for path in {**of_first, **of_peer} if of_first.get(path) != of_peer.get(path)]
            if paths:
                listed = "".join(f"\n  {one}: {of_first.get(one)} there, {of_peer.get(one)} here" for one in paths[:8])
                more = f"\n  and {len(paths) - 8} more" if len(paths) > 8 else ""
                return (
                    f"{who} has {what} other than process 0 on host {first.host} (there: process 0, here: process "
                    f"{number}):{listed}{more}\n{way}"
                )
    return ""


def _told(client: Any, key: str, *, until_s: float) -> str | None:
    """Returns the text of a key, or None if nobody has told it at this time of the monotonic clock."""
    wait_ms = max(1, int(1000 * (until_s - time.monotonic())))
    try:
        return client.blocking_key_value_get(f"jtrain/{key}", wait_ms)
    except Exception as error:  # jax raises JaxRuntimeError for a timeout as for a lost connection
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _source_digest() -> str:
    """Returns a digest of jtrain's own source: checkouts of different commits may have the same version."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
