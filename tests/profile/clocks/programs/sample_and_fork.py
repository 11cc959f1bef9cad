"""Samples, with another child that holds the sampler's pipe open; prints the ids of both children.

python sample_and_fork.py FILE SOURCE
"""

import os
import sys
import time
from pathlib import Path

from jtrain.profile.clocks.sampler import Sampler

running = Sampler(Path(sys.argv[1]), source=sys.argv[2], platform="cpu", devices=[0, 1])
forked = os.fork()
if forked == 0:
    time.sleep(600)
print(running.pid, forked, flush=True)
time.sleep(600)
