"""Holds the lock of a workdir; each line on stdin has it look whether it still does.

    python hold_workdir.py WORKDIR [MACHINE]

MACHINE: name of the machine that the process believes to run on.
"""

import sys
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import lease
from jtrain.runtime.workdir_lock import WorkdirLock

workdir, *machine = sys.argv[1:]
lease.BEAT_S = 0.05
if machine:
    lease.this_machine = lambda: machine[0]
try:
    with WorkdirLock(Path(workdir), say=print) as lock:
        print("held", flush=True)
        for _ in sys.stdin:
            lease.STALE_S = 0.0  # the next check looks
            lock.check()
            print("still held", flush=True)
except UserError as error:
    print(type(error).__name__, error, flush=True)
