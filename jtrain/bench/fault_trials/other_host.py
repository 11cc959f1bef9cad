"""The training command as on another host: `python -m jtrain.bench.fault_trials.other_host JSON ...`.

The host has a name of its own in leases, so its processes cannot be looked up, and a clock that may jump. It
watches a holder for seconds where a real one takes a minute: a trial has to end.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence

MODULE = "jtrain.bench.fault_trials.other_host"
BEAT_S, STALE_S, WATCH_S = 0.2, 3.0, 1.0
"""As in `lease`, a fifteenth of a beat and a twentieth of the rest. A loaded machine may keep a thread from
beating for a second."""


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """Host of a training process.

    name: as leases name it.
    jump_s: the clock jumps by so many seconds `after_s` seconds after the start.
    """

    name: str
    jump_s: float = 0.0
    after_s: float = 0.0

    @property
    def module(self) -> tuple[str, str]:
        """Words of the command before the arguments of the training."""
        return MODULE, json.dumps(dataclasses.asdict(self))


def become(host: HostSpec) -> None:
    """Makes this process one of another host."""
    from jtrain.runtime import lease

    # Before other modules import these names.
    lease.this_machine = lambda: host.name
    lease.BEAT_S, lease.STALE_S, lease.WATCH_S = BEAT_S, STALE_S, WATCH_S
    clock_s, jump_at_s = time.time, time.monotonic() + host.after_s
    if host.jump_s:
        # The monotonic clock does not jump, as on a real host.
        time.time = lambda: clock_s() + (host.jump_s if time.monotonic() > jump_at_s else 0.0)


def main(argv: Sequence[str]) -> int:
    """Becomes the host of the first argument and runs the training command of the others."""
    become(HostSpec(**json.loads(argv[0])))
    from jtrain.cli.launch import main as launch

    return launch(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
