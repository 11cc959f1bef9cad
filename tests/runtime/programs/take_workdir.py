"""Takes and releases a workdir at full speed, and prints how often it got the lock.

python take_workdir.py WORKDIR TRIES
"""

import os
import sys
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime.workdir_lock import WorkdirLock

workdir, wins = Path(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    try:
        with WorkdirLock(workdir, say=print):
            os.close(
                os.open(workdir / "inside", os.O_CREAT | os.O_EXCL)
            )  # fails if another one is inside too
            os.unlink(workdir / "inside")
            wins += 1
    except UserError as error:
        if "in use by another run: process" not in str(error):
            raise
print(wins, flush=True)
