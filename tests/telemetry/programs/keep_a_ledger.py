"""Writes goodput every five steps, until it is killed; prints each step that is written.

python keep_a_ledger.py WORKDIR
"""

import itertools
import sys
import time
from pathlib import Path

from jtrain.telemetry.goodput import Ledger

ledger = Ledger(Path(sys.argv[1]), start_step=0, started_s=time.time())
ledger.training()
for step in itertools.count(1):
    time.sleep(0.002)
    ledger.step_done(step)
    if step % 5 == 0:
        ledger.write(step)
        print(step, flush=True)
