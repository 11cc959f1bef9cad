"""Prints how many processes of a step with this folder there were at once, within 14 s.

python count_processes.py FOLDER
"""

import sys
import time
from pathlib import Path

from jtrain.bench.one_gpu_parts.process import processes

most, end = 0, time.monotonic() + 14
while time.monotonic() < end:
    most = max(most, len(list(processes(Path(sys.argv[1])))))
    time.sleep(0.1)
print(most)
