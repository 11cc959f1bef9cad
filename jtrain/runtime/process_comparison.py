"""Comparison of all processes of a run at its start, before their devices are used: versions and configs.

It goes through jax's coordination service: collectives between different versions could fail or wait for each other.
"""

import dataclasses
import hashlib
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.runtime.run_files import versions

_WAIT_MS = 300_000
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


def compare_processes(config: Mapping[str, str]) -> list[str]:
    """Returns the host of each process of this run; all processes must call it, before they use devices.

    Args:
      config: path -> value as text, of the config that this process was started with.

    Raises:
      UserError: processes have different versions or configs; the same message in all of them.
    """
    from jax._src import distributed  # public jax has no way to the coordination service

    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return [socket.gethostname()]
    client, own, count = state.client, state.process_id, state.num_processes
    client.key_value_set(f"jtrain/peer/{own}", json.dumps(dataclasses.asdict(this_process(config))))
    if own == 0:
        peers = [Peer(**json.loads(_told(client, f"peer/{number}"))) for number in range(count)]
        verdict = {"hosts": [peer.host for peer in peers], "refusal": difference(peers)}
        client.key_value_set("jtrain/verdict", json.dumps(verdict))
    else:
        verdict = json.loads(_told(client, "verdict"))
    if verdict["refusal"]:
        raise UserError(verdict["refusal"])
    return verdict["hosts"]


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


def _told(client: Any, key: str) -> str:
    return client.blocking_key_value_get(f"jtrain/{key}", _WAIT_MS)


def _source_digest() -> str:
    """Returns a digest of jtrain's own source: checkouts of different commits may have the same version."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
